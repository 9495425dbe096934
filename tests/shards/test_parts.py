"""Parts of a precomputation on several machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_folders import NOTHING
from trainpace.core.errors import TrainpaceError
from trainpace.shards.files import ShardPlan, encode, part_of, shard_sizes


def test_part_of_reads_index_and_number_of_parts():
    assert part_of(None) == (0, 1)
    assert part_of("2/8") == (1, 8)
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/3"):
        with pytest.raises(TrainpaceError):
            part_of(wrong)


@given(
    samples=st.integers(1, 10**6),
    size=st.floats(1, 1e9),
    workers=st.integers(1, 512),
    parts=st.integers(1, 20),
)
def test_parts_are_disjoint_and_cover_all_samples(samples, size, workers, parts):
    shard_samples, rows = shard_sizes(samples, size, workers)
    plan = ShardPlan(
        target="a.py:b",
        samples=samples,
        shard_samples=shard_samples,
        group_rows=rows,
        layout=encode(1).layout,
        fingerprint=NOTHING,
        probe_bytes=size,
    )
    assert 1 <= rows <= shard_samples
    assert rows * size <= 2**21 or rows == 1
    assert shard_samples * size <= 2**27 or shard_samples <= rows
    covered = sorted(n for part in range(parts) for n in plan.part(part, parts))
    assert covered == list(range(plan.shards))
    assert sum(len(plan.range_of(n)) for n in (0, plan.shards - 1)) <= samples or plan.shards == 1
    assert plan.range_of(plan.shards - 1).stop == samples
