"""What-if: one training, forecast at once for whatever the sliders say. Pure arithmetic on a workload that is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution, ZeroStage
from trainpace.forecast import forecast
from trainpace.forecast.curve import BatchCurve, batch_curve
from trainpace.forecast.jumps import jumps_of
from trainpace.hardware import Cluster, Device
from trainpace.job import assumed_in_words
from trainpace.offers.offer import Offer
from trainpace.outcome import Forecast, Interval
from trainpace.records import Record
from trainpace.report.charts import Axis, BarChart, Chart, Mark, Series
from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
from trainpace.report.charts.step_time import BATCH
from trainpace.schedule import Schedule
from trainpace.units import format_duration, format_number, format_usd
from trainpace.web.questions import WhatIfQuestion
from trainpace.workload import Workload

STEP_TIME = Axis(label="step time", unit="ms", low=0.0)
SIZES = 64
"""Batch sizes in the picture."""


class Price(Record):
    """Dollars of one GPU and hour, and where the figure comes from."""

    usd_per_device_hour: float
    source: str


class WhatIfAnswer(Record):
    """The forecast, the price that its cost rests on, the ends of the cost, and the pictures. `verdict` says it in words."""

    question: WhatIfQuestion
    verdict: tuple[str, ...]
    possible: bool
    forecast: Forecast | None = None
    price: Price | None = None
    cost_usd: Interval | None = None
    curve: Chart | None = None
    parts: BarChart | None = None
    memory: BarChart | None = None
    reason: str = ""


def cheapest(offers: Sequence[Offer]) -> dict[str, Price]:
    """For every device the lowest price of a GPU and hour among the offers (not spot)."""
    best: dict[str, tuple[float, Offer]] = {}
    for offer in offers:
        price = offer.price_usd_per_hour / offer.count
        if price > 0 and (offer.device not in best or price < best[offer.device][0]):
            best[offer.device] = (price, offer)
    return {
        device: Price(
            usd_per_device_hour=price,
            source=f"the cheapest on-demand offer known: {offer.provider} {offer.instance_type}"
            f"{f' in {offer.region}' if offer.region else ''}, {f'as of {offer.as_of}' if offer.as_of else 'undated'}",
        )
        for device, (price, offer) in best.items()
    }


def answer(q: WhatIfQuestion, workload: Workload, device: Device, price: Price | None) -> WhatIfAnswer:
    """Forecast what the question describes. What cannot be done has a `reason`, and no forecast where there is none."""
    if q.price is not None:
        price = Price(usd_per_device_hour=q.price, source="as given")
    try:
        cluster = Cluster(
            device=device, devices_per_node=q.gpus, nodes=q.nodes, network_gb_per_s_per_device=q.network / q.gpus,
            price_usd_per_device_hour=None if price is None else price.usd_per_device_hour,
        )  # fmt: skip
        execution = Execution(
            micro_batch=q.batch, accumulation=q.accumulate, nnodes=q.nodes, nproc_per_node=q.gpus, precision=q.precision,
            optimizer=workload.optimizer, zero_stage=cast(ZeroStage, q.zero),
            activation_checkpointing="full" if workload.checkpointed else q.checkpointing,
        )  # fmt: skip
        found = forecast(workload, execution, cluster, Schedule(samples=q.samples, epochs=q.epochs))
    except TrainpaceError as error:
        return WhatIfAnswer(question=q, verdict=(_sentence(str(error)),), possible=False, reason=str(error))
    if found.step is None:
        return WhatIfAnswer(
            question=q, verdict=(_sentence(f"Not forecast: {found.reason}"),), possible=False, forecast=found, price=price,
            reason=found.reason,
        )  # fmt: skip
    cost = found.cost_interval_usd
    return WhatIfAnswer(
        question=q, verdict=_verdict(found, cost), possible=found.fits is not False, forecast=found, price=price, cost_usd=cost,
        curve=_curve(workload, execution, cluster, found),
        parts=step_breakdown([Timed("", "forecast", found.step, found.step_time_interval_ms)]),
        memory=None if found.memory is None else memory_at_peak([Held("forecast", found.memory, found.capacity_gib)]),
    )  # fmt: skip


def sizes_around(batch: int) -> list[int]:
    """SIZES batch sizes, evenly up to twice this one at least, and this one."""
    most = max(SIZES, 1 << (2 * batch - 1).bit_length())
    every = max(1, most // SIZES)
    return sorted({batch, *range(every, most + 1, every)})


def _verdict(f: Forecast, cost: Interval | None) -> tuple[str, ...]:
    said = []
    if f.fits is False and f.memory is not None and f.capacity_gib is not None:
        said.append(
            f"Does not fit: {format_number(f.memory.reserved_gib)} GiB of {format_number(f.capacity_gib)};"
            + (
                f" the largest batch that does is {f.largest_micro_batch:,}."
                if f.largest_micro_batch
                else " nor does batch 1."
            )
        )
    t = f.training_time_interval_s
    if f.training_time is not None and t is not None:
        dollars = "" if f.cost_usd is None or cost is None else f" and {format_usd(f.cost_usd)}"
        would = "It would take" if f.fits is False else "The training takes"
        said.append(f"{would} {format_duration(f.training_time.total_s)}{dollars}.")
    said.append(
        f"9 of 10 trainings like this one should take {format_duration(t.low)} to {format_duration(t.high)}."
        if t
        else ""
    )
    said += [assumed_in_words(f.training_time.assumed)] if f.training_time is not None else []
    return tuple(s for s in said if s)


def _curve(workload: Workload, execution: Execution, cluster: Cluster, here: Forecast) -> Chart | None:
    sizes = sizes_around(execution.micro_batch)
    curve = batch_curve(workload, execution, cluster, sizes)
    if isinstance(curve, str) or here.step is None:
        return None
    fitting = int(curve.fits.sum())
    best = _best(sizes, curve)
    every_size = sizes[-1] == len(sizes)  # between sizes that are far apart a step says little
    jumps = jumps_of(workload, execution, cluster.device, sizes, curve.step_ms.tolist()) if every_size else ()
    marks = [
        Mark(
            axis="x",
            at=(jump.batch - 0.5),
            text=f"jump at {jump.batch}: +{format_number(jump.excess_ms)} ms",
            tone="jump",
        )
        for jump in jumps
    ]
    if fitting < len(sizes):
        marks.append(
            Mark(axis="x", at=sizes[fitting] - 0.5 if fitting else 0.5, text="out of memory from here", tone="limit")
        )
    chosen = execution.micro_batch
    marks.append(Mark(axis="point", at=float(chosen), y=here.step.total_ms, text=f"batch {chosen}", tone="measured"))
    said = f"At batch {chosen} a step takes {format_number(here.step.total_ms)} ms. "
    if best is None:
        said += "No batch size fits in memory."
    else:
        rate = 1e3 * best * execution.accumulation * execution.data_parallel_size / curve.step_ms[sizes.index(best)]
        said += f"Among these sizes that fit, {best} has the best throughput, {format_number(rate)} samples/s."
    line = Series(
        name="forecast, with its 90 % interval", kind="line", tone="forecast", x=tuple(map(float, sizes)),
        y=tuple(curve.step_ms.tolist()), low=tuple(curve.low_ms.tolist()), high=tuple(curve.high_ms.tolist()),
    )  # fmt: skip
    return Chart(
        title="Step time against the batch size", finding=said, x=BATCH, y=STEP_TIME, series=(line,), marks=tuple(marks),
    )  # fmt: skip


def _best(sizes: Sequence[int], curve: BatchCurve) -> int | None:
    rates = [batch / ms if fits else 0.0 for batch, ms, fits in zip(sizes, curve.step_ms, curve.fits, strict=True)]
    return sizes[rates.index(max(rates))] if max(rates) > 0 else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
