"""The what-if page: the answer in words and pictures."""

from typing import Any

import numpy as np

from trainpace.job import assumed_in_words
from trainpace.outcome import Forecast, Interval
from trainpace.records import Record
from trainpace.report import BATCH, Axis, BarChart, Chart, Held, Mark, Series, Timed, memory_at_peak, step_breakdown
from trainpace.units import format_duration, format_number, format_usd
from trainpace.verbs.serve import BatchCurve, Price, WhatIf, WhatIfRequest

STEP_TIME = Axis(label="step time", unit="ms", low=0.0)


class WhatIfAnswer(Record):
    """The forecast, the price that its cost rests on, the ends of the cost, and the pictures. `verdict` says it in words."""

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
    f = answer.forecast
    common: dict[str, Any] = {"question": answer.request, "forecast": f, "price": answer.price}
    if f is None or f.step is None:
        line = answer.reason if f is None else f"Not forecast: {answer.reason}"
        return WhatIfAnswer(verdict=(f"{line[:1].upper()}{line[1:]}",), possible=False, reason=answer.reason, **common)
    return WhatIfAnswer(
        verdict=_verdict(f), possible=f.fits is not False, cost_usd=f.cost_interval_usd,
        curve=None if answer.curve is None else _chart(answer.curve, f),
        parts=step_breakdown([Timed("", "forecast", f.step, f.step_time_interval_ms)]),
        memory=None if f.memory is None else memory_at_peak([Held("forecast", f.memory, f.capacity_gib)]), **common,
    )  # fmt: skip


def _verdict(f: Forecast) -> tuple[str, ...]:
    lines = []
    if f.fits is False and f.memory is not None and f.capacity_gib is not None:
        largest = f.largest_micro_batch
        fitting = f"the largest batch that does is {largest:,}" if largest else "nor does batch 1"
        need, capacity = format_number(f.memory.reserved_gib), format_number(f.capacity_gib)
        lines.append(f"Does not fit: {need} GiB of {capacity}; {fitting}.")
    time, interval_s = f.training_time, f.training_time_interval_s
    if time is not None and interval_s is not None:
        dollars = "" if f.cost_usd is None or f.cost_interval_usd is None else f" and {format_usd(f.cost_usd)}"
        would = "It would take" if f.fits is False else "The training takes"
        lines.append(f"{would} {format_duration(time.total_s)}{dollars}.")
    if interval_s is not None:
        low, high = format_duration(interval_s.low), format_duration(interval_s.high)
        lines.append(f"9 of 10 trainings like this one should take {low} to {high}.")
    if time is not None:
        lines.append(assumed_in_words(time.assumed))
    return tuple(line for line in lines if line)


def _chart(curve: BatchCurve, forecast: Forecast) -> Chart:
    assert forecast.step is not None
    sizes, table, execution = curve.sizes, curve.forecasts, forecast.execution
    marks = [
        Mark(axis="x", at=jump.batch - 0.5, text=f"jump at {jump.batch}: +{format_number(jump.excess_ms)} ms", tone="jump")
        for jump in curve.jumps
    ]  # fmt: skip
    fitting = int(table.fits.sum())
    if fitting < len(sizes):
        after = sizes[fitting] - 0.5 if fitting else 0.5
        marks.append(Mark(axis="x", at=after, text="out of memory from here", tone="limit"))
    chosen, step_ms = execution.micro_batch, forecast.step.total_ms
    marks.append(Mark(axis="point", at=float(chosen), y=step_ms, text=f"batch {chosen}", tone="measured"))
    finding = f"At batch {chosen} a step takes {format_number(step_ms)} ms. "
    if fitting:
        rates = np.where(table.fits, np.array(sizes) / table.step_ms, 0.0)
        best = int(rates.argmax())
        rate = 1e3 * rates[best] * execution.accumulation * execution.data_parallel_size
        finding += (
            f"Among these sizes that fit, {sizes[best]} has the best throughput, {format_number(rate)} samples/s."
        )
    else:
        finding += "No batch size fits in memory."
    line = Series(
        name="forecast, with its 90 % interval", kind="line", tone="forecast", x=tuple(map(float, sizes)),
        y=tuple(table.step_ms.tolist()), low=tuple(table.low_ms.tolist()), high=tuple(table.high_ms.tolist()),
    )  # fmt: skip
    return Chart(
        title="Step time against the batch size", finding=finding, x=BATCH, y=STEP_TIME, series=(line,),
        marks=tuple(marks),
    )  # fmt: skip
