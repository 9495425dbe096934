"""Time every operator of a step on its own, in the terms of a trace: the same rows, with seconds."""

import time
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainpace.trace import Row, rows_of

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_HEAD_START_CYCLES = 50_000_000
"""The GPU sleeps about 30 ms first, so that the host has launched a block before its first kernel runs, and the spans between
events are the device's time alone."""


class TimedRow(NamedTuple):
    row: Row
    seconds: float


class OperatorTimer(TorchDispatchMode):
    """Sees every ATen call below autograd and times it. Read `rows()` afterwards."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._cuda = device == "cuda"
        self._timed: list[tuple[Row, Any, Any]] = []
        self.seconds = 0.0
        """Time in all operators together, without what lies between them (on a CPU)."""
        if self._cuda:
            torch.cuda._sleep(_HEAD_START_CYCLES)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _CONVOLUTION_BACKWARD and not self._cuda:
            return self._convolution_backward(func, args)
        return self._time(func, args, kwargs)

    def rows(self) -> list[TimedRow]:
        if self._cuda:
            torch.cuda.synchronize()
            return [TimedRow(row, 1e-3 * start.elapsed_time(end)) for row, start, end in self._timed]
        return [TimedRow(row, end - start) for row, start, end in self._timed]

    def _time(self, func: Any, args: Any, kwargs: Any) -> Any:
        start = self._now()
        out = func(*args, **kwargs)
        end = self._now()
        if not self._cuda:
            self.seconds += end - start
        rows = rows_of(func, _on_meta(args), _on_meta(kwargs), _on_meta(out))
        if rows:  # the first names the call; what a CPU does on the way (a bias) is in its time
            self._timed.append((rows[0], start, end))
        return out

    def _convolution_backward(self, func: Any, args: Any) -> Any:
        """Compute the gradients of input and weight one after the other, since a trace has a row for each."""
        *others, mask = args
        of_input = self._time(func, (*others, [mask[0], False, False]), {})[0] if mask[0] else None
        if not (mask[1] or mask[2]):
            return of_input, None, None
        _, of_weight, of_bias = self._time(func, (*others, [False, mask[1], mask[2]]), {})
        return of_input, of_weight, of_bias

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _on_meta(tree: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), tree
    )
