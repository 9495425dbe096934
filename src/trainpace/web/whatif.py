"""The what-if page: forecast one training from the values of a form.

No user code runs. A model is either built in (its traces are packaged), or a workload file in one
folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import Checkpointing, Execution, Precision, ZeroStage
from trainpace.core.hardware import Cluster, Device, catalogue
from trainpace.core.outcome import Forecast, Interval, Jump
from trainpace.core.records import Record, load
from trainpace.core.software import Attention
from trainpace.core.units import format_duration, format_number, format_usd
from trainpace.forecast import Forecaster, Grid, Target, needed_gib
from trainpace.job import ASSUMED, Schedule, assumed_in_words, with_job
from trainpace.offers import Offer, cheapest_offer
from trainpace.report import (
    Axis,
    BarChart,
    Chart,
    Mark,
    Timed,
    forecast_sweep,
    memory_at_peak,
    step_breakdown,
)
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.places import named_host
from trainpace.verbs.request import Field, Request
from trainpace.verbs.traced import EVERY_FORM
from trainpace.verbs.training import default_setup, execution_of, software_of
from trainpace.workload import PLAIN, Workload, load_workload

CURVE_SIZES = 64
Text = Annotated[str, Meta(max_length=200)]


@dataclass(frozen=True)
class Slider(Field):
    """Number with a slider in forms.

    The slider goes from `low` to `high`. The field's type has the accepted range.
    """

    low: float = 1
    high: float = 1
    scale: Literal["linear", "log2", "log10"] = "log2"
    step: str = "1"
    shown_unit: str = ""


class WhatIfRequest(Request):
    """Model, training setup and hardware of a what-if forecast.

    Attributes:
        host: "" selects a typical CPU for the GPU.
        software: "" selects current torch; an `attention` of "" selects its default.
        batch: None selects the default of `forecast`, as it does for `accumulate`, `precision` and
            `checkpointing`.
        epochs: None selects 1 for models of token sequences, else `IMAGENET_EPOCHS`.
        samples: None selects `USUAL_TOKENS` of tokens for these models, else `IMAGENET_SAMPLES`.
        network: Bandwidth of a node in one direction, in GB/s.
        price: None selects the cheapest known price.
    """

    model: Annotated[Text, Field("Model")] = "resnet50"
    gpu: Annotated[Text, Field("GPU")] = "A100 SXM 80GB"
    host: Annotated[Text, Field("Host CPU")] = ""
    software: Annotated[Text, Field("Software")] = ""
    attention: Annotated[Literal["", Attention], Field("Attention")] = ""
    gpus: Annotated[int, Meta(ge=1, le=1024), Slider("GPUs of a node", high=16)] = 1
    nodes: Annotated[int, Meta(ge=1, le=100_000), Slider("Nodes", high=128)] = 1
    network: Annotated[
        float,
        Meta(ge=1e-3, le=1e5),
        Slider(
            "Network of a node", low=0.125, high=400, scale="log10", step="any", shown_unit="GB/s"
        ),
    ] = 12.5
    batch: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None, Slider("Batch of one GPU", high=512)
    ] = None
    accumulate: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None, Slider("Accumulation steps", high=64)
    ] = None
    precision: Annotated[Precision | None, Field("Precision")] = None
    zero: Annotated[ZeroStage, Slider("ZeRO stage", low=0, high=3, scale="linear")] = 0
    checkpointing: Annotated[Checkpointing | None, Field("Activation checkpointing")] = None
    epochs: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Slider("Epochs", high=300, scale="linear", step="any"),
    ] = None
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=10**12)] | None,
        Slider("Samples in an epoch", low=1000, high=100_000_000, scale="log10"),
    ] = None
    price: Annotated[
        Annotated[float, Meta(ge=0, le=1e5)] | None, Field("Price of a GPU and hour")
    ] = None


IMAGENET_SAMPLES, IMAGENET_EPOCHS = 1_281_167, 90.0
USUAL_TOKENS = 10**9
"""Tokens of one epoch that the page assumes for models of token sequences."""


class Price(Record):
    usd_per_device_hour: float
    source: str


class BatchCurve(NamedTuple):
    rows: list[Forecast]
    jumps: tuple[Jump, ...]


class WhatIf(NamedTuple):
    """Forecast with its price, and a curve over batch sizes.

    `reason` explains a missing forecast.
    """

    request: WhatIfRequest
    forecast: Forecast | None = None
    price: Price | None = None
    curve: BatchCurve | None = None
    reason: str = ""


def price_of(offers: Sequence[Offer], device: str, gpus: int, nodes: int) -> Price | None:
    """Return the price per GPU and hour on the cheapest known servers, as in `match`."""
    offer = cheapest_offer(offers, device, gpus, nodes)
    if offer is None:
        return None
    servers = (
        f"{nodes} of the cheapest servers that can be joined"
        if nodes > 1
        else "the cheapest server known"
    )
    region = f" in {offer.region}" if offer.region else ""
    dated = f"as of {offer.as_of}" if offer.as_of else "undated"
    idle = f", of whose {offer.count} GPUs {gpus} are used" if gpus < offer.count else ""
    return Price(
        usd_per_device_hour=offer.price_usd_per_hour / gpus,
        source=(
            f"{servers}, on demand: {offer.provider} {offer.instance_type}{region},"
            f" {format_usd(offer.price_usd_per_hour)} each an hour, {dated}{idle}"
        ),
    )


def forecaster_of(workload: Workload) -> Forecaster:
    """Return a forecaster that `run` can reuse. It works for any device."""
    return Forecaster(workload, Target(Cluster(device=catalogue()[0])))


def run(
    request: WhatIfRequest, forecaster: Forecaster, device: Device, price: Price | None
) -> WhatIf:
    """Forecast a request with its model's forecaster and its GPU."""
    workload = forecaster.workload
    r = _with_job(request, workload)
    if r.price is not None:
        price = Price(usd_per_device_hour=r.price, source="as given")
    try:
        cluster = Cluster(
            device=device,
            devices_per_node=r.gpus,
            nodes=r.nodes,
            network_gb_per_s_per_device=r.network / r.gpus,
            price_usd_per_device_hour=None if price is None else price.usd_per_device_hour,
            host=named_host(r.host or None),
        )
        forecaster = forecaster.on(Target(cluster, software=software_of(r)))
        execution = _execution(r, forecaster)
        r = replace(
            r,
            batch=execution.micro_batch,
            accumulate=execution.accumulation,
            precision=execution.precision,
            checkpointing=execution.activation_checkpointing,
        )
        forecast = with_job(
            forecaster.forecast(execution),
            workload,
            Schedule(samples=r.samples, epochs=r.epochs),
            replace(ASSUMED, price_usd_per_device_hour=cluster.price_usd_per_device_hour),
        )
    except TrainpaceError as error:
        return WhatIf(r, reason=str(error))
    if forecast.step is None:
        return WhatIf(r, forecast, price, reason=forecast.reason)
    sizes = sizes_around(execution.micro_batch)
    swept = forecaster.at(Grid.vary(execution, micro_batch=sizes))
    every_size = sizes[-1] == len(sizes)  # If sizes are skipped, jumps between them are not visible
    jumps = (
        forecaster.jumps(execution, sizes, swept.step_ms)
        if every_size and swept.timed.all()
        else ()
    )
    curve = BatchCurve(swept.forecasts(), jumps) if swept.timed.all() else None
    return WhatIf(r, forecast, price, curve)


def _execution(r: WhatIfRequest, forecaster: Forecaster) -> Execution:
    """Return the execution that `forecast` has for the same question."""
    workload, device = forecaster.workload, forecaster.target.cluster.device
    same: dict[str, Any] = {name: getattr(r, name) for name in SAME_AS_IN_FORECAST}
    same |= {"num_gpus": r.gpus, "batch": None if r.batch is None else (r.batch,)}
    asked = ForecastRequest(model=workload, **same)
    start = execution_of(asked.resolved(workload), workload, device)
    if not asked.leaves_batch_open(workload):
        return start
    return default_setup(forecaster, start, asked.leaves_checkpointing_open(workload))


SAME_AS_IN_FORECAST = ("nodes", "network", "accumulate", "precision", "zero", "checkpointing")


def _with_job(r: WhatIfRequest, workload: Workload) -> WhatIfRequest:
    """Fill in missing samples and epochs with those of the model's usual job."""
    samples, epochs = IMAGENET_SAMPLES, IMAGENET_EPOCHS
    if workload.sequence_length is not None:
        samples, epochs = max(1, USUAL_TOKENS // workload.sequence_length), 1.0
    return replace(r, samples=r.samples or samples, epochs=r.epochs or epochs)


def sizes_around(batch: int) -> list[int]:
    """Return about CURVE_SIZES batch sizes including `batch`.

    They are evenly spaced up to at least twice `batch`.
    """
    most = max(CURVE_SIZES, 1 << (2 * batch - 1).bit_length())
    every = max(1, most // CURVE_SIZES)
    return sorted({batch, *range(every, most + 1, every)})


STEP_TIME = Axis(label="step time", unit="ms", low=0.0)
BUILT_IN = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "mobilenet_v1",
    "mobilenet_v2",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
)
MOST_BYTES = 64 * 2**20
MOST_CACHED = 16
MOST_LISTED = 500


class Models:
    """Workloads in `folder` by file name, and built-in models.

    All requests share their forecasters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def saved(self) -> list[str]:
        """Return the names of saved workloads. Skips links that lead out of the folder."""
        try:
            root = self._folder.resolve(strict=True)
            names = [
                p.stem for p in root.glob("*.json") if p.is_file() and p.resolve().parent == root
            ]
        except OSError:
            return []
        return sorted(names)

    def get(self, name: str) -> Forecaster:
        """Return the forecaster of a model.

        Raises:
            UnknownName: There is no such model.
            TrainpaceError: The file is not a workload.
        """
        saved = self.saved()
        if name not in saved and name not in BUILT_IN:
            raise UnknownName(
                "model", name, (*BUILT_IN, *saved), "See docs/serve.md for how to add one."
            )
        if name not in saved:
            return _built_in(name)
        file = self._folder / f"{name}.json"
        try:
            stat = file.stat()
        except OSError:
            raise TrainpaceError(f"{file.name} does not exist.") from None
        if stat.st_size > MOST_BYTES:
            raise TrainpaceError(
                f"{file.name} is larger than {MOST_BYTES // 2**20} MiB, the limit for a"
                " workload file."
            )
        return _read(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(MOST_CACHED)
def _built_in(name: str) -> Forecaster:
    return forecaster_of(load_workload(name, EVERY_FORM, PLAIN))


@lru_cache(MOST_CACHED)
def _read(file: Path, mtime_ns: int, size: int) -> Forecaster:
    """Read a workload. The cache key includes modification time and size."""
    try:
        return forecaster_of(load(file, Workload))
    except TrainpaceError as error:
        raise TrainpaceError(error.message.replace(str(file), file.name), error.hint) from None


class WhatIfAnswer(Record):
    """Forecast with its price, cost interval and charts. `verdict` is the answer in sentences."""

    question: WhatIfRequest
    verdict: tuple[str, ...]
    possible: bool
    forecast: Forecast | None = None
    price: Price | None = None
    cost_usd: Interval | None = None
    curve: Chart | None = None
    parts: BarChart | None = None
    memory: BarChart | None = None
    reason: str = ""


def page_of(answer: WhatIf) -> WhatIfAnswer:
    """Convert a what-if forecast to the record of its page."""
    f = answer.forecast
    common: dict[str, Any] = {"question": answer.request, "forecast": f, "price": answer.price}
    if f is None or f.step is None:
        line = answer.reason if f is None else f"Not forecast: {answer.reason}"
        return WhatIfAnswer(
            verdict=(f"{line[:1].upper()}{line[1:]}",),
            possible=False,
            reason=answer.reason,
            **common,
        )
    return WhatIfAnswer(
        verdict=_verdict(f),
        possible=f.may_fit,
        cost_usd=f.cost_interval_usd,
        curve=None if answer.curve is None else _chart(answer.curve, f),
        parts=step_breakdown([Timed("", "forecast", f.step, f.step_time_interval_ms)]),
        memory=memory_at_peak([("forecast", f)]),
        **common,
    )


def _verdict(f: Forecast) -> tuple[str, ...]:
    lines = []
    if f.fits is False and f.memory is not None and f.capacity_gib is not None:
        largest = f.largest_micro_batch
        fitting = "no batch is sure to fit"
        if largest:
            fitting = f"the largest batch that fits is {largest:,}"
        need = format_number(float(needed_gib(f.memory)))
        capacity = format_number(f.capacity_gib)
        may = f"May not fit (probability of fitting: {f.fit_probability:.0%})"
        may = may if f.may_fit else "Does not fit"
        lines.append(f"{may}: {need} GiB of {capacity}; {fitting}.")
    time, interval_s = f.training_time, f.training_time_interval_s
    if time is not None and interval_s is not None:
        dollars = "" if f.cost_usd is None else f" and {format_usd(f.cost_usd)}"
        would = "The training takes" if f.may_fit else "It would take"
        low, high = format_duration(interval_s.low), format_duration(interval_s.high)
        lines += [
            f"{would} {format_duration(time.total_s)}{dollars}.",
            f"90% interval: {low} to {high}.",
            assumed_in_words(time.assumed),
        ]
    return tuple(filter(None, lines))


def _chart(curve: BatchCurve, forecast: Forecast) -> Chart | None:
    """Draw step time over batch size, with a mark at the chosen batch size."""
    chart = forecast_sweep(curve.rows, {forecast.device: curve.jumps})
    if chart is None or forecast.step is None:
        return None
    chosen = forecast.execution.micro_batch
    mark = Mark(
        axis="point",
        at=float(chosen),
        y=forecast.step.total_ms,
        text=f"batch {chosen}",
        tone="measured",
    )
    return replace(chart, marks=(*chart.marks, mark))
