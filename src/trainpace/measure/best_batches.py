"""Which batch sizes a measured curve recommends."""

import numpy as np

from trainpace.measure.changes import StepCurve
from trainpace.records import Record

LAUNCH_BOUND_COST = 1.1
"""A step is launch-bound as long as it costs less than this many times the smallest batch's step ..."""
LAUNCH_BOUND_SPAN = 2.0
"""... provided that this holds to at least so many times the smallest batch."""


class BatchChoice(Record):
    """A batch size, its fitted step, and its throughput: fitted, and as measured."""

    batch: int
    step_ms: float
    samples_per_second: float
    measured_samples_per_second: float


class BestBatches(Record):
    """`best`: the smallest batch whose throughput cannot be told from the highest. `before_jumps`: the last measured
    batch before each jump up, ascending. `launch_bound_until`: the largest measured batch of the flat region at the
    start, None where there is none.
    """

    best: BatchChoice
    before_jumps: tuple[BatchChoice, ...]
    launch_bound_until: int | None


def best_batches(curve: StepCurve) -> BestBatches:
    """The batch sizes that a curve recommends.

    Throughput is that of the fitted step, which averages noise away. A batch counts as the best if it is less than one
    standard deviation of a measured step (`curve.noise`) below the highest fitted throughput, and if its own measurement
    was not more than two deviations slower than its fit; of those, the smallest, which leaves memory and converges in
    fewer samples.
    """
    batches = np.asarray(curve.batches, dtype=float)
    fitted, measured = np.asarray(curve.fitted_ms), np.asarray(curve.step_ms)
    throughput = 1e3 * batches / fitted
    undisturbed = measured <= fitted * (1 + 2 * curve.noise)
    if not undisturbed.any():
        undisturbed[:] = True
    good = undisturbed & (throughput >= throughput[undisturbed].max() * (1 - curve.noise))
    return BestBatches(
        best=_choice(curve, int(np.flatnonzero(good)[0])),
        before_jumps=tuple(
            _choice(curve, curve.batches.index(jump.before)) for jump in curve.jumps if jump.size_ms > 0
        ),
        launch_bound_until=_launch_bound(curve),
    )


def _choice(curve: StepCurve, i: int) -> BatchChoice:
    batch, step = curve.batches[i], curve.fitted_ms[i]
    return BatchChoice(
        batch=batch, step_ms=step, samples_per_second=1e3 * batch / step,
        measured_samples_per_second=1e3 * batch / curve.step_ms[i],
    )  # fmt: skip


def _launch_bound(curve: StepCurve) -> int | None:
    smallest, first = curve.batches[0], curve.fitted_ms[0]
    flat = smallest
    for batch, step in zip(curve.batches, curve.fitted_ms, strict=True):
        if step > LAUNCH_BOUND_COST * first:
            break
        flat = batch
    return flat if flat >= LAUNCH_BOUND_SPAN * smallest else None
