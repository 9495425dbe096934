"""What the journal knows of a workload, for forecasts on any target: `forecast`, `match`, `plan` and `measure` alike."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    run_beside,
)
from trainpace.journal.entry import anonymous, default_place
from trainpace.workload import ModelSpec, Workload, form_of

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.entry import Entry
    from trainpace.journal.store import Journal

MOST = 2000
"""The number of runs examined, the newest first."""
MOST_MODELS, MOST_SIZES = 24, 4
"""Other models on a device whose runs count, and batch sizes of each: more add little, and time."""

Where = tuple[str, str, int]
"""Device, execution but for the batch, and batch size of a run."""


def may_know(place: str | None, devices: Collection[str], models: Collection[str] = ()) -> bool:
    """Whether the journal at a place, by default the user's own, may hold runs on one of the devices or of one of the models.

    An SQLite file is asked without SQLAlchemy, whose import takes longer than a forecast; what cannot be read like this (a
    server, a damaged file) is left to `Journal`.
    """
    where = place or default_place()
    if "://" in where:
        return True
    file = Path(where).expanduser()
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
    """Runs of a workload, however they were executed and wherever, and of other models on the same devices, beside their
    forecasts (see `trainpace.forecast.posterior`: the same card tells more than another, the same execution more than another).

    `sequence_length`, `image_size`: those asked for, where the workload does not say; runs that state others do not count.
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
        """What is known for a forecaster's target; None where nothing is."""
        return self._for(forecaster).posterior

    def source(self, forecaster: Forecaster) -> str:
        """For the intervals' basis."""
        return f"{self._for(forecaster).words} (journal)"

    def in_words(self, forecaster: Forecaster) -> str:
        """One sentence on the journal's part in a target's forecasts; "" where it has none."""
        words = self._for(forecaster).words
        return f"corrected by the journal: {words}." if words else ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Those on which the workload was measured."""
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
        others = [
            other
            for name in devices
            for entry in self._other_models(name)
            if (other := _beside(entry, plain)) is not None
        ]
        known = (
            *seen.values(),
            *(other for other in others if abs(other.log_ratios[0]) <= math.log(LARGEST_RATIO)),
        )
        return _Known(Posterior(known) if known else None, _in_words(seen, others, device))

    def _other_models(self, device: str) -> tuple[Entry, ...]:
        if device not in self._others:
            self._others[device] = other_models(self._journal, device, self._ids)
        return self._others[device]


def _in_words(seen: Mapping[Where, Observed], others: Sequence[Observed], device: str) -> str:
    sizes = sorted({batch for name, _, batch in seen if name == device})
    elsewhere = sorted({name for name, _, _ in seen} - {device})
    n = len({other.run.model for other in others if other.run.device == device})
    words = (
        f"this workload measured on this device at batch {_listed(sizes)}" if sizes else "",
        f"this workload measured on other cards: {', '.join(elsewhere)}" if elsewhere else "",
        f"{n} other model{'s' if n > 1 else ''} measured on this device" if n else "",
    )
    return "; ".join(word for word in words if word)


def _listed(sizes: Sequence[int], most: int = 8) -> str:
    more = f" and {len(sizes) - most} more" if len(sizes) > most else ""
    return ", ".join(str(size) for size in sizes[:most]) + more


def _observed(runs: Mapping[Where, Sequence[Entry]], plain: Forecaster) -> dict[Where, Observed]:
    """The median run of each batch size beside its forecast of today, as sure as the repeats of all its sizes agree."""
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
    """A run beside its forecast of today, on its own card and so many of them; None for one that cannot be forecast here: on
    another machine's CPU, on nodes whose network nobody knows, in a number format that was not traced.
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
    is_near = seen is not None and abs(seen.log_ratios[0]) <= math.log(LARGEST_RATIO)
    return seen if is_near or entry.device == here.device.name else None


def _beside(entry: Entry, plain: Forecaster) -> Observed | None:
    """A run of another model beside the forecast of its own time, which knew no measurement of it; None on an unknown card."""
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
    run = run_beside(
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
    """By device, execution and batch size the newest run, and its repeats: the others of its sweep. `device`: the name by which
    that device goes, whatever a run calls it."""
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
    """Of every other workload that was measured on a device beside its forecast, a few batch sizes of its newest sweep.
    `without`: ids of runs."""
    sweeps: dict[tuple[str, int | None, int | None], list[Entry]] = {}
    for entry in _newest_first(journal, device=device, with_forecast=True):
        if entry.id in without or entry.mode != "train" or len(entry.forecast_shares) != len(PARTS):
            continue
        if not entry.forecast_ms or not entry.step_time_ms or sum(entry.forecast_shares) <= 0:
            continue
        some = sweeps.setdefault((entry.model, entry.image_size, entry.sequence_length), [entry])
        if entry is not some[0] and (entry.sweep, _variant(entry.execution)) == (
            some[0].sweep,
            _variant(some[0].execution),
        ):
            some.append(entry)
    return tuple(
        entry for some in list(sweeps.values())[:MOST_MODELS] for entry in _spread_out(some)
    )


def _spread_out(entries: Sequence[Entry]) -> list[Entry]:
    """The middle run of at most MOST_SIZES of a sweep's batch sizes, from the smallest to the largest."""
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
    """What makes it the same run but for the batch."""
    return repr(replace(execution, micro_batch=1, accumulation=1))


def _catalogued(name: str, device: str) -> str:
    """`device` where the name is another of its names, as the driver's or a table's; else the name."""
    try:
        return device if name == device or find_device(name).name == device else name
    except TrainpaceError:
        return name


def workload_key(workload: Workload, execution: Execution) -> str:
    """Equal for workloads that compute the same, whatever their names."""
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
