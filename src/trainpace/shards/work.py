"""Hand the missing shards of one part out to workers, while the disk has room and not too many samples are bad."""

import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.errors import UserCodeError
from trainpace.process import DiskFull, Pool
from trainpace.records import Record
from trainpace.shards.folder import finished_shard
from trainpace.shards.plan import Shard, ShardPlan, shard_file
from trainpace.units import format_number

_SPARE = 1.02
"""Room for headers and for samples that are larger than those looked at."""
_SPARE_BYTES = 2**20
_AHEAD = 2
"""Shards that a worker has at a time: it computes one while it writes the other."""


class Settings(Record):
    """What to compute, where to, and by how many processes. `max_bad`: the share of samples that may be set aside;
    `repair`: shards to compute again."""

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
    """How far a part is, in samples. `bad`: those of `done` that were set aside; `new`: computed by this run, in `seconds`."""

    done: int
    wanted: int
    bad: int
    new: int
    seconds: float


class Work:
    """`run` computes the shards that are missing, and gives their records."""

    def __init__(
        self, pool: Pool, plan: ShardPlan, folder: Path, settings: Settings, tell: Callable[[Progress], None]
    ) -> None:
        self._pool, self._plan, self._folder, self._settings, self._tell = pool, plan, folder, settings, tell
        mine = plan.part(settings.part, settings.parts)
        there = {number: finished_shard(folder, number) for number in mine}
        self._todo = deque(number for number, shard in there.items() if shard is None)
        finished = [shard for shard in there.values() if shard is not None]
        self._shards, self._finished = len(mine), len(finished)
        self._wanted = sum(len(plan.range_of(number)) for number in mine)
        self._before = self._done = sum(shard.stop - shard.first for shard in finished)
        self._bad = sum(len(shard.bad) for shard in finished)
        self._under_way: dict[int, list[int]] = {worker: [] for worker in range(settings.workers)}
        self._partial: dict[int, tuple[int, int]] = {}
        self._largest = plan.probe_bytes * plan.shard_samples
        self._full: DiskFull | None = None
        self._request = {"do": "shard", "plan": msgspec.to_builtins(plan), "folder": str(folder)}

    def run(self) -> list[Shard]:
        """Raises `DiskFull` or `UserCodeError`; what is finished by then stays finished."""
        self._make_room()
        computed: list[Shard] = []
        begun = time.monotonic()
        for _ in range(_AHEAD):
            for worker in self._under_way:
                self._hand_out(worker)
        answers = self._pool.answers(self._doing)
        while any(self._under_way.values()):
            try:
                worker, answer = next(answers)
            except DiskFull as error:
                hint = (
                    f"{self._finished} of {self._shards} shards are kept; make room, then run the same command again."
                )
                raise DiskFull(f"{self._folder} has run full.", hint) from error
            if "progress" in answer:
                self._partial[answer["number"]] = (answer["progress"], answer["bad"])
            elif "shard" in answer:
                computed.append(self._take(worker, msgspec.convert(answer["shard"], Shard)))
                self._hand_out(worker)
            done = self._done + sum(samples for samples, _ in self._partial.values())
            bad = self._bad + sum(count for _, count in self._partial.values())
            self._tell(Progress(done, self._wanted, bad, done - self._before, time.monotonic() - begun))
            self._check(bad, computed, answer)
        if self._full is not None:
            raise self._full
        return computed

    def _make_room(self) -> None:
        """Remove the half-written files of a killed run. Raises DiskFull where the rest will not fit."""
        for number in self._todo:
            for rest in self._folder.glob(f".{shard_file(self._folder, number).name}.*"):
                rest.unlink(missing_ok=True)
        needed = (self._wanted - self._before) * self._plan.probe_bytes * _SPARE
        free = shutil.disk_usage(self._folder).free
        if self._todo and needed + _SPARE_BYTES > free:
            hint = "Give a folder on a larger disk."
            raise DiskFull(f"{_gb(needed)} are needed, and {self._folder} has room for {_gb(free)}.", hint)

    def _hand_out(self, worker: int) -> None:
        """Give a worker a shard if there is one and room for it; else what is under way may still end."""
        if not self._todo or self._full is not None:
            return
        free = shutil.disk_usage(self._folder).free
        if (sum(map(len, self._under_way.values())) + 1) * self._largest * _SPARE + _SPARE_BYTES > free:
            hint = "Make room, then run the same command again: it goes on where it stopped."
            self._full = DiskFull(f"stopped before {self._folder} would run full: {_gb(free)} are left.", hint)
            return
        number = self._todo.popleft()
        self._under_way[worker].append(number)
        self._pool.ask(worker, **self._request, number=number)

    def _take(self, worker: int, shard: Shard) -> Shard:
        self._under_way[worker].remove(shard.number)
        self._partial.pop(shard.number, None)
        self._largest = max(self._largest, shard.file_bytes)
        self._finished += 1
        self._done += shard.stop - shard.first
        self._bad += len(shard.bad)
        return shard

    def _check(self, bad: int, computed: list[Shard], answer: dict[str, Any]) -> None:
        if bad > self._settings.max_bad * self._wanted:
            last = computed[-1].bad[-1].reason if computed and computed[-1].bad else answer.get("reason", "")
            raise UserCodeError(
                f"{bad} samples could not be computed, more than --max-bad {100 * self._settings.max_bad:g} % of"
                f" {self._wanted} (the last: {last}).",
                "Mend the dataset, or allow more.",
            )

    def _doing(self, worker: int) -> str:
        covered = [self._plan.range_of(number) for number in self._under_way[worker]]
        return f"computing samples {covered[0].start} to {covered[-1].stop - 1}" if covered else "waiting"


def _gb(size: float) -> str:
    return f"{format_number(size / 1e9)} GB" if size >= 1e8 else f"{format_number(size / 1e6)} MB"
