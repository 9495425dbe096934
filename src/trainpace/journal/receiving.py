"""Runs that others shared, checked before the journal takes them: form, physics, repetition, and drift from today's forecast.

Nothing of a foreign file is believed: a run enters if its fields have the form of the schema, if its card could have done it, and
if it is not there yet. One that is ODD times off the forecast of this version is kept apart, unless the user accepts it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trainpace.core.catalogue_reader import find_device
from trainpace.core.cluster import Cluster, Device
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Precision
from trainpace.core.hosts import find_host
from trainpace.core.intake import read_json
from trainpace.core.outcome import MFU_LIMIT, Interval
from trainpace.core.records import SCHEMA_VERSION, Record
from trainpace.core.software import TODAY, Software, parse_version
from trainpace.forecast import PARTS, Forecaster, Target
from trainpace.journal.entry import Entry, Sweep, content_id
from trainpace.journal.exchange import Skipped
from trainpace.journal.query import Query
from trainpace.journal.shared import (
    KIND,
    NO_OPTIMIZER,
    OTHER_OPTIMIZER,
    OWN_MODEL,
    SharedRun,
    fingerprint,
    public_name,
    shared_of,
)
from trainpace.workload import Variant, Workload, form_of, load_workload

if TYPE_CHECKING:
    from trainpace.journal.store import Journal

ODD = 3.0
"""Times longer or shorter than the forecast, as three of a thousand public runs are (docs/sharing.md)."""
MOST_RUNS = 100_000
MOST_TRACING_S, MOST_TRACE_S = 120.0, 30.0
"""Time for tracing what a file names, all and each, a second or two mostly; runs of more models stay unchecked."""
MOST_REASONS = 12
FROM_SHARED = "a file of shared runs"

WorkloadOf = Callable[[str, Precision, Variant], Workload]


class Lesson(Record):
    """What a file brought of one model on one card.

    `batches`: micro-batch sizes of the new runs. `forecast_off_pct`: the median of (forecast - measured) / measured over the new
    runs that have a forecast, of this version where `traced`, else the one in the file. `corrects`: whether forecasts use them.
    """

    model: str
    device: str
    new: int
    batches: tuple[int, ...]
    traced: bool
    forecast_off_pct: float | None
    corrects: bool


class Odd(Record):
    """A run that was kept apart: `times` is measured / forecast."""

    model: str
    device: str
    batch: int
    precision: str
    measured_ms: float
    forecast_ms: float
    times: float


class Lessons(Record):
    """What a file of shared runs taught. `odd`: runs kept apart, or taken where they were accepted. `unchecked`: new runs whose
    time could be held against neither physics nor a forecast."""

    by: tuple[Lesson, ...]
    odd: tuple[Odd, ...]
    accepted_odd: bool
    unchecked: int


class Received(NamedTuple):
    """The items of a file in order, and what the new ones taught."""

    items: tuple[Entry | Sweep | Skipped, ...]
    lessons: Lessons


class _Seen(NamedTuple):
    """A new run, the entry that it becomes, and whether today's forecast is of its own operators."""

    run: SharedRun
    entry: Entry
    traced: bool
    odd: Odd | None


def is_shared(data: Any) -> bool:
    return isinstance(data, dict) and data.get("record") == KIND


def receive(
    journal: Journal, path: Path, accept_odd: bool = False, workload_of: WorkloadOf | None = None
) -> Received:
    """Read and check a file. Raises UnreadableInput for one that is not of this kind, or of a newer version.

    `workload_of`: gives a model's workload, by default from the package, the cache, or by tracing it.
    """
    runs = [_run_or_reason(item) for item in _items(path)]
    good = [run for run in runs if isinstance(run, SharedRun)]
    there = _already(journal, good)
    tag = content_id("".join(sorted(fingerprint(run) for run in good if run.is_of_own_model)))[:6]
    forecasts = _Forecasts(workload_of or _workload)
    items: list[Entry | Sweep | Skipped] = []
    seen: list[_Seen] = []
    ids: set[str] = set()
    id_of = _Ids()
    for run in runs:
        if isinstance(run, Skipped):
            items.append(run)
            continue
        id_ = id_of(run)
        if id_ in there:
            items.append(there[id_])
        elif id_ in ids:
            items.append(Skipped("twice in the file"))
        else:
            ids.add(id_)
            checked = forecasts.check(run, _entry_of(run, id_, tag))
            if isinstance(checked, Skipped):
                items.append(checked)
            elif checked.odd is not None and not accept_odd:
                seen.append(checked)
                items.append(Skipped(f"{ODD:g} times off the forecast or more, kept apart"))
            else:
                seen.append(checked)
                items.append(checked.entry)
    return Received(tuple(_few_reasons(items)), _lessons(seen, accept_odd))


def _items(path: Path) -> list[Any]:
    data = read_json(path)
    if not is_shared(data):
        raise UnreadableInput(
            f"{path} is not a file of shared runs.", "trainpace journal share writes one."
        )
    written = data.get("schema_version")
    if type(written) is not int or not 1 <= written <= SCHEMA_VERSION:
        raise UnreadableInput(
            f"{path} has schema version {str(written)[:20]}; this trainpace reads 1 to"
            f" {SCHEMA_VERSION}.",
            "Update trainpace.",
        )
    runs = data.get("runs")
    if data.keys() - {"record", "schema_version", "trainpace", "runs"} or not isinstance(
        runs, list
    ):
        raise UnreadableInput(
            f"{path} is not of the form that docs/shared_runs.schema.json describes."
        )
    if len(runs) > MOST_RUNS:
        raise UnreadableInput(f"{path} holds more than {MOST_RUNS:,} runs.")
    return runs


def _run_or_reason(item: Any) -> SharedRun | Skipped:
    try:
        run = msgspec.convert(item, SharedRun)
        find_device(run.device)
    except msgspec.ValidationError as error:
        return Skipped(f"not of the schema's form ({str(error)[:120]})")
    except TrainpaceError as error:
        return Skipped(f"not of the schema's form ({error.message[:120]})")
    return run


def _few_reasons(items: Iterable[Entry | Sweep | Skipped]) -> Iterator[Entry | Sweep | Skipped]:
    """A hostile file could give every run a reason of its own."""
    told: set[str] = set()
    for item in items:
        if isinstance(item, Skipped):
            if len(told) < MOST_REASONS:
                told.add(item.reason)
            yield item if item.reason in told else Skipped("for other reasons")
        else:
            yield item


class _Ids:
    """Ids of one sharer's runs: fingerprints, told apart where several own models have the same, as those do that ran out of
    memory at the same batch on the same day."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, int]] = {}

    def __call__(self, run: SharedRun) -> str:
        same = fingerprint(run)
        models = self._models.setdefault(same, {})
        nth = models.setdefault(run.model, len(models))
        return same if nth == 0 else content_id(f"{same} {nth}")


def _already(journal: Journal, runs: Iterable[SharedRun]) -> dict[str, Entry]:
    """By id the runs that the journal has: imported before, or measured here and shared by oneself."""
    runs = list(runs)
    ids = set(map(_Ids(), runs))
    there = {entry.id: entry for entry in journal.with_ids(ids)}
    times = {run.step_time_ms for run in runs if run.step_time_ms is not None}
    failed = Query(outcome="out_of_memory")
    candidates = journal.with_step_times(times)
    if any(run.outcome == "out_of_memory" for run in runs):
        candidates = [*candidates, *journal.find(failed, limit=None)]
    id_of, numbers = _Ids(), dict[str, int]()
    for entry in candidates:
        own = shared_of(entry, numbers)
        if isinstance(own, SharedRun) and (id_ := id_of(own)) in ids:
            there.setdefault(id_, entry)
    return there


def _entry_of(run: SharedRun, id_: str, tag: str) -> Entry:
    """The run as the journal keeps it. `tag` tells own models of different files apart."""
    interval = None
    if run.low_ms is not None and run.high_ms is not None:
        interval = Interval(
            low=run.low_ms, high=run.high_ms, coverage=0.9, basis="as it was shared"
        )
    of_parts = len(run.forecast_shares) == len(PARTS) and abs(sum(run.forecast_shares) - 1) < 0.01
    environment: dict[str, str] = dict(run.software.items())
    if run.host_cpu:
        environment["cpu"] = run.host_cpu
    return Entry(
        id=id_,
        created_at=f"{run.date}T00:00:00.000000Z",
        kind="import",
        outcome=run.outcome,
        reason="" if run.outcome == "ok" else "out of memory, as its source says",
        model=f"{run.model} of {tag}" if run.is_of_own_model else run.model,
        device=find_device(run.device).name,
        execution=run.execution,
        num_devices=run.execution.world_size,
        sequence_length=run.sequence_length,
        image_size=run.image_size,
        mode=run.mode,
        step_time_ms=run.step_time_ms,
        interval_ms=interval,
        step=run.parts,
        peak_memory_gib=run.peak_memory_gib,
        reserved_memory_gib=run.reserved_memory_gib,
        environment=environment,
        forecast_ms=run.forecast_ms,
        forecast_basis="its own version's, as it was shared" if run.forecast_ms else "",
        forecast_shares=run.forecast_shares if of_parts else (),
        source=FROM_SHARED,
    )


class _Forecasts:
    """Today's forecasts of shared runs; a workload is traced once."""

    def __init__(self, workload_of: WorkloadOf) -> None:
        self._workload_of = workload_of
        self._workloads: dict[Any, Workload | None] = {}
        self._forecasters: dict[Any, Forecaster] = {}
        self._traced_s = 0.0

    def check(self, run: SharedRun, entry: Entry) -> _Seen | Skipped:
        """The run with what is known of it, or why it cannot be."""
        device, e = find_device(run.device), run.execution
        for gib in (run.peak_memory_gib, run.reserved_memory_gib):
            if gib is not None and device.memory_gib is not None and gib > device.memory_gib.value:
                return Skipped(
                    f"more memory than the card has: {gib:.3g} GiB of {device.name}'s"
                    f" {device.memory_gib.value:g}"
                )
        if run.step_time_ms is None:
            return _Seen(run, entry, False, None)
        if run.parts is not None and not 0.5 < run.parts.total_ms / run.step_time_ms < 2:
            return Skipped("parts that do not add up to the step")
        forecast = self._forecast(run, device)
        if forecast is None or forecast.step is None:
            ms, traced = entry.forecast_ms, False
        else:
            ms, traced = forecast.step.total_ms, True
            if forecast.mfu is not None and forecast.mfu * ms / run.step_time_ms > MFU_LIMIT:
                return Skipped("a step faster than the card's peak rate allows")
            interval = forecast.step_time_interval_ms
            entry = msgspec.structs.replace(
                entry,
                forecast_ms=ms,
                forecast_low_ms=interval and interval.low,
                forecast_high_ms=interval and interval.high,
                forecast_basis=interval.basis if interval else "",
                forecast_shares=self._shares(run, device),
            )
        if ms is None:
            return _Seen(run, entry, traced, None)
        times = run.step_time_ms / ms
        odd = Odd(
            model=entry.model,
            device=device.name,
            batch=e.micro_batch,
            precision=e.precision,
            measured_ms=run.step_time_ms,
            forecast_ms=ms,
            times=times,
        )
        return _Seen(run, entry, traced, None if 1 / ODD < times < ODD else odd)

    def _forecaster(self, run: SharedRun, device: Device) -> Forecaster | None:
        e = run.execution
        if (
            public_name(run.model) is None  # what is not public could name a file
            or e.optimizer == OTHER_OPTIMIZER
            or (run.mode == "train" and e.optimizer == NO_OPTIMIZER)
        ):
            return None
        optimizer = None if e.optimizer == NO_OPTIMIZER or run.mode != "train" else e.optimizer
        recomputes = e.activation_checkpointing == "full" and e.tp * e.pp * e.cp == 1
        variant = Variant(
            optimizer, run.sequence_length, run.image_size, mode=run.mode, checkpointing=recomputes
        )
        traced = (run.model, form_of(e.precision), variant)
        key = (
            *traced,
            device.name,
            e.nproc_per_node,
            e.nnodes,
            run.host_cpu,
            run.software.get("torch"),
        )
        if key not in self._forecasters:
            workload = self._traced(traced, e.precision)
            if workload is None:
                return None
            host = find_host(run.host_cpu) if run.host_cpu else None
            cluster = Cluster(
                device=device, devices_per_node=e.nproc_per_node, nodes=e.nnodes, host=host
            )
            torch = run.software.get("torch")
            software = Software(version=parse_version(torch)) if torch else TODAY
            self._forecasters[key] = Forecaster(workload, Target(cluster, software=software))
        return self._forecasters[key]

    def _traced(self, what: tuple[str, Any, Variant], precision: Precision) -> Workload | None:
        if what not in self._workloads:
            if self._traced_s >= MOST_TRACING_S:
                return None
            begun = time.monotonic()
            try:
                self._workloads[what] = self._workload_of(what[0], precision, what[2])
            except TrainpaceError:
                self._workloads[what] = None
            self._traced_s += time.monotonic() - begun
        return self._workloads[what]

    def _forecast(self, run: SharedRun, device: Device) -> Any:
        try:
            forecaster = self._forecaster(run, device)
            return None if forecaster is None else forecaster.forecast(run.execution)
        except (
            TrainpaceError,
            AssertionError,
        ):  # a forecast that contradicts itself is a bug of ours, and checks nothing
            return None

    def _shares(self, run: SharedRun, device: Device) -> tuple[float, ...]:
        forecaster = self._forecaster(run, device)
        assert forecaster is not None
        return tuple(forecaster.at([run.execution]).shares()[0].tolist())


def _workload(model: str, precision: Precision, variant: Variant) -> Workload:
    return load_workload(model, (form_of(precision),), variant, MOST_TRACE_S)


def _lessons(seen: list[_Seen], accepted_odd: bool) -> Lessons:
    taken = [one for one in seen if one.odd is None or accepted_odd]
    odd = [one.odd for one in seen if one.odd is not None]
    ordered = sorted(taken, key=_where)
    return Lessons(
        by=tuple(_lesson(*where, list(group)) for where, group in groupby(ordered, _where)),
        odd=tuple(odd),
        accepted_odd=accepted_odd,
        unchecked=sum(one.entry.outcome == "ok" and not one.traced for one in taken),
    )


def _where(one: _Seen) -> tuple[str, str]:
    return one.entry.model, one.entry.device


def _lesson(model: str, device: str, group: list[_Seen]) -> Lesson:
    off = [
        100 * (one.entry.forecast_ms / one.entry.step_time_ms - 1)
        for one in group
        if one.entry.forecast_ms and one.entry.step_time_ms
    ]
    return Lesson(
        model=model,
        device=device,
        new=len(group),
        traced=all(one.traced for one in group),
        batches=tuple(sorted({one.run.execution.micro_batch for one in group})),
        forecast_off_pct=statistics.median(off) if off else None,
        corrects=any(
            one.entry.mode == "train" and one.entry.outcome == "ok" and one.entry.forecast_shares
            for one in group
        )
        or any(_is_public(one) for one in group),
    )


def _is_public(one: _Seen) -> bool:
    return (
        one.entry.mode == "train"
        and one.entry.outcome == "ok"
        and not one.entry.model.startswith(OWN_MODEL)
    )
