"""The work of a training run: samples, batches, micro-batches and steps."""

import math
from typing import Literal

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import Record, check_fields

MAX_COUNT = 10**18
"""Largest accepted count. Larger counts are typing mistakes, and their products would exceed the
range of a double.
"""


class Schedule(Record):
    """The amount of work in one run. See `trainpace.job.JobConditions` for everything else.

    The size of an epoch is given as `samples`, or as `tokens` with `sequence_length` (packed into
    tokens // length samples). `epochs` may be fractional, as in Hugging Face's `num_train_epochs`.
    If both `epochs` and `max_steps` are given, the run ends at whichever comes first, as in
    Lightning.

    With `drop_last`, the data loader drops the last micro-batch of an epoch unless it is full.
    `partial_accumulation` tells what the trainer does with micro-batches that remain at the end of
    an epoch: a smaller "step" (Hugging Face, Lightning) or "drop".
    """

    samples: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    drop_last: bool = False
    partial_accumulation: Literal["step", "drop"] = "step"

    def __post_init__(self) -> None:
        counts = ("samples", "tokens", "sequence_length", "max_steps")
        check_fields(self, counts, lambda n: 1 <= n <= MAX_COUNT, "a whole number from 1 to 1e18")
        check_fields(self, ("epochs",), lambda epochs: 0 < epochs <= MAX_COUNT, "above 0")
        if self.samples is not None and self.tokens is not None:
            raise Contradiction(
                f"samples ({self.samples}) and tokens ({self.tokens}) both give the size of an"
                " epoch.",
                "Give one of them.",
            )
        if self.tokens is not None and self.sequence_length is None:
            raise TrainpaceError("tokens need a sequence length.", "Add `sequence_length`.")

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one epoch, or None if unknown."""
        if self.tokens is None:
            return self.samples
        assert self.sequence_length is not None
        samples = self.tokens // self.sequence_length
        if samples < 1:
            raise Contradiction(
                f"{self.tokens} tokens are fewer than one sample of {self.sequence_length}"
                " (sequence_length).",
                "Give more tokens or a shorter sequence.",
            )
        return samples


class EpochSteps(Record):
    """Steps of one epoch under one execution.

    `last_step_samples` is the size of the last update over all ranks.
    """

    steps: int
    micro_steps_per_rank: int
    samples_seen: int
    last_step_samples: int


def epoch_steps(schedule: Schedule, execution: Execution) -> EpochSteps:
    """Count the steps of one epoch.

    Without `drop_last` every sample counts: steps = ceil(samples / global batch). A distributed
    sampler may repeat samples to fill all ranks. This does not change the number of steps.

    Raises:
        Contradiction: The samples do not fill one step.
    """
    samples = schedule.samples_per_epoch
    if samples is None:
        raise TrainpaceError("the samples of an epoch are unknown.", "Add `samples` or `tokens`.")
    per_micro_step = execution.micro_batch * execution.data_parallel_size
    micro_steps = samples // per_micro_step if schedule.drop_last else -(-samples // per_micro_step)
    whole, left_over = divmod(micro_steps, execution.accumulation)
    drops_left_over = schedule.partial_accumulation == "drop"
    steps = whole if drops_left_over else whole + (left_over > 0)
    if steps == 0:
        what = "partial accumulation dropped" if micro_steps else "drop_last"
        raise Contradiction(
            f"{samples} samples do not fill one step: micro-batch {execution.micro_batch} x"
            f" accumulation {execution.accumulation} x data-parallel size"
            f" {execution.data_parallel_size} = {execution.global_batch} samples, with {what}.",
            "Use a smaller batch, or keep the last batch.",
        )
    used_micro_steps = whole * execution.accumulation if drops_left_over else micro_steps
    seen = min(samples, used_micro_steps * per_micro_step)
    return EpochSteps(
        steps=steps,
        micro_steps_per_rank=used_micro_steps,
        samples_seen=seen,
        last_step_samples=seen - (steps - 1) * execution.global_batch,
    )


def total_steps(schedule: Schedule, execution: Execution) -> int:
    """Return the optimizer updates of one run.

    This is ceil(epochs x steps per epoch), limited to `max_steps`.
    """
    if schedule.epochs is None:
        if schedule.max_steps is None:
            raise TrainpaceError(
                "the length of the run is unknown.", "Add `epochs` or `max_steps`."
            )
        return schedule.max_steps
    exact = schedule.epochs * epoch_steps(schedule, execution).steps
    # In floating point, 1.1 epochs of 50,000 steps are 55,000.00000000001 steps. 55,000 are meant.
    steps = max(1, math.ceil(exact - min(1e-9 * max(1.0, exact), 0.5)))
    return steps if schedule.max_steps is None else min(steps, schedule.max_steps)


def accumulation_for_global_batch(
    global_batch: int, micro_batch: int, data_parallel_size: int
) -> int:
    """Return the number of accumulation steps that gives exactly `global_batch`.

    Raises an error that names the nearest possible batches if there is no such number.
    """
    per_micro_step = micro_batch * data_parallel_size
    whole, rest = divmod(global_batch, per_micro_step)
    if rest == 0 and whole:
        return whole
    nearest = [n * per_micro_step for n in (whole, whole + 1) if n]
    raise Contradiction(
        f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x"
        f" data-parallel size {data_parallel_size} = {per_micro_step}.",
        f"Nearest global batches: {' and '.join(str(n) for n in nearest)};"
        f" or a micro-batch that divides {global_batch}.",
    )


class SpeedUp(Record):
    """A measured speed-up: the ratio of old to new time. Above 1 is faster.

    A ratio of 3.63 means 3.63 times as fast, or 27.5% of the old time. It is written as "363%" of
    the old speed. "Faster by 363%" would mean 4.63 times as fast.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise TrainpaceError(f"a speed-up of {self.ratio} is not above 0.")

    @property
    def share_of_old_time(self) -> float:
        """New time as a share of the old time: 0.0465 for a ratio of 21.53."""
        return 1 / self.ratio

    @property
    def percent_of_old_speed(self) -> float:
        """New speed in percent of the old speed: 2153 for a ratio of 21.53."""
        return 100 * self.ratio

    def new_time_s(self, old_time_s: float) -> float:
        return old_time_s / self.ratio
