"""Kernels measured on the lent H100 and H200 (fitting/data):

single calls, and calls in profiled training steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch

from fitting.calls import Measured, rows_of_profiled, rows_of_work
from fitting.gpu_kernels import _FORWARD_ONLY, _ROWS, DTYPES
from trainpace.core.execution import Precision
from trainpace.workload import OtherSizes
from trainpace.workload.operators import Row, rows_of

CARDS = {"h100": "H100 SXM", "h200": "H200 SXM"}
ELSEWHERE = (
    "aten::mm",
    "addmm",
    "bmm",
    "attention",
    "_foreach",
    "triton",
    "_local_scalar_dense",
    "random_",
    "bernoulli_",
    "nll_loss",
    "amp_",
)
"""Calls with a model of their own, those whose sizes the profiler does not tell, and those that
launch their bulk by another.
"""
SHORTEST_STEP_US = 400.0
"""Optimizers were launched by the host, call by call: shorter updates measure it."""
LEFT_OUT = ("batchnorm_fwd", "batchnorm_bwd", "embedding_bwd")
"""Calls that copied besides, or wrote to few rows over and over."""
SHORTEST_US = 3.0
"""Shorter calls are their launch."""
MOST_A_CALL = 250
"""Kernels drawn of one ATen call in one precision."""
SEVERAL_KERNELS = (
    "convolution",
    "norm",
    "embedding",
    "index",
    "pool",
    "sum",
    "depthwise",
    "loss",
    "cumsum",
    "all",
    "mean",
)


def single_calls(data: Path, card: str) -> list[Measured]:
    """Calls that ran alone, over and over: convolutions, rows of numbers, optimizers."""
    table = pd.read_parquet(data / f"{card}_kernels.parquet")
    found = []
    for operator, dtype, sizes, us in zip(
        table.op, table.dtype, table.sizes, table.latency_us, strict=True
    ):
        if (
            operator in LEFT_OUT
            or (operator.endswith("_step") and us < SHORTEST_STEP_US)
            or us < SHORTEST_US
        ):
            continue
        rows = _rows_of_single(operator, dtype, json.loads(sizes))
        if rows:
            nhwc = json.loads(sizes).get("layout") == "NHWC"
            found.append(
                Measured(
                    f"{card}_kernels", CARDS[card], cast(Precision, dtype), operator, rows, us, nhwc
                )
            )
    return found


def _rows_of_single(operator: str, dtype: str, sizes: dict[str, Any]) -> tuple[Row, ...]:
    if operator.startswith("conv_"):
        return (convolution(operator.replace("_fwd", ""), DTYPES[dtype], **sizes),)
    if operator.endswith("_step"):
        return _optimizer(operator.removesuffix("_step"), DTYPES[dtype], **sizes)
    name, _, way = operator.rpartition("_")
    if name == "rmsnorm":
        return fused_rms_norm(DTYPES[dtype], sizes["m"], sizes["hidden"], way == "bwd")
    if name not in _ROWS:
        return ()

    def make() -> Any:
        backward = way == "bwd"
        x = torch.randn(
            sizes["m"], sizes["hidden"], device="cuda", dtype=DTYPES[dtype], requires_grad=backward
        )
        function = _ROWS[name](x)
        if not backward:
            return lambda: function(x)
        out = function(x)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)

    assert way == "fwd" or name not in _FORWARD_ONLY
    return rows_of_work(make)


def fused_rms_norm(dtype: torch.dtype, m: int, width: int, backward: bool) -> tuple[Row, ...]:
    """RMSNorm in one kernel, as on CUDA since torch 2.8; on the meta device it is several operators."""
    size, half = float(m * width * dtype.itemsize), dtype != torch.float32
    name = "_fused_rms_norm_backward" if backward else "_fused_rms_norm"
    sizes = OtherSizes(m * width * (2 if backward else 1), m * width, width)
    return (
        Row(
            "norm",
            name,
            half,
            1,
            float(sum(sizes[:2])) / 2,
            size * (2 if backward else 1),
            size,
            tuple(sizes),
        ),
    )


def convolution(
    kind: str,
    dtype: torch.dtype,
    b: int,
    cin: int,
    cout: int,
    side: int,
    kernel_size: int,
    stride: int,
    groups: int,
    layout: str = "NCHW",
    width: int | None = None,
    kernel_width: int | None = None,
    padding: tuple[int, int] | None = None,
    strides: tuple[int, int] | None = None,
) -> Row:
    """The row of one pass of a convolution, padded by half its window where nothing is said."""
    form = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    x = torch.empty(b, cin, side, width or side, device="meta", dtype=dtype).to(memory_format=form)
    w = torch.empty(
        cout, cin // groups, kernel_size, kernel_width or kernel_size, device="meta", dtype=dtype
    )
    pads = list(padding or (kernel_size // 2, (kernel_width or kernel_size) // 2))
    steps = list(strides or (stride, stride))
    aten = torch.ops.aten
    args = (x, w, None, steps, pads, [1, 1], False, [0, 0], groups)
    out = aten.convolution(*args)
    if kind == "conv":
        return rows_of(aten.convolution.default, args, {}, out)[0]
    mask = [kind == "conv_dgrad", kind == "conv_wgrad", False]
    return rows_of(
        aten.convolution_backward.default, (out, x, w, None, *args[3:], mask), {}, (x, w, None)
    )[0]


def _optimizer(
    kind: str, dtype: torch.dtype, b: int, m: int, n: int, kernel: str
) -> tuple[Row, ...]:
    """One step after the first, when the states exist."""

    def make() -> Any:
        parameters = [
            torch.nn.Parameter(torch.empty(m, n, dtype=dtype, device="cuda")) for _ in range(b)
        ]
        for p in parameters:
            p.grad = torch.empty_like(p)
        made: Any = (
            torch.optim.AdamW(parameters, foreach=True)
            if kind == "adamw"
            else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
        )
        made.step()
        return lambda: made.step()

    if kernel == "foreach":
        return rows_of_work(make)
    lists = 4 if kind == "adamw" else 3
    tensors = [
        [torch.empty(m, n, dtype=dtype, device="meta") for _ in range(b)] for _ in range(lists)
    ]
    func = (
        torch.ops.aten._fused_adamw_.default
        if kind == "adamw"
        else torch.ops.aten._fused_sgd_.default
    )
    return tuple(rows_of(func, tuple(tensors), {}, None))


def step_calls(data: Path, card: str, seed: int = 0) -> list[Measured]:
    """ATen calls of profiled eager steps, each by all its kernels together."""
    table = pd.read_parquet(data / f"{card}_step_kernels.parquet")
    table = table[
        table.call.str.startswith("aten::") & ~table.call.str.contains("|".join(ELSEWHERE))
    ]
    table = table[~table.case.str.contains('"compile": true')]
    precisions = {
        case: json.loads(case)["precision"].removeprefix("amp_") for case in table.case.unique()
    }
    table = table.assign(precision=table.case.map(precisions), total=table["count"] * table.mean_us)
    columns = ["call", "dims", "types", "strides", "concrete"]
    found = []
    per_case = (
        table.groupby(["case", "precision", *columns], sort=False)
        .agg(
            total=("total", "sum"),
            most=("count", "max"),
            least=("count", "min"),
            every=("count", "sum"),
        )
        .reset_index()
    )
    several = per_case.call.str.contains("|".join(SEVERAL_KERNELS))
    # a call launches each of its kernels once, or some of them several times: then their counts are
    # multiples of the least
    times = per_case.least.where(per_case.most % per_case.least == 0, per_case.most)
    per_case["calls"] = times.where(several, per_case.every)
    merged = (
        per_case.groupby(["precision", *columns], sort=False)[["total", "calls"]]
        .sum()
        .reset_index()
    )
    merged = merged[merged.total / merged.calls > SHORTEST_US].sample(frac=1.0, random_state=seed)
    merged = merged.groupby(["precision", "call"], sort=False).head(MOST_A_CALL)
    for record in merged.to_dict("records"):
        answer = rows_of_profiled(record["call"], record)
        if answer is None:
            continue
        rows, nhwc = answer
        name = record["call"].removeprefix("aten::")
        found.append(
            Measured(
                f"{card}_steps",
                CARDS[card],
                record["precision"],
                name,
                rows,
                record["total"] / record["calls"],
                nhwc,
            )
        )
    return found
