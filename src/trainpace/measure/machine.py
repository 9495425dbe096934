"""What this machine's CPU really does: a few seconds of micro-benchmarks into a Device and a KernelModel.

Each benchmark runs the kind of operator that it stands for and no model, so that a forecast from it is a forecast.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trainpace.forecast import KernelModel
from trainpace.hardware import Device, Figure
from trainpace.measure.profile import MachineProfile

ROUNDS = 5


def profile_cpu() -> MachineProfile:
    """Measure this machine's CPU with torch's current number of threads; takes a few seconds."""
    spreads: list[float] = []

    def rate(amount: float, work: Callable[[], object]) -> float:
        seconds, spread = _median_s(work)
        spreads.append(spread)
        return amount / seconds

    square = torch.randn(768, 768)
    product = rate(2 * 768.0**3, lambda: square @ square)
    gemm = _linear_rate(rate)
    # few channels and many: real networks have both, and a CPU runs the first at half the rate
    conv = (_conv_rate(rate, channels=32, groups=1) * _conv_rate(rate, channels=128, groups=1)) ** 0.5
    depthwise = _conv_rate(rate, channels=64, groups=64)
    attention = _attention_rate(rate)
    # with a new output each time, as training has it: fresh pages cost a CPU more than the traffic itself
    x = torch.randn(2 * 2**20)
    bandwidth = rate(2 * 4.0 * x.numel(), lambda: torch.relu(x))
    overhead_us = _overhead_us()
    peak = max(product, gemm, conv, attention)
    memory_gib = _memory_gib()

    def measured(value: float) -> Figure:
        return Figure(value=value, source="micro-benchmark on this machine", kind="measured")

    device = Device(
        name=cpu_name(),
        vendor="",
        architecture=platform.machine(),
        kind="cpu",
        fp32_tflops=measured(peak / 1e12),
        memory_bandwidth_gb_per_s=measured(bandwidth / 1e9),
        memory_gib=None if memory_gib is None else measured(memory_gib),
    )
    kernels = KernelModel(
        gemm=gemm / peak,
        conv=conv / peak,
        conv_grouped=min(1.0, depthwise / peak),
        attention=attention / peak,
        tensor_core_factor=1.0,
        memory=1.0,
        latency_us=0.0,
        host_us_per_launch=overhead_us,
        basis="micro-benchmarks on this machine",
    )
    return MachineProfile(device=device, kernels=kernels, environment=environment(), spread=max(spreads))


def environment() -> dict[str, str]:
    """What a reader must know to compare: nothing that identifies a person, a host or a path."""
    return {
        "cpu": cpu_name(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _linear_rate(rate: Callable[[float, Callable[[], object]], float]) -> float:
    """A layer of a small transformer, forward and backward: its three products are not of one speed."""
    layer = nn.Linear(192, 768)
    x = torch.randn(512, 192, requires_grad=True)
    gradient = torch.ones(512, 768)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x).backward(gradient)

    return rate(3 * 2.0 * 512 * 192 * 768, step)


def _conv_rate(rate: Callable[[float, Callable[[], object]], float], channels: int, groups: int) -> float:
    """Forward and backward together, as training runs it, in FLOP/s."""
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
    x = torch.randn(8, channels, 32, 32, requires_grad=True)
    flops = 3 * 2.0 * 8 * 32 * 32 * channels * (channels // groups) * 9

    def step() -> None:
        layer(x).backward(torch.ones(8, channels, 32, 32))

    return rate(flops, step)


def _attention_rate(rate: Callable[[float, Callable[[], object]], float]) -> float:
    q = torch.randn(8, 4, 128, 48, requires_grad=True)
    flops = 7 * 2.0 * 8 * 4 * 128 * 128 * 48

    def step() -> None:
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    return rate(flops, step)


def _overhead_us() -> float:
    """Host time of one operator in a training step: 20 layers too small to compute, forward and backward.

    A Linear + ReLU is 2 operators forward (addmm, relu) and 4 backward (threshold, two mm, the bias' sum).
    """
    layers = 20
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.ReLU())))
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return 1e6 * _median_s(step)[0] / (6 * layers)


def _median_s(work: Callable[[], object]) -> tuple[float, float]:
    """(median seconds of one call, spread over rounds). Rounds last at least 30 ms each."""
    work()
    start = time.perf_counter()
    work()
    calls = max(3, int(0.03 / max(time.perf_counter() - start, 1e-7)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        rounds.append((time.perf_counter() - start) / calls)
    median = statistics.median(rounds)
    return median, (max(rounds) - min(rounds)) / median


def _memory_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    total = [int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return total[0] / 2**20 if total else None
