"""A question about a training with some numbers missing, answered with all of them: the heart of `trainpace schedule`.

Every solver inverts `Training.time` itself, by bisection or by trying whole numbers, so that it stays right when the
formula gains a term. Time never falls when there is more of anything, which the tests check.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import JobTime
from trainpace.core.records import Record, check_fields
from trainpace.core.units import format_duration
from trainpace.job.conditions import ONLY_STEPS, JobConditions
from trainpace.job.halving import HalvingRound, successive_halving
from trainpace.job.learning_rate import LearningRateAdvice, learning_rate_advice
from trainpace.job.training import Training, training_of
from trainpace.job.work import (
    MAX_COUNT,
    EpochSteps,
    Schedule,
    SpeedUp,
    accumulation_for_global_batch,
    epoch_steps,
)

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
            f"a deadline of {format_duration(deadline_s)} cannot be met: start-up, evaluation,"
            f" checkpoints and restarts alone take {format_duration(fastest.total_s)}.",
            "Allow more time, or evaluate and checkpoint less often.",
        )
    # no step can take longer than an even share of the deadline
    low, high = 1e-15, max(deadline_s / training.steps, 1e-15)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if training.time(middle).total_s <= deadline_s else (low, middle)
        if high - low <= 1e-13 * high:
            break
    return low


def epochs_for_deadline(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions,
    step_time_s: float,
    deadline_s: float,
) -> int:
    """The most whole epochs that fit into the deadline."""
    _check_deadline(deadline_s)

    def time_s(epochs: int) -> float:
        run = replace(schedule, epochs=float(epochs), max_steps=None)
        return training_of(run, execution, conditions).time(step_time_s).total_s

    if time_s(1) > deadline_s:
        raise Contradiction(
            f"not even one epoch fits: it takes {format_duration(time_s(1))}, and"
            f" {format_duration(deadline_s)} is given.",
            "Allow more time, use a faster step, or count in `max_steps`.",
        )
    return _last_true(lambda n: time_s(n) <= deadline_s, MAX_EPOCHS)


def samples_for_deadline(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions,
    step_time_s: float,
    deadline_s: float,
) -> int:
    """The most samples an epoch may have for all epochs to end within the deadline. `schedule` needs its epochs alone."""
    _check_deadline(deadline_s)
    batch = execution.global_batch

    def time_s(batches: int) -> float:
        run = replace(schedule, samples=batches * batch)
        return training_of(run, execution, conditions).time(step_time_s).total_s

    if time_s(1) > deadline_s:
        raise Contradiction(
            f"not even one step an epoch fits: {schedule.epochs:g} epochs of one step take"
            f" {format_duration(time_s(1))}, and {format_duration(deadline_s)} is given.",
            "Allow more time, use a faster step or fewer epochs.",
        )
    return batch * _last_true(lambda n: time_s(n) <= deadline_s, MAX_COUNT // batch)


def micro_batch_for_deadline(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions,
    step_time_s: float,
    deadline_s: float,
) -> int:
    """The smallest micro-batch that meets the deadline, if a step takes as long whatever its batch size.

    That holds only as long as the GPU is not busy: the answer is a lower bound on the batch that is needed.
    """
    _check_deadline(deadline_s)

    def time_s(micro_batch: int) -> float:
        larger = replace(execution, micro_batch=micro_batch)
        return training_of(schedule, larger, conditions).time(step_time_s).total_s

    samples = schedule.samples_per_epoch
    if samples is None:
        raise TrainpaceError(
            "the batch size follows from the samples of an epoch.", "Add `samples` or `tokens`."
        )
    each = execution.accumulation * execution.data_parallel_size
    drops = schedule.drop_last or schedule.partial_accumulation == "drop"
    most = max(1, samples // each if drops else -(-samples // each))
    if time_s(most) > deadline_s:
        raise Contradiction(
            f"no batch size meets {format_duration(deadline_s)}: even with one step an epoch it"
            f" takes {format_duration(time_s(most))} at {format_duration(step_time_s)} a step.",
            "Use a faster step or fewer epochs.",
        )
    return 1 if time_s(1) <= deadline_s else 1 + _last_true(lambda n: time_s(n) > deadline_s, most)


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
        wider = _on_one_node(execution, ranks, accumulation)
        step_s = step_time_s * (accumulation / execution.accumulation)
        return DataParallelChoice(
            data_parallel_size=ranks,
            accumulation=accumulation,
            global_batch=wider.global_batch,
            step_time_s=step_s,
            time=training_of(schedule, wider, conditions).time(step_s),
        )

    if keep_global_batch:
        product = execution.accumulation * execution.data_parallel_size
        choices = [
            choice(ranks, product // ranks)
            for ranks in range(1, product + 1)
            if product % ranks == 0
        ]
        meeting = next((c for c in choices if c.time.total_s <= deadline_s), None)
        if meeting is not None:
            return meeting
        fastest = min(c.time.total_s for c in choices)
        raise Contradiction(
            f"at a constant global batch of {execution.global_batch} and micro-batch"
            f" {execution.micro_batch} the most ranks are {product}, which take"
            f" {format_duration(fastest)}; the deadline is {format_duration(deadline_s)}.",
            "Let the global batch grow, use a smaller micro-batch, or a faster step.",
        )
    most = MAX_RANKS
    if schedule.drop_last or schedule.partial_accumulation == "drop":
        samples = schedule.samples_per_epoch or 0
        most = max(1, min(MAX_RANKS, samples // (execution.micro_batch * execution.accumulation)))
    if choice(most).time.total_s > deadline_s:
        raise Contradiction(
            f"no number of GPUs meets {format_duration(deadline_s)}: with the batch growing to"
            f" {choice(most).global_batch} samples it still takes"
            f" {format_duration(choice(most).time.total_s)} at {format_duration(step_time_s)} a"
            " step.",
            "Use a faster step or fewer epochs; steps cannot be fewer than one an epoch, nor fewer"
            " than `max_steps`.",
        )
    if choice(1).time.total_s <= deadline_s:
        return choice(1)
    return choice(_last_true(lambda n: choice(n).time.total_s > deadline_s, most) + 1)


def _on_one_node(execution: Execution, ranks: int, accumulation: int) -> Execution:
    """The execution with so many data-parallel ranks."""
    processes = ranks * execution.tp * execution.pp * execution.cp
    return replace(execution, nnodes=1, nproc_per_node=processes, accumulation=accumulation)


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


class Question(Record):
    """The numbers that are given. Of micro-batch, accumulation and global batch one may be missing; of step time, epochs,
    samples, batch size and ranks one may be missing where a deadline or a budget is given. `conditions` holds what was
    stated, and nothing is assumed.
    """

    schedule: Schedule
    conditions: JobConditions = ONLY_STEPS
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    step_time_s: float | None = None
    throughput_samples_per_s: float | None = None
    epoch_time_s: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    speedups: tuple[SpeedUp, ...] = ()
    solve_gpus: bool = False
    keep_global_batch: bool = False
    learning_rate: float | None = None
    base_global_batch: int | None = None
    halving: int | None = None


class Answer(Record):
    """All numbers of the training. `solved` names those that were missing; `meets_limit` is None where no limit was given.
    `halving`: the rounds of its repeats under successive halving, where that was asked for."""

    schedule: Schedule
    conditions: JobConditions
    execution: Execution | None = None
    epoch: EpochSteps | None = None
    step_time_s: float | None = None
    throughput_samples_per_s: float | None = None
    time: JobTime | None = None
    limit_s: float | None = None
    meets_limit: bool | None = None
    cost_usd: float | None = None
    solved: tuple[str, ...] = ()
    gpus_choice: DataParallelChoice | None = None
    learning_rate: LearningRateAdvice | None = None
    speedups: tuple[SpeedUp, ...] = ()
    notes: tuple[str, ...] = ()
    halving: tuple[HalvingRound, ...] = ()


def answer(question: Question) -> Answer:
    """Fill in what is missing. Raises `Contradiction` where the numbers clash, and says which."""
    found = _answer(question)
    if question.halving is None:
        return found
    if found.schedule.epochs is None or found.time is None:
        raise TrainpaceError(
            "rounds of a search are counted in epochs and time.", "Add `epochs` and a step time."
        )
    return replace(
        found,
        halving=successive_halving(
            question.conditions.repeats, found.schedule.epochs, question.halving
        ),
    )


def _answer(question: Question) -> Answer:
    q = question
    _check_positive(q)
    notes: list[str] = []
    if q.epoch_time_s is not None and q.schedule.samples_per_epoch is None:
        return _answer_from_epoch_time(q)
    schedule = q.schedule
    shape = _shape(q)
    limit_s = _limit_s(q, shape.world_size)
    unbatched = q.micro_batch is None and q.global_batch is None and not q.solve_gpus
    # a number of steps takes as long whatever the batch
    by_epochs = schedule.epochs is not None and schedule.max_steps is None
    if unbatched and by_epochs and limit_s is not None and q.step_time_s is not None:
        micro = micro_batch_for_deadline(schedule, shape, q.conditions, q.step_time_s, limit_s)
        execution, solved = replace(shape, micro_batch=micro), ["micro_batch", "global_batch"]
        notes.append(
            "assumes that a step takes as long with any batch size; a busy GPU takes longer for a"
            " larger one"
        )
    else:
        execution, solved = _execution(q, shape)
    epoch = epoch_steps(schedule, execution) if schedule.samples_per_epoch is not None else None
    step_time_s = _step_time(q, execution, epoch)
    unsized = schedule.samples_per_epoch is None and not q.solve_gpus
    if unsized and by_epochs and limit_s is not None and step_time_s is not None:
        samples = samples_for_deadline(schedule, execution, q.conditions, step_time_s, limit_s)
        schedule = replace(schedule, samples=samples)
        epoch = epoch_steps(schedule, execution)
        solved.append("samples")

    choice = None
    if q.solve_gpus:
        if limit_s is None or step_time_s is None:
            raise TrainpaceError(
                "the number of GPUs follows from a deadline and a step time.",
                "Add `deadline` and `step_time`.",
            )
        if q.budget_usd is not None:
            raise Contradiction(
                "a budget buys GPU-hours, whatever the number of GPUs.",
                "Give `deadline` to solve for GPUs.",
            )
        before = execution.global_batch
        choice = data_parallel_for_deadline(
            schedule, execution, q.conditions, step_time_s, limit_s, q.keep_global_batch
        )
        execution = _on_one_node(execution, choice.data_parallel_size, choice.accumulation)
        step_time_s = choice.step_time_s
        epoch = epoch_steps(schedule, execution)
        solved.append("data_parallel_size")
        notes.append(
            "assumes that a step takes as long on many GPUs as on few: communication is not counted"
        )
        if execution.global_batch != before:
            notes.append(f"the global batch changes from {before} to {execution.global_batch}")
            q = replace(q, base_global_batch=q.base_global_batch or before)
    if schedule.epochs is None and schedule.max_steps is None:
        if limit_s is None or step_time_s is None:
            raise TrainpaceError(
                "the length of the run is not known.",
                "Add `epochs` or `max_steps`; or `step_time` with a `deadline` or `budget`, to"
                " learn how many epochs fit.",
            )
        epochs = epochs_for_deadline(schedule, execution, q.conditions, step_time_s, limit_s)
        schedule = replace(schedule, epochs=float(epochs))
        solved.append("epochs")
    training = training_of(schedule, execution, q.conditions)
    if step_time_s is None and limit_s is not None:
        step_time_s = step_time_for_deadline(training, limit_s)
        solved += ["step_time", "throughput"]
    time = None if step_time_s is None else training.time(step_time_s)
    advice = None
    if q.base_global_batch not in (None, execution.global_batch):
        advice = learning_rate_advice(q.base_global_batch, execution.global_batch, q.learning_rate)
    return Answer(
        schedule=schedule,
        conditions=q.conditions,
        execution=execution,
        epoch=epoch,
        step_time_s=step_time_s,
        throughput_samples_per_s=(
            None if step_time_s is None else execution.global_batch / step_time_s
        ),
        time=time,
        limit_s=limit_s,
        meets_limit=_meets(time, limit_s),
        cost_usd=None if time is None else time.usd,
        solved=tuple(solved),
        gpus_choice=choice,
        learning_rate=advice,
        speedups=q.speedups,
        notes=tuple(notes),
    )


def _answer_from_epoch_time(q: Question) -> Answer:
    """Repeats x epochs x time of an epoch, where the number of samples is not given."""
    if q.schedule.epochs is None:
        raise TrainpaceError("the number of epochs is not known.", "Add `epochs`.")
    if q.step_time_s is not None or q.throughput_samples_per_s is not None:
        raise Contradiction(
            "an epoch time together with a step time or throughput needs `samples`.",
            "Give one of them.",
        )
    assert q.epoch_time_s is not None
    if (
        q.conditions.evaluate_every_steps
        or q.conditions.checkpoint_every_steps
        or q.schedule.max_steps
    ):
        raise TrainpaceError(
            "counting in steps needs to know the steps of an epoch.",
            "Add `samples` and a batch size.",
        )
    world_size = (q.nnodes or 1) * (q.nproc_per_node or 1)
    # the whole run counts as one step here
    run = Training(
        steps=1,
        epochs=q.schedule.epochs,
        samples_per_step=1,
        nodes=q.nnodes or 1,
        devices=world_size,
        compiles=False,
        conditions=q.conditions,
    )
    time = replace(run.time(q.epoch_time_s * q.schedule.epochs), steps=0)
    limit_s = _limit_s(q, world_size)
    return Answer(
        schedule=q.schedule,
        conditions=q.conditions,
        time=time,
        limit_s=limit_s,
        meets_limit=_meets(time, limit_s),
        cost_usd=time.usd,
        solved=("time",),
        speedups=q.speedups,
    )


def _shape(q: Question) -> Execution:
    """The execution without a micro-batch of its own."""
    return Execution(
        nnodes=q.nnodes or 1,
        nproc_per_node=q.nproc_per_node or q.tp * q.pp * q.cp,
        tp=q.tp,
        pp=q.pp,
        cp=q.cp,
        accumulation=q.accumulation or 1,
    )


def _execution(q: Question, shape: Execution) -> tuple[Execution, list[str]]:
    """The execution and the sizes that were solved for: two of micro-batch, accumulation and global batch give the third."""
    dp = shape.data_parallel_size
    micro, accumulation, total = q.micro_batch, q.accumulation, q.global_batch
    solved = ["global_batch"] if total is None else []
    if micro is None:
        if total is None:
            raise TrainpaceError(
                "the batch size is not known.",
                "Add `micro_batch` (samples per GPU), or `global_batch`.",
            )
        accumulation, solved = accumulation or 1, ["micro_batch"]
        micro, rest = divmod(total, accumulation * dp)
        if rest:
            raise Contradiction(
                f"global batch {total} cannot be split into accumulation {accumulation} x"
                f" data-parallel size {dp} = {accumulation * dp} equal micro-batches.",
                f"Use a global batch that is a multiple of {accumulation * dp}.",
            )
    elif total is not None and accumulation is None:
        accumulation, solved = accumulation_for_global_batch(total, micro, dp), ["accumulation"]
    execution = replace(shape, micro_batch=micro, accumulation=accumulation or 1)
    if total is not None and execution.global_batch != total:
        raise Contradiction(
            f"global batch {total} is not micro-batch {micro} x accumulation {accumulation} x"
            f" data-parallel size {dp} = {execution.global_batch}.",
            "Leave one of them out and it is computed.",
        )
    return execution, solved


def _step_time(q: Question, execution: Execution, epoch: EpochSteps | None) -> float | None:
    """Step time from whichever form it was given in; two forms that disagree by more than 1 % are an error."""
    forms: dict[str, float] = {}
    if q.step_time_s is not None:
        forms["step time"] = q.step_time_s
    if q.throughput_samples_per_s is not None:
        forms["throughput"] = execution.global_batch / q.throughput_samples_per_s
    if q.epoch_time_s is not None and epoch is not None:
        forms["epoch time"] = q.epoch_time_s / epoch.steps
    if forms and max(forms.values()) > 1.01 * min(forms.values()):
        times = ", ".join(
            f"{name} gives {format_duration(value)} a step" for name, value in forms.items()
        )
        raise Contradiction(
            f"the step time is given in ways that disagree: {times}.", "Give one of them."
        )
    return next(iter(forms.values()), None)


def _limit_s(q: Question, world_size: int) -> float | None:
    """The tighter of the deadline and what the budget pays for."""
    limits = [] if q.deadline_s is None else [q.deadline_s]
    if q.budget_usd is not None:
        price = q.conditions.price_usd_per_device_hour
        if price is None:
            raise TrainpaceError(
                "a budget needs a price.", "Add `price`, in dollars per GPU and hour."
            )
        limits.append(3600.0 * q.budget_usd / (price * world_size))
    return min(limits) if limits else None


def _meets(time: JobTime | None, limit_s: float | None) -> bool | None:
    # a solved step time meets its limit up to rounding
    return None if time is None or limit_s is None else time.total_s <= limit_s * (1 + 1e-9)


def _check_positive(q: Question) -> None:
    names = (
        "micro_batch",
        "accumulation",
        "global_batch",
        "nnodes",
        "nproc_per_node",
        "tp",
        "pp",
        "cp",
        "step_time_s",
        "throughput_samples_per_s",
        "epoch_time_s",
        "deadline_s",
        "budget_usd",
        "learning_rate",
        "base_global_batch",
    )
    for record, fields in ((q, names), (q.conditions, ("price_usd_per_device_hour",))):
        check_fields(record, fields, lambda value: 0 < value <= 1e18, "above 0 and at most 1e18")
