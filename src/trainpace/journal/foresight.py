"""A model's forecast on one machine, corrected by similar runs in the journal."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.forecast import (
    LARGEST_RATIO,
    PARTS,
    Z_95,
    Forecaster,
    Observed,
    Run,
    Target,
    corrected,
    observe,
    run_of,
    student_t_95,
)  # fmt: skip
from trainpace.hardware import Cluster, find_device
from trainpace.medians import noise_of
from trainpace.outcome import Forecast
from trainpace.workload import Workload

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.entry import Entry
    from trainpace.journal.store import Journal

TORCHVISION = "torchvision:"
"""The built-in models are torchvision's, layer by layer, so that runs of either name are of the same workload."""
MOST = 2000
"""The number of runs examined, the newest first."""


class Foresight(NamedTuple):
    """A forecaster, and what the journal's runs were beside their forecasts.

    `same_workload`: runs of this workload on this device, by batch size; `elsewhere`: on other devices, or executed otherwise;
    `others`: runs of other models on this device.
    """

    forecaster: Forecaster
    same_workload: tuple[Observed, ...] = ()
    elsewhere: tuple[Observed, ...] = ()
    others: tuple[Observed, ...] = ()

    @property
    def workload(self) -> Workload:
        return self.forecaster.workload

    def at(self, execution: Execution) -> Forecast:
        """The forecast, corrected."""
        return self.corrected([self.forecaster.forecast(execution)])[0]

    def corrected(self, forecasts: Sequence[Forecast]) -> list[Forecast]:
        """Forecasts of the forecaster, corrected by what the journal knows."""
        known = (*self.same_workload, *self.elsewhere, *self.others)
        return corrected(self.forecaster, forecasts, known, f"{self._sources()} (journal)")

    def in_words(self) -> str:
        """One sentence on the journal's part in the forecast; "" where it has none."""
        sources = self._sources()
        return f"corrected by the journal: {sources}." if sources else ""

    def _sources(self) -> str:
        sizes = ", ".join(str(seen.run.batch) for seen in self.same_workload[:8])
        devices = sorted({seen.run.device for seen in self.elsewhere})
        n = len(self.others)
        words = (
            f"this workload measured on this device at batch {sizes}" if sizes else "",
            f"this workload measured with other settings or on other cards: {', '.join(devices)}" if devices else "",
            f"{n} other model{'s' if n > 1 else ''} measured on this device" if n else "",
        )
        return "; ".join(word for word in words if word)


class Neighbours(NamedTuple):
    """Runs of the journal near a workload and a device: of the same workload on this device, and on others or executed otherwise,
    the newest of each batch size, in order of batch size (on this device with its repeats, the others of its sweep); and of
    every other model on this device one, of the middle error."""

    same: tuple[Entry, ...] = ()
    elsewhere: tuple[Entry, ...] = ()
    others: tuple[Entry, ...] = ()


def foresight_of(
    forecaster: Forecaster,
    execution: Execution,
    journal: Journal | None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Foresight:
    """Look up the journal's runs near this workload and device."""
    if journal is None:
        return Foresight(forecaster)
    from trainpace.journal.identity import anonymous

    workload, device = forecaster.workload, forecaster.target.cluster.device
    near = neighbours(
        journal, anonymous(workload.model), device.name, execution, workload_key(workload, execution),
        sequence_length or workload.sequence_length, image_size or workload.image_side,
    )  # fmt: skip
    table = forecaster.at([execution])
    plain = table.brief(0)
    asked = None if plain.step is None else run_of(plain, table.shares()[0])
    others = () if asked is None else (observed_beside(entry, asked) for entry in near.others)
    return Foresight(
        forecaster,
        _observed_repeats(near.same, forecaster),
        tuple(
            seen
            for entry in near.elsewhere
            if (seen := observed_elsewhere(entry, forecaster)) is not None
            and abs(seen.log_ratios[0]) <= math.log(LARGEST_RATIO)
        ),
        tuple(seen for seen in others if abs(seen.log_ratios[0]) <= math.log(LARGEST_RATIO)),
    )


def _observed_repeats(entries: Sequence[Entry], forecaster: Forecaster) -> tuple[Observed, ...]:
    """The median run of each batch size beside its forecast of today, as sure as the repeats of all sizes agree."""
    groups = {batch: list(some) for batch, some in groupby(entries, lambda entry: entry.execution.global_batch)}
    noise = noise_of({batch: [e.step_time_ms for e in some if e.step_time_ms] for batch, some in groups.items()})
    repeat_sd = 0.0 if noise is None else noise.relative * student_t_95(noise.degrees) / Z_95
    observed = []
    for some in groups.values():
        seen = observed_again(middle_run(some), forecaster)
        if seen is not None:
            own_sd = max(seen.noise_sd, repeat_sd / math.sqrt(len(some)))
            observed.append(seen._replace(noise_sd=own_sd, repeat_sd=max(seen.repeat_sd, repeat_sd)))
    return tuple(observed)


def observed_again(entry: Entry, forecaster: Forecaster) -> Observed | None:
    """A run beside its forecast of today."""
    assert entry.step_time_ms is not None
    return observe(forecaster, entry.execution, entry.step_time_ms, entry.step, entry.interval_ms)


def observed_beside(entry: Entry, asked: Run) -> Observed:
    """A run of another model beside the forecast of its own time, which is taken to be as unsure as the one asked for."""
    assert entry.step_time_ms is not None
    assert entry.forecast_ms is not None
    ratio = math.log(entry.step_time_ms * entry.forecast_factor / entry.forecast_ms)
    e = entry.execution
    shares = (
        entry.forecast_shares if len(entry.forecast_shares) == len(PARTS) and sum(entry.forecast_shares) > 0 else ()
    )
    run = asked._replace(model=entry.model, variant="", batch=e.global_batch, shares=shares)
    return Observed(run, (ratio,) * 4)


def observed_elsewhere(entry: Entry, forecaster: Forecaster) -> Observed | None:
    """A run beside the forecast of its own execution on its own card; None for one that cannot be forecast here: on a CPU, on
    several nodes whose network nobody knows, or in a number format that was not traced."""
    target, e = forecaster.target, entry.execution
    if target.kernels.traces_cpu or e.nnodes > 1:
        return None
    try:
        cluster = Cluster(device=find_device(entry.device), devices_per_node=e.nproc_per_node)
        there = forecaster.on(Target(cluster, software=target.software))
        return observed_again(replace(entry, device=cluster.device.name), there)
    except TrainpaceError:
        return None


def neighbours(
    journal: Journal,
    model: str,
    device: str,
    execution: Execution,
    workload_key: str | None = None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Neighbours:
    """Runs of the same workload, and of other models on the same device. Those with otherwise the same execution on this device
    are its own runs; others were measured elsewhere.

    Where both a run and the question have a `workload_key`, the keys decide whether the workload is the same, whatever
    the model is called; otherwise the model's name does. A sequence length or image size that both state must agree.
    """
    variant = _variant(execution)
    candidates = of_workload(journal, model, (workload_key,) if workload_key else (), sequence_length, image_size)
    newest = newest_repeats(candidates, device)
    in_order = sorted(newest.items(), key=lambda item: item[0])
    return Neighbours(
        same=tuple(entry for where, some in in_order if where[:2] == (device, variant) for entry in some),
        elsewhere=tuple(some[0] for where, some in in_order if where[:2] != (device, variant)),
        others=other_models(journal, model, device, {entry.id for entry in candidates}),
    )


def newest_repeats(newest_first: Iterable[Entry], device: str = "") -> dict[tuple[str, str, int], list[Entry]]:
    """By device, execution and batch size the newest run, and its repeats: the others of its sweep. `device`: the name by which
    that device goes, whatever a run calls it."""
    groups: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in newest_first:
        where = (_catalogued(entry.device, device), _variant(entry.execution), entry.execution.global_batch)
        some = groups.setdefault(where, [entry])
        if entry is not some[0] and entry.sweep and entry.sweep == some[0].sweep:
            some.append(entry)
    return groups


def middle_run(repeats: Sequence[Entry]) -> Entry:
    """The run of the median step time."""
    return sorted(repeats, key=lambda entry: entry.step_time_ms or 0.0)[len(repeats) // 2]


def of_workload(
    journal: Journal,
    model: str,
    keys: Collection[str] = (),
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> list[Entry]:
    """Trainings of a workload, the newest first: of that model, or with one of the `keys` (see `workload_key`)."""
    plain = model.removeprefix(TORCHVISION)
    names = (plain, f"{TORCHVISION}{plain}")
    candidates = {entry.id: entry for name in names for entry in _newest_first(journal, model=name)}
    for key in keys:
        candidates |= {entry.id: entry for entry in _newest_first(journal, workload_key=key)}

    def belongs(entry: Entry) -> bool:
        shapes = ((entry.sequence_length, sequence_length), (entry.image_size, image_size))
        other = keys and entry.workload_key and entry.workload_key not in keys
        return entry.mode == "train" and not other and not any(a and b and a != b for a, b in shapes)

    return sorted(filter(belongs, candidates.values()), key=lambda e: (e.created_at, e.id), reverse=True)


def other_models(journal: Journal, model: str, device: str, without: Collection[str] = ()) -> tuple[Entry, ...]:
    """Of every other model that was measured on a device beside its forecast one run, of the middle error. `without`: ids."""
    others: dict[str, list[Entry]] = {}
    for entry in _newest_first(journal, device=device, with_forecast=True):
        if entry.model == model or entry.id in without or entry.mode != "train":
            continue
        if entry.forecast_ms and entry.step_time_ms and entry.forecast_factor:
            others.setdefault(entry.model, []).append(entry)
    return tuple(_middle(others[name]) for name in sorted(others))


def _newest_first(journal: Journal, **filters: Any) -> list[Entry]:
    from trainpace.journal.query import Query

    return journal.find(Query(exact=True, outcome="ok", **filters), limit=MOST)


def _variant(execution: Execution) -> str:
    """What makes it the same run but for the batch."""
    return repr(replace(execution, micro_batch=1, accumulation=1))


def _catalogued(name: str, device: str) -> str:
    """`device` where the name is another of its names, as the driver's or a table's; else the name."""
    try:
        return device if name == device or find_device(name).name == device else name
    except TrainpaceError:
        return name


def _middle(entries: list[Entry]) -> Entry:
    def plain_error(entry: Entry) -> float:
        assert entry.step_time_ms is not None
        assert entry.forecast_ms is not None
        return entry.step_time_ms * entry.forecast_factor / entry.forecast_ms

    middle = statistics.median_low([plain_error(entry) for entry in entries])
    return next(entry for entry in entries if plain_error(entry) == middle)


def workload_key(workload: Workload, execution: Execution) -> str:
    """Equal for workloads that compute the same, whatever their names."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (operators.count, operators.flops, operators.read_bytes, operators.written_bytes, operators.dims)
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]
