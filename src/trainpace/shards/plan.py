"""The records of a precomputed folder: its plan, one record a shard, and the manifest of all; and its division over nodes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from trainpace.errors import TrainpaceError
from trainpace.records import Record
from trainpace.shards.samples import Layout

PLAN, MANIFEST, BAD_SAMPLES = "plan.json", "manifest.json", "bad_samples.jsonl"
SHARD_BYTES = 64 * 2**20
GROUP_BYTES = 2**20
_SHARDS_A_WORKER = 16
GROUP_SAMPLES = 100
"""Shuffling moves row groups as a whole: large enough for one read, small enough that a buffer holds many."""


class Fingerprint(Record):
    """What the shards depend on. `code`: hashes of the user's source files; `packages`: versions of what they import;
    `source`: number of samples, the dataset's own settings, size and time of files that it opens."""

    code: dict[str, str]
    packages: dict[str, str]
    source: dict[str, str]

    def differences(self, now: Fingerprint) -> list[str]:
        """What has changed since, one phrase each."""
        changes = []
        for what in ("code", "packages", "source"):
            then, today = getattr(self, what), getattr(now, what)
            for name in sorted(then.keys() | today.keys()):
                if then.get(name) != today.get(name):
                    change = "is new" if name not in then else "is gone" if name not in today else "has changed"
                    changes.append(f"{name} {change}")
        return changes


class BadSample(Record):
    """A sample that could not be computed: its index in the source and the reason."""

    index: int
    reason: str


class Column(Record):
    """Where a shard keeps one field. `starts`: the file offset of each row group's values; `shape`: of every sample, or
    None where they differ (then the column `NAME.shape` has them); `width`: bytes a sample, 0 where they differ."""

    starts: tuple[int, ...]
    width: int
    shape: tuple[int, ...] | None = None
    shape_starts: tuple[int, ...] = ()


class Shard(Record):
    """One finished Parquet file: the samples `first` to `stop` (not included) of the source without its bad ones."""

    number: int
    first: int
    stop: int
    samples: int
    file_bytes: int
    crc32: int
    group_rows: int
    columns: tuple[Column, ...] = ()
    index_starts: tuple[int, ...] = ()
    bad: tuple[BadSample, ...] = ()


class ShardPlan(Record):
    """How a dataset is cut into shards, decided once when a folder is begun; `probe_*` are the inspection's figures."""

    target: str
    samples: int
    shard_samples: int
    group_rows: int
    layout: Layout
    fingerprint: Fingerprint
    probe_bytes: float
    probe_s: float

    @property
    def shards(self) -> int:
        return math.ceil(self.samples / self.shard_samples)

    def range_of(self, number: int) -> range:
        return range(number * self.shard_samples, min((number + 1) * self.shard_samples, self.samples))

    def part(self, part: int, parts: int) -> range:
        """The shards of the `part`-th of `parts` (from 0): disjoint, together all."""
        return range(part, self.shards, parts)


class Manifest(Record):
    """All shards of a finished folder, in the order of the source."""

    plan: ShardPlan
    shards: tuple[Shard, ...]


def shard_sizes(samples: int, sample_bytes: float, workers: int, shard_samples: int | None = None) -> tuple[int, int]:
    """(samples a shard, samples a row group): about 64 MiB and 1 MiB, yet enough shards for all workers to end together."""
    sample_bytes = max(sample_bytes, 1.0)
    fitting = round(GROUP_BYTES / sample_bytes)
    groups = min(1000, fitting) if sample_bytes * GROUP_SAMPLES < GROUP_BYTES else max(1, min(GROUP_SAMPLES, fitting))
    if shard_samples is None:
        balanced = math.ceil(samples / (_SHARDS_A_WORKER * workers))
        shard_samples = max(1, min(round(SHARD_BYTES / sample_bytes), balanced, 100_000))
        if shard_samples > groups:
            shard_samples = math.ceil(shard_samples / groups) * groups
    return shard_samples, min(groups, shard_samples)


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.parquet"


def shard_record(folder: Path, number: int) -> Path:
    """The record beside a shard's file; it is written last, so a shard that has one is finished."""
    return folder / f"shard-{number:06d}.json"


def part_of(stated: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(part from 0, parts): as stated (``2/8`` is the second of eight: (1, 8)), else this task's place in its Slurm array,
    else all of it."""
    if stated is not None:
        part, _, parts = stated.partition("/")
        if not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
            raise TrainpaceError(f"{stated!r} is not a part.", "Write I/N, from 1/N to N/N.")
        return int(part) - 1, int(parts)
    try:
        count = int(environment["SLURM_ARRAY_TASK_COUNT"])
        number, first = int(environment["SLURM_ARRAY_TASK_ID"]), int(environment["SLURM_ARRAY_TASK_MIN"])
        step = int(environment.get("SLURM_ARRAY_TASK_STEP") or 1)
    except (KeyError, ValueError):
        return 0, 1
    place, odd = divmod(number - first, step)
    if odd or not 0 <= place < count:
        raise TrainpaceError("the Slurm array's tasks are not numbered evenly.", "Say which part this is: --part I/N.")
    return place, count


def array_script(target: str, folder: str, parts: int, workers: int, hours: float, options: str = "") -> str:
    """A batch script for sbatch, of `parts` array tasks with `workers` cores each. Source: sbatch's manual, --array.

    A task that is requeued computes only what it had not finished. The one that ends last writes the manifest.
    """
    minutes = max(10, round(60 * hours))
    command = f"trainpace precompute {shlex.quote(target)} --out {shlex.quote(folder)} --workers $SLURM_CPUS_PER_TASK"
    return f"""#!/bin/bash
#SBATCH --job-name=precompute
#SBATCH --array=1-{parts}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={workers}
#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00
#SBATCH --requeue
#SBATCH --output=precompute-%A_%a.log

srun {command}{" " + options if options else ""}
"""
