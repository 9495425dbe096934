"""Optimizer steps of one process on one device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainpace.core.execution import NUMBER_FORMATS, Execution, Precision
from trainpace.measure.devices import KINDS
from trainpace.workload import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[Any, Any], torch.Tensor]
"""(model, batch) -> the mean loss of the batch."""


def _weights_dtype(precision: Precision) -> torch.dtype | None:
    """The format that a model and its inputs are converted to; None where they stay as they are."""
    number_format = NUMBER_FORMATS[precision]
    return _DTYPES.get(number_format.products) if number_format.form == "half" else None


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """The batch on the device, floating-point inputs in the weights' own format. Pinned memory is copied without waiting."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = _weights_dtype(precision) if tensor.is_floating_point() else None
        tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        return (
            tensor.to(memory_format=torch.channels_last)
            if channels_last and tensor.dim() == 4
            else tensor
        )

    return map_tensors(place, batch)


@contextlib.contextmanager
def _moving_in_place(kind: str) -> Iterator[None]:
    """Let a model's parameters stay the objects that its optimizer holds, and tied ones tied. torch moves them in place between
    its own kinds of devices alone (c10's has_compatible_shallow_copy_type); elsewhere it makes new ones.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or kind not in ("cpu", *KINDS))
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def move(model: Any, device: Any, **changes: Any) -> Any:
    """The model on the device, and with `changes` as of its `to`, in place: its optimizer keeps its parameters."""
    with _moving_in_place(torch.device(device).type):
        return model.to(device=device, **changes)


class PlainEngine:
    """A model and its optimizer in one process. The model is moved in place, so that its optimizer keeps its parameters."""

    def __init__(self, execution: Execution, device: str, model: Any, optimizer: Any) -> None:
        self._execution = e = execution
        self.device = torch.device(device)
        memory_format = torch.channels_last if e.channels_last else torch.preserve_format
        model = move(model, device, dtype=_weights_dtype(e.precision), memory_format=memory_format)
        self.model: Any = torch.compile(model) if e.compile else model
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device) if e.precision == "amp_fp16" else None

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until the update: a GradScaler's factor, or 1."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def place(self, batch: Any) -> Any:
        """The batch on the device, in the number format that the model takes."""
        return place_batch(
            batch, self.device, self._execution.precision, self._execution.channels_last
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward passes run."""
        number_format = NUMBER_FORMATS[self._execution.precision]
        if number_format.form != "amp":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, _DTYPES[number_format.products])

    def forward(self, loss: Loss, batch: Any) -> torch.Tensor:
        with self.autocast():
            return loss(self.model, batch)

    def backward(self, value: torch.Tensor) -> None:
        part = value / self._execution.accumulation
        (part if self._scaler is None else self._scaler.scale(part)).backward()

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        """Run forward and backward, and return the batch's own loss, detached. `last`: the last micro-batch of this step."""
        value = self.forward(loss, batch)
        self.backward(value)
        return value.detach()

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
