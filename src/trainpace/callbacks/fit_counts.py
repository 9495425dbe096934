"""The remaining work of Lightning's fit loop as counts, by the loop's own rules. Pure.

Batches are counted rather than optimizer steps: with manual optimization a batch may step several optimizers or none.
Rules as in lightning 2.6, loops/training_epoch_loop.py and loops/fit_loop.py.
"""

import math
from typing import NamedTuple

from trainpace.callbacks.time_left import multiples_in


class FitState(NamedTuple):
    """The state of a fit after a batch, before the validation that may follow it.

    `epoch` is the current one, from 0, of `max_epochs` (None: no limit); `batch` batches of `epoch_batches` (None:
    unknown) are done in it. `global_step` counts optimizer steps, of `max_steps` (None: no limit).

    Validation runs after every `val_every_batches` batches of an epoch, in every `val_every_epochs`-th epoch; where the
    latter is None, after as many batches of the whole run. `val_every_batches` None: at the end of epochs; 0: never.
    """

    epoch: int
    batch: int
    total_batch: int
    epoch_batches: int | None
    max_epochs: int | None
    global_step: int = 0
    max_steps: int | None = None
    steps_per_batch: float = 1.0
    accumulation: int = 1
    val_every_batches: int | None = 0
    val_every_epochs: int | None = 1


class Remaining(NamedTuple):
    """Remaining counts; `total_batches` includes those that are done."""

    batches: int
    evaluations: int
    epochs: int
    total_batches: int


def remaining_counts(s: FitState) -> Remaining | None:
    """The remaining counts, None where the end is unknown (no limit, or a stream of unknown length)."""
    if s.epoch_batches == 0:  # such a fit is skipped
        return Remaining(0, 0, 0, s.total_batch)
    by_epochs = _batches_by_epochs(s)
    by_steps = _batches_by_steps(s)
    limits = [batches for batches in (by_epochs, by_steps) if batches is not None]
    if not limits:
        return None
    batches = max(0, min(limits))
    if s.epoch_batches is None:
        return Remaining(batches, 0, 0, s.total_batch + batches)
    last = s.batch + batches  # counted from the start of the current epoch
    epochs = max(0, math.ceil(last / s.epoch_batches) - 1)
    return Remaining(batches, _evaluations(s, batches), epochs, s.total_batch + batches)


def _batches_by_epochs(s: FitState) -> int | None:
    if s.max_epochs is None or s.epoch_batches is None:
        return None
    return (s.max_epochs - s.epoch) * s.epoch_batches - s.batch


def _batches_by_steps(s: FitState) -> int | None:
    """Batches until `max_steps` updates. The last batches of an epoch are an update, even where they are fewer."""
    if s.max_steps is None:
        return None
    steps = max(0, s.max_steps - s.global_step)
    if s.accumulation == 1 or s.epoch_batches is None:
        return math.ceil(steps * s.accumulation / s.steps_per_batch - s.batch % s.accumulation) if steps else 0
    an_epoch = math.ceil(s.epoch_batches / s.accumulation)
    this_epoch = an_epoch - s.batch // s.accumulation if s.batch < s.epoch_batches else 0
    if steps <= this_epoch:
        return min(s.epoch_batches, (s.batch // s.accumulation + steps) * s.accumulation) - s.batch
    whole, rest = divmod(steps - this_epoch, an_epoch)
    return s.epoch_batches - s.batch + whole * s.epoch_batches + min(s.epoch_batches, rest * s.accumulation)


def _evaluations(s: FitState, batches: int) -> int:
    assert s.epoch_batches is not None
    every = s.epoch_batches if s.val_every_batches is None else s.val_every_batches
    if every <= 0:
        return 0
    if s.val_every_epochs is None:
        return multiples_in(every, s.total_batch - 1, s.total_batch + batches)
    last = s.batch + batches
    whole, rest = divmod(last, s.epoch_batches)

    def validates(epoch: int) -> bool:
        return (epoch + 1) % (s.val_every_epochs or 1) == 0

    done = (s.batch - 1) // every if validates(s.epoch) and s.batch else 0
    full_epochs = multiples_in(s.val_every_epochs, s.epoch, s.epoch + whole)  # of those that end
    return full_epochs * (s.epoch_batches // every) + (rest // every if validates(s.epoch + whole) else 0) - done
