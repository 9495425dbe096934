"""Compute a dataset once, in parallel processes, into shards. Finished shards stay and are not computed again."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.process import Pool
from trainpace.records import Record, load, save, to_json, write_whole
from trainpace.shards.folder import damage, finished_shard
from trainpace.shards.plan import (
    BAD_SAMPLES,
    MANIFEST,
    PLAN,
    Fingerprint,
    Manifest,
    Shard,
    ShardPlan,
    shard_file,
    shard_record,
    shard_sizes,
)
from trainpace.shards.precompute_estimate import Estimate, SampleCosts, decide
from trainpace.shards.precompute_worker import Inspection
from trainpace.shards.work import Progress, Settings, Work

_LOCK = ".lock"
_WORKER = "trainpace.shards.precompute_worker"


class Precomputed(Record):
    """The state of a folder after a run. `finished`: the manifest is written; else other parts still have shards to compute;
    `shards_planned`: how many there will be."""

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
    """A shard that cannot be trusted, and why."""

    number: int
    file: str
    problem: str


def precompute(
    settings: Settings, tell: Callable[[Progress], None] = lambda _: None, note: Callable[[str], None] = lambda _: None
) -> Precomputed:
    """Compute the shards of this part that are not there yet, and the manifest once all are.

    Raises `Contradiction` where the folder was begun with other code, source or settings, `DiskFull` before the disk is, and
    `UserCodeError` where more samples are bad than `max_bad` allows. Finished shards are kept in every case.
    """
    folder = Path(settings.folder)
    _make_ready(folder)
    begun = time.monotonic()
    with _alone(folder, settings), Pool(_WORKER, settings.target, settings.workers, note) as pool:
        plan = _agreed_plan(pool, folder, settings)
        _set_aside(folder, settings.repair)
        computed = Work(pool, plan, folder, settings, tell).run()
    shards = [finished_shard(folder, number) for number in range(plan.shards)]
    there = [shard for shard in shards if shard is not None]
    if len(there) == plan.shards:
        _finish(folder, plan, there)
    return Precomputed(
        folder=str(folder), samples=sum(s.samples for s in there), bad=sum(len(s.bad) for s in there), shards=len(there),
        shards_computed=len(computed), samples_computed=sum(s.samples for s in computed), seconds=time.monotonic() - begun,
        total_bytes=sum(s.file_bytes for s in there), finished=len(there) == plan.shards, shards_planned=plan.shards,
    )  # fmt: skip


def estimate(
    target: str, folder: str, workers: int, seconds: float = 20.0, most: int = 256, step_s: float | None = None,
    batch: int = 1, epochs: float | None = None,
) -> Estimate:  # fmt: skip
    """Decide if `precompute` is worth it, from up to `most` samples computed in a separate process. Leaves no files behind."""
    with Pool(_WORKER, target, 1) as pool:
        pool.ask(0, do="estimate", options={"folder": folder, "seconds": seconds, "most": most})
        _, answer = next(pool.answers(lambda _: "computing some samples"))
    return decide(msgspec.convert(answer["estimate"], SampleCosts), workers, step_s, batch, epochs)


def verify(folder: Path) -> tuple[ShardPlan, list[Damage]]:
    """Read every byte of every shard, and name those that are missing or not as they were written."""
    plan = read_plan(folder)
    recorded: dict[int, Shard] = {}
    if (folder / MANIFEST).exists():
        recorded = {shard.number: shard for shard in load(folder / MANIFEST, Manifest).shards}
    damaged = []
    for number in range(plan.shards):
        file = shard_file(folder, number)
        problem: str | None
        try:
            shard = load(shard_record(folder, number), Shard)
            agreed = recorded.get(number, shard)
            problem = damage(folder, agreed) or (None if shard == agreed else "its record is not the manifest's")
        except UnreadableInput:
            problem = "its record cannot be read" if file.exists() else "missing"
        if problem is not None:
            damaged.append(Damage(number=number, file=file.name, problem=problem))
    return plan, damaged


def _set_aside(folder: Path, numbers: tuple[int, ...]) -> None:
    """Remove these shards, so that they are computed again."""
    if numbers:
        (folder / MANIFEST).unlink(missing_ok=True)
    for number in numbers:
        shard_record(folder, number).unlink(missing_ok=True)
        shard_file(folder, number).unlink(missing_ok=True)


def read_plan(folder: Path) -> ShardPlan:
    """The plan that a folder was begun with."""
    if not (folder / PLAN).exists():
        raise UnreadableInput(
            f"{folder} holds no precomputed samples.", "Begin with: trainpace precompute FILE.py:NAME."
        )
    return load(folder / PLAN, ShardPlan)


def _make_ready(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
        (folder / _LOCK).open("w").close()
    except OSError as error:
        raise UnreadableInput(f"cannot use {folder}: {(error.strerror or str(error)).lower()}.") from None
    if others and PLAN not in others:
        raise TrainpaceError(f"{folder} holds other files ({others[0]}).", "Give a new or empty folder.")


@contextlib.contextmanager
def _alone(folder: Path, settings: Settings) -> Iterator[None]:
    """Hold the lock of the whole folder, or of one part beside others. The locks end with the process, however it ends."""
    whole = settings.parts == 1
    with (
        open(folder / _LOCK, "w") as whole_lock,
        open(folder / f".lock-{settings.part + 1}-of-{settings.parts}", "w") as part_lock,
    ):
        try:
            fcntl.flock(whole_lock, (fcntl.LOCK_EX if whole else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            fcntl.flock(part_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Contradiction(f"another precompute is at work on {folder}.", "Wait for it, or end it.") from None
        except OSError:  # a file system without locks; shards are renamed into place all the same
            pass
        if settings.again:
            for path in folder.iterdir():
                if path.name in (PLAN, MANIFEST, BAD_SAMPLES) or path.match("shard-*") or path.match(".shard-*"):
                    path.unlink()
        yield


def _agreed_plan(pool: Pool, folder: Path, settings: Settings) -> ShardPlan:
    """The folder's plan, checked against the present code and source; for a new folder, a plan made from a few samples."""
    begun = (folder / PLAN).exists()
    pool.ask(0, do="fingerprint" if begun else "inspect")
    _, answer = next(pool.answers(lambda worker: "waiting" if worker else "looking at the first samples"))
    if not begun:
        seen = msgspec.convert(answer["inspection"], Inspection)
        samples, rows = shard_sizes(
            seen.samples, seen.sample_bytes, settings.workers * settings.parts, settings.shard_samples
        )
        plan = ShardPlan(
            target=_absolute(settings.target), samples=seen.samples, shard_samples=samples, group_rows=rows,
            layout=seen.layout, fingerprint=seen.fingerprint, probe_bytes=seen.sample_bytes, probe_s=seen.sample_s,
        )  # fmt: skip
        if _write_first(folder / PLAN, to_json(plan) + "\n"):
            return plan
        now = seen.fingerprint
    else:
        now = msgspec.convert(answer["fingerprint"], Fingerprint)
    plan = read_plan(folder)
    changes = plan.fingerprint.differences(now)
    if plan.target.rpartition(":")[2] != settings.target.rpartition(":")[2]:
        changes.insert(0, f"it was {plan.target.rpartition(':')[2]}")
    if settings.shard_samples not in (None, plan.shard_samples):
        changes.append(f"--shard-samples was {plan.shard_samples}")
    if changes:
        raise Contradiction(
            f"{folder} was begun with something else: {'; '.join(changes[:5])}.",
            "Give another folder, or begin this one anew with --again.",
        )
    return plan


def _write_first(path: Path, text: str) -> bool:
    """Write a file unless another part has written it first."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write_whole(aside, text)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _finish(folder: Path, plan: ShardPlan, shards: list[Shard]) -> None:
    manifest = Manifest(plan=plan, shards=tuple(shards))
    lines = [json.dumps({"index": b.index, "reason": b.reason}) + "\n" for b in manifest.bad()]
    write_whole(folder / BAD_SAMPLES, "".join(lines))
    save(manifest, folder / MANIFEST)


def _absolute(target: str) -> str:
    file, _, name = target.rpartition(":")
    return f"{os.path.abspath(file)}:{name}"
