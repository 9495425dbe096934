"""A measured call as the rows that a trace would have of it:

it is made again on the meta device and read by `rows_of`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainpace.core.execution import Precision
from trainpace.workload.cuda_mapping import CudaMapping
from trainpace.workload.operators import Row, rows_of

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long int": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
    "unsigned char": torch.uint8,
    "signed char": torch.int8,
}
"""The profiler's names of number formats."""


POSITIONAL = {
    "add": 2,
    "add_": 2,
    "sub": 2,
    "sub_": 2,
    "gelu": 1,
    "gelu_backward": 2,
    "sum": 3,
    "mean": 3,
    "linalg_vector_norm": 2,
}
"""Arguments behind these are given by name, which the profiler does not tell, and change no time.
"""


class Measured(NamedTuple):
    """One measured piece of work: the rows of the operator table that it is made of, and how long
    they take together.

    operator: the class of work, for weights and tables of errors. floor_us: what the timing adds to
    the kernels.
    """

    source: str
    device: str
    precision: Precision
    operator: str
    rows: tuple[Row, ...]
    us: float
    channels_last: bool = False
    floor_us: float = 0.0


class _Collector(TorchDispatchMode):
    """Keeps the rows of every ATen call, as the recorder of traces does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.rows += rows_of(func, args, kwargs or {}, out)
        return out


class _OnMeta(CudaMapping):
    """Sends what is made "on cuda" to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        if (
            func is torch.nn.functional.dropout
        ):  # called from outside of a module, it brings arguments that the mapping does not take
            kwargs.pop("inplace", None)
        return super().__torch_function__(func, types, args, kwargs)


def rows_of_work(make: Callable[[], Callable[[], Any]]) -> tuple[Row, ...]:
    """The rows of the call that `make` returns; what it does to make its inputs is not among them. Both may ask for "cuda"."""
    with _OnMeta(False):
        call = make()
        with _Collector() as collector:
            call()
    return tuple(row for row in collector.rows if row.launches)


@contextmanager
def _collected() -> Iterator[list[Row]]:
    with _Collector() as collector:
        yield collector.rows


def rows_of_profiled(call: str, record: Mapping[str, str]) -> tuple[tuple[Row, ...], bool] | None:
    """The rows of a call that torch.profiler saw, and whether its first tensor is channels-last;
    None where they cannot be told.

    record: JSON of "dims", "types", "strides" and "concrete", one entry an argument.
    """
    name = call.removeprefix("aten::")
    args = _arguments(record)
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if first is None:
        return None
    nhwc = (
        first.dim() == 4
        and first.shape[1] > 1
        and first.stride(1) == 1
        and not first.is_contiguous()
    )
    aten = torch.ops.aten
    if (
        name == "copy_"
    ):  # the trace has the call around it, _to_copy or clone, which reads only its source
        return (_copy(args[1], args[0]),), nhwc
    try:
        with _collected() as rows:
            if name == "cudnn_convolution":
                x, w, padding, stride, dilation, groups = args[:6]
                aten.convolution(x, w, None, stride, padding, dilation, False, [0, 0], groups)
            elif name == "_conv_depthwise2d":
                x, w, _, _, stride, padding, dilation = args
                aten.convolution(x, w, None, stride, padding, dilation, False, [0, 0], x.shape[1])
            elif name == "convolution_backward":  # the bias is summed by a call of its own
                aten.convolution_backward(*args[:10], [*args[10][:2], False])
            elif name in ("cudnn_batch_norm", "native_batch_norm"):
                rows += _batch_norm(args[0], aten.native_batch_norm.default, args)
            elif name in ("cudnn_batch_norm_backward", "native_batch_norm_backward"):
                rows += _batch_norm(args[0], aten.native_batch_norm_backward.default, args)
            else:
                getattr(aten, name)(*args[: POSITIONAL.get(name, len(args))])
    except (RuntimeError, TypeError, NotImplementedError, IndexError, AttributeError, ValueError):
        return None
    kept = tuple(row for row in rows if row.launches)
    return (kept, nhwc) if kept else None


def _batch_norm(x: torch.Tensor, func: Any, args: Sequence[Any]) -> list[Row]:
    """cuDNN's kernels are rows of the same names as torch's own."""
    channels = torch.empty(x.shape[1], device="meta")
    if "backward" in func._schema.name:
        return rows_of(
            func, (x, x, channels, None, None, channels, channels), {}, (x, channels, channels)
        )
    return rows_of(func, (x, channels, channels, None, None, args[5]), {}, (x, channels, channels))


def _copy(source: torch.Tensor, to: torch.Tensor) -> Row:
    return rows_of(torch.ops.aten._to_copy.default, (source,), {}, to)[0]


def _arguments(record: Mapping[str, str]) -> list[Any]:
    columns = [json.loads(record[name]) for name in ("dims", "types", "strides", "concrete")]
    return [_argument(*column) for column in zip(*columns, strict=True)]


def _argument(dims: Any, kind: str, strides: Any, concrete: str) -> Any:
    if kind == "TensorList":
        return [
            torch.empty_strided(d, s, device="meta") for d, s in zip(dims, strides, strict=True)
        ]
    if kind in DTYPES and (dims or concrete == ""):
        return torch.empty_strided(dims, strides, dtype=DTYPES[kind], device="meta")
    if not concrete:
        return None
    try:
        return ast.literal_eval(concrete)
    except (ValueError, SyntaxError):
        return concrete
