"""Solve the time of a training for whichever number is missing.

Every solver inverts `Training.time` itself, by bisection or by trying whole numbers, so that it stays right when the
formula gains a term. Time never falls when there is more of anything, which the tests check.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from trainpace.errors import Contradiction, TrainpaceError
from trainpace.execution import Execution
from trainpace.job.conditions import JobConditions
from trainpace.job.training import Training, training_of
from trainpace.outcome import JobTime
from trainpace.records import Record
from trainpace.schedule import Schedule
from trainpace.units import format_duration

MAX_RANKS = 1_000_000
MAX_EPOCHS = 10**9


class DataParallelChoice(Record):
    """A data-parallel size that meets a deadline, with the execution's other numbers and the time it gives."""

    data_parallel_size: int
    accumulation: int
    global_batch: int
    step_time_s: float
    time: JobTime


def step_time_for_deadline(training: Training, deadline_s: float) -> float:
    """The slowest step time (seconds) that still meets the deadline."""
    _check_deadline(deadline_s)
    fastest = training.time(1e-15)
    if fastest.total_s > deadline_s:
        raise Contradiction(
            f"a deadline of {format_duration(deadline_s)} cannot be met: start-up, evaluation, checkpoints and restarts"
            f" alone take {format_duration(fastest.total_s)}.",
            "Allow more time, or evaluate and checkpoint less often.",
        )
    # no step can take longer than an even share of the deadline
    low, high = 1e-15, max(deadline_s / training.steps, 1e-15)
    for _ in range(200):
        middle = (low + high) / 2
        if training.time(middle).total_s <= deadline_s:
            low = middle
        else:
            high = middle
        if high - low <= 1e-13 * high:
            break
    return low


def epochs_for_deadline(
    schedule: Schedule, execution: Execution, conditions: JobConditions, step_time_s: float, deadline_s: float
) -> int:
    """The most whole epochs that fit into the deadline."""
    _check_deadline(deadline_s)

    def time_s(epochs: int) -> float:
        run = replace(schedule, epochs=float(epochs), max_steps=None)
        return training_of(run, execution, conditions).time(step_time_s).total_s

    if time_s(1) > deadline_s:
        raise Contradiction(
            f"not even one epoch fits: it takes {format_duration(time_s(1))}, and {format_duration(deadline_s)} is given.",
            "Allow more time, use a faster step, or count in --max-steps.",
        )
    return _last_true(lambda n: time_s(n) <= deadline_s, MAX_EPOCHS)


def data_parallel_for_deadline(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions,
    step_time_s: float,
    deadline_s: float,
    keep_global_batch: bool,
) -> DataParallelChoice:
    """The smallest data-parallel size that meets the deadline, if a step takes as long on many ranks as on few.

    That is an upper bound on what more ranks give: communication is not in it. With `keep_global_batch` more ranks
    take over accumulation steps, and step time falls in proportion; without, the global batch grows with the ranks and
    there are fewer steps.
    """
    _check_deadline(deadline_s)

    def choice(ranks: int, accumulation: int = execution.accumulation) -> DataParallelChoice:
        wider = _with_ranks(execution, ranks, accumulation)
        step_s = step_time_s * (accumulation / execution.accumulation)
        return DataParallelChoice(
            data_parallel_size=ranks, accumulation=accumulation, global_batch=wider.global_batch, step_time_s=step_s,
            time=training_of(schedule, wider, conditions).time(step_s),
        )  # fmt: skip

    if keep_global_batch:
        product = execution.accumulation * execution.data_parallel_size
        choices = [choice(ranks, product // ranks) for ranks in range(1, product + 1) if product % ranks == 0]
        meeting = next((c for c in choices if c.time.total_s <= deadline_s), None)
        if meeting is not None:
            return meeting
        fastest = min(c.time.total_s for c in choices)
        raise Contradiction(
            f"at a constant global batch of {execution.global_batch} and micro-batch {execution.micro_batch} the most ranks are"
            f" {product}, which take {format_duration(fastest)}; the deadline is {format_duration(deadline_s)}.",
            "Let the global batch grow, use a smaller micro-batch, or a faster step.",
        )
    most = MAX_RANKS
    if schedule.drop_last or schedule.partial_accumulation == "drop":
        samples = schedule.samples_per_epoch or 0
        most = max(1, min(MAX_RANKS, samples // (execution.micro_batch * execution.accumulation)))
    if choice(most).time.total_s > deadline_s:
        raise Contradiction(
            f"no number of GPUs meets {format_duration(deadline_s)}: with the batch growing to {choice(most).global_batch}"
            f" samples it still takes {format_duration(choice(most).time.total_s)} at {format_duration(step_time_s)} a step.",
            "Use a faster step or fewer epochs; steps cannot be fewer than one an epoch, nor fewer than --max-steps.",
        )
    below = (
        _last_true(lambda n: choice(n).time.total_s > deadline_s, most) if choice(1).time.total_s > deadline_s else 0
    )
    return choice(below + 1)


def _with_ranks(execution: Execution, ranks: int, accumulation: int) -> Execution:
    return replace(
        execution,
        nnodes=1,
        nproc_per_node=ranks * execution.tp * execution.pp * execution.cp,
        accumulation=accumulation,
    )


def _last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most for which `holds`, given that holds(1) and that it never comes back once it fails."""
    if holds(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_deadline(deadline_s: float) -> None:
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise TrainpaceError(f"the deadline is {deadline_s} s; it must be above 0.")
