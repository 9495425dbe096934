"""What the gradient noise scale needs, gathered from a trial's own steps: gradients of a part of the batch against the whole's.

With accumulation the part is the first micro-batch (under FSDP2, whose gradients are reduced in every one, all ranks'); under DDP
without it, each rank's share. It costs one pass over the gradients for each of the two norms, so it is done in steps after those
that are timed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trainpace.errors import TrainpaceError
from trainpace.launch.engines.engine import Engine
from trainpace.launch.trial import Trial
from trainpace.measure import DdpNoiseNorms, squared_norm
from trainpace.schedule import GradientNorms, noise_scale


class Norms(Protocol):
    """Told of the moments of a step when gradients are of its first micro-batch, and of the whole batch."""

    def after_first(self) -> None:
        """Before the second micro-batch."""
        ...

    def after_last(self) -> None:
        """Before the update."""
        ...

    def norms(self) -> GradientNorms:
        """Of all steps so far."""
        ...


def norms_of(trial: Trial, engine: Engine) -> Norms:
    """For an engine and an execution that show a part's gradients (`engines.rules`)."""
    e = trial.execution
    if e.accumulation > 1:
        ranks = e.data_parallel_size if trial.engine == "fsdp2" else 1
        return _Accumulated(engine, e.micro_batch * ranks, e.global_batch, e.accumulation)
    return _Shares(engine, e.micro_batch)


def estimate(norms: Norms) -> tuple[dict[str, float], tuple[str, ...]]:
    """samples, low, high (90 %) and steps, as far as they are told; and notes."""
    try:
        found = noise_scale(norms.norms())
    except TrainpaceError as error:
        return {}, (str(error),)
    told = {"samples": found.samples, "low": found.low, "high": found.high, "steps": float(found.steps)}
    return {name: value for name, value in told.items() if value is not None}, (found.reason,) if found.reason else ()


class _Accumulated:
    def __init__(self, engine: Engine, small: int, big: int, parts: int) -> None:
        self._engine, self._small, self._big, self._parts = engine, small, big, parts
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first = torch.zeros(())

    def after_first(self) -> None:
        self._first = self._squared_norm() * self._parts**2  # the loss was divided by the number of parts

    def after_last(self) -> None:
        self._pairs.append((self._first, self._squared_norm()))

    def norms(self) -> GradientNorms:
        numbers = torch.tensor([[float(a), float(b)] for a, b in self._pairs], dtype=torch.float64).reshape(-1, 2)
        kept = numbers[numbers.isfinite().all(1)]
        small, big = (tuple(column.tolist()) for column in kept.T)
        return GradientNorms(small_batch=self._small, big_batch=self._big, small_squared=small, big_squared=big)

    def _squared_norm(self) -> torch.Tensor:
        return squared_norm(self._engine.model.parameters()) / self._engine.loss_scale**2


class _Shares:
    def __init__(self, engine: Engine, samples: int) -> None:
        # inside of Fabric's module, and of a compiled one
        ddp = next(m for m in engine.model.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel))
        self._gathered = DdpNoiseNorms(ddp, samples)

    def after_first(self) -> None:
        pass

    def after_last(self) -> None:
        self._gathered.after_last()

    def norms(self) -> GradientNorms:
        return self._gathered.norms()
