"""Run one probe of the health examination in its own process, which may crash or hang."""

import json
import os
import shutil
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainpace.core.errors import TrainpaceError
from trainpace.core.worker import is_out_of_memory, serve
from trainpace.measure import (
    MemoryMeter,
    StepClock,
    accelerator_here,
    collective_backend,
    count_devices,
    device_name,
    set_up_device,
    synchronize,
    versions,
)

PRODUCTS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TOLERATED = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2, "fp16": 2e-3}
"""Tolerated relative error of a matmul, compared with fp64 on the CPU, by number format.

Each is a multiple of the rounding error of the format.
"""
CHECKED_SIDE = 256
SMALLEST_SIDE, LARGEST_SIDE = 512, 8192
LONG_ENOUGH_S, SECONDS_A_PRODUCT = 0.005, 0.7
"""Duration of a large enough matmul, and the time to repeat it, in seconds.

The matrices grow until one matmul takes LONG_ENOUGH_S or has the largest side. Only large matmuls
reach the device's full rate.
"""
COPIED_MIB, ALLOCATED_MIB = 256, 64
MORE_THAN_ANY_CARD_GIB = 4096
IMAGE, IMAGES, WORKERS = (3, 224, 224), 512, 2


class _Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(IMAGE, float(index))


def software(kind: str) -> dict[str, Any]:
    """Return software versions, the number of devices, and the size of shared memory.

    Loader workers use the shared memory.
    """
    try:
        backend = collective_backend(kind)
    except TrainpaceError:
        backend = ""
    shared = "/dev/shm"
    return {
        "torch": torch.__version__,
        "accelerator": accelerator_here(),
        "name": device_name(kind),
        "count": count_devices(kind),
        "versions": versions(kind),
        "backend": backend if backend and torch.distributed.is_backend_available(backend) else "",
        "shared_memory_gib": (
            shutil.disk_usage(shared).total / 2**30 if os.path.isdir(shared) else None
        ),
    }


def clock(kind: str) -> dict[str, float]:
    """Time the same matmuls with device events and with the host's clock, in ms.

    The host waits for the device before it reads its clock.
    """
    a = torch.rand(SMALLEST_SIDE, SMALLEST_SIDE, device=kind)
    _seconds(kind, partial(torch.matmul, a, a), 0.2)
    steps = StepClock(kind)
    synchronize(kind)
    start = time.perf_counter()
    steps.start_step()
    while time.perf_counter() - start < 0.3:
        a @ a
    steps.mark()
    synchronize(kind)
    host_ms = 1e3 * (time.perf_counter() - start)
    steps.settle()
    return {"device_ms": steps.spans_ms[0][0], "host_ms": host_ms}


def products(kind: str) -> dict[str, dict[str, Any]]:
    """Run a small and a large matmul in every number format.

    Returns:
        `tflops` has the rate of the large matmul by format. `failed` has the reason if a format
        raised an error or gave wrong numbers. Formats that this kind of device does not support
        are in neither.
    """
    tflops: dict[str, float] = {}
    failed: dict[str, str] = {}
    for precision, dtype in PRODUCTS.items():
        try:
            set_up_device(kind, precision)  # type: ignore[arg-type]
        except TrainpaceError:
            continue
        try:
            error = _relative_error(kind, dtype)
            if not error <= TOLERATED[precision]:
                failed[precision] = f"a product is off by {100 * error:.2g}%"
                continue
            tflops[precision] = _tflops(kind, dtype)
        except Exception as error:
            failed[precision] = _sentence(error)
    return {"tflops": tflops, "failed": failed}


def _relative_error(kind: str, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand(CHECKED_SIDE, CHECKED_SIDE, generator=generator) - 0.5
    right, a = matrix.double() @ matrix.double(), matrix.to(kind, dtype)
    return float((torch.matmul(a, a).cpu().double() - right).norm() / right.norm())


def _tflops(kind: str, dtype: torch.dtype) -> float:
    side, seconds = SMALLEST_SIDE // 2, 0.0
    while seconds < LONG_ENOUGH_S and side < LARGEST_SIDE:
        side *= 2
        a = torch.rand(side, side, device=kind).to(dtype)
        seconds = _seconds(kind, partial(torch.matmul, a, a), 0.0)
    return 2 * side**3 / _seconds(kind, partial(torch.matmul, a, a), SECONDS_A_PRODUCT) / 1e12


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def copies(kind: str) -> dict[str, float]:
    """Return the copy rates between host and device in GB/s, for pageable and pinned memory."""
    host, device = (
        torch.empty(COPIED_MIB * 2**20, dtype=torch.uint8, device=where) for where in ("cpu", kind)
    )
    pinned = host.pin_memory()
    works = {
        "to_device": lambda: device.copy_(host),
        "to_host": lambda: host.copy_(device),
        "to_device_pinned": lambda: device.copy_(pinned, non_blocking=True),
    }
    return {name: host.nbytes / _seconds(kind, work, 0.5) / 1e9 for name, work in works.items()}


def memory(kind: str) -> dict[str, Any]:
    """Return the memory that the allocator reports for a tensor of known size, in GiB.

    On an accelerator, `recovered` is True if the device still works after running out of memory.
    """
    meter = MemoryMeter(kind)
    torch.ones(ALLOCATED_MIB * 2**18, device=kind)
    allocated, reserved = meter.peak_gib()
    found: dict[str, Any] = {"allocated_gib": allocated, "reserved_gib": reserved}
    if kind != "cpu":
        try:
            torch.empty(MORE_THAN_ANY_CARD_GIB * 2**30, dtype=torch.uint8, device=kind)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        found["recovered"] = float(torch.ones(8, device=kind).sum()) == 8.0
    return found


def loader(kind: str) -> dict[str, float]:
    """Return the samples per second of a loader with two workers.

    The dataset only fills tensors of 3 x 224 x 224, so this is the cost of the workers themselves.
    """
    batches = DataLoader(_Images(), batch_size=32, num_workers=WORKERS)
    start = time.perf_counter()
    count = sum(len(batch) for batch in batches)
    return {"samples_per_s": count / (time.perf_counter() - start)}


def _seconds(kind: str, work: Callable[[], Any], seconds: float) -> float:
    """Return the seconds per call of `work`, after a first call that warms up.

    The host's clock times many calls together, for at least `seconds`.
    """
    work()
    synchronize(kind)
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < seconds:
        work()
        calls += 1
        if calls % 8 == 0:
            synchronize(kind)
    synchronize(kind)
    return (time.perf_counter() - start) / calls


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    part.__name__: part for part in (software, clock, products, copies, memory, loader)
}


def _work(request: dict[str, str]) -> str:
    try:
        return json.dumps({"values": PARTS[request["part"]](request["kind"])})
    except Exception as error:
        return json.dumps({"error": _sentence(error), "trace": traceback.format_exc()})


if __name__ == "__main__":
    serve(_work)
