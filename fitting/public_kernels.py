"""Kernels that others measured (kernels16.parquet, liger_kernels.csv; kernels16.md tells how):
norms, what stands between products, embeddings, convolutions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch

from fitting.calls import Measured, rows_of_work
from fitting.lent_kernels import DTYPES, convolution, fused_rms_norm
from fitting.public_cards import NAMES
from trainpace.core.execution import Precision
from trainpace.workload.operators import Row

CARDS = {
    name: NAMES[name]
    for name in (
        "A100-SXM-80GB",
        "A100-SXM-40GB",
        "A40",
        "H100-SXM-80GB",
        "H200-SXM",
        "GB200",
        "GH200-96GB",
        "RTX-2080Ti",
        "TITAN-RTX",
        "V100-SXM-16GB",
        "RTX-4090",
        "RTX-A6000",
        "P100",
        "T4",
        "GTX-1080Ti",
        "TITAN-X-Pascal",
        "TITAN-Xp",
        "MI100",
        "MI210",
        "MI300X",
    )
}
LIGER_CARDS = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
}
LENGTHS = [
    "op",
    "gpu",
    "dtype",
    "source",
    "library",
    "kernel",
    "m",
    "n",
    "hidden",
    "time_us",
    "extra",
]
CONVOLUTIONS = [
    "op",
    "gpu",
    "dtype",
    "source",
    "layout",
    "conv_n",
    "conv_c",
    "conv_h",
    "conv_w",
    "conv_k",
    "conv_r",
    "conv_s",
    "conv_stride",
    "conv_pad",
    "conv_groups",
    "time_us",
    "extra",
]
MOST_A_GROUP = 120
"""Kernels drawn of one source, card, operator and number format."""
SHORTEST_US = {
    "Vidur": 8.0,
    "LLMServingSim (v1)": 2.0,
    "sailor (Aceso op profiles)": 250.0,
    "cudnn-frontend benchmark": 8.0,
    "DeepBench": 60.0,
    "MIOpen find-db": 20.0,
}
"""Below this a source's times are rounded to whole microseconds, or are mostly launches."""
FLOOR_US = {"sailor (Aceso op profiles)": 40.0, "DeepBench": 8.0}
"""What a timer on the host adds."""


class _Source(NamedTuple):
    """Which rows of the file are single calls, and how."""

    libraries: tuple[str, ...]
    operators: tuple[str, ...]


_SOURCES = {
    # vLLM's own kernels of those days (RMSNorm, SwiGLU, its divided embedding) are not torch's
    "Vidur": _Source(("sarathi-serve/vllm",), ("layernorm_fwd", "gelu_fwd", "add_fwd")),
    "LLMServingSim (v1)": _Source(("vllm",), ("rmsnorm_fwd", "silu_mul_fwd", "embedding_fwd")),
    "sailor (Aceso op profiles)": _Source(
        ("megatron (Aceso)",),
        ("layernorm_fwd", "layernorm_bwd", "gelu_fwd", "gelu_bwd", "dropout_fwd", "dropout_bwd"),
    ),
    "cudnn-frontend benchmark": _Source(
        ("pytorch",), ("layernorm_fwd", "rmsnorm_fwd", "layernorm_bwd", "rmsnorm_bwd")
    ),
}


def kernels16(file: Path, seed: int = 0) -> list[Measured]:
    """A seeded sample of the single calls of kernels16.parquet that are neither products, attention
    nor communication.
    """
    wanted = [
        ("source", "in", [*_SOURCES, "DeepBench", "MIOpen find-db"]),
        ("gpu", "in", list(CARDS)),
    ]
    columns = list(dict.fromkeys(LENGTHS + CONVOLUTIONS))
    table = pd.read_parquet(file, columns=columns, filters=wanted)
    is_conv = table.op.str.startswith("conv_") & (table.dtype != "int8")
    is_call = np.zeros(len(table), bool)
    for source, (libraries, operators) in _SOURCES.items():
        is_call |= (
            (table.source == source) & table.library.isin(libraries) & table.op.isin(operators)
        )
    shortest = table.source.map(SHORTEST_US)
    table = table[
        (is_conv | is_call)
        & (table.time_us >= shortest)
        & ~table.extra.fillna("").str.contains(r"\btp\b\": (?!1\b)")
    ]
    draw = np.random.default_rng(seed)
    keep = []
    for _, rows in table.groupby(["source", "gpu", "op", "dtype"]).groups.items():
        keep.append(draw.choice(rows, min(MOST_A_GROUP, len(rows)), replace=False))
    table = table.loc[np.sort(np.concatenate(keep))]
    found = []
    for record in table.to_dict("records"):
        rows = _convolution(record) if record["op"].startswith("conv_") else _rows(record)
        if not rows:
            continue
        source = record["source"]
        found.append(
            Measured(
                source,
                CARDS[record["gpu"]],
                cast(Precision, record["dtype"]),
                record["op"],
                rows,
                float(record["time_us"]),
                record["layout"] == "NHWC",
                FLOOR_US.get(source, 0.0),
            )
        )
    return found


def _convolution(record: dict[str, Any]) -> tuple[Row, ...]:
    """MIOpen's dilated ones have no place in the operator table, nor have sizes that contradict
    each other.
    """
    extra = json.loads(record["extra"] or "{}")
    if extra.get("dil", "1x1") != "1x1" or any(
        pd.isna(record[name]) for name in ("conv_r", "conv_s", "conv_groups")
    ):
        return ()
    (down, right), (top, left) = (
        [int(v) for v in record[name].split("x")] for name in ("conv_stride", "conv_pad")
    )
    c = {name: int(record[f"conv_{name}"]) for name in "nchwkrs"}
    if c["h"] + 2 * top < c["r"] or c["w"] + 2 * left < c["s"]:
        return ()
    kind = record["op"].replace("_fwd", "")
    row = convolution(
        kind,
        DTYPES[record["dtype"]],
        c["n"],
        c["c"],
        c["k"],
        c["h"],
        c["r"],
        down,
        int(record["conv_groups"]),
        record["layout"],
        c["w"],
        c["s"],
        (top, left),
        (down, right),
    )
    return (row,) if row.flops >= 1e7 else ()


def _rows(record: dict[str, Any]) -> tuple[Row, ...]:
    name, _, way = record["op"].rpartition("_")
    dtype, m, width = DTYPES[record["dtype"]], int(record["m"]), record["hidden"]
    if pd.isna(width):
        return ()
    width = int(width)
    if name == "rmsnorm":
        return fused_rms_norm(dtype, m, width, way == "bwd")
    if name == "embedding":
        if pd.isna(record["n"]):
            return ()
        return rows_of_work(lambda: _embedding(m, int(record["n"]), width, dtype))
    if name not in _FUNCTIONS:
        return ()
    return rows_of_function(_FUNCTIONS[name], m, width, dtype, way == "bwd")


def rows_of_function(
    function: Callable[[torch.Tensor], Any], m: int, width: int, dtype: torch.dtype, backward: bool
) -> tuple[Row, ...]:
    """The rows of a function of an m x width tensor, or of its gradient by everything that wants
    one.
    """

    def make() -> Callable[[], Any]:
        x = torch.empty(m, width, device="cuda", dtype=dtype, requires_grad=backward)
        if not backward:
            return lambda: function(x)
        out = function(x)
        gradient = torch.empty_like(out)
        return lambda: out.backward(gradient)

    return rows_of_work(make)


def _embedding(m: int, vocabulary: int, width: int, dtype: torch.dtype) -> Callable[[], Any]:
    table = torch.empty(vocabulary, width, device="cuda", dtype=dtype)
    index = torch.empty(m, device="cuda", dtype=torch.int64)
    return lambda: torch.embedding(table, index)


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    w, b = (
        torch.empty(x.shape[1], device="cuda", dtype=x.dtype, requires_grad=x.requires_grad)
        for _ in range(2)
    )
    return torch.layer_norm(x, x.shape[1:], w, b)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "layernorm": _layer_norm,
    "gelu": torch.nn.functional.gelu,
    "dropout": lambda x: torch.native_dropout(x, 0.1, True)[0],
    "add": lambda x: torch.add(x, torch.empty_like(x)),
    # one kernel that halves the width
    "silu_mul": lambda x: torch.mul(x, torch.empty_like(x)),
    "softmax": lambda x: torch.softmax(x, -1),
    "cross_entropy": lambda x: torch.nn.functional.cross_entropy(
        x, torch.empty(x.shape[0], dtype=torch.int64, device="cuda")
    ),
}


def liger(file: Path) -> list[Measured]:
    """torch's own layer norm, softmax and cross-entropy of Liger's benchmarks, forward; those above 40 microseconds."""
    table = pd.read_csv(file)
    table = table[
        (table.metric_name == "speed")
        & (table.kernel_operation_mode == "forward")
        & (table.y_value_50 > 0.04)
    ]
    table = table[
        table.kernel_provider.isin(("huggingface", "torch")) & table.gpu_name.isin(LIGER_CARDS)
    ]
    found = []
    for record in table.to_dict("records"):
        name = {"layer_norm": "layernorm"}.get(record["kernel_name"], record["kernel_name"])
        if name not in ("layernorm", "softmax", "cross_entropy"):
            continue
        extra = json.loads(record["extra_benchmark_config_str"])
        m = int(extra["M"]) if "M" in extra else int(extra["B"]) * int(extra["T"])
        dtype = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[
            extra.get("dtype", "torch.float32")
        ]
        rows = rows_of_function(_FUNCTIONS[name], m, int(record["x_value"]), dtype, backward=False)
        precision: Precision = "fp32" if dtype == torch.float32 else "bf16"
        found.append(
            Measured(
                "liger",
                LIGER_CARDS[record["gpu_name"]],
                precision,
                f"{name}_fwd",
                rows,
                1e3 * record["y_value_50"],
            )
        )
    return found
