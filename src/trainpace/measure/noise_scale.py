"""The gradient noise scale of a task: some steps on fresh samples of its own data set, in the process that this runs in."""

import operator
import time

import torch

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.measure.conditions import Conditions
from trainpace.measure.formats import map_tensors
from trainpace.measure.noise_norms import NoiseNorms
from trainpace.outcome import MeasuredNoiseScale
from trainpace.schedule import FEWEST_STEPS, noise_scale
from trainpace.trace import build_task, make_optimizer

MOST_STEPS = 500
FIRST_STEPS = 30


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """Train from the first weights on a shuffled pass over the data, each step in `accumulation` micro-batches of `batch_size`
    samples, or in two halves of it where there is no accumulation, for `conditions.seconds` and FIRST_STEPS steps at least.

    Raises TrainpaceError for a model without a data set of its own: the gradients of random samples point nowhere.
    """
    c = conditions
    torch.manual_seed(c.seed)
    task = build_task(c.model, c.sequence_length, c.image_size)
    if task.dataset is None or task.collate is None:
        raise TrainpaceError(
            f"{c.model} has no data: the noise scale is one of real samples.",
            "Name FILE.py:FUNCTION, whose function returns (model, loss, optimizer, dataset).",
        )
    parts = c.accumulation if c.accumulation > 1 else 2
    samples = batch_size if c.accumulation > 1 else batch_size // 2
    if samples < 1:
        raise TrainpaceError("a batch of 1 sample has no halves.", "Give a larger --batch.")
    model = task.model.to(c.device).train()
    own = task.optimizer if c.optimizer is None else None
    optimizer = own or make_optimizer(c.optimizer or "sgd_momentum", model)
    gradients = NoiseNorms(model, samples, parts)
    order = _Shuffled(len(task.dataset), c.seed)
    to_device = operator.methodcaller("to", c.device)
    clock, steps, norms_s = time.perf_counter, 0, 0.0
    begin = clock()
    while steps < MOST_STEPS and (steps < FIRST_STEPS or clock() - begin < c.seconds):
        optimizer.zero_grad(set_to_none=True)
        for part in range(parts):
            batch = map_tensors(to_device, task.collate([task.dataset[i] for i in order.take(samples)]))
            (task.loss(model, batch) / parts).backward()
            if part in (0, parts - 1):
                _wait(c.device)
                start = clock()
                (gradients.after_last if part else gradients.after_first)()
                _wait(c.device)
                norms_s += clock() - start
        optimizer.step()
        steps += 1
    seconds = clock() - begin
    norms = gradients.norms()
    if len(norms.small_squared) < FEWEST_STEPS:
        raise UserCodeError("most gradients were no numbers (NaN).", "Lower the learning rate.")
    return MeasuredNoiseScale(
        batch=samples * parts, parts=parts, scale=noise_scale(norms), norms_ms=1e3 * norms_s / steps,
        step_ms=1e3 * (seconds - norms_s) / steps,
    )  # fmt: skip


class _Shuffled:
    """Positions of samples, shuffled anew for each pass."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._left: list[int] = []
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, count: int) -> list[int]:
        while len(self._left) < count:
            self._left += torch.randperm(self._size, generator=self._generator).tolist()
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
