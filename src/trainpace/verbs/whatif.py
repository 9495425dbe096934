"""What-if: one training, forecast at once for whatever a form says. Pure arithmetic on a workload that is in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Checkpointing, Execution, Precision, ZeroStage
from trainpace.core.hardware import Cluster, Device, catalogue
from trainpace.core.outcome import Forecast, Jump
from trainpace.core.records import Record
from trainpace.core.software import Attention
from trainpace.core.units import format_usd
from trainpace.forecast import Forecaster, ForecastTable, Target
from trainpace.job import Schedule
from trainpace.offers import Offer, cheapest_offer
from trainpace.verbs.places import named_host
from trainpace.verbs.request import Field, Request
from trainpace.verbs.training import execution_values, software_of
from trainpace.workload import Workload

CURVE_SIZES = 64
Text = Annotated[str, Meta(max_length=200)]


@dataclass(frozen=True)
class Slider(Field):
    """A number that a form also offers as a slider from `low` to `high`; what may be asked is what its type says."""

    low: float = 1
    high: float = 1
    scale: Literal["linear", "log2", "log10"] = "log2"
    step: str = "1"
    shown_unit: str = ""


class WhatIfRequest(Request):
    """A model, how it is trained, and on what. `host`: empty for one typical of the card; `software`, `attention`: empty for
    today's torch as it comes; `network`: a node's, in one direction;
    `price`: None is the cheapest known."""

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
    batch: Annotated[int, Meta(ge=1, le=65_536), Slider("Batch of one GPU", high=512)] = 32
    accumulate: Annotated[int, Meta(ge=1, le=65_536), Slider("Accumulation steps", high=64)] = 1
    precision: Annotated[Precision, Field("Precision")] = "amp_bf16"
    zero: Annotated[ZeroStage, Slider("ZeRO stage", low=0, high=3, scale="linear")] = 0
    checkpointing: Annotated[Checkpointing, Field("Activation checkpointing")] = "none"
    epochs: Annotated[
        float, Meta(gt=0, le=1e6), Slider("Epochs", high=300, scale="linear", step="any")
    ] = 90.0
    samples: Annotated[
        int,
        Meta(ge=1, le=10**12),
        Slider("Samples in an epoch", low=1000, high=100_000_000, scale="log10"),
    ] = 1_281_167
    price: Annotated[
        Annotated[float, Meta(ge=0, le=1e5)] | None, Field("Price of a GPU and hour")
    ] = None


class Price(Record):
    usd_per_device_hour: float
    source: str


class BatchCurve(NamedTuple):
    sizes: list[int]
    forecasts: ForecastTable
    jumps: tuple[Jump, ...]


class WhatIf(NamedTuple):
    """The forecast, the price that its cost rests on, and the curve over batch sizes.

    What cannot be done has a `reason`, and no forecast where there is none.
    """

    request: WhatIfRequest
    forecast: Forecast | None = None
    price: Price | None = None
    curve: BatchCurve | None = None
    reason: str = ""


def price_of(offers: Sequence[Offer], device: str, gpus: int, nodes: int) -> Price | None:
    """What one GPU of so many nodes costs an hour on the cheapest servers known that can be joined so, as `match` counts it."""
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
    """A forecaster that `run` can ask again and again; which device it is made for does not matter."""
    return Forecaster(workload, Target(Cluster(device=catalogue()[0])))


def run(
    request: WhatIfRequest, forecaster: Forecaster, device: Device, price: Price | None
) -> WhatIf:
    """Forecast what the request describes: the forecaster's workload is the one that its model names, the device its GPU."""
    r, workload = request, forecaster.workload
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
        execution = Execution(optimizer=workload.optimizer, **execution_values(r, workload))
        forecast = forecaster.forecast(execution, Schedule(samples=r.samples, epochs=r.epochs))
    except TrainpaceError as error:
        return WhatIf(r, reason=str(error))
    if forecast.step is None:
        return WhatIf(r, forecast, price, reason=forecast.reason)
    sizes = sizes_around(execution.micro_batch)
    swept = forecaster.over_batches(execution, sizes)
    every_size = sizes[-1] == len(sizes)  # between sizes that are far apart a step says little
    jumps = (
        forecaster.jumps_in(execution, sizes, swept.step_ms)
        if every_size and swept.timed.all()
        else ()
    )
    return WhatIf(
        r, forecast, price, BatchCurve(sizes, swept, jumps) if swept.timed.all() else None
    )


def sizes_around(batch: int) -> list[int]:
    """CURVE_SIZES batch sizes, evenly up to twice this one at least, and this one."""
    most = max(CURVE_SIZES, 1 << (2 * batch - 1).bit_length())
    every = max(1, most // CURVE_SIZES)
    return sorted({batch, *range(every, most + 1, every)})
