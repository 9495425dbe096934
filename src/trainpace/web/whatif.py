"""The what-if page: the answer in words and pictures."""

from trainpace.job import assumed_in_words
from trainpace.outcome import Forecast, Interval
from trainpace.records import Record
from trainpace.report import BATCH, Axis, BarChart, Chart, Held, Mark, Series, Timed, memory_at_peak, step_breakdown
from trainpace.units import format_duration, format_number, format_usd
from trainpace.verbs.whatif import BatchCurve, Price, WhatIf, WhatIfRequest

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
    f, request = answer.forecast, answer.request
    if f is None or f.step is None:
        line = answer.reason if f is None else f"Not forecast: {answer.reason}"
        return WhatIfAnswer(
            question=request, verdict=(f"{line[:1].upper()}{line[1:]}",), possible=False, forecast=f, price=answer.price,
            reason=answer.reason,
        )  # fmt: skip
    return WhatIfAnswer(
        question=request, verdict=_verdict(f, answer.cost_usd), possible=f.fits is not False, forecast=f,
        price=answer.price, cost_usd=answer.cost_usd, curve=None if answer.curve is None else _chart(answer.curve, f),
        parts=step_breakdown([Timed("", "forecast", f.step, f.step_time_interval_ms)]),
        memory=None if f.memory is None else memory_at_peak([Held("forecast", f.memory, f.capacity_gib)]),
    )  # fmt: skip


def _verdict(f: Forecast, cost: Interval | None) -> tuple[str, ...]:
    lines = []
    if f.fits is False and f.memory is not None and f.capacity_gib is not None:
        lines.append(
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
        lines.append(f"{would} {format_duration(f.training_time.total_s)}{dollars}.")
    lines.append(
        f"9 of 10 trainings like this one should take {format_duration(t.low)} to {format_duration(t.high)}."
        if t
        else ""
    )
    lines += [assumed_in_words(f.training_time.assumed)] if f.training_time is not None else []
    return tuple(s for s in lines if s)


def _chart(curve: BatchCurve, forecast: Forecast) -> Chart:
    assert forecast.step is not None
    sizes, execution, step_ms = curve.sizes, forecast.execution, forecast.step.total_ms
    marks = [
        Mark(axis="x", at=jump.batch - 0.5, text=f"jump at {jump.batch}: +{format_number(jump.excess_ms)} ms", tone="jump")
        for jump in curve.jumps
    ]  # fmt: skip
    fitting = sum(curve.fits)
    if fitting < len(sizes):
        marks.append(
            Mark(axis="x", at=sizes[fitting] - 0.5 if fitting else 0.5, text="out of memory from here", tone="limit")
        )
    chosen = execution.micro_batch
    marks.append(Mark(axis="point", at=float(chosen), y=step_ms, text=f"batch {chosen}", tone="measured"))
    finding = f"At batch {chosen} a step takes {format_number(step_ms)} ms. "
    if curve.best is None:
        finding += "No batch size fits in memory."
    else:
        samples = curve.best * execution.accumulation * execution.data_parallel_size
        rate = 1e3 * samples / curve.step_ms[sizes.index(curve.best)]
        finding += f"Among these sizes that fit, {curve.best} has the best throughput, {format_number(rate)} samples/s."
    line = Series(
        name="forecast, with its 90 % interval", kind="line", tone="forecast", x=tuple(map(float, sizes)),
        y=curve.step_ms, low=curve.low_ms, high=curve.high_ms,
    )  # fmt: skip
    return Chart(
        title="Step time against the batch size", finding=finding, x=BATCH, y=STEP_TIME, series=(line,),
        marks=tuple(marks),
    )  # fmt: skip
