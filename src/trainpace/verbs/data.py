"""`loader` and `precompute`: measure a DataLoader alone, and run expensive preprocessing once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.host import usable_cores
from trainpace.core.intake import read_json
from trainpace.core.records import Record, common_fields
from trainpace.verbs.request import (
    COUNT,
    DURATION,
    MILLISECONDS,
    WORKERS,
    Argument,
    Field,
    Misuse,
    Progress,
    Request,
    within,
)
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.measure import LoaderAdvice, LoaderComparison, LoaderCost, LoaderMeasurement
    from trainpace.shards import Damage, Estimate, Precomputed


class LoaderRequest(Request):
    """Request to measure a DataLoader."""

    target: Annotated[
        str, Argument("A dataset, a DataLoader or a task: FILE.py:NAME.", metavar="FILE.py:NAME")
    ]
    batch: Annotated[
        int | None, Field("Samples in a batch.  [default: the DataLoader's own, or 32]", COUNT)
    ] = None
    workers: Annotated[
        tuple[int, ...] | None,
        Field(
            "Workers: 4, or 0,2,4, or 0:4.  [default: 0 up to the number after which gains stop]",
            WORKERS,
        ),
    ] = None
    compute_ms: Annotated[
        float | None,
        Field("Step time without loading.  [default: measured for a task]", MILLISECONDS),
    ] = None
    seconds: Annotated[float, Field("How long to time each run of the loader.", DURATION)] = 0.5
    repeats: Annotated[int, Field("Runs of each setting.", COUNT)] = 3
    timeout: Annotated[float, Field("Time limit of each measurement.", DURATION)] = 600.0
    compare: Annotated[
        str | None,
        Field("A second loader to compare, such as the test set's.", metavar="FILE.py:NAME"),
    ] = None


class MeasuredLoader(Record):
    """A measured loader with advice.

    `other` and `comparison` describe a second loader, if one was given for comparison.
    """

    measurement: LoaderMeasurement
    advice: LoaderAdvice
    other: LoaderMeasurement | None = None
    comparison: LoaderComparison | None = None


def time_loader(request: LoaderRequest, progress: Progress) -> MeasuredLoader:
    from trainpace.measure import advise, compare_loaders

    measurement = _measured(request, request.target, progress)
    if request.compare is not None:  # Only loaders are compared, so no step is measured.
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


def loader_file(path: str) -> tuple[LoaderCost, float, int]:
    """Read a file written by `trainpace loader --json`.

    Returns:
        The cost per sample, the share of it that can be computed offline, and the number of cores.
    """
    from trainpace.measure import LoaderCost

    try:
        answer = read_json(path)
        cost = msgspec.convert(answer["cost"], LoaderCost)
        share, cores = answer["advice"]["offline_share"], answer["cores"]
        if not (0 <= share <= 1 and 1 <= cores <= 1e6):
            raise ValueError
    except (msgspec.ValidationError, KeyError, TypeError, ValueError):
        raise UnreadableInput(f"{path} is not output of trainpace loader --json.") from None
    return cost, share, cores


def _measured(request: LoaderRequest, target: str, progress: Progress) -> LoaderMeasurement:
    from trainpace.measure import LoaderConditions, measure_loader

    conditions = LoaderConditions(
        **common_fields(replace(request, target=target), LoaderConditions),
        batch_size=request.batch,
        timeout_s=request.timeout,
    )
    progress.note(
        "measuring the loader alone for about half a minute; do not run anything else now"
    )
    with progress.work(f"measuring {target}"):
        return measure_loader(conditions)


def _compute(
    request: LoaderRequest, batch_size: int, progress: Progress
) -> tuple[float | None, float]:
    """Measure the training of the task.

    Returns:
        The step time without data loading in ms, and the number of cores that it keeps busy. The
            step time is None if the task cannot train by itself.
    """
    from trainpace.measure import Conditions, measure

    progress.note("measuring the task's compute")
    try:
        step = measure(Conditions(model=request.target, timeout_s=request.timeout), batch_size)
    except TrainpaceError as error:
        progress.note(f"note: the compute was not measured: {error}")
        return None, 1.0
    return step.median_ms, float(step.environment["threads"])


class PrecomputeRequest(Request):
    """Request to compute, estimate, verify or repair the shards of a dataset."""

    target: Annotated[str | None, Argument("The dataset: FILE.py:NAME.")] = None
    out: Annotated[str, Field("Folder of the shards.", metavar="FOLDER")] = "shards"
    workers: Annotated[int | None, Field("Processes.  [default: as many as cores]", COUNT)] = None
    shard_samples: Annotated[
        int | None, Field("Samples in a shard.  [default: about 64 MiB of them]", COUNT)
    ] = None
    max_bad: Annotated[
        float, Field("Largest share of samples that may fail.", within("share", 0, 1))
    ] = 0.05
    part: Annotated[str | None, Field("Compute part I of N.", metavar="I/N")] = None
    again: Annotated[bool, Field("Delete the folder's shards and start again.")] = False
    verify: Annotated[bool, Field("Read every shard completely and list the damaged ones.")] = False
    repair: Annotated[bool, Field("Verify, then compute only the damaged shards again.")] = False
    estimate: Annotated[
        bool, Field("Estimate cost and savings from some samples; compute nothing else.")
    ] = False
    seconds: Annotated[float, Field("Time to compute samples for `estimate`.", DURATION)] = 20.0
    step_ms: Annotated[
        float | None,
        Field("Step time of the training without its data.", MILLISECONDS, needs="estimate batch"),
    ] = None
    batch: Annotated[
        int | None, Field("Samples in that step.", COUNT, needs="estimate step_ms")
    ] = None
    epochs: Annotated[float | None, Field("Epochs that will be trained.", needs="estimate")] = None


class Verified(Record):
    """Result of checking a folder of shards: the planned number of shards, and the damaged ones."""

    shards: int
    damaged: tuple[Damage, ...]


def precompute(request: PrecomputeRequest, progress: Progress) -> Precomputed | Estimate | Verified:
    """Write, estimate or check the shards of a dataset.

    Returns:
        `Verified` with `verify` (or with `repair` if nothing is damaged), `Estimate` with
            `estimate`, otherwise `Precomputed`.
    """
    from trainpace import shards

    r = request
    if not (r.verify or r.repair):
        return _computed(r, progress)
    plan, damaged = shards.verify(Path(r.out))
    if r.verify or not damaged:
        return Verified(shards=plan.shards, damaged=tuple(damaged))
    for shard in damaged:
        progress.note(f"{shard.file}: {shard.problem}; it will be computed again")
    target = r.target or plan.target
    if not Path(ModelSpec.of(target).path).is_file():
        raise Misuse(
            f"The shards were computed by {target}, which no longer exists.",
            "Give its new `target`.",
        )
    whole = replace(r, target=target, part="1/1", estimate=False)
    return _computed(whole, progress, tuple(shard.number for shard in damaged))


def _computed(
    r: PrecomputeRequest, progress: Progress, repair: tuple[int, ...] = ()
) -> Precomputed | Estimate:
    """Estimate or compute the shards. `repair` lists the only ones to compute again."""
    from trainpace import shards

    target, workers = _given_target(r.target), r.workers or usable_cores()
    if r.estimate:
        step_s = None if r.step_ms is None else r.step_ms / 1e3
        return shards.estimate(
            target, r.out, workers, r.seconds, step_s=step_s, batch=r.batch or 1, epochs=r.epochs
        )
    number, parts = shards.part_of(r.part)
    if r.again and parts > 1:
        raise Misuse(
            "`again` computes all parts anew and cannot be combined with `part`.",
            f"Delete {r.out}, and compute each part.",
        )
    own = {"target": target, "workers": workers, "part": number, "repair": repair}
    given = common_fields(r, shards.Settings) | own
    settings = shards.Settings(**given, folder=r.out, parts=parts)
    with progress.work("precomputing", unit="samples") as work:
        try:
            return shards.precompute(
                settings,
                lambda p: work.to(p.done, p.wanted, f"{p.bad:,} bad" if p.bad else "", p.new),
                lambda text: work.say(f"note: {text}"),
            )
        except KeyboardInterrupt:
            work.say("note: finished shards are kept; the same command goes on from there")
            raise


def _given_target(target: str | None) -> str:
    if target is None:
        raise Misuse("Give a `target`: FILE.py:NAME.")
    return target
