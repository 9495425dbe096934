"""What a reader must know of this machine to compare its figures: nothing that identifies a person, a host or a path."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def environment(device: str) -> dict[str, str]:
    """Hardware and versions."""
    found = {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return found


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_gib() -> float | None:
    """Of the whole machine; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    total = [int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return total[0] / 2**20 if total else None
