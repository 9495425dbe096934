"""Parts for an array of tasks, and the script that starts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_folders import NOTHING
from trainpace.configs.shell import read_sbatch
from trainpace.core.errors import TrainpaceError
from trainpace.shards.files import ShardPlan, array_script, encode, part_of, shard_sizes

GOLDEN = """#!/bin/bash
#SBATCH --job-name=precompute
#SBATCH --array=1-8
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=06:30:00
#SBATCH --requeue
#SBATCH --output=precompute-%A_%a.log

srun trainpace precompute 'my faces.py:Faces' --out /data/shards --workers $SLURM_CPUS_PER_TASK
"""


def test_the_script():
    script = array_script("my faces.py:Faces", "/data/shards", 8, 16, 6.5)
    assert script == GOLDEN
    notes = read_sbatch(script, "job.sh").notes
    assert [note for note in notes if "not an option" in str(note)] == []


def test_parts():
    slurm = {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
    assert part_of(None, {}) == (0, 1)
    assert part_of(None, slurm) == (2, 4)
    assert part_of("2/8", slurm) == (1, 8)
    assert part_of(None, {**slurm, "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_STEP": "2"}) == (
        2,
        4,
    )
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/3"):
        with pytest.raises(TrainpaceError):
            part_of(wrong, {})
    with pytest.raises(TrainpaceError, match="not numbered evenly"):
        part_of(None, {**slurm, "SLURM_ARRAY_TASK_ID": "9"})


@given(
    samples=st.integers(1, 10**6),
    size=st.floats(1, 1e9),
    workers=st.integers(1, 512),
    parts=st.integers(1, 20),
)
def test_parts_are_disjoint_and_all(samples, size, workers, parts):
    shard_samples, rows = shard_sizes(samples, size, workers)
    plan = ShardPlan(
        target="a.py:b",
        samples=samples,
        shard_samples=shard_samples,
        group_rows=rows,
        layout=encode(1).layout,
        fingerprint=NOTHING,
        probe_bytes=size,
        probe_s=1.0,
    )
    assert 1 <= rows <= shard_samples
    assert rows * size <= 2**21 or rows == 1
    assert shard_samples * size <= 2**27 or shard_samples <= rows
    covered = sorted(n for part in range(parts) for n in plan.part(part, parts))
    assert covered == list(range(plan.shards))
    assert sum(len(plan.range_of(n)) for n in (0, plan.shards - 1)) <= samples or plan.shards == 1
    assert plan.range_of(plan.shards - 1).stop == samples
