"""Reading precomputed samples back."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from shard_folders import write_folder
from trainpace.core.errors import UnreadableInput
from trainpace.shards import ShardDataset

COUNT, BAD = 203, {5, 77, 78}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    samples = [(torch.full((2, 3), i, dtype=torch.int32), i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("data") / "s", samples, 50, 8, bad=BAD)


GOOD = [i for i in range(COUNT) if i not in BAD]


def ids(batches):
    return [batch[1].tolist() for batch in batches]


def flat(batches):
    return [i for batch in batches for i in batch]


def test_dataset_supports_indexing_and_transform(folder):
    data = ShardDataset(folder, transform=lambda sample: sample[1])
    assert [data[i] for i in range(len(data))] == GOOD
    assert data[-1] == COUNT - 1
    with pytest.raises(IndexError):
        data[200]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_yield_every_sample_once(folder, workers):
    data = ShardDataset(pickle.loads(pickle.dumps(ShardDataset(folder))).reader.folder)
    for loader in (
        DataLoader(data, batch_size=16, shuffle=True, num_workers=workers),
        data.loader(16, num_workers=workers),
    ):
        batches = list(loader)
        assert sorted(flat(ids(batches))) == GOOD
        assert all((batch[0][:, 0, 0] == batch[1]).all() for batch in batches)
        assert len(batches) == len(loader) == 13


@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_loader_takes_a_sampler(folder, collate):
    data, seen = ShardDataset(folder), []
    for rank in range(3):
        sampler = DistributedSampler(data, 3, rank, drop_last=True)
        loader = data.loader(7, drop_last=True, sampler=sampler, collate_fn=collate)
        batches = ids(loader)
        assert {len(batch) for batch in batches} == {7}
        assert len(batches) == 200 // 3 // 7
        seen += flat(batches)
    assert len(set(seen)) == len(seen)


def test_loader_applies_transform(folder):
    batch = next(iter(ShardDataset(folder, lambda s: (s[0] + 1000, s[1])).loader(7)))
    assert (batch[0][:, 0, 0] == batch[1] + 1000).all()


def test_missing_and_damaged_folders_are_unreadable(tmp_path):
    with pytest.raises(UnreadableInput, match="is no folder"):
        ShardDataset(tmp_path / "none")
    with pytest.raises(UnreadableInput, match="holds no finished shards"):
        ShardDataset(tmp_path)
    (tmp_path / "plan.json").touch()
    with pytest.raises(
        UnreadableInput, match=r"is not finished\. Give its trainpace precompute command again"
    ):
        ShardDataset(tmp_path)
    place = write_folder(tmp_path / "s", [np.zeros(3)] * 6, 3, 3)
    with open(place / "shard-000001.parquet", "r+b") as file:
        file.truncate(100)
    data = ShardDataset(place)
    assert data[0].shape == (3,)
    with pytest.raises(
        UnreadableInput, match=r"shard-000001\.parquet is not as long as it was written"
    ):
        data[3]
    (place / "shard-000001.parquet").unlink()
    with pytest.raises(UnreadableInput, match=r"shard-000001\.parquet is missing"):
        data[3]
    (place / "shard-000001.parquet").mkdir()
    with pytest.raises(
        UnreadableInput, match=r"shard-000001\.parquet cannot be read: is a directory\.$"
    ):
        data[3]


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_uses_custom_collate_for_varying_lengths(tmp_path, workers):
    place = write_folder(tmp_path / "s", [torch.arange(n % 5 + 1) for n in range(20)], 10, 5)
    by_position = ShardDataset(place).loader(
        4, shuffle=False, collate_fn=padded, num_workers=workers
    )
    assert [batch.shape for batch in by_position] == [(4, 4), (4, 5), (4, 5), (4, 5), (4, 5)]
