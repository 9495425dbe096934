"""Solve for the missing numbers of a training: the core of `trainpace schedule`.

Every solver inverts `Training.time`, either by bisection or by trying whole numbers. The solvers
therefore stay correct when the formula gains a term. The time is monotonic in every quantity; tests
check this.
"""

from collections.abc import Callable

from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import JobTime
from trainpace.core.records import Record, check_fields
from trainpace.core.units import format_duration
from trainpace.job.learning_rate import LearningRateAdvice, learning_rate_advice
from trainpace.job.training import (
    MAX_COUNT,
    ONLY_STEPS,
    EpochSteps,
    JobConditions,
    Schedule,
    SpeedUp,
    Training,
    accumulation_for_global_batch,
    epoch_steps,
    training_of,
)

MAX_RANKS = 1_000_000
MAX_EPOCHS = 10**9


class DataParallelChoice(Record):
    """Data-parallel size that meets a deadline, and the resulting training time."""

    data_parallel_size: int
    accumulation: int
    global_batch: int
    step_time_s: float
    time: JobTime


def step_time_for_deadline(training: Training, deadline_s: float) -> float:
    """Return the longest step time in seconds that meets the deadline."""
    fastest = training.time(1e-15)
    if fastest.total_s > deadline_s:
        raise Contradiction(
            f"a deadline of {format_duration(deadline_s)} is impossible: start-up, evaluation,"
            f" checkpoints and restarts alone take {format_duration(fastest.total_s)}.",
            "Allow more time, or evaluate and checkpoint less often.",
        )
    # No step can take longer than the deadline divided by the number of steps.
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
    """Return the largest number of whole epochs within the deadline."""

    def time_s(epochs: int) -> float:
        run = replace(schedule, epochs=float(epochs), max_steps=None)
        return training_of(run, execution, conditions).time(step_time_s).total_s

    if time_s(1) > deadline_s:
        raise Contradiction(
            f"one epoch takes {format_duration(time_s(1))}, longer than the limit of"
            f" {format_duration(deadline_s)}.",
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
    """Return the largest number of samples per epoch that meets the deadline."""
    batch = execution.global_batch

    def time_s(batches: int) -> float:
        run = replace(schedule, samples=batches * batch)
        return training_of(run, execution, conditions).time(step_time_s).total_s

    if time_s(1) > deadline_s:
        raise Contradiction(
            f"Even with one step per epoch, {schedule.epochs:g} epochs take"
            f" {format_duration(time_s(1))}. The limit is {format_duration(deadline_s)}.",
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
    """Return the smallest micro-batch that meets the deadline at a constant step time.

    In practice a larger batch takes longer per step once the GPU is busy. The result is therefore a
    lower bound.
    """

    def time_s(micro_batch: int) -> float:
        larger = replace(execution, micro_batch=micro_batch)
        return training_of(schedule, larger, conditions).time(step_time_s).total_s

    samples = schedule.samples_per_epoch
    if samples is None:
        raise TrainpaceError(
            "solving for the batch size needs the samples of an epoch.",
            "Add `samples` or `tokens`.",
        )
    each = execution.accumulation * execution.data_parallel_size
    drops = schedule.drop_last or schedule.partial_accumulation == "drop"
    most = max(1, samples // each if drops else -(-samples // each))
    if time_s(most) > deadline_s:
        raise Contradiction(
            f"no batch size meets {format_duration(deadline_s)}: even one step per epoch takes"
            f" {format_duration(time_s(most))} at {format_duration(step_time_s)} per step.",
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
    """Return the smallest data-parallel size that meets the deadline. Ignores communication.

    With `keep_global_batch`, additional ranks replace accumulation steps and the step time falls in
    proportion. Without it, the global batch grows with the number of ranks, and there are fewer
    steps.
    """

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
        return _at_constant_batch(execution, choice, deadline_s)
    most = MAX_RANKS
    if schedule.drop_last or schedule.partial_accumulation == "drop":
        samples = schedule.samples_per_epoch or 0
        most = max(1, min(MAX_RANKS, samples // (execution.micro_batch * execution.accumulation)))
    if choice(most).time.total_s > deadline_s:
        raise Contradiction(
            f"no number of GPUs meets {format_duration(deadline_s)}: with the batch growing to"
            f" {choice(most).global_batch} samples it still takes"
            f" {format_duration(choice(most).time.total_s)} at {format_duration(step_time_s)} per"
            " step.",
            "Use a faster step or fewer epochs; an epoch has at least one step.",
        )
    if choice(1).time.total_s <= deadline_s:
        return choice(1)
    return choice(_last_true(lambda n: choice(n).time.total_s > deadline_s, most) + 1)


def _at_constant_batch(
    execution: Execution, choice: Callable[[int, int], DataParallelChoice], deadline_s: float
) -> DataParallelChoice:
    most = execution.accumulation * execution.data_parallel_size
    choices = [choice(ranks, most // ranks) for ranks in range(1, most + 1) if most % ranks == 0]
    meeting = [c for c in choices if c.time.total_s <= deadline_s]
    if meeting:
        return meeting[0]
    fastest = min(c.time.total_s for c in choices)
    raise Contradiction(
        f"at a constant global batch of {execution.global_batch} and micro-batch"
        f" {execution.micro_batch} the most ranks are {most}, which take"
        f" {format_duration(fastest)}; the deadline is {format_duration(deadline_s)}.",
        "Let the global batch grow, use a smaller micro-batch, or a faster step.",
    )


def _on_one_node(execution: Execution, ranks: int, accumulation: int) -> Execution:
    processes = ranks * execution.ranks_per_copy
    return replace(execution, nnodes=1, nproc_per_node=processes, accumulation=accumulation)


def _last_true(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest n in 1..most with holds(n).

    `holds(1)` must be True. Once `holds` is False, it must stay False for larger n.
    """
    if holds(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class Question(Record):
    """Known numbers of a training. None marks an unknown number.

    One of micro-batch, accumulation and global batch may be missing. If a deadline or a budget is
    given, one of step time, epochs, samples, batch size and ranks may be missing as well.
    `conditions` contain no assumed values.
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


class Answer(Record):
    """Complete numbers of a training, given or solved.

    `solved` lists the numbers that were missing. `meets_limit` is None if there is no deadline or
    budget.
    """

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


def answer(question: Question) -> Answer:
    """Compute the missing numbers of a question.

    Raises:
        Contradiction: The given numbers conflict. The message names them.
    """
    _check_positive(question)
    if question.epoch_time_s is not None and question.schedule.samples_per_epoch is None:
        return _answer_from_epoch_time(question)
    solver = _Solver(question)
    solver.solve_batch()
    solver.solve_samples()
    solver.solve_gpus()
    solver.solve_epochs()
    return solver.answer()


class _Solver:
    """Solver for the missing numbers. Each `solve_*` method fills in one of them."""

    def __init__(self, question: Question) -> None:
        self.q = question
        self.schedule = question.schedule
        self.shape = _shape(question)
        self.limit_s = _limit_s(question, self.shape.world_size)
        self.base_global_batch = question.base_global_batch
        self.gpus_choice: DataParallelChoice | None = None
        self.notes: list[str] = []

    @property
    def _by_epochs(self) -> bool:
        """True if the number of steps follows from epochs, and so from the batch size."""
        return self.schedule.epochs is not None and self.schedule.max_steps is None

    @property
    def _epoch(self) -> EpochSteps | None:
        sized = self.schedule.samples_per_epoch is not None
        return epoch_steps(self.schedule, self.execution) if sized else None

    def solve_batch(self) -> None:
        """Set the execution, and the step time from step time, throughput or epoch time."""
        q = self.q
        unbatched = q.micro_batch is None and q.global_batch is None and not q.solve_gpus
        if unbatched and self._by_epochs and self.limit_s and q.step_time_s:
            micro = micro_batch_for_deadline(
                self.schedule, self.shape, q.conditions, q.step_time_s, self.limit_s
            )
            self.execution = replace(self.shape, micro_batch=micro)
            self.solved = ["micro_batch", "global_batch"]
            self.notes.append(
                "assumes that a step takes as long with any batch size; a busy GPU takes longer for"
                " a larger one"
            )
        else:
            self.execution, self.solved = _execution(q, self.shape)
        self.step_time_s = _step_time(q, self.execution, self._epoch)

    def solve_samples(self) -> None:
        if self.schedule.samples_per_epoch is not None or self.q.solve_gpus:
            return
        if self._by_epochs and self.limit_s and self.step_time_s:
            samples = samples_for_deadline(
                self.schedule, self.execution, self.q.conditions, self.step_time_s, self.limit_s
            )
            self.schedule = replace(self.schedule, samples=samples)
            self.solved.append("samples")

    def solve_gpus(self) -> None:
        """Find the data-parallel size that meets the deadline, if it is the missing number."""
        q, before = self.q, self.execution.global_batch
        if not q.solve_gpus:
            return
        if not self.limit_s or not self.step_time_s:
            raise TrainpaceError(
                "solving for the number of GPUs needs a deadline and a step time.",
                "Add `deadline` and `step_time`.",
            )
        if q.budget_usd is not None:
            raise Contradiction(
                "a budget buys GPU-hours, whatever the number of GPUs.",
                "Give `deadline` to solve for GPUs.",
            )
        choice = data_parallel_for_deadline(
            self.schedule,
            self.execution,
            q.conditions,
            self.step_time_s,
            self.limit_s,
            q.keep_global_batch,
        )
        self.execution = _on_one_node(
            self.execution, choice.data_parallel_size, choice.accumulation
        )
        self.gpus_choice, self.step_time_s = choice, choice.step_time_s
        self.solved.append("data_parallel_size")
        self.notes.append(
            "assumes that a step takes as long on many GPUs as on few: communication is not counted"
        )
        if choice.global_batch != before:
            self.notes.append(f"the global batch changes from {before} to {choice.global_batch}")
            self.base_global_batch = self.base_global_batch or before

    def solve_epochs(self) -> None:
        if self.schedule.epochs is not None or self.schedule.max_steps is not None:
            return
        if not self.limit_s or not self.step_time_s:
            raise TrainpaceError(
                "the length of the run is unknown.",
                "Add `epochs` or `max_steps`; or `step_time` with a `deadline` or `budget`, to"
                " learn how many epochs fit.",
            )
        epochs = epochs_for_deadline(
            self.schedule, self.execution, self.q.conditions, self.step_time_s, self.limit_s
        )
        self.schedule = replace(self.schedule, epochs=float(epochs))
        self.solved.append("epochs")

    def answer(self) -> Answer:
        """Return all numbers. If no step time was given, use the longest one within the limit."""
        q, batch, limit_s = self.q, self.execution.global_batch, self.limit_s
        training = training_of(self.schedule, self.execution, q.conditions)
        if self.step_time_s is None and limit_s is not None:
            self.step_time_s = step_time_for_deadline(training, limit_s)
            self.solved += ["step_time", "throughput"]
        step_s, advice = self.step_time_s, None
        time = None if step_s is None else training.time(step_s)
        if self.base_global_batch not in (None, batch):
            advice = learning_rate_advice(self.base_global_batch, batch, q.learning_rate)
        return Answer(
            schedule=self.schedule,
            conditions=q.conditions,
            execution=self.execution,
            epoch=self._epoch,
            step_time_s=step_s,
            throughput_samples_per_s=None if step_s is None else batch / step_s,
            time=time,
            limit_s=limit_s,
            meets_limit=_meets(time, limit_s),
            cost_usd=None if time is None else time.usd,
            solved=tuple(self.solved),
            gpus_choice=self.gpus_choice,
            learning_rate=advice,
            speedups=q.speedups,
            notes=tuple(self.notes),
        )


def _answer_from_epoch_time(q: Question) -> Answer:
    """Return the answer for a given epoch time. The number of samples is not needed."""
    _check_epoch_time(q)
    assert q.epoch_time_s is not None
    assert q.schedule.epochs is not None
    world_size = (q.nnodes or 1) * (q.nproc_per_node or 1)
    # The whole run counts as one step here.
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


def _check_epoch_time(q: Question) -> None:
    if q.schedule.epochs is None:
        raise TrainpaceError("the number of epochs is unknown.", "Add `epochs`.")
    if q.step_time_s is not None or q.throughput_samples_per_s is not None:
        raise Contradiction(
            "an epoch time together with a step time or throughput needs `samples`.",
            "Add `samples`, or give one of them.",
        )
    if (
        q.conditions.evaluate_every_steps
        or q.conditions.checkpoint_every_steps
        or q.schedule.max_steps
    ):
        raise TrainpaceError(
            "options in steps need the number of steps of an epoch.",
            "Add `samples` and a batch size.",
        )


def _shape(q: Question) -> Execution:
    return Execution(
        nnodes=q.nnodes or 1,
        nproc_per_node=q.nproc_per_node or q.tp * q.pp * q.cp,
        tp=q.tp,
        pp=q.pp,
        cp=q.cp,
        accumulation=q.accumulation or 1,
    )


def _execution(q: Question, shape: Execution) -> tuple[Execution, list[str]]:
    """Return the execution and the names of the solved sizes.

    Any two of micro-batch, accumulation and global batch determine the third.
    """
    dp = shape.data_parallel_size
    micro, accumulation, total = q.micro_batch, q.accumulation, q.global_batch
    solved = ["global_batch"] if total is None else []
    if micro is None:
        accumulation, solved = accumulation or 1, ["micro_batch"]
        micro = _equal_micro_batches(total, accumulation, dp)
    elif total is not None and accumulation is None:
        accumulation, solved = accumulation_for_global_batch(total, micro, dp), ["accumulation"]
    execution = replace(shape, micro_batch=micro, accumulation=accumulation or 1)
    if total is not None and execution.global_batch != total:
        raise Contradiction(
            f"global batch {total} is not micro-batch {micro} x accumulation {accumulation} x"
            f" data-parallel size {dp} = {execution.global_batch}.",
            "Drop one of them, and it is computed.",
        )
    return execution, solved


def _equal_micro_batches(total: int | None, accumulation: int, dp: int) -> int:
    if total is None:
        raise TrainpaceError(
            "the batch size is unknown.", "Add `micro_batch` (samples per GPU), or `global_batch`."
        )
    micro, rest = divmod(total, accumulation * dp)
    if rest:
        raise Contradiction(
            f"global batch {total} cannot be split into accumulation {accumulation} x"
            f" data-parallel size {dp} = {accumulation * dp} equal micro-batches.",
            f"Use a global batch that is a multiple of {accumulation * dp}.",
        )
    return micro


def _step_time(q: Question, execution: Execution, epoch: EpochSteps | None) -> float | None:
    """Return the step time, converted from whichever form was given.

    Raises an error if two given forms disagree by more than 1%.
    """
    forms: dict[str, float] = {}
    if q.step_time_s is not None:
        forms["step time"] = q.step_time_s
    if q.throughput_samples_per_s is not None:
        forms["throughput"] = execution.global_batch / q.throughput_samples_per_s
    if q.epoch_time_s is not None and epoch is not None:
        forms["epoch time"] = q.epoch_time_s / epoch.steps
    if forms and max(forms.values()) > 1.01 * min(forms.values()):
        times = ", ".join(
            f"{name} gives {format_duration(value)} per step" for name, value in forms.items()
        )
        raise Contradiction(f"the given step times disagree: {times}.", "Give one of them.")
    return next(iter(forms.values()), None)


def _limit_s(q: Question, world_size: int) -> float | None:
    """Return the tighter of the deadline and the time that the budget pays for, in seconds."""
    limits = [] if q.deadline_s is None else [q.deadline_s]
    if q.budget_usd is not None:
        price = q.conditions.price_usd_per_device_hour
        if price is None:
            raise TrainpaceError("a budget needs a price.", "Add `price`, in dollars per GPU-hour.")
        limits.append(3600.0 * q.budget_usd / (price * world_size))
    return min(limits) if limits else None


def _meets(time: JobTime | None, limit_s: float | None) -> bool | None:
    # A solved step time meets its limit only up to rounding.
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
