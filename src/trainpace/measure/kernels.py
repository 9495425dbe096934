"""What a device does, by the profiler's record of its kernels."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

_FROM_HOST = ("htod", "hosttodevice")
"""In the names of copies from the host, in small letters: CUDA's and ROCm's."""
_EXCHANGES = ("nccl", "rccl", "oneccl")


class DeviceWork(NamedTuple):
    """Milliseconds that a device was busy, of them those in which it only took copies from the host, and those of each kernel by
    its name."""

    busy_ms: float
    copies_ms: float
    kernels_ms: dict[str, float]


def device_work(kind: str) -> Callable[[], DeviceWork | None] | None:
    """Begin to record the kernels of the device; the result, called, ends it and gives what the device did.

    Kernels that exchange between ranks do not count, since they mostly wait. None where the script has a profiler of its own,
    which a second one would end, and where torch's profiler does not record this kind.
    """
    import torch

    from trainpace.measure.device import synchronize

    activity: Any = getattr(torch.profiler.ProfilerActivity, kind.upper(), None)
    recorded: Any = getattr(torch.autograd.DeviceType, kind.upper(), None)
    if torch.autograd._profiler_enabled() or activity is None or recorded is None or kind == "cpu":
        return None
    synchronize(kind)
    profiler = torch.profiler.profile(activities=[activity])
    profiler.start()

    def end() -> DeviceWork | None:
        synchronize(kind)
        profiler.stop()
        with warnings.catch_warnings():  # the profiler's own, which the script did not ask for
            warnings.simplefilter("ignore")
            events = profiler.events() or ()
        return work_of(
            (event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == recorded
        )

    return end


def work_of(events: Iterable[tuple[str, float, float]]) -> DeviceWork | None:
    """What the kernels and copies say, each as (name, start, end) in microseconds; None where there are none."""
    copies, computing = [], []
    kernels_ms: defaultdict[str, float] = defaultdict(float)
    for name, start, end in events:
        low = name.lower()
        if any(library in low for library in _EXCHANGES):
            continue
        if any(word in low for word in _FROM_HOST):
            copies.append((start, end))
        else:
            computing.append((start, end))
            kernels_ms[name] += (end - start) / 1e3
    busy = covered([*copies, *computing])
    return (
        DeviceWork(busy / 1e3, (busy - covered(computing)) / 1e3, dict(kernels_ms))
        if busy
        else None
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    busy, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


KERNEL_KINDS = {
    "matrix": "matrix products, convolutions, attention",
    "memory": "element-wise and other memory-bound kernels",
    "other": "other kernels",
}
"""Kinds of kernels that compute, in words."""
_COMMUNICATION = re.compile(r"nccl|rccl|oneccl|nvshmem|cross_device_reduce|deep_ep|multimem_all")
_MATRIX = re.compile(
    r"gemm|cutlass|cublas|nvjet|wgmma|cijk_|winograd|implicit_con|conv(?!ert)|fprop|dgrad|wgrad|xmma|flash|fmha|attention|_mm_|matmul"
)
_NO_MATRIX = re.compile(
    r"elementwise|bn_fw|bn_bw|batch_?norm|layer_?norm|reduce_kernel|softmax_warp|splitkreduce"
)
_MEMORY = re.compile(
    r"elementwise|reduce|softmax|norm|bn_fw|bn_bw|copy|cat|index|gather|scatter|embedding|dropout|multi_tensor|foreach|adam|sgd|"
    r"pool|transpose|permute|fill|triton_(poi|red|per)|nchw|nhwc|memset|memcpy|cast|upsample|nll_loss|cross_entropy|activation"
)
DATA_RANGE, STEP_RANGE, OPTIMIZER_RANGE = "enumerate(data", "profilerstep#", "optimizer.step#"
"""What torch's own ranges begin with, in small letters."""


@cache
def kind_of(name: str) -> str:
    """communication, matrix, memory or other."""
    low = name.lower()
    if _COMMUNICATION.search(low):
        return "communication"
    if _MATRIX.search(low) and not _NO_MATRIX.search(low):
        return "matrix"
    return "memory" if _MEMORY.search(low) else "other"


def kind_of_copy(name: str) -> str:
    """Copies between devices are communication, those within one are kernels that only move memory, the others copies."""
    low = name.lower()
    if any(between in low for between in ("ptop", "peer")):
        return "communication"
    return (
        "memory"
        if any(within in low for within in ("memset", "dtod", "device -> device"))
        else "copy"
    )


def waits_for_data(range_name: str) -> bool:
    low = range_name.lower()
    return low.startswith(DATA_RANGE) or ("dataload" in low and "next" in low)


def waits_for_device(call: str) -> bool:
    """Whether a call of the runtime library returns only when the device is done."""
    low = call.lower()
    blocking_copy = low.startswith(("cudamemcpy", "hipmemcpy")) and "async" not in low
    return "synchronize" in low or blocking_copy


def exchanges(operator: str) -> bool:
    """Whether an operator on the host exchanges between ranks."""
    return operator.lower().startswith(("gloo:", "mpi:", "nccl:", "ucc:", "c10d::"))


@cache
def short(name: str) -> str:
    """A kernel's name without namespaces and types, with the function that an element-wise one applies."""
    plain = name.replace("(anonymous namespace)", "").removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1].strip() or plain[:60]
    applied = re.search(
        r"CUDAFunctor_(\w+)|(\w+?)_?(?:[Ff]unctor|_kernel_impl|_kernel_cuda)\b", plain[len(head) :]
    )
    inner = re.search(r"<\s*(cutlass_\w+|cudnn::\w+)", plain)
    function = (applied[1] or applied[2]) if applied else ""
    detail = inner[1] if inner else function if function not in head else ""
    return f"{head} {detail}".strip()[:48]
