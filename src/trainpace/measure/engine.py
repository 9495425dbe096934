"""Training engine for one process on one device, and gradient norms for the noise scale."""

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
"""Function (model, batch) -> mean loss of the batch."""


def _weights_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that the model and its inputs are converted to, or None to keep theirs."""
    number_format = NUMBER_FORMATS[precision]
    return _DTYPES.get(number_format.products) if number_format.form == "half" else None


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """Copy a batch to the device, and convert floating-point inputs to the dtype of the weights.

    Copies from pinned memory do not block the host.
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
    """Within this context, `.to(device)` keeps the parameter objects.

    The optimizer then keeps its parameters, and tied parameters stay tied. By default, torch moves
    parameters in place only between its own kinds of devices (c10's
    has_compatible_shallow_copy_type). For other devices, it creates new parameters.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or kind not in ("cpu", *KINDS))
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def move(model: Any, device: Any, **changes: Any) -> Any:
    """Move a model to the device in place, so that its optimizer keeps the parameters.

    `changes` are further arguments of `Module.to`, such as a dtype.
    """
    with _moving_in_place(torch.device(device).type):
        return model.to(device=device, **changes)


class PlainEngine:
    """Model and optimizer in one process on one device. The model is moved there in place."""

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
        """Factor by which gradients are scaled before the update: the GradScaler's scale, or 1."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def place(self, batch: Any) -> Any:
        """Copy a batch to the device and convert it to the model's number format."""
        return place_batch(
            batch, self.device, self._execution.precision, self._execution.channels_last
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for forward passes, or a null context without AMP."""
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

        `last` is True for the last micro-batch of the step.
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
    """Return the squared norm of all gradients as an fp32 tensor on their device.

    The host does not wait for the device. If gradients are sharded (DTensor), the result is the
    norm of the whole gradient, and every rank must call this function.
    """
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    return torch.stack(whole).square().sum()


class NoiseNorms:
    """Recorder of squared gradient norms in a training loop, for the gradient noise scale.

    Two norms per step are enough: after the backward pass of the first micro-batch, and after that
    of the last one. Call `after_first` after the first backward pass, and `after_last` before the
    optimizer step.

    Args:
        samples: Number of samples in the first micro-batch.
        parts: Number of micro-batches per step. The training loop divides losses by it.
        whole: Number of samples behind the final gradients, by default samples x parts.
        loss_scale: Function that returns the factor by which a GradScaler multiplies losses.
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
        """Record the norm after the backward pass of the first micro-batch."""
        self._first = squared_norm(self._parameters) * (self._parts / self._loss_scale()) ** 2

    def after_last(self) -> None:
        self._pairs.append((self._first, squared_norm(self._parameters) / self._loss_scale() ** 2))

    def norms(self) -> GradientNorms:
        """Return the norms of all steps. Steps with overflowing gradients are left out.

        Under DDP, all ranks return the same norms.
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
    """Recorder of squared gradient norms under DDP without gradient accumulation.

    The small batch is that of one rank, and the large batch is that of all ranks. A communication
    hook sees each rank's gradients before the all-reduce. It costs one pass over the gradients and
    an all-reduce of one number.

    Create the recorder before the first step. It replaces any other communication hook. Call
    `after_last` on every rank before the optimizer step.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, samples: int) -> None:
        super().__init__(model, samples, dist.get_world_size())
        self._own: list[torch.Tensor] = []

        def reduce(_: Any, bucket: Any) -> Any:
            self._own.append(
                torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32).square()
            )
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        # DDP compares the hook's annotations with classes, but here they are strings.
        reduce.__annotations__.clear()
        model.register_comm_hook(None, reduce)

    def after_first(self) -> None:
        """Do nothing, because the hook has already seen the gradients."""

    def after_last(self) -> None:
        own = torch.stack(self._own).sum()
        self._own.clear()
        dist.all_reduce(own)
        self._pairs.append((own / self._parts, squared_norm(self._parameters)))
