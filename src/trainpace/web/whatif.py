"""The what-if page: the models that it knows, and the answer in words and pictures.

No code of a user's is run: a model's name is either in a list that this package brings (their traces are packaged), or a file
of numbers in one folder.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.outcome import Forecast, Interval
from trainpace.core.records import Record, load
from trainpace.core.units import format_duration, format_number, format_usd
from trainpace.forecast import Forecaster
from trainpace.job import assumed_in_words
from trainpace.report import (
    BATCH,
    Axis,
    BarChart,
    Chart,
    Mark,
    Series,
    Timed,
    memory_at_peak,
    step_breakdown,
)
from trainpace.verbs.traced import EVERY_FORM
from trainpace.verbs.whatif import BatchCurve, Price, WhatIf, WhatIfRequest, forecaster_of
from trainpace.workload import PLAIN, Workload, load_workload

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
    """The workloads in `folder` by their file names, and the built-in ones, each with a forecaster that all requests share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def saved(self) -> list[str]:
        """Names of the files of workloads, without their ending. Links that lead out of the folder are left out."""
        try:
            root = self._folder.resolve(strict=True)
            names = [
                p.stem for p in root.glob("*.json") if p.is_file() and p.resolve().parent == root
            ]
        except OSError:
            return []
        return sorted(names)

    def get(self, name: str) -> Forecaster:
        """The model of that name. Raises UnknownName, or TrainpaceError for a file that holds no workload."""
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
            raise TrainpaceError(f"{file.name} is not there.") from None
        if stat.st_size > MOST_BYTES:
            raise TrainpaceError(
                f"{file.name} is larger than {MOST_BYTES // 2**20} MiB, and so no workload."
            )
        return _read(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(MOST_CACHED)
def _built_in(name: str) -> Forecaster:
    return forecaster_of(load_workload(name, EVERY_FORM, PLAIN))


@lru_cache(MOST_CACHED)
def _read(file: Path, mtime_ns: int, size: int) -> Forecaster:
    """The workload in a file that is read again when its time or size changes."""
    try:
        return forecaster_of(load(file, Workload))
    except TrainpaceError as error:
        raise TrainpaceError(error.message.replace(str(file), file.name), error.hint) from None


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
        return WhatIfAnswer(
            verdict=(f"{line[:1].upper()}{line[1:]}",),
            possible=False,
            reason=answer.reason,
            **common,
        )
    return WhatIfAnswer(
        verdict=_verdict(f),
        possible=f.fits is not False,
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
        fitting = f"the largest batch that does is {largest:,}" if largest else "nor does batch 1"
        need, capacity = format_number(f.memory.reserved_gib), format_number(f.capacity_gib)
        lines.append(f"Does not fit: {need} GiB of {capacity}; {fitting}.")
    time, interval_s = f.training_time, f.training_time_interval_s
    if time is not None and interval_s is not None:
        dollars = (
            ""
            if f.cost_usd is None or f.cost_interval_usd is None
            else f" and {format_usd(f.cost_usd)}"
        )
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
        Mark(
            axis="x",
            at=jump.batch - 0.5,
            tone="jump",
            text=", ".join(
                filter(
                    None,
                    (f"jump at {jump.batch}: +{format_number(jump.excess_ms)} ms", jump.mechanism),
                )
            ),
        )
        for jump in curve.jumps
    ]
    fitting = int(table.fits.sum())
    if fitting < len(sizes):
        after = sizes[fitting] - 0.5 if fitting else 0.5
        marks.append(Mark(axis="x", at=after, text="out of memory from here", tone="limit"))
    chosen, step_ms = execution.micro_batch, forecast.step.total_ms
    marks.append(
        Mark(axis="point", at=float(chosen), y=step_ms, text=f"batch {chosen}", tone="measured")
    )
    finding = f"At batch {chosen} a step takes {format_number(step_ms)} ms. "
    if fitting:
        rates = np.where(table.fits, np.array(sizes) / table.step_ms, 0.0)
        best = int(rates.argmax())
        rate = 1e3 * rates[best] * execution.accumulation * execution.data_parallel_size
        finding += (
            f"Of the sizes that fit, {sizes[best]} has the best throughput, {format_number(rate)}"
            " samples/s."
        )
    else:
        finding += "No batch size fits in memory."
    line = Series(
        name="forecast, with its 90 % interval",
        kind="line",
        tone="forecast",
        x=tuple(map(float, sizes)),
        y=tuple(table.step_ms.tolist()),
        low=tuple(table.low_ms.tolist()),
        high=tuple(table.high_ms.tolist()),
    )
    return Chart(
        title="Step time against the batch size",
        finding=finding,
        x=BATCH,
        y=STEP_TIME,
        series=(line,),
        marks=tuple(marks),
    )
