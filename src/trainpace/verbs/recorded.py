"""A recording beside the workload that `watch` kept in it: what forecasts of the same training take from it, and its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainpace.core.errors import TrainpaceError
from trainpace.core.units import format_number
from trainpace.workload import ModelSpec, Workload

if TYPE_CHECKING:
    from trainpace.watch import Recording

FEW_STEPS = 10
"""Steps below which the times of a recording are called rough."""


class RecordedLoader(NamedTuple):
    """A script's loader as it was seen. samples_per_s: of one process with its `workers`, on the recording's `cores`; with none
    it loads between the steps. samples_per_core_s: what one core prepares."""

    workers: int
    cores: int
    samples_per_s: float
    samples_per_core_s: float

    @property
    def words(self) -> str:
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        return (
            f"{workers}, {format_number(self.samples_per_s)} samples/s on the recording's"
            f" {self.cores} cores"
        )


def recording_of(model: str | Workload) -> Recording | None:
    """The recording in whose folder a saved workload lies; None where there is none that can be read."""
    spec = ModelSpec.of(model)
    if not (spec.is_saved and spec.path):
        return None
    from trainpace.watch import COMMAND_FILE, read_recording

    folder = Path(spec.path).parent
    if not (folder / COMMAND_FILE).is_file():
        return None
    try:
        recording = read_recording(folder)
    except TrainpaceError:
        return None
    return recording if recording.ranks else None


def loader_of(recording: Recording) -> RecordedLoader | None:
    """The first process' loader; None where it was not seen."""
    from trainpace.diagnose import loader_cost
    from trainpace.measure import batch_ms

    rank = recording.ranks[0]
    cost = loader_cost(rank)
    if cost is None or rank.loader is None:
        return None
    ms = batch_ms(cost, rank.loader.workers, max(1.0, float(rank.cpus)))
    core_ms = cost.sample_cpu_ms + cost.collate_ms / cost.batch_size
    if ms <= 0 or core_ms <= 0:
        return None
    return RecordedLoader(
        rank.loader.workers, rank.cpus, 1000 * cost.batch_size / ms, 1000 / core_ms
    )


def caveats(recording: Recording) -> tuple[str, ...]:
    """Why the recording's times may mislead, each as a clause."""
    first = recording.ranks[0]
    found = []
    if recording.busy:
        found.append(f"while the script was recorded, {recording.busy.rstrip('.')}")
    if first.steps < FEW_STEPS:
        found.append(
            f"the recording has only {first.steps} steps to count, so that its times are rough"
        )
    if not first.accelerator:
        found.append(
            "the script was recorded on a CPU: its loader counts here, the time of its steps"
            " does not"
        )
    return tuple(found)


def sentences_of(clauses: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{clause[:1].upper()}{clause[1:]}." for clause in clauses)
