"""Own runs as others may see them: an anonymous file that people can read.

It is an allow-list. A field that is not named here does not leave, and a text leaves only where Trainpace knows it already: a
card or a host CPU of the catalogue, a public model, an optimizer, a version number. A run holds no path, name, host, command,
note, time of day or id of its journal. `docs/shared_runs.schema.json` is `schema()`.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import EXECUTION_FIELDS, OPTIMIZERS, Execution, Precision
from trainpace.core.hardware import Cluster, Device, find_device, find_host
from trainpace.core.intake import read_json
from trainpace.core.outcome import MFU_LIMIT, Interval, StepTime
from trainpace.core.records import SCHEMA_VERSION, Record
from trainpace.core.software import TODAY, Software, parse_version
from trainpace.forecast import PARTS, Forecaster, Target
from trainpace.journal.entry import Entry, Sweep, anonymous, content_id
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
"""torchvision's classifiers, and the built-in models of other origin."""

_Ms = Annotated[float, Meta(gt=0, le=1e10, description="milliseconds")]
_Gib = Annotated[float, Meta(ge=0, le=1e6, description="GiB of one device")]
_Share = Annotated[float, Meta(ge=0, le=1.001)]


class Skipped(NamedTuple):
    """Content of a file that is not a run, and the reason."""

    reason: str


class SharedRun(Record, omit_defaults=True):
    """One measured step. `model`: a public name, or "own model N", where N tells the models of one file apart. `date`: of the
    measurement, UTC. `step_time_ms`: the median step, absent where the memory was not enough; `low_ms` to `high_ms` its 90 %
    interval, `parts` what it is made of. `forecast_ms`, `forecast_shares`: what Trainpace had forecast without the journal.
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
        if (self.outcome == "ok") != (self.step_time_ms is not None):
            raise TrainpaceError("a run has a step time if its outcome is ok, and only then.")
        if self.execution.optimizer not in OPTIMIZER_NAMES:
            raise TrainpaceError("its optimizer is none that is known.")
        for name, field in EXECUTION_FIELDS.items():
            most = MOST_SAMPLES if name == "micro_batch" else MOST_OF_A_KIND
            if (
                field.kind in ("count", "optional count")
                and (getattr(self.execution, name) or 0) > most
            ):
                raise TrainpaceError(f"its {name} is more than any run has.")
        if self.low_ms is not None and self.high_ms is not None and self.low_ms > self.high_ms:
            raise TrainpaceError("its interval ends before it begins.")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise TrainpaceError("its date is none.") from None
        if not all(
            map(
                str.isprintable,
                (self.model, self.device, self.date, self.host_cpu or "", *self.software.values()),
            )
        ):
            raise TrainpaceError("its text holds characters that cannot be printed.")

    @property
    def is_of_own_model(self) -> bool:
        return self.model.startswith(f"{OWN_MODEL} ")


class SharedRuns(Record):
    """A file of shared runs. `trainpace`: the version that wrote it."""

    trainpace: Annotated[str, Meta(max_length=40)]
    runs: tuple[SharedRun, ...]


class Sharing(NamedTuple):
    """What leaves, and of what stays behind how many runs, by reason."""

    runs: SharedRuns
    left_out: dict[str, int]


def share(entries: Iterable[Entry]) -> Sharing:
    """The runs of a journal that can be shared. Models of one's own become "own model 1", "own model 2", as they appear."""
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
    """What of a run may leave, or the reason why nothing of it does. `numbers`: of own models so far, which grows."""
    e = entry
    if e.kind == "import":
        return "imported from tables or shared files, which are not your measurements"
    if e.outcome not in ("ok", "out_of_memory"):
        return "neither timed nor out of memory"
    if e.mode not in ("train", "forward_backward", "inference"):
        return "neither training nor inference"
    try:
        device = find_device(e.device)
    except UnknownName:
        return "on a device that the catalogue does not know, so that nobody could use them"
    foreseen = e.forecast_ms and e.forecast_ms / e.forecast_factor
    interval = e.interval_ms if e.interval_ms and e.interval_ms.low > 0 else None
    public, number = public_name(e.model), numbers.get(e.model, len(numbers) + 1)
    try:
        run = msgspec.convert(
            {
                "model": public or f"{OWN_MODEL} {number}",
                "device": device.name,
                "date": e.created_at[:10],
                "outcome": e.outcome,
                "mode": e.mode,
                "sequence_length": e.sequence_length,
                "image_size": e.image_size,
                "execution": msgspec.structs.asdict(_known(e.execution)),
                "step_time_ms": e.step_time_ms,
                "low_ms": interval and interval.low,
                "high_ms": interval and interval.high,
                "steps_timed": len(e.step_times_ms),
                "parts": e.step and msgspec.structs.asdict(e.step),
                "peak_memory_gib": e.peak_memory_gib,
                "reserved_memory_gib": e.reserved_memory_gib,
                "forecast_ms": foreseen or None,
                "forecast_shares": e.forecast_shares if foreseen else (),
                "software": _software(e.environment),
                "host_cpu": _host(e.environment.get("cpu", "")),
            },
            SharedRun,
        )
    except (msgspec.ValidationError, TrainpaceError):
        return "with values that no shared run may have"
    if public is None:
        numbers[e.model] = number  # only now: a run that stays behind takes no number
    return run


def public_name(model: str) -> str | None:
    """The name of a model that everybody knows, None for one's own. A name of a person or a machine in it makes it one's own."""
    spec = ModelSpec.of(model)
    is_name = spec.kind in ("built_in", "timm", "torchvision")
    known = is_name and (spec.name in TORCHVISION or spec.name in _names_of_others())
    return model if known and re.fullmatch(MODEL, model) and anonymous(model) == model else None


@cache
def _names_of_others() -> frozenset[str]:
    from trainpace.forecast import public_runs  # late: a tenth of a second

    return frozenset(run.model for run in public_runs())


def _known(execution: Execution) -> Execution:
    return (
        execution
        if execution.optimizer in OPTIMIZER_NAMES
        else replace(execution, optimizer=OTHER_OPTIMIZER)
    )


def _software(environment: dict[str, str]) -> dict[str, str]:
    """Versions without what a build's maker appended to them (2.4.1+cu121)."""
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
    """32 hexadecimal digits that are equal for the same measurement, whoever shared it, and however its model is numbered."""
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
    """The file's text: what is as usual is left out, so that people can read it."""
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
    """The JSON Schema (2020-12) of the file, made from the records."""
    made: dict[str, Any] = msgspec.json.schema(SharedRuns)
    whole = made["$defs"].pop(KIND)
    made["$defs"]["Execution"]["properties"]["optimizer"]["enum"] = list(OPTIMIZER_NAMES)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Runs shared from a journal of Trainpace",
        "description": "docs/sharing.md tells what each field says.",
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
