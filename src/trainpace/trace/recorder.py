"""Record one optimizer step on the meta device: its operators, and what is alive at each of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainpace.trace.operators import Row, rows_of
from trainpace.workload import Phase


class Recorder(TorchDispatchMode):
    """Sees every ATen call below autograd. Read `rows`, `phases`, `modules` and `alive` afterwards."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.recording = True
        self.rows: list[Row] = []
        self.phases: list[Phase] = []
        self.modules: list[str] = []
        self.alive: list[tuple[float, float]] = []
        """(gradient bytes, activation bytes) while each row's operator runs."""
        self._gradient_bytes = 0.0
        self._activation_bytes = 0.0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._module_of_storage: dict[int, str] = {}
        self._module = ""
        for name, parameter in parameters.items():
            self._module_of_storage[parameter.untyped_storage()._cdata] = name.rpartition(".")[0] or name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, 0.7 s, to keep it out of a trace that it is not part of

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are alive all the time (parameters, buffers): they count as no activation."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())

    def enter_module(self, name: str) -> None:
        """Name the module that runs now; operators without weights of their own are shown under it."""
        self._module = name
        if self.recording:
            self._append(Row("module", "module", False, 0, 0.0, 0.0, 0.0, ()), name)

    def gradient_ready(self, gradient: torch.Tensor) -> None:
        """A gradient has been accumulated: from now on it counts as one, not as an activation."""
        size = float(gradient.untyped_storage().nbytes())
        self._activation_bytes -= size
        self._gradient_bytes += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shortcut = _SHORTCUTS.get(func)
        out = func(*args, **kwargs) if shortcut is None else shortcut(*args)
        self._track(out)
        if self.recording:
            for row in rows_of(func, args, kwargs, out):
                self._append(row, self._name(args))
        return out

    def _append(self, row: Row, module: str) -> None:
        self.rows.append(row)
        self.phases.append(self.phase)
        self.modules.append(module)
        self.alive.append((self._gradient_bytes, self._activation_bytes))

    def _name(self, args: Any) -> str:
        for argument in args[:3]:
            if isinstance(argument, torch.Tensor):
                name = self._module_of_storage.get(argument.untyped_storage()._cdata)
                if name is not None:
                    return name
        return self._module if self.phase == "forward" else ""

    def _track(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            if out.device.type != "meta":
                return
            storage = out.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                return
            size = float(storage.nbytes())
            self._activation_bytes += size

            def freed(_: Any, key: int = key, size: float = size) -> None:
                self._activation_bytes -= size
                del self._storages[key]

            self._storages[key] = weakref.ref(storage, freed)
        elif isinstance(out, list | tuple):
            for part in out:
                self._track(part)


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, inverse_deviation = (torch.empty(x.shape[1], dtype=torch.float32, device="meta") for _ in range(2))
    return torch.empty_like(x), mean, inverse_deviation


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    mask = rest[-1]
    of_weight = None if weight is None else torch.empty_like(weight)
    of_bias = None if weight is None else torch.empty_like(weight)
    return torch.empty_like(x) if mask[0] else None, of_weight if mask[1] else None, of_bias if mask[2] else None


# torch's own meta kernels of these two run a Python decomposition of 20 operators: 80 % of ResNet-50's trace
_SHORTCUTS: dict[Any, Any] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
