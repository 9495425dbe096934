"""Files of runs that are shared with others: writing them anonymously, and checking them.

Sharing uses an allow-list: only named fields are written. Text is written only if Trainpace already
knows it: a card or a host CPU of the catalogue, a public model, an optimizer, a version number. A
shared run has no path, name, host, command, note, time of day or id from its journal.
`docs/shared_runs.schema.json` is the output of `schema()`.

A file from others is not trusted. A run is imported only if its fields match the schema, its card
could have run it, and it is new. A run that differs from today's forecast by a factor of ODD is
rejected, unless the user accepts it.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput, shortened
from trainpace.core.execution import EXECUTION_FIELDS, OPTIMIZERS, Execution, Precision
from trainpace.core.hardware import Cluster, Device, find_device, find_host
from trainpace.core.intake import read_json
from trainpace.core.outcome import MFU_LIMIT, Interval, StepTime
from trainpace.core.records import SCHEMA_VERSION, Record
from trainpace.core.software import TODAY, Software, parse_version
from trainpace.forecast import PARTS, Forecaster, ForecastTable, Target
from trainpace.journal.comparison import error_pct
from trainpace.journal.entry import Entry, Sweep, anonymous, content_id, shared_fields
from trainpace.journal.knowledge import with_forecast
from trainpace.journal.store import Query
from trainpace.workload import ModelSpec, Variant, Workload, form_of, load_workload

if TYPE_CHECKING:
    from trainpace.journal.store import Journal


KIND = "SharedRuns"
OWN_MODEL = "own model"
MODEL = (
    rf"^({OWN_MODEL} [1-9][0-9]{{0,4}}|((timm|torchvision):)?[A-Za-z0-9][A-Za-z0-9_.\-]{{0,79}})$"
)
VERSION = r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}$"
OTHER_OPTIMIZER, NO_OPTIMIZER = "other", "none"
OPTIMIZER_NAMES = (*OPTIMIZERS, NO_OPTIMIZER, OTHER_OPTIMIZER)
MOST_SAMPLES, MOST_OF_A_KIND = 10**9, 10**6
Library = Literal["torch", "cuda", "cudnn", "rocm", "oneapi", "python"]
SHARED_LIBRARIES = get_args(Library)
SharedOutcome = Literal["ok", "out_of_memory"]
SharedMode = Literal["train", "forward_backward", "inference"]
_ALWAYS = ("micro_batch", "precision", "optimizer")
TORCHVISION = frozenset(
    "alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161"
    " densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3"
    " efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l"
    " efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75"
    " mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf"
    " regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf"
    " regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf"
    " regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d"
    " resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5"
    " shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s"
    " swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32"
    " vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2 mobilenet_v1 vgg11_keras"
    " vgg13_keras vgg16_keras vgg19_keras".split()
)
"""torchvision's classifiers, and the built-in models from other sources."""

_Ms = Annotated[float, Meta(gt=0, le=1e10, description="milliseconds")]
_Gib = Annotated[float, Meta(ge=0, le=1e6, description="GiB of one device")]
_Share = Annotated[float, Meta(ge=0, le=1.001)]


class Skipped(NamedTuple):
    """Item of a file that was skipped, with the reason."""

    reason: str


class SharedRun(Record, omit_defaults=True):
    """One measured training step that can be shared.

    Attributes:
        model: Public name, or "own model N", where N distinguishes the models of one file.
        date: Date of the measurement in UTC.
        step_time_ms: Median step time. It is missing if the run was out of memory. `low_ms` and
            `high_ms` are its 90% interval, and `parts` are its parts.
        forecast_ms: Trainpace's forecast without the journal. `forecast_shares` are its parts.
    """

    model: Annotated[str, Meta(pattern=MODEL)]
    device: Annotated[str, Meta(max_length=60, description="a name of Trainpace's catalogue")]
    date: Annotated[str, Meta(pattern=r"^20[0-9]{2}-[01][0-9]-[0-3][0-9]$")]
    outcome: SharedOutcome = "ok"
    mode: SharedMode = "train"
    sequence_length: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    image_size: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    execution: Execution = Execution()
    step_time_ms: _Ms | None = None
    low_ms: _Ms | None = None
    high_ms: _Ms | None = None
    steps_timed: Annotated[int, Meta(ge=0, le=10**9)] = 0
    parts: StepTime | None = None
    peak_memory_gib: _Gib | None = None
    reserved_memory_gib: _Gib | None = None
    forecast_ms: _Ms | None = None
    forecast_shares: Annotated[tuple[_Share, ...], Meta(max_length=64)] = ()
    software: dict[Library, Annotated[str, Meta(pattern=VERSION)]] = msgspec.field(
        default_factory=dict
    )
    host_cpu: (
        Annotated[str, Meta(max_length=60, description="a CPU of Trainpace's catalogue")] | None
    ) = None

    def __post_init__(self) -> None:
        _check_counts(self.execution)
        if (self.outcome == "ok") != (self.step_time_ms is not None):
            raise TrainpaceError(
                "a run has a step time if its outcome is ok; any other run has none."
            )
        if self.low_ms is not None and self.high_ms is not None and self.low_ms > self.high_ms:
            raise TrainpaceError("the interval ends before it begins.")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise TrainpaceError("invalid date.") from None
        texts = (self.model, self.device, self.host_cpu or "", *self.software.values())
        if not all(map(str.isprintable, texts)):
            raise TrainpaceError("the text contains unprintable characters.")

    @property
    def is_of_own_model(self) -> bool:
        """True if the model is an own model, which is not public."""
        return self.model.startswith(f"{OWN_MODEL} ")


def _check_counts(execution: Execution) -> None:
    """Raise TrainpaceError if an execution has numbers that no real run has."""
    if execution.optimizer not in OPTIMIZER_NAMES:
        raise TrainpaceError("unknown optimizer.")
    for name, field in EXECUTION_FIELDS.items():
        most = MOST_SAMPLES if name == "micro_batch" else MOST_OF_A_KIND
        value = getattr(execution, name) if field.kind.endswith("count") else None
        if value is not None and value > most:
            raise TrainpaceError(f"{name} is larger than in any real run.")


class SharedRuns(Record):
    """File of shared runs. `trainpace` is the version that wrote it."""

    trainpace: Annotated[str, Meta(max_length=40)]
    runs: tuple[SharedRun, ...]


class Sharing(NamedTuple):
    """Runs to share, and the number of runs that are not shared for each reason."""

    runs: SharedRuns
    left_out: dict[str, int]


def share(entries: Iterable[Entry]) -> Sharing:
    """Return the runs of a journal that can be shared.

    Own models are renamed to "own model 1", "own model 2" and so on.
    """
    runs: list[SharedRun] = []
    left_out: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for entry in entries:
        run = shared_of(entry, numbers)
        if isinstance(run, str):
            left_out[run] = left_out.get(run, 0) + 1
        else:
            runs.append(run)
    return Sharing(
        SharedRuns(trainpace=_release(version("trainpace")) or "0", runs=tuple(runs)), left_out
    )


def shared_of(entry: Entry, numbers: dict[str, int]) -> SharedRun | str:
    """Return the shareable part of a run, or the reason why it cannot be shared.

    `numbers` maps own models to their numbers. New models are added to it.
    """
    e = entry
    if reason := _why_private(e):
        return reason
    public, number = public_name(e.model), numbers.get(e.model, len(numbers) + 1)
    interval = e.interval_ms if e.interval_ms and e.interval_ms.low > 0 else None
    fields = shared_fields(e, SharedRun) | {
        "model": public or f"{OWN_MODEL} {number}",
        "device": find_device(e.device).name,
        "date": e.created_at[:10],
        "execution": _known(e.execution),
        "steps_timed": len(e.step_times_ms),
        "parts": e.step,
        "forecast_ms": e.forecast_ms and e.forecast_ms / e.forecast_factor,
        "software": _software(e.environment),
        "host_cpu": _host(e.environment.get("cpu", "")),
    }
    if interval is not None:
        fields |= {"low_ms": interval.low, "high_ms": interval.high}
    try:
        run = msgspec.convert(msgspec.to_builtins(fields), SharedRun)
    except (msgspec.ValidationError, TrainpaceError):
        return "with values that no shared run may have"
    if public is None:
        numbers[e.model] = number  # Only a shared run needs a number.
    return run


def _why_private(entry: Entry) -> str:
    """Return the reason why a run cannot be shared, or ""."""
    if entry.kind == "import":
        return "imported from tables or shared files, so not your own measurements"
    if entry.outcome not in get_args(SharedOutcome):
        return "neither timed nor out of memory"
    if entry.mode not in get_args(SharedMode):
        return "neither training nor inference"
    try:
        find_device(entry.device)
    except UnknownName:
        return "on a device that is not in the catalogue, so nobody could use them"
    return ""


def public_name(model: str) -> str | None:
    """Return the name of a public model, or None for an own model.

    A name that contains the name of a person or a machine is not public.
    """
    spec = ModelSpec.of(model)
    is_name = spec.kind in ("built_in", "timm", "torchvision")
    known = is_name and (spec.name in TORCHVISION or spec.name in _names_of_others())
    return model if known and re.fullmatch(MODEL, model) and anonymous(model) == model else None


@cache
def _names_of_others() -> frozenset[str]:
    from trainpace.forecast import public_runs  # This import takes 0.1 s.

    return frozenset(run.model for run in public_runs())


def _known(execution: Execution) -> Execution:
    return (
        execution
        if execution.optimizer in OPTIMIZER_NAMES
        else replace(execution, optimizer=OTHER_OPTIMIZER)
    )


def _software(environment: dict[str, str]) -> dict[str, str]:
    """Return the versions of known libraries without a build suffix (2.4.1+cu121 gives 2.4.1)."""
    names = Library.__args__  # type: ignore[attr-defined]
    return {name: release for name in names if (release := _release(environment.get(name, "")))}


def _release(text: str) -> str:
    found = re.match(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}(?![0-9])", text)
    return found[0] if found else ""


def _host(cpu: str) -> str | None:
    try:
        return find_host(cpu).name if cpu else None
    except TrainpaceError:
        return None


def fingerprint(run: SharedRun) -> str:
    """Return 32 hexadecimal digits that are equal for the same measurement, whoever shares it."""
    same = replace(
        run,
        model=OWN_MODEL + " 1" if run.is_of_own_model else run.model,
        forecast_ms=None,
        forecast_shares=(),
        software={},
        host_cpu=None,
    )
    return content_id(json.dumps(_plain(same), sort_keys=True))


def text_of(shared: SharedRuns) -> str:
    """Return the text of the file. Default values are omitted to keep it readable."""
    head = {"record": KIND, "schema_version": SCHEMA_VERSION, "trainpace": shared.trainpace}
    return (
        json.dumps(
            {**head, "runs": [_plain(run) for run in shared.runs]}, indent=1, allow_nan=False
        )
        + "\n"
    )


def _plain(run: SharedRun) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(run)
    execution = msgspec.structs.asdict(run.execution)
    plain["execution"] = {
        name: value
        for name, value in execution.items()
        if name in _ALWAYS or value != EXECUTION_FIELDS[name].default
    }
    if run.parts is not None:
        plain["parts"] = {name: value for name, value in plain["parts"].items() if value}
    return plain


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the file, generated from the records."""
    made: dict[str, Any] = msgspec.json.schema(SharedRuns)
    whole = made["$defs"].pop(KIND)
    made["$defs"]["Execution"]["properties"]["optimizer"]["enum"] = list(OPTIMIZER_NAMES)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Runs shared from a journal of Trainpace",
        "description": "docs/sharing.md describes each field.",
        "type": "object",
        "additionalProperties": False,
        "required": ["record", "schema_version", "trainpace", "runs"],
        "properties": {
            "record": {"const": KIND},
            "schema_version": {"type": "integer", "minimum": 1, "maximum": SCHEMA_VERSION},
            **whole["properties"],
        },
        "$defs": made["$defs"],
    }


ODD = 3.0
"""Ratio of measured and forecast time from which a run is rejected as odd.

Three of a thousand public runs are odd (docs/sharing.md).
"""
MOST_RUNS = 100_000
"""Maximum number of runs in one file."""
MOST_TRACING_S, MOST_TRACE_S = 120.0, 30.0
"""Time limits in seconds for tracing all models of a file, and for tracing one model.

After the first limit, the runs of further models are not checked.
"""
FROM_SHARED = "a file of shared runs"

WorkloadOf = Callable[[str, Precision, Variant], Workload]


class Lesson(Record):
    """New runs of a file for one model on one card.

    Attributes:
        new: Number of new runs.
        batches: Micro-batch sizes of the new runs.
        traced: True if the forecasts come from this version, False if they come from the file.
        forecast_off_pct: Median of (forecast - measured) / measured, in percent.
        corrects: True if forecasts use these runs.
    """

    model: str
    device: str
    new: int
    batches: tuple[int, ...]
    traced: bool
    forecast_off_pct: float | None
    corrects: bool


class Odd(Record):
    """Run far off its forecast. `times` is measured / forecast."""

    model: str
    device: str
    batch: int
    precision: str
    measured_ms: float
    forecast_ms: float
    times: float


class Lessons(Record):
    """Effect of a file of shared runs on the journal.

    `odd` holds the runs far off their forecast, which are rejected unless `accepted_odd` is True.
    `unchecked` counts new runs that could not be compared with physics or a forecast.
    """

    by: tuple[Lesson, ...]
    odd: tuple[Odd, ...]
    accepted_odd: bool
    unchecked: int


class Received(NamedTuple):
    """Items of a file in order, and the lessons from the new runs."""

    items: tuple[Entry | Sweep | Skipped, ...]
    lessons: Lessons


class _Seen(NamedTuple):
    """New run with its entry.

    `traced` is True if today's forecast uses the run's own operators.
    """

    run: SharedRun
    entry: Entry
    traced: bool
    odd: Odd | None


class _File(Record, tag_field="record", tag=KIND):
    """File of shared runs whose runs are not checked yet."""

    schema_version: Annotated[int, Meta(ge=1, le=SCHEMA_VERSION)]
    runs: Annotated[list[Any], Meta(max_length=MOST_RUNS)]
    trainpace: object = ""


def receive(
    journal: Journal, path: Path, accept_odd: bool = False, workload_of: WorkloadOf | None = None
) -> Received:
    """Read and check a file of shared runs.

    Args:
        journal: Journal that will receive the runs.
        path: Path of the file.
        accept_odd: If True, accept runs far off their forecast.
        workload_of: Returns a model's workload. By default it comes from the package, the cache or
            a trace.

    Raises:
        UnreadableInput: If the file is of another kind, or from a newer version.
    """
    try:
        items = msgspec.convert(read_json(path), _File).runs
    except msgspec.ValidationError as error:
        raise UnreadableInput(
            f"{path} is not a valid file of shared runs: {error}.",
            "trainpace journal share writes one. A newer version may write another schema.",
        ) from None
    runs = [_run_or_reason(item) for item in items]
    good = [run for run in runs if isinstance(run, SharedRun)]
    ids = _ids_of(good)
    there = _already(journal, good, ids)
    tag = content_id("".join(sorted(fingerprint(run) for run in good if run.is_of_own_model)))[:6]
    forecasts = _Forecasts(workload_of or _workload)
    seen: dict[str, _Seen | None] = {}
    id_of = iter(ids)

    def item_of(run: SharedRun | Skipped) -> Entry | Skipped:
        if isinstance(run, Skipped):
            return run
        id_ = next(id_of)
        if id_ in there:
            return there[id_]
        if id_ in seen:
            return Skipped("twice in the file")
        seen[id_] = None
        checked = forecasts.check(run, _entry_of(run, id_, tag))
        if isinstance(checked, Skipped):
            return checked
        seen[id_] = checked
        if checked.odd is not None and not accept_odd:
            return Skipped(f"{ODD:g} times off the forecast or more")
        return checked.entry

    received = tuple(map(item_of, runs))
    return Received(received, _lessons(list(filter(None, seen.values())), accept_odd))


def _run_or_reason(item: Any) -> SharedRun | Skipped:
    try:
        run = msgspec.convert(item, SharedRun)
        find_device(run.device)
    except (msgspec.ValidationError, TrainpaceError) as error:
        text = error.message if isinstance(error, TrainpaceError) else str(error)
        return Skipped(f"invalid ({shortened(text, 120)})")
    return run


def _ids_of(runs: Sequence[SharedRun]) -> list[str]:
    """Return the ids of the runs of one sharer.

    An id is the run's fingerprint. Own models can have equal fingerprints if they ran out of memory
    at the same batch on the same day. Their ids are made different.
    """
    models: dict[str, dict[str, int]] = {}
    ids = []
    for run in runs:
        same = fingerprint(run)
        alike = models.setdefault(same, {})
        nth = alike.setdefault(run.model, len(alike))
        ids.append(content_id(f"{same} {nth}") if nth else same)
    return ids


def _already(journal: Journal, runs: Sequence[SharedRun], ids: Sequence[str]) -> dict[str, Entry]:
    """Return the runs that the journal already has, by id.

    They were imported before, or measured here and shared.
    """
    candidates = journal.where_in("step_time_ms", {run.step_time_ms for run in runs} - {None})
    if any(run.outcome == "out_of_memory" for run in runs):
        candidates += journal.find(Query(outcome="out_of_memory"), limit=None)
    numbers: dict[str, int] = {}
    shared = ((entry, shared_of(entry, numbers)) for entry in candidates)
    own = [(entry, run) for entry, run in shared if isinstance(run, SharedRun)]
    own_ids = _ids_of([run for _, run in own])
    there = {id_: entry for id_, (entry, _) in zip(own_ids, own, strict=True)}
    return there | {entry.id: entry for entry in journal.where_in("id", set(ids))}


def _entry_of(run: SharedRun, id_: str, tag: str) -> Entry:
    """Return a shared run as a journal entry. `tag` distinguishes own models of different files."""
    interval = None
    if run.low_ms is not None and run.high_ms is not None:
        interval = Interval(low=run.low_ms, high=run.high_ms, coverage=0.9, basis="as shared")
    of_parts = len(run.forecast_shares) == len(PARTS) and abs(sum(run.forecast_shares) - 1) < 0.01
    environment: dict[str, str] = dict(run.software.items())
    if run.host_cpu:
        environment["cpu"] = run.host_cpu
    return Entry(
        **shared_fields(run, Entry)
        | {
            "id": id_,
            "created_at": f"{run.date}T00:00:00.000000Z",
            "kind": "import",
            "reason": "" if run.outcome == "ok" else "out of memory, by its source",
            "model": f"{run.model} of {tag}" if run.is_of_own_model else run.model,
            "device": find_device(run.device).name,
            "num_devices": run.execution.world_size,
            "interval_ms": interval,
            "step": run.parts,
            "environment": environment,
            "forecast_basis": "its own version's, as shared" if run.forecast_ms else "",
            "forecast_shares": run.forecast_shares if of_parts else (),
            "source": FROM_SHARED,
        }
    )


class _Forecasts:
    """Forecaster for shared runs with this version. Each workload is traced once."""

    def __init__(self, workload_of: WorkloadOf) -> None:
        self._workload_of = workload_of
        self._workloads: dict[Any, Workload | None] = {}
        self._forecasters: dict[Any, Forecaster] = {}
        self._traced_s = 0.0

    def check(self, run: SharedRun, entry: Entry) -> _Seen | Skipped:
        """Compare a run with physical limits and with its forecast.

        Return `Skipped` with the reason if the run cannot be true.
        """
        device, ms = find_device(run.device), run.step_time_ms
        if reason := _impossible(run, device):
            return Skipped(reason)
        table = self._forecast(run, device) if ms else None
        if ms is None or table is None:
            return _Seen(run, entry, False, _odd(entry))
        forecast = table.forecast(0)
        assert forecast.step is not None
        if (forecast.mfu or 0.0) * forecast.step.total_ms / ms > MFU_LIMIT:
            return Skipped("a step faster than the card's peak rate allows")
        entry = with_forecast(entry, table)
        return _Seen(run, entry, True, _odd(entry))

    def _forecast(self, run: SharedRun, device: Device) -> ForecastTable | None:
        """Return a table with the forecast of a run, or None if there is none."""
        try:
            forecaster = self._forecaster(run, device)
            table = forecaster and forecaster.at([run.execution])
        except (TrainpaceError, AssertionError):
            # A failed assertion is a bug in the forecast. The run then stays unchecked.
            return None
        return table if table and table.timed[0] else None

    def _forecaster(self, run: SharedRun, device: Device) -> Forecaster | None:
        """Return a forecaster for a run's workload on its card, or None if it cannot be traced."""
        e, torch = run.execution, run.software.get("torch")
        variant = _variant_of(run)
        if variant is None:
            return None
        traced = (run.model, form_of(e.precision), variant)
        key = (*traced, device.name, e.nproc_per_node, e.nnodes, run.host_cpu, torch)
        if key not in self._forecasters:
            workload = self._traced(traced, e.precision)
            if workload is None:
                return None
            host = find_host(run.host_cpu) if run.host_cpu else None
            cluster = Cluster(
                device=device, devices_per_node=e.nproc_per_node, nodes=e.nnodes, host=host
            )
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


def _impossible(run: SharedRun, device: Device) -> str:
    """Return the reason why the device cannot have run this, or ""."""
    memory, ms = device.memory_gib, run.step_time_ms
    used = max(run.peak_memory_gib or 0.0, run.reserved_memory_gib or 0.0)
    if memory is not None and used > memory.value:
        card = f"{device.name}'s {memory.value:g}"
        return f"more memory than the card has: {used:.3g} GiB of {card}"
    if ms and run.parts is not None and not 0.5 < run.parts.total_ms / ms < 2:
        return "the parts do not add up to the step"
    return ""


def _variant_of(run: SharedRun) -> Variant | None:
    """Return the variant of the workload to trace, or None if it is unknown."""
    e, train = run.execution, run.mode == "train"
    if e.optimizer == OTHER_OPTIMIZER or (train and e.optimizer == NO_OPTIMIZER):
        return None
    if public_name(run.model) is None:  # Another name could be a file.
        return None
    return Variant(
        e.optimizer if train else None,
        run.sequence_length,
        run.image_size,
        mode=run.mode,
        checkpointing=e.activation_checkpointing == "full" and e.ranks_per_copy == 1,
    )


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
    errors = [error for one in group if (error := error_pct(one.entry)) is not None]
    return Lesson(
        model=model,
        device=device,
        new=len(group),
        traced=all(one.traced for one in group),
        batches=tuple(sorted({one.run.execution.micro_batch for one in group})),
        forecast_off_pct=statistics.median(errors) if errors else None,
        corrects=any(map(_corrects, group)),
    )


def _corrects(one: _Seen) -> bool:
    trained = one.run.mode == "train" and one.run.outcome == "ok"
    return trained and bool(one.entry.forecast_shares or not one.run.is_of_own_model)


def _odd(entry: Entry) -> Odd | None:
    """Return the run as `Odd` if it is far off the forecast in its entry, otherwise None."""
    if not entry.step_time_ms or not entry.forecast_ms:
        return None
    times = entry.step_time_ms / entry.forecast_ms
    if 1 / ODD < times < ODD:
        return None
    return Odd(
        model=entry.model,
        device=entry.device,
        batch=entry.execution.micro_batch,
        precision=entry.execution.precision,
        measured_ms=entry.step_time_ms,
        forecast_ms=entry.forecast_ms,
        times=times,
    )
