"""Classification of device kernels by name, and recording of kernels with torch's profiler.

The name patterns come from open source code and from traces of cuBLAS and CUTLASS, cuDNN, ATen,
Triton, Inductor, NCCL and RCCL (which uses NCCL's names), rocBLAS (Cijk) and FlashAttention.
Classification works without torch.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

_FROM_HOST = ("htod", "hosttodevice")
"""Substrings in the names of copies from the host (CUDA and ROCm), in lower case."""


class DeviceWork(NamedTuple):
    """Recorded work of a device, in milliseconds.

    `busy_ms` is time with any work, `copies_ms` is time with only copies from the host, and
    `kernels_ms` is the total time of the kernels of each name.
    """

    busy_ms: float
    copies_ms: float
    kernels_ms: dict[str, float]


def device_work(kind: str) -> Callable[[], DeviceWork | None] | None:
    """Start recording the kernels of the device.

    Communication kernels are not counted, since they mostly wait for other ranks.

    Returns:
        A function that stops the recording and returns the work. None if torch's profiler does not
        support this kind of device, or if the script runs its own profiler, which a second profiler
        would stop.
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
        with warnings.catch_warnings():  # hide the profiler's warnings from the script's user
            warnings.simplefilter("ignore")
            events = profiler.events() or ()
        return work_of(
            (event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == recorded
        )

    return end


def work_of(events: Iterable[tuple[str, float, float]]) -> DeviceWork | None:
    """Sum up kernels and copies, each (name, start, end) in microseconds.

    Returns None if there are no events.
    """
    copies, computing = [], []
    kernels_ms: defaultdict[str, float] = defaultdict(float)
    for name, start, end in events:
        if kind_of(name) == "communication":
            continue
        if any(word in name.lower() for word in _FROM_HOST):
            copies.append((start, end))
        else:
            computing.append((start, end))
            kernels_ms[name] += (end - start) / 1e3
    busy = covered([*copies, *computing])
    if not busy:
        return None
    return DeviceWork(busy / 1e3, (busy - covered(computing)) / 1e3, dict(kernels_ms))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    busy, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


KERNEL_KINDS = {
    "matrix": "matmuls, convolutions, attention",
    "memory": "element-wise and other memory-bound kernels",
    "other": "other kernels",
}
"""Kinds of compute kernels, with their descriptions."""
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
"""Prefixes of the names of torch's own ranges, in lower case."""


@cache
def kind_of(name: str) -> str:
    """Return the kind of a kernel: communication, matrix, memory or other."""
    low = name.lower()
    if _COMMUNICATION.search(low):
        return "communication"
    if _MATRIX.search(low) and not _NO_MATRIX.search(low):
        return "matrix"
    return "memory" if _MEMORY.search(low) else "other"


def kind_of_copy(name: str) -> str:
    """Return the kind of a copy by its name.

    The kind is "communication" between devices, "memory" within a device, and "copy" between host
    and device.
    """
    low = name.lower()
    if any(between in low for between in ("ptop", "peer")):
        return "communication"
    within = any(word in low for word in ("memset", "dtod", "device -> device"))
    return "memory" if within else "copy"


def waits_for_data(range_name: str) -> bool:
    """Return True if a named range is a wait for the data loader."""
    low = range_name.lower()
    return low.startswith(DATA_RANGE) or ("dataload" in low and "next" in low)


def waits_for_device(call: str) -> bool:
    """Return True if a call of the runtime library blocks until the device has finished."""
    low = call.lower()
    blocking_copy = low.startswith(("cudamemcpy", "hipmemcpy")) and "async" not in low
    return "synchronize" in low or blocking_copy


def is_collective(operator: str) -> bool:
    """Return True if an operator on the host communicates between ranks."""
    return operator.lower().startswith(("gloo:", "mpi:", "nccl:", "ucc:", "c10d::"))


@cache
def short(name: str) -> str:
    """Shorten a kernel's name.

    Namespaces and template arguments are removed, except the function of an element-wise kernel.
    """
    plain = name.replace("(anonymous namespace)", "").removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1].strip() or plain[:60]
    applied = re.search(
        r"CUDAFunctor_(\w+)|(\w+?)_?(?:[Ff]unctor|_kernel_impl|_kernel_cuda)\b", plain[len(head) :]
    )
    inner = re.search(r"<\s*(cutlass_\w+|cudnn::\w+)", plain)
    function = (applied[1] or applied[2]) if applied else ""
    detail = inner[1] if inner else function if function not in head else ""
    return f"{head} {detail}".strip()[:48]
