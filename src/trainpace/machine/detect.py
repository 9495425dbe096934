"""What this machine is, as far as it bears on training: read from /proc, /sys and the drivers, without torch.

Every field may be None: on systems without /proc, in containers, and for drivers that do not tell. Nothing that
identifies a machine, a person or a place is kept: no host name, serial number, UUID, bus address or path.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from trainpace.machine.gpus import Gpu, detect_gpus
from trainpace.machine.storage import Storage
from trainpace.records import Record
from trainpace.units import gib_from_bytes

_NO_LIMIT_BYTES = 2**60
"""cgroup v1 writes "no limit" as the largest number of pages."""


class Cpu(Record):
    """The processors together. `affinity_cores`: logical cores that this process may run on; `quota_cores`: CPU time of
    its cgroup, in cores. Caches are of one core (L3: as many cores as share it)."""

    name: str | None
    sockets: int | None
    physical_cores: int | None
    logical_cores: int | None
    affinity_cores: int | None
    quota_cores: float | None
    base_mhz: float | None
    max_mhz: float | None
    governor: str | None
    l1d_bytes: int | None
    l2_bytes: int | None
    l3_bytes: int | None

    @property
    def usable_cores(self) -> float | None:
        """Logical cores' worth of CPU time that this process can get."""
        known = [cores for cores in (self.affinity_cores, self.quota_cores, self.logical_cores) if cores is not None]
        return float(min(known)) if known else None


class Machine(Record):
    """One machine as a process on it sees it. `memory_limit_gib`: its cgroup's, None without one below `memory_gib`.

    `load_average` is over the last minute; `on_battery` None where there is no power supply to ask.
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


def detect(root: Path = Path("/"), storage: Storage | None = None) -> Machine:
    """Read the machine; takes milliseconds. `root` is where proc, sys and etc are; `storage` what `measure_storage` gave."""
    memory = _memory_gib(root)
    limit = _memory_limit_gib(root)
    load = _text(root / "proc/loadavg").split()
    return Machine(
        cpu=detect_cpu(root),
        memory_gib=memory,
        memory_limit_gib=None if limit is None or (memory is not None and limit >= memory) else limit,
        gpus=detect_gpus(),
        storage=storage,
        operating_system=_operating_system(root),
        kernel=_text(root / "proc/sys/kernel/osrelease").strip() or platform.release() or None,
        python=platform.python_version(),
        container=_in_container(root),
        on_battery=_on_battery(root),
        load_average=_number(load[0]) if load else None,
    )


def detect_cpu(root: Path = Path("/")) -> Cpu:
    """The processors alone."""
    processors = _cpuinfo(root)
    names = [block["model name"] for block in processors if block.get("model name")]
    packages = _topology(root, processors)
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    name = names[0] if names else platform.processor() or None
    stated = re.search(r"@\s*([\d.]+)\s*GHz", name or "")
    base = _mhz(frequency / "base_frequency")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root / "proc/self/status"), re.MULTILINE)
    return Cpu(
        name=name,
        sockets=len({package for package, _ in packages}) or None,
        physical_cores=len(packages) or None,
        logical_cores=len(processors) or None,
        affinity_cores=_count_of_list(allowed.group(1)) if allowed else None,
        quota_cores=_quota_cores(root),
        base_mhz=1e3 * float(stated.group(1)) if base is None and stated else base,
        max_mhz=_mhz(frequency / "cpuinfo_max_freq"),
        governor=_text(frequency / "scaling_governor").strip() or None,
        **_caches(root),
    )


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """One dict a logical processor."""
    blocks = []
    for text in _text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in text.splitlines())
        block = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in block:  # ARM ends with a block about the board
            blocks.append(block)
    return blocks


def _topology(root: Path, processors: list[dict[str, str]]) -> set[tuple[str, str]]:
    """(package, core) of every physical core."""
    found = set()
    for i in range(len(processors)):
        folder = root / f"sys/devices/system/cpu/cpu{i}/topology"
        package, core = (_text(folder / name).strip() for name in ("physical_package_id", "core_id"))
        if package and core:
            found.add((package, core))
    told = {(b["physical id"], b["core id"]) for b in processors if "physical id" in b and "core id" in b}
    return found or told


def _caches(root: Path) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {"l1d_bytes": None, "l2_bytes": None, "l3_bytes": None}
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, kind, size = (_text(folder / name).strip() for name in ("level", "type", "size"))
        name = f"l{level}d_bytes" if level == "1" else f"l{level}_bytes"
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and name in sizes and match:
            sizes[name] = int(match.group(1)) * {"": 1, "K": 2**10, "M": 2**20}[match.group(2)]
    return sizes


def _mhz(file: Path) -> float | None:
    khz = _number(_text(file))
    return None if khz is None else khz / 1e3


def _memory_gib(root: Path) -> float | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return gib_from_bytes(int(match.group(1)) * 1024) if match else None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup in v2 and in v1's `controller`, and those above it: the tightest limit holds.

    In a container the path may be the host's, which is not mounted; the folder mounted at the top is then its own.
    """
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        for top in (base / controller, base / controllers) if controllers else (base, base / "unified"):
            folder = Path(*(part for part in Path(path).parts if part not in ("/", "..")))
            for level in (folder, *folder.parents):
                yield top / level


def _quota_cores(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        both = _text(folder / "cpu.max").split() or [
            _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        quota, period = (_number(text) for text in [*both, "", ""][:2])
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _memory_limit_gib(root: Path) -> float | None:
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(_text(folder / name))
            if limit is not None and limit < _NO_LIMIT_BYTES:
                limits.append(gib_from_bytes(limit))
    return min(limits, default=None)


def _operating_system(root: Path) -> str | None:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', _text(root / "etc/os-release"), re.MULTILINE)
    return match.group(1) if match else platform.system() or None


def _in_container(root: Path) -> bool | None:
    """None where there is no /proc to ask."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    groups = _text(root / "proc/1/cgroup")
    if re.search(r"docker|kubepods|containerd|libpod|lxc|garden", groups):
        return True
    return False if groups else None


def _on_battery(root: Path) -> bool | None:
    battery, mains = None, []
    with contextlib.suppress(OSError):
        for supply in (root / "sys/class/power_supply").iterdir():
            kind = _text(supply / "type").strip()
            if kind in ("Mains", "USB"):
                mains.append(_text(supply / "online").strip() == "1")
            elif kind == "Battery" and _text(supply / "scope").strip() != "Device":  # not a mouse's
                battery = bool(battery) or _text(supply / "status").strip() == "Discharging"
    return False if any(mains) else battery


def _count_of_list(text: str) -> int | None:
    """How many numbers are in the kernel's list, such as 0-3,8."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        count += int(last or first) - int(first) + 1
    return count


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(file: Path) -> str:
    """A file's text; empty where it is missing or not readable, as some of /sys is."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
