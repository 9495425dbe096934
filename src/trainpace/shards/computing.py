"""Precompute a dataset into shards with parallel worker processes.

A run can be interrupted and repeated: it skips finished shards.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.core.errors import (
    Contradiction,
    TrainpaceError,
    UnreadableInput,
    UserCodeError,
    os_reason,
)
from trainpace.core.records import Record, load, save, to_json, write_whole
from trainpace.core.units import format_number
from trainpace.core.worker import DiskFull, Pool
from trainpace.shards import files
from trainpace.shards.precompute_worker import Estimate, Inspection, SampleCosts, decide
from trainpace.workload import ModelSpec

_LOCK = ".lock"
_WORKER = "trainpace.shards.precompute_worker"
_SPARE = 1.02
"""Safety factor on disk space, for headers and for samples larger than the inspected ones."""
_SPARE_BYTES = 2**20
_AHEAD = 2
"""Number of shards that a worker has at a time. It computes one while it writes the other."""


class Settings(Record):
    """Settings of a precomputation.

    Attributes:
        target: FILE.py:NAME of the dataset.
        folder: Folder for the shards.
        workers: Number of worker processes.
        shard_samples: Number of samples per shard. By default, it is chosen automatically.
        max_bad: Maximum share of samples that may fail.
        part: Index of the part to compute, from 0, if several machines share the work.
        parts: Number of parts.
        repair: Numbers of shards to compute again.
    """

    target: str
    folder: str
    workers: int
    shard_samples: int | None = None
    max_bad: float = 0.05
    part: int = 0
    parts: int = 1
    again: bool = False
    repair: tuple[int, ...] = ()


class Progress(NamedTuple):
    """Progress of a part, in samples.

    `bad` is the number of failed samples among `done`. This run computed `new` samples in `seconds`
    seconds.
    """

    done: int
    wanted: int
    bad: int
    new: int
    seconds: float


class Precomputed(Record):
    """State of a folder after a run.

    If `finished` is False, other parts still have shards to compute. `shards_planned` is the total
    number of shards.
    """

    folder: str
    samples: int
    bad: int
    shards: int
    shards_computed: int
    samples_computed: int
    seconds: float
    total_bytes: int
    finished: bool
    shards_planned: int


class Damage(Record):
    """Missing or damaged shard, with a description of the problem."""

    number: int
    file: str
    problem: str


def precompute(
    settings: Settings,
    tell: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Precomputed:
    """Compute the missing shards of this part. Write the manifest once all shards exist.

    Finished shards are kept, even if the run fails.

    Args:
        settings: Settings of the precomputation.
        tell: Callback for progress.
        note: Callback for messages.

    Raises:
        Contradiction: If the folder was begun with other code, source or settings.
        DiskFull: If the disk has no room for the missing shards.
        UserCodeError: If more samples fail than `max_bad` allows.
    """
    folder = Path(settings.folder)
    _make_ready(folder)
    begun = time.monotonic()
    with _alone(folder, settings), Pool(_WORKER, settings.target, settings.workers, note) as pool:
        plan = _agreed_plan(pool, folder, settings)
        for number in settings.repair:  # a shard without a record is computed again
            (folder / files.MANIFEST).unlink(missing_ok=True)
            files.shard_record(folder, number).unlink(missing_ok=True)
            files.shard_file(folder, number).unlink(missing_ok=True)
        computed = _Work(pool, plan, folder, settings, tell).run()
    found = [files.finished_shard(folder, number) for number in range(plan.shards)]
    there = [shard for shard in found if shard is not None]
    bad = [sample for shard in there for sample in shard.bad]
    if len(there) == plan.shards:
        lines = [json.dumps({"index": b.index, "reason": b.reason}) + "\n" for b in bad]
        write_whole(folder / files.BAD_SAMPLES, "".join(lines))
        save(files.Manifest(plan=plan, shards=tuple(there)), folder / files.MANIFEST)
    return Precomputed(
        folder=str(folder),
        samples=sum(s.samples for s in there),
        bad=len(bad),
        shards=len(there),
        shards_computed=len(computed),
        samples_computed=sum(s.samples for s in computed),
        seconds=time.monotonic() - begun,
        total_bytes=sum(s.file_bytes for s in there),
        finished=len(there) == plan.shards,
        shards_planned=plan.shards,
    )


def estimate(
    target: str,
    folder: str,
    workers: int,
    seconds: float = 20.0,
    most: int = 256,
    step_s: float | None = None,
    batch: int = 1,
    epochs: float | None = None,
) -> Estimate:
    """Estimate if `precompute` is worth it.

    A separate process computes up to `most` samples and measures their costs. It removes its files
    at the end.

    Args:
        target: FILE.py:NAME of the dataset.
        folder: Planned folder, for measuring the speed of its disk.
        workers: Number of processes that would load or compute samples.
        seconds: Time limit of the measurement.
        most: Maximum number of samples to compute.
        step_s: Time of a training step without data, if known.
        batch: Number of samples per step.
        epochs: Number of epochs of the training, if known.
    """
    with Pool(_WORKER, target, 1) as pool:
        pool.ask(0, do="estimate", options={"folder": folder, "seconds": seconds, "most": most})
        _, answer = next(pool.answers(lambda _: "computing some samples"))
    return decide(msgspec.convert(answer["estimate"], SampleCosts), workers, step_s, batch, epochs)


def verify(folder: Path) -> tuple[files.ShardPlan, list[Damage]]:
    """Read every byte of every shard. Return the plan, and the missing or damaged shards."""
    plan = read_plan(folder)
    recorded: tuple[files.Shard, ...] = ()
    if (folder / files.MANIFEST).exists():
        recorded = load(folder / files.MANIFEST, files.Manifest).shards
    damaged = []
    here = {path.name for path in folder.iterdir()}
    for number in range(plan.shards):
        file = files.shard_file(folder, number)
        if file.name not in here:
            damaged.append(Damage(number=number, file=file.name, problem="missing"))
            continue
        try:
            shard = load(files.shard_record(folder, number), files.Shard)
            agreed = recorded[number] if recorded else shard
            other = "" if shard == agreed else "its record is not the manifest's"
            problem = files.damage(folder, agreed) or other
        except UnreadableInput:
            problem = "its record cannot be read"
        if problem:
            damaged.append(Damage(number=number, file=file.name, problem=problem))
    return plan, damaged


def read_plan(folder: Path) -> files.ShardPlan:
    """Return the plan of a folder. Raise `UnreadableInput` if it has none."""
    if not (folder / files.PLAN).exists():
        raise UnreadableInput(
            f"{folder} holds no precomputed samples.",
            "Start with: trainpace precompute FILE.py:NAME.",
        )
    return load(folder / files.PLAN, files.ShardPlan)


def _make_ready(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
        (folder / _LOCK).open("w").close()
    except OSError as error:
        raise UnreadableInput(f"cannot use {folder}: {os_reason(error)}.") from None
    if others and files.PLAN not in others:
        raise TrainpaceError(
            f"{folder} holds other files ({others[0]}).", "Give a new or empty folder."
        )


@contextlib.contextmanager
def _alone(folder: Path, settings: Settings) -> Iterator[None]:
    """Lock the folder, or one part of it if other machines compute the other parts.

    The operating system releases the locks when the process ends.
    """
    whole = settings.parts == 1
    with (
        open(folder / _LOCK, "w") as whole_lock,
        open(folder / f".lock-{settings.part + 1}-of-{settings.parts}", "w") as part_lock,
    ):
        try:
            fcntl.flock(whole_lock, (fcntl.LOCK_EX if whole else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            fcntl.flock(part_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Contradiction(
                f"another precompute is at work on {folder}.", "Wait for it, or end it."
            ) from None
        except OSError:  # the file system has no locks; renaming still keeps shards consistent
            pass
        # Delete the plan last. If the process is killed before, the folder still has a plan, and
        # its files are recognized as those of a precomputation.
        written = (files.MANIFEST, files.BAD_SAMPLES, "shard-*", ".shard-*", files.PLAN)
        for pattern in written if settings.again else ():
            for path in folder.glob(pattern):
                path.unlink()
        yield


def _agreed_plan(pool: Pool, folder: Path, settings: Settings) -> files.ShardPlan:
    """Return the folder's plan after checking it against the current code and source.

    For a new folder, make the plan from an inspection of a few samples.
    """
    begun = (folder / files.PLAN).exists()
    pool.ask(0, do="fingerprint" if begun else "inspect")
    _, answer = next(
        pool.answers(lambda worker: "waiting" if worker else "looking at the first samples")
    )
    if not begun:
        seen = msgspec.convert(answer["inspection"], Inspection)
        samples, rows = files.shard_sizes(
            seen.samples,
            seen.sample_bytes,
            settings.workers * settings.parts,
            settings.shard_samples,
        )
        if seen.samples > files.MOST_SHARDS * samples:
            raise TrainpaceError(
                f"a dataset of {seen.samples:,} samples would make more than {files.MOST_SHARDS:,}"
                f" shards of {samples:,}.",
                "Check the dataset's __len__. If it is right, increase `shard_samples`.",
            )
        spec = ModelSpec.of(settings.target)
        plan = files.ShardPlan(
            target=spec.with_path(os.path.abspath(spec.path)),
            samples=seen.samples,
            shard_samples=samples,
            group_rows=rows,
            layout=seen.layout,
            fingerprint=seen.fingerprint,
            probe_bytes=seen.sample_bytes,
        )
        if _write_first(folder / files.PLAN, to_json(plan) + "\n"):
            return plan
        now = seen.fingerprint
    else:
        now = msgspec.convert(answer["fingerprint"], files.Fingerprint)
    plan = read_plan(folder)
    changes = plan.fingerprint.differences(now)
    before = ModelSpec.of(plan.target).name
    if before != ModelSpec.of(settings.target).name:
        changes.insert(0, f"it was {before}")
    if settings.shard_samples not in (None, plan.shard_samples):
        changes.append(f"--shard-samples was {plan.shard_samples}")
    if changes:
        raise Contradiction(
            f"{folder} was begun with something else: {'; '.join(changes[:5])}.",
            "Give another folder, or begin this one anew with --again.",
        )
    return plan


def _write_first(path: Path, text: str) -> bool:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write_whole(aside, text)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # the file system has no hard links
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return True


class _Work:
    """Scheduler that hands out the missing shards of one part to workers."""

    def __init__(
        self,
        pool: Pool,
        plan: files.ShardPlan,
        folder: Path,
        settings: Settings,
        tell: Callable[[Progress], None],
    ) -> None:
        self._pool, self._plan, self._folder, self._settings, self._tell = (
            pool,
            plan,
            folder,
            settings,
            tell,
        )
        self._mine = plan.part(settings.part, settings.parts)
        there = {number: files.finished_shard(folder, number) for number in self._mine}
        self._todo = deque(number for number, shard in there.items() if shard is None)
        finished = [shard for shard in there.values() if shard is not None]
        self._shards, self._finished = len(self._mine), len(finished)
        self._wanted = sum(len(plan.range_of(number)) for number in self._mine)
        self._before = self._done = sum(shard.stop - shard.first for shard in finished)
        self._bad = sum(len(shard.bad) for shard in finished)
        self._under_way: dict[int, list[int]] = {worker: [] for worker in range(settings.workers)}
        self._partial: dict[int, tuple[int, int]] = {}
        self._request = {"do": "shard", "plan": msgspec.to_builtins(plan), "folder": str(folder)}

    def run(self) -> list[files.Shard]:
        """Compute the missing shards and return their records.

        Raises `DiskFull` or `UserCodeError`. Finished shards are kept.
        """
        self._make_room()
        computed: list[files.Shard] = []
        begun = time.monotonic()
        for worker in list(self._under_way) * _AHEAD:
            self._hand_out(worker)
        answers = self._pool.answers(self._doing)
        while any(self._under_way.values()):
            try:
                worker, answer = next(answers)
            except DiskFull as error:
                kept = f"{self._finished} of {self._shards} shards are kept"
                hint = f"{kept}; make room, then run the same command again."
                raise DiskFull(f"{self._folder} has run full.", hint) from error
            if "progress" in answer:
                self._partial[answer["number"]] = (answer["progress"], answer["bad"])
            elif "shard" in answer:
                computed.append(self._take(worker, msgspec.convert(answer["shard"], files.Shard)))
                self._hand_out(worker)
            done = self._done + sum(samples for samples, _ in self._partial.values())
            bad = self._bad + sum(count for _, count in self._partial.values())
            self._tell(
                Progress(done, self._wanted, bad, done - self._before, time.monotonic() - begun)
            )
            if bad > self._settings.max_bad * self._wanted:
                raise self._too_many(bad, computed[-1].bad if computed else (), answer)
        return computed

    def _too_many(
        self, bad: int, recent: Sequence[files.BadSample], answer: Mapping[str, Any]
    ) -> UserCodeError:
        last = recent[-1].reason if recent else answer.get("reason", "")
        return UserCodeError(
            f"{bad} samples could not be computed, more than --max-bad"
            f" {100 * self._settings.max_bad:g} % of {self._wanted} (the last: {last}).",
            "Fix the dataset, or raise --max-bad.",
        )

    def _make_room(self) -> None:
        """Remove half-written files of a killed run. Raise `DiskFull` if the rest will not fit."""
        stems = {f".{files.shard_file(self._folder, number).stem}" for number in self._mine}
        for rest in self._folder.glob(".shard-*"):
            if rest.name.rsplit(".", 2)[0] in stems:
                rest.unlink(missing_ok=True)
        needed = (self._wanted - self._before) * self._plan.probe_bytes * _SPARE
        free = shutil.disk_usage(self._folder).free
        if self._todo and needed + _SPARE_BYTES > free:
            hint = "Give a folder on a larger disk."
            raise DiskFull(
                f"{_gb(needed)} are needed, and {self._folder} has room for {_gb(free)}.", hint
            )

    def _hand_out(self, worker: int) -> None:
        if self._todo:
            number = self._todo.popleft()
            self._under_way[worker].append(number)
            self._pool.ask(worker, **self._request, number=number)

    def _take(self, worker: int, shard: files.Shard) -> files.Shard:
        self._under_way[worker].remove(shard.number)
        self._partial.pop(shard.number, None)
        self._finished += 1
        self._done += shard.stop - shard.first
        self._bad += len(shard.bad)
        return shard

    def _doing(self, worker: int) -> str:
        covered = [self._plan.range_of(number) for number in self._under_way[worker]]
        return (
            f"computing samples {covered[0].start} to {covered[-1].stop - 1}"
            if covered
            else "waiting"
        )


def _gb(size: float) -> str:
    return f"{format_number(size / 1e9)} GB" if size >= 1e8 else f"{format_number(size / 1e6)} MB"
