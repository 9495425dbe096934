"""Runs of the journal that improve forecasts of a workload on any target.

`forecast`, `match`, `plan` and `measure` use them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import PRECISIONS, Execution, Precision
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.stats import Z_95, noise_of, student_t_95
from trainpace.forecast import (
    LARGEST_RATIO,
    PARTS,
    Forecaster,
    Observed,
    Posterior,
    Target,
    Variant,
    observe,
    run_of_stored,
)
from trainpace.journal.entry import anonymous, default_place
from trainpace.workload import ModelSpec, Workload, form_of

if TYPE_CHECKING:  # A forecast without a journal must not load the database packages.
    from trainpace.forecast import ForecastTable
    from trainpace.journal.entry import Entry
    from trainpace.journal.store import Journal

MOST = 2000
"""Maximum number of runs to examine, the newest first."""
MOST_MODELS, MOST_SIZES, MOST_LISTED = 24, 4, 8
"""Maximum number of other models per device, and of batch sizes per model.

More of them would add little.
"""

Where = tuple[str, str, int]
"""Key of a run: its device, its execution without the batch, and its batch size."""


def may_know(place: str | None, devices: Collection[str], models: Collection[str] = ()) -> bool:
    """Return True if a journal may contain runs on one of the devices or of one of the models.

    An SQLite file is read without SQLAlchemy, because importing SQLAlchemy takes longer than a
    forecast. If a journal cannot be read this way (a server, a damaged file), the result is True.
    `Journal` then reports the error.
    """
    where = place or default_place()
    if "://" in where:
        return True
    file = Path(os.path.expanduser(where))
    if place is None and not file.exists():
        return False
    import sqlite3

    address = file.absolute().as_uri() + "?mode=ro"
    models = {name for model in models for name in ModelSpec.of(model).aliases}
    of_devices, of_models = (",".join("?" * len(names)) for names in (devices, models))
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            query = (
                "SELECT 1 FROM runs WHERE outcome = 'ok'"
                f" AND (device IN ({of_devices}) OR model IN ({of_models})) LIMIT 1"
            )
            return connection.execute(query, (*devices, *models)).fetchone() is not None
    except (sqlite3.Error, ValueError):
        return True


class _Known(NamedTuple):
    posterior: Posterior | None
    words: str


class Knowledge:
    """Runs of a workload, and runs of other models on the same devices, with their forecasts.

    `trainpace.forecast.uncertainty` weights them: the same card counts more than another card, and
    the same execution more than another execution. `sequence_length` and `image_size` are the
    requested sizes, if the workload has none. Runs with other sizes do not count.
    """

    def __init__(
        self,
        journal: Journal,
        workload: Workload,
        sequence_length: int | None = None,
        image_size: int | None = None,
    ) -> None:
        self._journal, self._workload = journal, workload
        self._model = anonymous(workload.model)
        of_form: dict[str, Precision] = {form_of(precision): precision for precision in PRECISIONS}
        keys = {
            workload_key(workload, Execution(precision=of_form[form])) for form in workload.forms
        }
        sizes = sequence_length or workload.sequence_length, image_size or workload.image_side
        runs = of_workload(journal, self._model, keys, *sizes) if workload.mode == "train" else []
        self._ids = frozenset(run.id for run in runs)
        self._runs = newest_repeats(runs)
        self._others: dict[str, tuple[Entry, ...]] = {}
        self._known: dict[Any, _Known] = {}

    def posterior(self, forecaster: Forecaster) -> Posterior | None:
        """Return the posterior for a forecaster's target, or None if there are no relevant runs."""
        return self._for(forecaster).posterior

    def source(self, forecaster: Forecaster) -> str:
        """Return the words that name the journal as the source of an interval."""
        return f"{self._for(forecaster).words} (journal)"

    def in_words(self, forecaster: Forecaster) -> str:
        """Return a sentence on how the journal corrects a target's forecasts, or ""."""
        words = self._for(forecaster).words
        return f"corrected by the journal: {words}." if words else ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices on which the workload was measured."""
        return tuple(sorted({device for device, _, _ in self._runs}))

    def _for(self, forecaster: Forecaster) -> _Known:
        target = forecaster.target
        cluster = target.cluster
        key = (
            cluster.device.name,
            cluster.host,
            cluster.network_gb_per_s_per_device,
            target.kernels,
            target.software,
        )
        if key not in self._known:
            self._known[key] = self._look_up(forecaster.plain)
        return self._known[key]

    def _look_up(self, plain: Forecaster) -> _Known:
        if self._workload.mode != "train":
            return _Known(None, "")
        device = plain.target.cluster.device.name
        runs = newest_repeats((entry for some in self._runs.values() for entry in some), device)
        seen = _observed(runs, plain)
        devices = dict.fromkeys((device, *(where[0] for where in seen)))
        entries = chain.from_iterable(map(self._other_models, devices))
        others = [other for entry in entries if (other := _beside(entry, plain)) is not None]
        known = (*seen.values(), *filter(_is_near, others))
        return _Known(Posterior(known) if known else None, _in_words(seen, others, device))

    def _other_models(self, device: str) -> tuple[Entry, ...]:
        if device not in self._others:
            self._others[device] = other_models(self._journal, device, self._ids)
        return self._others[device]


def _in_words(seen: Mapping[Where, Observed], others: Sequence[Observed], device: str) -> str:
    words = []
    if sizes := sorted({batch for name, _, batch in seen if name == device}):
        words.append(f"this workload measured on this device at batch {_listed(sizes)}")
    if elsewhere := sorted({name for name, _, _ in seen} - {device}):
        words.append(f"this workload measured on other cards: {', '.join(elsewhere)}")
    if n := len({other.run.model for other in others if other.run.device == device}):
        words.append(f"{n} other model{'s' if n > 1 else ''} measured on this device")
    return "; ".join(words)


def _listed(sizes: Sequence[int]) -> str:
    more = f" and {len(sizes) - MOST_LISTED} more" if len(sizes) > MOST_LISTED else ""
    return ", ".join(map(str, sizes[:MOST_LISTED])) + more


def _observed(runs: Mapping[Where, Sequence[Entry]], plain: Forecaster) -> dict[Where, Observed]:
    """Return the middle run of each batch size with today's forecast.

    The noise comes from the repeats.
    """
    repeats: dict[tuple[str, str], dict[int, list[float]]] = {}
    for (device, variant, batch), some in runs.items():
        repeats.setdefault((device, variant), {})[batch] = [
            e.step_time_ms for e in some if e.step_time_ms
        ]
    observed = {}
    for where, some in sorted(runs.items(), key=lambda item: item[0]):
        noise = noise_of(repeats[where[:2]])
        repeat_sd = 0.0 if noise is None else noise.relative * student_t_95(noise.degrees) / Z_95
        seen = _again(replace(middle_run(some), device=where[0]), plain)
        if seen is not None:
            own_sd = max(seen.noise_sd, repeat_sd / math.sqrt(len(some)))
            observed[where] = seen._replace(
                noise_sd=own_sd, repeat_sd=max(seen.repeat_sd, repeat_sd)
            )
    return observed


def _again(entry: Entry, plain: Forecaster) -> Observed | None:
    """Return a run with today's forecast for its own card and number of cards, or None.

    No forecast is possible here for another machine's CPU, for nodes with an unknown network, or
    for a precision that was not traced.
    """
    target, e = plain.target, entry.execution
    here = target.cluster
    try:
        if entry.device == here.device.name:
            there = plain.on(replace(here, nodes=e.nnodes, devices_per_node=e.nproc_per_node))
        elif target.kernels.traces_cpu or e.nnodes > 1:
            return None
        else:
            cluster = Cluster(device=find_device(entry.device), devices_per_node=e.nproc_per_node)
            there = plain.on(Target(cluster, software=target.software))
        assert entry.step_time_ms is not None
        seen = observe(there, e, entry.step_time_ms, entry.step, entry.interval_ms)
    except TrainpaceError:
        return None
    return seen if entry.device == here.device.name or (seen and _is_near(seen)) else None


def _is_near(seen: Observed) -> bool:
    return abs(seen.log_ratios[0]) <= math.log(LARGEST_RATIO)


def _beside(entry: Entry, plain: Forecaster) -> Observed | None:
    """Return a run of another model with the forecast made for it, or None for an unknown card.

    The journal's correction is removed from the forecast.
    """
    here, e = plain.target.cluster.device, entry.execution
    assert entry.step_time_ms
    assert entry.forecast_ms
    forecast_ms = entry.forecast_ms / entry.forecast_factor
    try:
        device = here if entry.device == here.name else find_device(entry.device)
    except TrainpaceError:
        return None
    variant = Variant(
        replace(e, micro_batch=1, accumulation=1), entry.image_size, entry.sequence_length
    )
    run = run_of_stored(
        plain.target.kernels,
        device,
        entry.model,
        variant,
        e.global_batch,
        entry.forecast_shares,
        forecast_ms,
    )
    return Observed(run, (math.log(entry.step_time_ms / forecast_ms),) * 4)


def newest_repeats(
    newest_first: Iterable[Entry], device: str = ""
) -> dict[tuple[str, str, int], list[Entry]]:
    """Return the newest run and its repeats by device, execution and batch size.

    Repeats are runs of the same sweep. If a run's device is another name of `device`, it counts as
    a run on `device`.
    """
    groups: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in newest_first:
        where = (
            _catalogued(entry.device, device),
            _variant(entry.execution),
            entry.execution.global_batch,
        )
        some = groups.setdefault(where, [entry])
        if entry is not some[0] and entry.sweep and entry.sweep == some[0].sweep:
            some.append(entry)
    return groups


def middle_run(repeats: Sequence[Entry]) -> Entry:
    """Return the run with the median step time."""
    return sorted(repeats, key=lambda entry: entry.step_time_ms or 0.0)[len(repeats) // 2]


def of_workload(
    journal: Journal,
    model: str,
    keys: Collection[str] = (),
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> list[Entry]:
    """Return the training runs of a workload, the newest first.

    They are runs of this model, or runs whose workload key is one of `keys`. Runs with another
    sequence length or image size do not count.
    """
    names = ModelSpec.of(model).aliases
    candidates = {entry.id: entry for name in names for entry in _newest_first(journal, model=name)}
    for key in keys:
        candidates |= {entry.id: entry for entry in _newest_first(journal, workload_key=key)}

    def belongs(entry: Entry) -> bool:
        shapes = ((entry.sequence_length, sequence_length), (entry.image_size, image_size))
        other = keys and entry.workload_key and entry.workload_key not in keys
        return (
            entry.mode == "train" and not other and not any(a and b and a != b for a, b in shapes)
        )

    return sorted(
        filter(belongs, candidates.values()), key=lambda e: (e.created_at, e.id), reverse=True
    )


def other_models(journal: Journal, device: str, without: Collection[str] = ()) -> tuple[Entry, ...]:
    """Return runs of other workloads on a device, with their forecasts.

    For each workload, a few batch sizes of its newest sweep count. Runs with an id in `without` do
    not count.
    """
    sweeps: dict[tuple[str, int | None, int | None], list[Entry]] = {}
    for entry in _newest_first(journal, device=device, with_forecast=True):
        if entry.id in without or not _can_teach(entry):
            continue
        some = sweeps.setdefault((entry.model, entry.image_size, entry.sequence_length), [entry])
        alike = (entry.sweep, _variant(entry.execution)) == (
            some[0].sweep,
            _variant(some[0].execution),
        )
        if entry is not some[0] and alike:
            some.append(entry)
    newest = list(sweeps.values())[:MOST_MODELS]
    return tuple(entry for some in newest for entry in _spread_out(some))


def _can_teach(entry: Entry) -> bool:
    """Return True if the entry is a training run with a forecast whose parts are known."""
    parts = len(entry.forecast_shares) == len(PARTS) and sum(entry.forecast_shares) > 0
    return bool(entry.mode == "train" and parts and entry.forecast_ms and entry.step_time_ms)


def _spread_out(entries: Sequence[Entry]) -> list[Entry]:
    """Return the middle run for each of at most MOST_SIZES batch sizes, the smallest first.

    The batch sizes are spread from the smallest to the largest.
    """
    repeats: dict[int, list[Entry]] = {}
    for entry in entries:
        repeats.setdefault(entry.execution.global_batch, []).append(entry)
    sizes = sorted(repeats)
    n = min(len(sizes), MOST_SIZES)
    return [middle_run(repeats[sizes[i * (len(sizes) - 1) // max(n - 1, 1)]]) for i in range(n)]


def _newest_first(journal: Journal, **filters: Any) -> list[Entry]:
    from trainpace.journal.store import Query

    return journal.find(Query(exact=True, outcome="ok", **filters), limit=MOST)


def _variant(execution: Execution) -> str:
    """Return text that identifies an execution without its batch."""
    return repr(replace(execution, micro_batch=1, accumulation=1))


def _catalogued(name: str, device: str) -> str:
    """Return `device` if `name` is another name of it, such as the driver's. Else return `name`."""
    try:
        return device if name == device or find_device(name).name == device else name
    except TrainpaceError:
        return name


def workload_key(workload: Workload, execution: Execution) -> str:
    """Return a key that is equal for workloads that compute the same, whatever their names."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (
        operators.count,
        operators.flops,
        operators.read_bytes,
        operators.written_bytes,
        operators.dims,
    )
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]


def with_forecast(entry: Entry, table: ForecastTable) -> Entry:
    """Return the entry with the forecast in the first row of a table."""
    forecast, plain = table.brief(0), table.forecaster.plain.at([entry.execution])
    interval = forecast.step_time_interval_ms
    if forecast.step is None or interval is None:
        return entry
    return replace(
        entry,
        forecast_ms=forecast.step.total_ms,
        forecast_low_ms=interval.low,
        forecast_high_ms=interval.high,
        forecast_factor=forecast.step.total_ms / float(plain.step_ms[0]),
        forecast_basis=interval.basis,
        forecast_shares=tuple(table.shares()[0].tolist()),
    )
