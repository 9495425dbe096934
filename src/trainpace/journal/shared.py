"""Own runs as others may see them: an anonymous file that people can read.

It is an allow-list. A field that is not named here does not leave, and a text leaves only where Trainpace knows it already: a
card or a host CPU of the catalogue, a public model, an optimizer, a version number. A run holds no path, name, host, command,
note, time of day or id of its journal. `docs/shared_runs.schema.json` is `schema()`.
"""

import datetime
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from trainpace.core.catalogue_reader import find_device
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.hosts import find_host
from trainpace.core.optimizers import OPTIMIZERS
from trainpace.core.outcome import StepTime
from trainpace.core.records import SCHEMA_VERSION, Record
from trainpace.journal.entry import Entry, content_id
from trainpace.journal.identity import anonymous
from trainpace.workload import ModelSpec

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
