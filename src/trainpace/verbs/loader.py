"""`loader`: a DataLoader measured alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.verbs.request import (
    COUNT,
    DURATION,
    MILLISECONDS,
    WORKERS,
    Argument,
    Field,
    Progress,
    Request,
)

if TYPE_CHECKING:
    from trainpace.measure import LoaderAdvice, LoaderComparison, LoaderMeasurement


class LoaderRequest(Request):
    target: Annotated[
        str, Argument("A dataset, a DataLoader or a task: FILE.py:NAME.", metavar="FILE.py:NAME")
    ]
    batch: Annotated[
        int | None, Field("Samples in a batch.  [default: the DataLoader's own, or 32]", COUNT)
    ] = None
    workers: Annotated[
        tuple[int, ...] | None,
        Field("4, or 0,2,4, or 0:4.  [default: 0 up to where more stop gaining]", WORKERS),
    ] = None
    compute_ms: Annotated[
        float | None,
        Field("Step time with its data at hand.  [default: measured for a task]", MILLISECONDS),
    ] = None
    seconds: Annotated[float, Field("Timed part of one run of the loader.", DURATION)] = 0.5
    repeats: Annotated[int, Field("Runs of each setting.", COUNT)] = 3
    timeout: Annotated[float, Field("Give up after this.", DURATION)] = 600.0
    compare: Annotated[
        str | None,
        Field(
            "A second one, such as the test's: which is slower, and through what?",
            metavar="FILE.py:NAME",
        ),
    ] = None


class MeasuredLoader(Record):
    """`other` and `comparison`: of the second loader, where one was to be compared."""

    measurement: LoaderMeasurement
    advice: LoaderAdvice
    other: LoaderMeasurement | None = None
    comparison: LoaderComparison | None = None


def run(request: LoaderRequest, progress: Progress) -> MeasuredLoader:
    from trainpace.measure import advise, compare_loaders

    measurement = _measured(request, request.target, progress)
    if request.compare is not None:
        other = _measured(request, request.compare, progress)
        comparison = compare_loaders(measurement, other)
        return MeasuredLoader(
            measurement=measurement,
            advice=advise(measurement, request.compute_ms),
            other=other,
            comparison=comparison,
        )
    compute_ms, compute_cores = request.compute_ms, 1.0
    if compute_ms is None and measurement.is_task:
        compute_ms, compute_cores = _compute(request, measurement.batch_size, progress)
    return MeasuredLoader(
        measurement=measurement, advice=advise(measurement, compute_ms, compute_cores)
    )


def _measured(request: LoaderRequest, target: str, progress: Progress) -> LoaderMeasurement:
    from trainpace.measure import LoaderConditions, measure_loader

    conditions = LoaderConditions(
        target=target,
        batch_size=request.batch,
        workers=request.workers,
        compute_ms=request.compute_ms,
        seconds=request.seconds,
        repeats=request.repeats,
        timeout_s=request.timeout,
    )
    progress.note("measuring the loader alone, for half a minute or so; let nothing else run")
    with progress.work(f"measuring {target}"):
        return measure_loader(conditions)


def _compute(
    request: LoaderRequest, batch_size: int, progress: Progress
) -> tuple[float | None, float]:
    """(ms of a step that has its data, cores that it keeps busy), or no ms where the task does not train by itself."""
    from trainpace.measure import Conditions, measure

    progress.note("measuring the task's compute")
    try:
        step = measure(Conditions(model=request.target, timeout_s=request.timeout), batch_size)
    except TrainpaceError as error:
        progress.note(f"note: the compute was not measured: {error}")
        return None, 1.0
    return step.median_ms, float(step.environment["threads"])
