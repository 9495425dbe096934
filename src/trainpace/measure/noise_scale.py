"""The gradient noise scale, from squared lengths of gradients inside a training loop: of a part of the batch, and of the whole.

Two norms a step are enough: after the first micro-batch's backward pass, when the gradients are still its own, and after the
last one's. Under DDP the part is each rank's own share, whose gradients are seen before they are reduced.
"""

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.outcome import MeasuredNoiseScale
from trainpace.job import FEWEST_STEPS, GradientNorms, noise_scale
from trainpace.measure.device_clock import StepClock
from trainpace.measure.engine import move
from trainpace.measure.sweep import Conditions
from trainpace.workload import build_task, make_optimizer, map_tensors, usual_optimizer

MOST_STEPS = 500
FIRST_STEPS = 30


def squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The squared length of all gradients that are there, in fp32, on their device: nothing waits for it.

    Where gradients are sharded (DTensor) it is the whole gradient's, and every rank has to ask for it.
    """
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    return torch.stack(whole).square().sum()


class NoiseNorms:
    """Call `after_first` when the first micro-batch's backward pass has ended, and `after_last` before the optimizer.

    A step has `parts` micro-batches, whose losses are divided by `parts`; the first one's gradients are of `samples` samples,
    the last one's of `whole` (by default samples x parts). `loss_scale` tells what a GradScaler multiplies losses by.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int,
        parts: int,
        whole: int | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._samples, self._parts, self._whole, self._loss_scale = (
            samples,
            parts,
            whole or samples * parts,
            loss_scale,
        )
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first = torch.zeros(())

    def after_first(self) -> None:
        self._first = squared_norm(self._parameters) * (self._parts / self._loss_scale()) ** 2

    def after_last(self) -> None:
        self._pairs.append((self._first, squared_norm(self._parameters) / self._loss_scale() ** 2))

    def norms(self) -> GradientNorms:
        """The norms of all steps, without those whose gradients overflowed; under DDP the same on every rank."""
        pairs = [(float(part), float(whole)) for part, whole in self._pairs]
        finite = [pair for pair in pairs if math.isfinite(sum(pair))]
        return GradientNorms(
            small_batch=self._samples,
            big_batch=self._whole,
            small_squared=tuple(part for part, _ in finite),
            big_squared=tuple(whole for _, whole in finite),
        )


class DdpNoiseNorms(NoiseNorms):
    """The norms under DDP without accumulation: each rank's share against the mean of all, by a hook on the gradients' exchange.

    Costs a pass over the gradients and one exchange of a number. Put on before the first step; it takes the place of another
    communication hook. Call `after_last` before the optimizer, on every rank.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, samples: int) -> None:
        super().__init__(model, samples, dist.get_world_size())
        self._own: list[torch.Tensor] = []

        def reduce(_: Any, bucket: Any) -> Any:
            self._own.append(
                torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32).square()
            )
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        reduce.__annotations__.clear()  # DDP compares them with classes, and here they are strings
        model.register_comm_hook(None, reduce)

    def after_first(self) -> None:
        """The hook has seen them."""

    def after_last(self) -> None:
        own = torch.stack(self._own).sum()
        self._own.clear()
        dist.all_reduce(own)
        self._pairs.append((own / self._parts, squared_norm(self._parameters)))


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The noise scale of a task over some steps on fresh samples of its own data set, in the process that this runs in.

    It trains from the first weights, each step in `accumulation` micro-batches of `batch_size` samples, or in two halves of it
    where there is no accumulation, for `conditions.seconds` and FIRST_STEPS steps at least.

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
    model = move(task.model, c.device).train()
    own = task.optimizer if c.optimizer is None else None
    optimizer = own or make_optimizer(c.optimizer or usual_optimizer(task), model)
    gradients = NoiseNorms(model, samples, parts)
    order = _shuffled(len(task.dataset), c.seed)
    device_clock = StepClock(c.device)
    to_device = operator.methodcaller("to", c.device)
    clock, steps, norms_s = time.perf_counter, 0, 0.0
    begin = clock()
    while steps < MOST_STEPS and (steps < FIRST_STEPS or clock() - begin < c.seconds):
        optimizer.zero_grad(set_to_none=True)
        for part in range(parts):
            batch = map_tensors(
                to_device, task.collate([task.dataset[i] for i in itertools.islice(order, samples)])
            )
            (task.loss(model, batch) / parts).backward()
            if part in (0, parts - 1):
                device_clock.wait()
                start = clock()
                (gradients.after_last if part else gradients.after_first)()
                device_clock.wait()
                norms_s += clock() - start
        optimizer.step()
        steps += 1
    seconds = clock() - begin
    norms = gradients.norms()
    if len(norms.small_squared) < FEWEST_STEPS:
        raise UserCodeError("most gradients were no numbers (NaN).", "Lower the learning rate.")
    return MeasuredNoiseScale(
        batch=samples * parts,
        parts=parts,
        scale=noise_scale(norms),
        norms_ms=1e3 * norms_s / steps,
        step_ms=1e3 * (seconds - norms_s) / steps,
    )


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Positions of samples, shuffled anew for each pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()
