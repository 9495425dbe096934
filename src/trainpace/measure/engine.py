"""Optimizer steps of one process on one device, and the norms of gradients inside them."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from trainpace.core.execution import NUMBER_FORMATS, Execution, Precision
from trainpace.job import GradientNorms
from trainpace.measure.device import KINDS
from trainpace.workload import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Loss = Callable[[Any, Any], torch.Tensor]
"""(model, batch) -> the mean loss of the batch."""


def _weights_dtype(precision: Precision) -> torch.dtype | None:
    """Return the format that a model and its inputs are converted to, or None if they stay as they
    are."""
    number_format = NUMBER_FORMATS[precision]
    return _DTYPES.get(number_format.products) if number_format.form == "half" else None


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """Copy a batch to the device, with floating-point inputs in the format of the weights.

    Copies from pinned memory do not block.
    """

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = _weights_dtype(precision) if tensor.is_floating_point() else None
        tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        if channels_last and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        return tensor

    return map_tensors(place, batch)


@contextlib.contextmanager
def _moving_in_place(kind: str) -> Iterator[None]:
    """Let parameters stay the objects that the optimizer holds, and tied parameters tied.

    torch moves parameters in place only between its own kinds of devices (c10's
    has_compatible_shallow_copy_type); for others it makes new ones.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or kind not in ("cpu", *KINDS))
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def move(model: Any, device: Any, **changes: Any) -> Any:
    """Move a model to the device in place, with `changes` of its `to`.

    Its optimizer keeps its parameters.
    """
    with _moving_in_place(torch.device(device).type):
        return model.to(device=device, **changes)


class PlainEngine:
    """A model and its optimizer in one process. The model is moved in place."""

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
        """Return the factor of gradients until the update: a GradScaler's scale, or 1."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def place(self, batch: Any) -> Any:
        """Copy a batch to the device, in the model's number format."""
        return place_batch(
            batch, self.device, self._execution.precision, self._execution.channels_last
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
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
        """Run forward and backward, and return the detached loss of the batch.

        `last`: this is the last micro-batch of the step.
        """
        value = self.forward(loss, batch)
        self.backward(value)
        return value.detach()

    def update(self) -> None:
        """Step the optimizer and clear the gradients."""
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


def squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the squared norm of all gradients in fp32 on their device, without waiting.

    If gradients are sharded (DTensor), it is the norm of the whole gradient, and every rank must
    call this.
    """
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    return torch.stack(whole).square().sum()


class NoiseNorms:
    """Squared gradient norms inside a training loop, for the gradient noise scale.

    Two norms per step are enough: after the first micro-batch's backward pass, and after the last.
    Call `after_first` when the first backward pass has ended, and `after_last` before the
    optimizer.

    Args:
        samples: number of samples in the first micro-batch.
        parts: micro-batches per step; their losses are divided by it.
        whole: samples behind the last gradients, by default samples x parts.
        loss_scale: returns the factor by which a GradScaler multiplies losses.
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
        """Return the norms of all steps without overflowing gradients.

        Under DDP all ranks agree.
        """
        pairs = [(float(part), float(whole)) for part, whole in self._pairs]
        finite = [pair for pair in pairs if math.isfinite(sum(pair))]
        return GradientNorms(
            small_batch=self._samples,
            big_batch=self._whole,
            small_squared=tuple(part for part, _ in finite),
            big_squared=tuple(whole for _, whole in finite),
        )


class DdpNoiseNorms(NoiseNorms):
    """Norms under DDP without accumulation: each rank's gradients against the mean, by a
    communication hook.

    It costs a pass over the gradients and an all-reduce of one number. Install it before the first
    step; it replaces any other communication hook. Call `after_last` before the optimizer, on every
    rank.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, samples: int) -> None:
        super().__init__(model, samples, dist.get_world_size())
        self._own: list[torch.Tensor] = []

        def reduce(_: Any, bucket: Any) -> Any:
            self._own.append(
                torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32).square()
            )
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        # DDP compares annotations with classes; here they are strings
        reduce.__annotations__.clear()
        model.register_comm_hook(None, reduce)

    def after_first(self) -> None:
        """Do nothing: the hook has seen the gradients."""

    def after_last(self) -> None:
        own = torch.stack(self._own).sum()
        self._own.clear()
        dist.all_reduce(own)
        self._pairs.append((own / self._parts, squared_norm(self._parameters)))
