"""Batch sizes measured from outside, each in a fresh process, so that a crash or a hang costs only that probe: which comes next,
and what to keep when something ends the sweep."""

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec

from trainpace.core import records
from trainpace.core.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.core.execution import Execution, Precision
from trainpace.core.optimizers import FOR_LANGUAGE, FOR_OTHERS
from trainpace.core.outcome import FailedProbe, MeasuredNoiseScale, Measurement, ProbeFailure
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated
from trainpace.measure.adaptive import next_batch
from trainpace.workload import ModelSpec

R = TypeVar("R", bound=Record)
Outcome = Measurement | FailedProbe
ADAPTIVE_FROM = 13
"""Batch sizes from which on some are left out: below it, measuring all is as cheap as choosing."""
MOST_CRASHES = 4
"""Sizes at which the code may fail before one is measured: more, and it fails at every size."""
RESOLUTION = 1 / 64
"""Sizes closer than this share of the largest are the same answer."""


class Conditions(Record):
    """The conditions under which a model is measured: everything but the batch size. A sweep and its resumption share them.

    `seconds` is the training time of one probe; `memory_limit_gib` the most memory that its process may map (CPU only);
    `optimizer` None is the task's own, or the usual one (`trainpace.core.optimizers`).
    """

    model: str
    device: str = "cpu"
    precision: Precision = "fp32"
    optimizer: str | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    image_size: int | None = None
    channels_last: bool = False
    compile: bool = False
    seconds: float = 2.0
    timeout_s: float = 600.0
    memory_limit_gib: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.timeout_s > 0 and self.accumulation >= 1):
            raise TrainpaceError(
                "a probe needs seconds of 0 or more, a time-out above 0 and 1 or more"
                " micro-batches."
            )
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise TrainpaceError("a memory limit is above 0 GiB.")
        if self.memory_limit_gib is not None and self.device != "cpu":
            raise TrainpaceError(
                "a memory limit is for probes on the CPU.", "A GPU's own memory is the limit there."
            )

    def execution(self, batch_size: int, own_optimizer: str = "") -> Execution:
        """How a probe at this batch size is executed. `own_optimizer`: what the task is trained with, "" before it was built."""
        is_language = (
            self.sequence_length is not None or ModelSpec.of(self.model).kind == "transformers"
        )
        return Execution(
            micro_batch=batch_size,
            accumulation=self.accumulation,
            precision=self.precision,
            optimizer=self.optimizer
            or own_optimizer
            or (FOR_LANGUAGE if is_language else FOR_OTHERS),
            channels_last=self.channels_last,
            compile=self.compile,
        )


def measure(conditions: Conditions, batch_size: int) -> Measurement:
    """Real training steps at one batch size on this machine. Raises `UserCodeError` and its kin where they fail."""
    return _answer(Measurement, "measuring", conditions, batch_size)


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The gradient noise scale over some steps on the task's own data. Raises as `measure` does, and where there is no data."""
    return _answer(MeasuredNoiseScale, "gathering gradients of", conditions, batch_size)


def _answer(kind: type[R], verb: str, conditions: Conditions, batch_size: int) -> R:
    """The worker's answer, which is a record of that kind."""
    request = {
        "record": kind.__name__,
        "conditions": msgspec.to_builtins(conditions),
        "batch_size": batch_size,
    }
    what = f"{verb} {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.steps", request, conditions.timeout_s, what)
    return records.from_json(answer, kind, "the answer of the measuring process")


def probe(conditions: Conditions, batch_size: int, device: str) -> Measurement | FailedProbe:
    """Measure; a failure of the user's code or a lack of memory is an answer, on the named device."""
    try:
        return measure(conditions, batch_size)
    except OutOfMemory as error:
        failure: ProbeFailure = "out_of_memory"
        reason = error.message
    except TimedOut as error:
        failure, reason = "timeout", error.message
    except UserCodeError as error:
        failure, reason = "crashed", str(error)
    return FailedProbe(
        model=conditions.model,
        device=device,
        failure=failure,
        reason=reason,
        environment={},
        execution=conditions.execution(batch_size),
        sequence_length=conditions.sequence_length,
        image_size=conditions.image_size,
    )


class SweepPlan(Record):
    """A sweep that was asked for. `every` measures all of `batches`, `repeats` times; `until_oom` looks for the largest that
    fits, up to the last of `batches`, and measures the others only with `also_batches`."""

    batches: tuple[int, ...]
    repeats: int = 2
    every: bool = False
    until_oom: bool = False
    also_batches: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.repeats < 1:
            raise TrainpaceError(
                "a sweep needs batch sizes of 1 or more, each measured at least once."
            )

    @property
    def adaptive(self) -> bool:
        return not self.every and len(self.batches) >= ADAPTIVE_FROM


def medians_of(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """The median step in ms of each probe, by batch size."""
    medians: dict[int, list[float]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Measurement):
            medians.setdefault(outcome.execution.micro_batch, []).append(outcome.median_ms)
    return dict(sorted(medians.items()))


def next_for_largest(
    worked: Collection[int], failed: Collection[int], most: int, crashed: Collection[int] = ()
) -> int | None:
    """Double until a batch size fails, then bisect. None once the largest that works is known, or is `most`.

    Where a smaller size failed than one that worked, sizes above the smallest failure are not trusted. `crashed`: sizes that
    failed for a reason of their own, which say nothing of larger ones unless a smaller one worked.
    """
    smallest = min(worked, default=math.inf)
    failed = {*failed, *(n for n in crashed if n > smallest)}
    ceiling = min(failed, default=most + 1)
    floor = max((n for n in worked if n < ceiling), default=0)
    if floor >= most or ceiling <= 1:
        return None
    if not failed:
        tried = max(floor, max(crashed, default=0))
        return None if tried >= most else min(2 * tried, most) if tried else 1
    if ceiling - floor <= max(1, int(floor * RESOLUTION)):
        return None
    return next((n for n in range((floor + ceiling) // 2, ceiling) if n not in crashed), None)


def next_probe(
    plan: SweepPlan, outcomes: Sequence[Outcome], hints: Sequence[int] = ()
) -> int | None:
    """The batch size to measure next, None when all is done. Raises where the user's code fails at all sizes, or at
    MOST_CRASHES, and works at none."""
    medians = medians_of(outcomes)
    failures = [o for o in outcomes if isinstance(o, FailedProbe)]
    crashes = [o for o in failures if o.failure == "crashed"]
    crashed = {o.execution.micro_batch for o in crashes}
    failed = {o.execution.micro_batch for o in failures} - crashed
    most = MOST_CRASHES if plan.until_oom else max(2, min(MOST_CRASHES, len(plan.batches)))
    if len(crashed) >= most and not medians:
        raise UserCodeError(crashes[-1].reason)
    too_large = {o.execution.micro_batch for o in failures if o.failure == "out_of_memory"}
    limit = min(too_large, default=None)
    if plan.until_oom:
        larger = next_for_largest(medians, failed, plan.batches[-1], crashed)
        if larger is not None or not plan.also_batches:
            return larger
    wanted = [b for b in plan.batches if b not in failed | crashed and (limit is None or b < limit)]
    if plan.adaptive:
        return next_batch(plan.batches, medians, hints, failed, crashed=crashed) if wanted else None
    rounds = {b: len(medians.get(b, ())) for b in wanted}
    now = min(rounds.values(), default=plan.repeats)
    if now >= plan.repeats:
        return None
    # in each round another order, so that a machine that slows down does not bend the curve
    order = sorted(wanted)
    random.Random(f"{plan.seed}:{now}").shuffle(order)
    return next(b for b in order if rounds[b] == now)


def run_sweep(
    conditions: Conditions,
    plan: SweepPlan,
    device: str,
    keep: Callable[[Outcome], None],
    done: Sequence[Outcome] = (),
    hints: Sequence[int] = (),
    tell: Callable[[int, int], None] = lambda batch, finished: None,
) -> list[Outcome]:
    """Probe until the plan is fulfilled. `keep` gets each outcome as soon as it is there; `done` are those of an earlier,
    interrupted run; `tell(batch, finished)` says what begins. `device` names the machine where a probe fails.
    """
    outcomes = list(done)
    while (batch := next_probe(plan, outcomes, hints)) is not None:
        tell(batch, len(outcomes))
        outcome = probe(conditions, batch, device)
        keep(outcome)
        outcomes.append(outcome)
    return outcomes
