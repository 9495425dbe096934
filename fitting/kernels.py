"""Measured single kernels (gpu_ops_fp32.parquet) as an operator table with the latencies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from fitting.kernel_rows import KernelRows
from trainpace.core.hardware import find_device
from trainpace.forecast.constants import NO_CARDS
from trainpace.workload import CONV, GEMM, MOST_SIZES, OTHER

FUNCTIONS = {
    "linear": "mm",
    "bmm": "bmm",
    "conv": "conv",
    "softmax": "_softmax",
    "ln": "native_layer_norm",
    "add": "add",
    "relu": "relu",
    "gelu": "gelu",
}
KINDS = {"linear": "gemm", "bmm": "gemm", "conv": "conv", "softmax": "softmax", "ln": "norm"}
DEVICES = {
    "Tesla P4": "P4",
    "Tesla P100-PCIE-16GB": "P100 PCIe 16GB",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
}
FAMILIES = {
    "linear": "",
    "bmm": "",
    "conv": "conv",
    "softmax": "softmax",
    "ln": "layer_norm",
    "add": "elementwise",
    "relu": "elementwise",
    "gelu": "elementwise",
}
PER_GROUP = {
    "linear": 240,
    "bmm": 240,
    "conv": 300,
    "softmax": 48,
    "ln": 48,
    "add": 48,
    "relu": 36,
    "gelu": 24,
}
"""Kernels drawn for each GPU and operator."""
FLOOR_QUANTILE = 0.005
LONG = 2.5
"""Only kernels this many times the floor:

the short ones measure the event timer, 25 to 60 microseconds.
"""


def read_kernels(data: Path, seed: int = 0, without: frozenset[str] = frozenset()) -> KernelRows:
    """A seeded sample of the measured kernels of all GPUs but those named.

    In this file a product is (m x n) times (n x k): column n is the reduction, which its grids
    confirm.
    """
    table = pyarrow.parquet.read_table(data / "gpu_ops_fp32.parquet")
    column: dict[str, Any] = {}
    for name in (
        "latency_ms",
        "b",
        "h",
        "m",
        "n",
        "k",
        "in_channels",
        "out_channels",
        "input_size",
    ):
        column[name] = table[name].to_numpy(zero_copy_only=False).astype(float)
    operator = np.array(table["op"].to_pylist())
    device = np.array([DEVICES[name] for name in table["gpu"].to_pylist()])
    draw = np.random.default_rng(seed)
    chosen, floors = [], []
    for gpu in sorted(set(device) - without):
        for name, most in PER_GROUP.items():
            rows = np.flatnonzero((device == gpu) & (operator == name))
            if not len(rows):
                continue
            floor = np.quantile(column["latency_ms"][rows], FLOOR_QUANTILE)
            rows = rows[column["latency_ms"][rows] > LONG * floor]
            rows = draw.choice(rows, min(most, len(rows)), replace=False)
            chosen.append(rows)
            floors.append(np.full(len(rows), 0.9 * floor))
    rows = np.concatenate(chosen)
    c = {name: values[rows] for name, values in column.items()}
    kernels = KernelRows.__new__(KernelRows)
    _fill(kernels, operator[rows], c)
    kernels.floor_ms = np.concatenate(floors)
    kernels.measured_ms = c["latency_ms"]
    kernels.operator = operator[rows]
    kernels.family = np.array([FAMILIES[name] for name in kernels.operator])
    kernels.source = np.full(len(rows), "gpu_ops_fp32")
    kernels.kernel = np.arange(len(rows))
    kernels.device = np.array([find_device(name).name for name in device[rows]])
    kernels.devices = {(name, "fp32"): find_device(name) for name in sorted(set(kernels.device))}
    order = {key[0]: i for i, key in enumerate(kernels.devices)}
    kernels.device_row = np.array([order[name] for name in kernels.device])
    return kernels


def _fill(kernels: KernelRows, operator: np.ndarray, c: dict[str, np.ndarray]) -> None:
    n = len(operator)
    dims, flops, read, written = (
        np.zeros((n, MOST_SIZES, 2)),
        np.zeros((n, 2)),
        np.zeros((n, 2)),
        np.zeros((n, 2)),
    )
    product, conv = np.isin(operator, ("linear", "bmm")), operator == "conv"
    batch = np.where(operator == "linear", 1.0, c["b"])
    m, inner, out = c["m"], c["n"], c["k"]
    sizes = np.stack([batch, m, out, inner], axis=1)
    dims[product, : len(GEMM), 0] = sizes[product]  # in the order of GemmSizes
    flops[product, 0] = 2 * sizes[product].prod(axis=1)
    read[product, 0] = (4 * batch * (m * inner + inner * out))[product]
    written[product, 0] = (4 * batch * m * out)[product]
    side = c["input_size"]
    sides = (CONV.in_h, CONV.in_w, CONV.out_h, CONV.out_w)
    ones = (CONV.groups, CONV.in_d, CONV.out_d, CONV.kernel_d, CONV.stride_h, CONV.stride_w)
    lengths = {
        CONV.images: c["b"],
        CONV.c_in: c["in_channels"],
        CONV.c_out: c["out_channels"],
        **dict.fromkeys(sides, side),
        **dict.fromkeys(ones, np.ones(n)),
        **dict.fromkeys((CONV.kernel_h, CONV.kernel_w), np.full(n, 3.0)),
    }
    for position, length in lengths.items():
        dims[conv, position, 0] = length[conv]
    weights = 9 * c["in_channels"] * c["out_channels"]
    flops[conv, 0] = (2 * c["b"] * side**2 * weights)[conv]
    read[conv, 0] = (4 * (c["b"] * c["in_channels"] * side**2 + weights))[conv]
    written[conv, 0] = (4 * c["b"] * c["out_channels"] * side**2)[conv]
    rest = ~product & ~conv
    elements = c["b"] * c["h"]
    dims[rest, OTHER.elements_in, 0] = dims[rest, OTHER.elements_out, 0] = elements[rest]
    flops[rest, 0] = elements[rest]
    read[rest, 0] = (4 * elements * np.where(operator == "add", 2, 1))[rest]
    written[rest, 0] = 4 * elements[rest]
    kernels.columns = {
        "kind": np.array([KINDS.get(name, "elementwise") for name in operator]),
        "function": np.array([FUNCTIONS[name] for name in operator]),
        "half": np.zeros(n, bool),
        "count": np.ones(n),
        "launches": np.ones(n),
        "flops": flops,
        "read_bytes": read,
        "written_bytes": written,
        "dims": dims,
        "phase": np.full(n, "forward"),
    }
    kernels.cards, kernels.products = NO_CARDS, None
    kernels.batch = np.ones(n)
    kernels.channels_last = np.zeros(n, bool)
    kernels.compiled = np.zeros(n, bool)
