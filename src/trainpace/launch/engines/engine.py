"""What every engine does: a micro-batch forward and backward, and the update after the last of a step."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Loss = Callable[[Any, Any], torch.Tensor]
"""(model, batch) -> the mean loss of the batch."""


class Engine(Protocol):
    """A model and its optimizer, wrapped. `notes` say where it departs from what was asked for."""

    device: torch.device
    model: Any
    notes: tuple[str, ...]

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until the update: a GradScaler's factor, or 1."""
        ...

    def place(self, batch: Any) -> Any:
        """The batch on the device, in the number format that the model takes."""
        ...

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        """Run forward and backward, and return the batch's own loss, detached. `last`: the last micro-batch of this step."""
        ...

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        ...
