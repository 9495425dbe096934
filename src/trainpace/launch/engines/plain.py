"""One process and no engine: a loop as anyone writes it."""

from typing import Any

import torch

from trainpace.launch.engines.engine import Engine, Loss
from trainpace.launch.engines.recompute import recompute_blocks
from trainpace.launch.trial import Trial
from trainpace.measure import autocast, place_batch, place_model


def load(device: str) -> None:
    """Nothing is to be imported but torch."""


def make(trial: Trial, model: Any, optimizer: Any) -> Engine:
    return _Plain(trial, model, optimizer)


class _Plain:
    def __init__(self, trial: Trial, model: Any, optimizer: Any) -> None:
        self._execution = e = trial.execution
        self.device = torch.device(trial.device)
        self.notes = recompute_blocks(model) if e.activation_checkpointing == "full" else ()
        model = place_model(model, trial.device, e.precision, e.channels_last)
        self.model = torch.compile(model) if e.compile else model
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(trial.device) if e.precision == "amp_fp16" else None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def place(self, batch: Any) -> Any:
        return place_batch(batch, self.device, self._execution.precision, self._execution.channels_last)

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        with autocast(self.device.type, self._execution.precision):
            value = loss(self.model, batch)
        part = value / self._execution.accumulation
        (part if self._scaler is None else self._scaler.scale(part)).backward()
        return value.detach()

    def update(self) -> None:
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
