"""Every supported sample type round-trips through a shard."""

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from shard_folders import write_folder
from trainpace.core.errors import TrainpaceError
from trainpace.shards import ShardDataset
from trainpace.shards import files as shards
from trainpace.shards.files import UnsupportedSample, differing_columns, encode, spread

LEAVES = {
    "fixed tensor": lambda r: torch.from_numpy(r.normal(size=(3, 4)).astype(np.float32)),
    "bfloat16": lambda r: torch.from_numpy(r.normal(size=3)).to(torch.bfloat16),
    "bool tensor": lambda r: torch.from_numpy(r.random(5) < 0.5),
    "scalar tensor": lambda r: torch.tensor(r.random()),
    "array of any length": lambda r: r.integers(0, 9, int(r.integers(0, 5))),
    "tensor of any shape": lambda r: torch.zeros(
        tuple(r.integers(0, 3, int(r.integers(0, 3)))), dtype=torch.int16
    ),
    "empty array": lambda r: np.zeros((0, 3), np.uint8),
    "not contiguous": lambda r: torch.arange(12).reshape(3, 4).t() + int(r.integers(9)),
    "big-endian": lambda r: r.integers(0, 9, 3).astype(">i4"),
    "numpy scalar": lambda r: np.float32(r.random()),
    "int": lambda r: int(r.integers(-(2**63), 2**63 - 1)),
    "float": lambda r: float(r.choice([r.random(), np.inf, -0.0])),
    "bool": lambda r: bool(r.random() < 0.5),
    "text": lambda r: "häß€" * int(r.integers(0, 3)),
    "bytes": lambda r: r.bytes(int(r.integers(0, 9))),
    "picture": lambda r: Image.fromarray(r.integers(0, 256, (4, 6, 3), dtype=np.uint8)),
}


def equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Image.Image):
        return a.mode == b.mode and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=5),
    nest=st.sampled_from(["single", "tuple", "list", "dict", "deep"]),
    count=st.integers(1, 12),
    shard_samples=st.integers(1, 7),
    group_rows=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_samples_round_trip_through_shards(
    tmp_path_factory, kinds, nest, count, shard_samples, group_rows, seed
):
    rng = np.random.default_rng(seed)

    def sample():
        leaves = [LEAVES[kind](rng) for kind in kinds]
        return {
            "single": lambda: leaves[0],
            "tuple": lambda: tuple(leaves),
            "list": lambda: leaves,
            "dict": lambda: {f"k{i}": leaf for i, leaf in enumerate(leaves)},
            "deep": lambda: {"a": (leaves[0], [leaves]), "b": {"c": leaves[-1]}},
        }[nest]()

    samples = [sample() for _ in range(count)]
    data = ShardDataset(
        write_folder(tmp_path_factory.mktemp("s"), samples, shard_samples, group_rows)
    )
    assert len(data) == count
    assert all(equal(data[i], samples[i]) for i in range(count))
    order = rng.integers(0, count, 5).tolist()
    assert all(map(equal, data.__getitems__(order), [samples[i] for i in order]))


@pytest.mark.parametrize(
    "kind",
    sorted(set(LEAVES) - {"picture", "big-endian", "array of any length", "tensor of any shape"}),
)
def test_batch_matches_torch_default_collate(tmp_path, kind):
    rng = np.random.default_rng(0)
    samples = [{"x": LEAVES[kind](rng), "label": i} for i in range(11)]
    data = ShardDataset(write_folder(tmp_path / "s", samples, 4, 3))
    order = [10, 0, 3, 4, 9]
    assert equal(data[order], default_collate([samples[i] for i in order]))


def test_returned_samples_can_be_modified(tmp_path):
    data = ShardDataset(write_folder(tmp_path / "s", [(torch.ones(4), np.ones(4))] * 3, 2, 2))
    first, batch = data[0], data[[0, 1]]
    first[0].zero_()
    first[1][:] = 0
    batch[0].zero_()
    assert data[0][0].sum() == 4
    assert data[0][1].sum() == 4


def test_shards_are_plain_parquet_files(tmp_path):
    samples = [(np.full((2, 2), i, np.uint8), i, f"text {i}") for i in range(7)]
    folder = write_folder(tmp_path / "s", samples, 7, 3, bad={4})
    table = pq.read_table(folder / "shard-000000.parquet")
    assert table.column("__index__").to_pylist() == [0, 1, 2, 3, 5, 6]
    assert table.column("0").to_pylist()[4] == samples[5][0].tobytes()
    assert table.column("2").to_pylist()[4] == "text 5"
    assert pq.ParquetFile(folder / "shard-000000.parquet").metadata.num_row_groups == 2


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (None, "NoneType"),
        ((1, None), "^part 1 is a NoneType"),
        ({1: 2}, "keys are not all text"),
        ((), "empty"),
        (2**70, "beyond 64 bits"),
        (np.array(["a"]), "dtype <U1"),
        (torch.eye(3).to_sparse(), "sparse"),
        ({"a": {"b": 1}, "a.b": 2}, "have the name 'a.b'"),
        (Image.new("CMYK", (2, 2)), "mode CMYK"),
    ],
)
def test_encode_rejects_unsupported_sample(sample, reason):
    with pytest.raises(UnsupportedSample, match=reason):
        encode(sample)


def test_encode_rejects_sample_with_other_dtype():
    known = encode((np.zeros(3, np.float32), 1)).layout
    assert encode((np.zeros(5, np.float32), 1), known).shapes[0] == (5,)
    with pytest.raises(UnsupportedSample, match="0 is array <f8, in the other samples array <f4"):
        encode((np.zeros(3), 1), known)
    with pytest.raises(UnsupportedSample, match="another arrangement"):
        encode([np.zeros(3, np.float32), 1], known)


@pytest.mark.parametrize(
    ("others", "sample"),
    [
        ({"ids": [1, 2], "label": 3}, {"ids": [1, 2, 3], "label": 3}),
        ((0, {"a": [(1,)]}), (0, {"a": [(1, 2)]})),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_encode_rejects_sample_with_other_structure(others, sample):
    with pytest.raises(UnsupportedSample, match=r"another arrangement.*make lists"):
        encode(sample, encode(others).layout)


def test_sample_comparison_is_bitwise():
    assert differing_columns(encode(float("nan")), encode(float("nan"))) == []
    assert differing_columns(encode(0.0), encode(-0.0)) == ["sample"]


@given(count=st.integers(1, 20), total=st.integers(1, 50))
def test_spread_returns_sorted_distinct_indices(count, total):
    found = list(spread(count, total))
    assert found == sorted(set(found))
    assert len(found) == min(count, total)
    assert set(found) <= set(range(total))


def test_missing_pyarrow_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TrainpaceError, match="needs pyarrow"):
        shards.import_pyarrow()
