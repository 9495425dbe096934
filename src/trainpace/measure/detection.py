"""Detection of this machine's processors, memory, storage and devices.

The module also finds conditions that disturb measurements. Importing it does not import torch.

Facts come from psutil, py-cpuinfo, NVML, /proc and /sys. Many fields are None on systems other than
Linux, in containers, or if a driver does not report them. For privacy, nothing that identifies a
machine, a person or a place is recorded: no host name, serial number, UUID, bus address or path.
"""

import contextlib
import errno
import functools
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trainpace.core.errors import TrainpaceError, os_reason
from trainpace.core.hardware import catalogue_name
from trainpace.core.host import (
    cgroup_folders,
    core_numbers,
    cpu_model,
    drop_from_cache,
    filesystem_of,
    quota_cores,
    read_fact,
    share_in_cache,
)
from trainpace.core.records import Record, from_json, to_json
from trainpace.core.units import gib_from_bytes
from trainpace.core.worker import run_isolated, serve
from trainpace.measure.gpus import Gpu, detect_gpus

_NO_LIMIT_BYTES = 2**60
"""Lower limit of the value that cgroup v1 writes for "no limit" (the largest number of pages)."""
_LOAD_SHARE = 0.2
"""Load average per usable core above which other programs are assumed to run."""
_BUSY_STATE = 2
"""Highest performance state of a GPU that computes (P0 to P2).

In higher states, a GPU is idle and also lowers its PCIe generation.
"""


class Cpu(Record):
    """All processors of a machine.

    Attributes:
        affinity_cores: Number of logical cores that this process may run on.
        quota_cores: CPU time limit of the process's cgroup, in cores.

    L2 is per core, and L3 is per group of cores that share it.
    """

    name: str | None
    physical_cores: int | None
    logical_cores: int | None
    affinity_cores: int | None
    quota_cores: float | None
    governor: str | None
    l2_bytes: int | None
    l3_bytes: int | None

    @property
    def usable_cores(self) -> float | None:
        """CPU time that this process can get, in logical cores, or None if unknown."""
        limits = [
            cores
            for cores in (self.affinity_cores, self.quota_cores, self.logical_cores)
            if cores is not None
        ]
        return float(min(limits)) if limits else None


class Storage(Record):
    """Sequential throughput of writing and reading one file. GB is 1e9 bytes.

    Writing includes an fsync at the end. `read_from_cache` is True if the read probably came from
    the page cache. Caches of a network server, a virtual machine's host or the drive itself remain
    undetected.
    """

    filesystem: str | None
    size_bytes: int
    write_gb_per_s: float
    read_gb_per_s: float
    read_from_cache: bool


class Machine(Record):
    """Machine as one process sees it.

    Attributes:
        memory_limit_gib: Memory limit of the process's cgroup, or None without a limit below
            `memory_gib`.
        load_average: Load average over the last minute.
        on_battery: None if the machine reports no power supply.
        gpu_problem: Reason why the NVIDIA driver does not show all GPUs.
    """

    cpu: Cpu
    memory_gib: float | None
    memory_limit_gib: float | None
    gpus: tuple[Gpu, ...]
    storage: Storage | None
    operating_system: str | None
    kernel: str | None
    python: str
    container: bool | None
    on_battery: bool | None
    load_average: float | None
    gpu_problem: str | None = None


def detect(root: Path = Path("/")) -> Machine:
    """Describe this machine, without its storage. This takes only milliseconds.

    `root` is the folder that contains sys, etc and proc.
    """
    import psutil

    memory_gib = gib_from_bytes(psutil.virtual_memory().total)
    limit_gib = _memory_limit_gib(root)
    gpus, problem = detect_gpus()
    return Machine(
        cpu=detect_cpu(root),
        memory_gib=memory_gib,
        memory_limit_gib=None if limit_gib is None or limit_gib >= memory_gib else limit_gib,
        gpus=gpus,
        gpu_problem=problem,
        storage=None,
        operating_system=_operating_system(root),
        kernel=platform.release() or None,
        python=platform.python_version(),
        container=_in_container(root),
        on_battery=_on_battery(root),
        load_average=psutil.getloadavg()[0],
    )


def detect_cpu(root: Path = Path("/")) -> Cpu:
    import psutil

    governor = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    numbers = core_numbers()
    return Cpu(
        name=cpu_name(root),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        affinity_cores=None if numbers is None else len(numbers),
        quota_cores=quota_cores(root),
        governor=read_fact(governor).strip() or None,
        l2_bytes=_cache_bytes(root, "2"),
        l3_bytes=_cache_bytes(root, "3"),
    )


@functools.cache
def cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name, or its architecture if the name is unknown.

    /proc/cpuinfo has the name of x86 processors. py-cpuinfo also knows others (ARM from lscpu, and
    macOS), but it is slower because it starts programs.
    """
    if name := cpu_model(root):
        return name
    import cpuinfo

    description = {}
    with contextlib.suppress(
        Exception
    ):  # py-cpuinfo raises bare exceptions on processors that it does not know
        description = cpuinfo.get_cpu_info()
    return str(description.get("brand_raw") or platform.machine())


def _cache_bytes(root: Path, level: str) -> int | None:
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size = re.match(r"(\d+)([KM]?)", read_fact(folder / "size"))
        if size and read_fact(folder / "level").strip() == level:
            return int(size[1]) * {"": 1, "K": 2**10, "M": 2**20}[size[2]]
    return None


def _memory_limit_gib(root: Path) -> float | None:
    limits = []
    for folder in cgroup_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(read_fact(folder / name))
            if limit is not None and limit < _NO_LIMIT_BYTES:
                limits.append(gib_from_bytes(limit))
    return min(limits, default=None)


def _operating_system(root: Path) -> str | None:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_fact(root / "etc/os-release"), re.MULTILINE)
    return match.group(1) if match else platform.system() or None


def _in_container(root: Path) -> bool | None:
    """Return True if this process runs in a container, or None if /proc is missing."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    groups = read_fact(root / "proc/1/cgroup")
    if re.search(r"docker|kubepods|containerd|libpod|lxc|garden", groups):
        return True
    return False if groups else None


def _on_battery(root: Path) -> bool | None:
    battery, mains = None, []
    with contextlib.suppress(OSError):
        for supply in (root / "sys/class/power_supply").iterdir():
            kind = read_fact(supply / "type").strip()
            if kind in ("Mains", "USB"):
                mains.append(read_fact(supply / "online").strip() == "1")
            elif (
                kind == "Battery" and read_fact(supply / "scope").strip() != "Device"
            ):  # skip batteries of devices such as a mouse
                battery = bool(battery) or read_fact(supply / "status").strip() == "Discharging"
    return False if any(mains) else battery


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def warnings_of(machine: Machine) -> tuple[str, ...]:
    """Return one sentence for each condition that disturbs or limits measurements."""
    return tuple(_warnings(machine))


def _warnings(machine: Machine) -> Iterator[str]:
    yield from _cpu_warnings(machine)
    if machine.memory_limit_gib is not None:
        total = (
            "" if machine.memory_gib is None else f" of the machine's {machine.memory_gib:.1f} GiB"
        )
        where = "the container" if machine.container else "this process's control group"
        yield f"{where} may use {machine.memory_limit_gib:.1f} GiB{total}."
    for index, gpu in enumerate(machine.gpus):
        yield from _gpu_warnings(index, gpu)
    if machine.gpu_problem:
        yield f"the NVIDIA driver does not show every GPU ({machine.gpu_problem})."
    if machine.storage is not None and machine.storage.read_from_cache:
        yield "the storage's read speed is probably that of the page cache in memory."


def _cpu_warnings(machine: Machine) -> Iterator[str]:
    cpu = machine.cpu
    usable, physical = cpu.usable_cores, cpu.physical_cores
    if usable is not None and physical is not None and usable < physical:
        limit = "a CPU quota" if cpu.quota_cores == usable else "its CPU affinity"
        yield f"this process can use {usable:g} of {physical} physical cores, because of {limit}."
    if cpu.governor is not None and cpu.governor != "performance":
        yield (
            f'the CPU frequency governor is "{cpu.governor}", not "performance": clocks follow the'
            " load."
        )
    yield from _power_warnings(machine)


def _power_warnings(machine: Machine) -> Iterator[str]:
    usable = machine.cpu.usable_cores
    if machine.on_battery:
        yield "the machine runs on battery, which lowers clocks and power limits."
    if machine.load_average is not None and usable and machine.load_average > _LOAD_SHARE * usable:
        yield (
            f"other work is running: the load average is {machine.load_average:.1f} on {usable:g}"
            " usable cores."
        )


def _gpu_warnings(index: int, gpu: Gpu) -> Iterator[str]:
    who = f"GPU {index}" + (f" ({gpu.name})" if gpu.name else "")
    if _below(gpu.pcie_width, gpu.pcie_width_max):
        yield f"{who} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes."
    busy = gpu.performance_state is not None and gpu.performance_state <= _BUSY_STATE
    if busy and _below(gpu.pcie_generation, gpu.pcie_generation_max):
        yield f"{who} runs at PCIe generation {gpu.pcie_generation} of {gpu.pcie_generation_max}."
    if _below(gpu.power_limit_w, gpu.power_limit_default_w):
        yield (
            f"{who} is limited to {gpu.power_limit_w:.0f} W, below its default of"
            f" {gpu.power_limit_default_w:.0f} W."
        )
    if gpu.throttled_by:
        yield f"the clocks of {who} are held down by {' and '.join(gpu.throttled_by)}."
    yield from _sharing_warnings(who, gpu)


def _sharing_warnings(who: str, gpu: Gpu) -> Iterator[str]:
    if gpu.mig:
        yield f"{who} is divided into MIG instances, so a process gets a part of it."
    if gpu.other_processes:
        one = gpu.other_processes == 1
        yield f"{gpu.other_processes} other {'program uses' if one else 'programs use'} {who}."


def _below(value: float | None, full: float | None) -> bool:
    return value is not None and full is not None and value < full


def environment(device: str) -> dict[str, str]:
    """Return the hardware and the versions of the software. This imports torch."""
    import torch

    from trainpace.measure.device import versions

    properties = {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    return properties | versions(device)


def device_in(environment: Mapping[str, str]) -> str:
    """Return the catalog name of the measured device, or an empty string if it is unknown."""
    return (
        catalogue_name(environment["gpu"]) if "gpu" in environment else environment.get("cpu", "")
    )


SIZE_BYTES = 256 * 2**20
_BLOCK_BYTES = 8 * 2**20
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_CACHED_SHARE = 0.1
"""Share of sampled pages in memory above which a read does not measure the storage."""


def measure_storage(folder: str | os.PathLike[str], size_bytes: int = SIZE_BYTES) -> Storage:
    """Measure storage by writing, flushing and reading a file of random bytes in `folder`.

    The file has no name, so it does not remain even if the process is killed.

    Raises:
        TrainpaceError: If the folder is missing, not writable or full.
    """
    assert size_bytes >= 2**20
    block = os.urandom(min(_BLOCK_BYTES, size_bytes))  # random, since some filesystems compress
    filesystem = filesystem_of(folder)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            handle = file.fileno()
            write_s = _write_s(handle, block, size_bytes)
            evictable = drop_from_cache(handle)
            cached = share_in_cache(handle, size_bytes)
            read_s = _read_s(handle, len(block))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise TrainpaceError(
                f"{folder} lacks the {size_bytes / 2**20:.0f} MiB that the storage probe needs.",
                "Free some space, probe another folder, or use a smaller size.",
            ) from None
        reason = f"cannot probe the storage of {folder}: {os_reason(error)}."
        raise TrainpaceError(reason, "Give a folder that you can write to.") from None
    return Storage(
        filesystem=filesystem,
        size_bytes=size_bytes,
        write_gb_per_s=size_bytes / write_s / 1e9,
        read_gb_per_s=size_bytes / read_s / 1e9,
        read_from_cache=(
            not evictable
            or cached is None
            or cached > _CACHED_SHARE
            or filesystem in _MEMORY_FILESYSTEMS
        ),
    )


def _write_s(handle: int, block: bytes, size_bytes: int) -> float:
    start = time.perf_counter()
    written = 0
    while written < size_bytes:
        written += os.write(handle, block[: size_bytes - written])
    os.fsync(handle)
    return time.perf_counter() - start


def _read_s(handle: int, block_bytes: int) -> float:
    os.lseek(handle, 0, os.SEEK_SET)
    buffer = bytearray(block_bytes)
    start = time.perf_counter()
    while os.readv(handle, [buffer]):
        pass
    return time.perf_counter() - start


TIMEOUT_S = 120.0


class DeviceHere(Record):
    """Accelerator of this machine, as torch describes it.

    `name` is empty if torch does not name devices of this kind.
    """

    kind: str
    count: int
    name: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


def device_here(kind: str | None = None) -> DeviceHere:
    """Describe the device of a kind.

    A separate process asks torch, so this process does not need to import it.

    Args:
        kind: Device type, such as "cuda". None means the accelerator that torch finds, or the CPU.

    Raises:
        TrainpaceError: If there is no device of that kind.
    """
    answer = run_isolated(
        "trainpace.measure.detection", {"kind": kind}, TIMEOUT_S, "looking for a device"
    )
    return from_json(answer, DeviceHere, "the description of the device")


def _work(request: dict[str, str | None]) -> str:
    from trainpace.measure.device import (
        accelerator_here,
        check_device,
        count_devices,
        device_name,
        versions,
    )

    kind = request["kind"] or accelerator_here() or "cpu"
    check_device(kind)
    return to_json(
        DeviceHere(
            kind=kind, count=count_devices(kind), name=device_name(kind), versions=versions(kind)
        )
    )


if __name__ == "__main__":
    serve(_work)
