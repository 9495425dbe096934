"""Read facts about the host: cores, scheduling, folders, file systems and installed packages.

The recorder imports this module inside the user's script. Therefore the module only imports parts
of the standard library that load quickly.
"""

import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

UserFolder = Literal["data", "config", "cache"]

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_XDG_DEFAULTS: dict[UserFolder, str] = {
    "data": ".local/share",
    "config": ".config",
    "cache": ".cache",
}
_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


# ---- random generators


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators by the name of their imported library.

    Two results are equal if no random number was drawn in between.
    """
    states: dict[str, Any] = {}
    if python := sys.modules.get("random"):
        states["Python"] = python.getstate()
    if numpy := sys.modules.get("numpy"):
        of_numpy = numpy.random.get_state()
        states["numpy"] = of_numpy[1].tobytes(), *of_numpy[2:]
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def drawn_from(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the libraries whose generators were used between two results of `random_states`."""
    return [name for name, state in after.items() if before.get(name, state) != state]


# ---- cores


def core_numbers() -> list[int] | None:
    """Return the numbers of the cores that this process may run on, or None if unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def usable_cores() -> int:
    """Return the number of cores that this process may run on, ignoring CPU quotas."""
    numbers = core_numbers()
    return (os.cpu_count() or 1) if numbers is None else len(numbers)


def allowed_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that this process can keep busy.

    It is the number of usable cores, or the CPU quota if it is smaller.
    """
    return min(float(usable_cores()), quota_cores(root) or float("inf"))


def cpu_model(root: Path = Path("/")) -> str:
    """Return the name of an x86 processor, or "" if the system does not give it."""
    text = read_fact(root / "proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return match.group(1) if match else ""


def quota_cores(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process in cores, or None without a quota.

    Containers and Slurm set quotas on any level of the cgroup tree. The smallest one applies.
    Source: the kernel's documents on cgroup v2 (cpu.max) and sched-bwc (cpu.cfs_quota_us).
    """
    quotas = []
    for folder in cgroup_folders("cpu", root):
        both = read_fact(folder / "cpu.max").split() or [
            read_fact(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        # "max" and -1 mean "no quota"
        if len(both) == 2 and both[0].isdecimal() and both[1].isdecimal() and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))
    return min((quota for quota in quotas if quota), default=None)


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the cgroup folders of this process and all their parents.

    In a container, the path may be the host's path, which is not mounted. The folder mounted at the
    top is then the container's own cgroup.

    Args:
        controller: Controller for cgroup v1, such as cpu. cgroup v2 has one tree for all.
        root: Root of the file system.
    """
    base = root / "sys/fs/cgroup"
    for line in read_fact(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tops = (controller, controllers) if controllers else (".", "unified")
        folder = Path(*(part for part in Path(path).parts if part not in ("/", "..")))
        for top in tops:
            for level in (folder, *folder.parents):
                yield base / top / level


def read_fact(file: Path) -> str:
    """Return the text of a file below /proc, /sys or /etc, or "" if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def thread_times(thread: int | None = None) -> tuple[int, int] | None:
    """Return (CPU time, run-queue wait) of a thread in nanoseconds.

    The default is the calling thread. None if the system does not report it. Source: proc(5),
    schedstat.
    """
    try:
        with open(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(ran), int(waited)) if int(ran) else None


# ---- folders


def user_folder(kind: UserFolder) -> Path:
    """Return Trainpace's folder for a kind of file, by the XDG base directory specification."""
    chosen = os.environ.get(f"XDG_{kind.upper()}_HOME")
    if chosen:
        return Path(chosen) / "trainpace"
    home = home_folder()
    if home is None:  # Without a home folder, nothing is kept beyond the next start of the machine.
        import tempfile

        return Path(tempfile.gettempdir()) / f"trainpace-{os.getuid()}" / kind
    return home / _XDG_DEFAULTS[kind] / "trainpace"


def home_folder() -> Path | None:
    """Return the user's home folder, or None for a user without HOME and without an account."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def temporary_environment(folder: str) -> dict[str, str]:
    """Return environment variables that make `folder` the temporary folder of a process.

    The cache of torch.compile stays in torch's default folder. Otherwise it would be in `folder`,
    and everything would be compiled again.
    """
    import getpass
    import tempfile

    around = {"TMPDIR": folder}
    try:
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    except (KeyError, OSError):  # the user has no name
        return around
    return around | {_INDUCTOR_CACHE: os.environ.get(_INDUCTOR_CACHE, compiled)}


# ---- file systems


def filesystem_of(folder: str | os.PathLike[str]) -> str | None:
    """Return the type of the file system that holds `folder`, such as ext4, or None if unknown."""
    import psutil

    place, kind, deepest = Path(folder).resolve(), None, -1
    for mount in psutil.disk_partitions(all=True):
        depth = len(Path(mount.mountpoint).parts)
        # a later mount hides an earlier one at the same path
        if depth >= deepest and place.is_relative_to(mount.mountpoint):
            deepest, kind = depth, mount.fstype or None
    return kind


def drop_from_cache(handle: int) -> bool:
    """Remove the clean pages of a file from the page cache.

    Returns False if the system does not support it (macOS).
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def share_in_cache(handle: int, size_bytes: int, samples: int = 32) -> float | None:
    """Return the share of a file that is in the page cache, or None if unknown.

    It is estimated from `samples` positions in the file.
    """
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return None
    ready = 0
    for i in range(samples):
        try:
            ready += os.preadv(handle, [bytearray(512)], i * size_bytes // samples, flag) > 0
        except BlockingIOError:
            continue
        except OSError:
            return None
    return ready / samples


# ---- installed packages


def top_of(folder: str) -> str:
    """Return the folder that contains the top-level package of `folder`, or `folder` itself.

    `folder` is an absolute path.
    """
    while (
        os.path.isfile(os.path.join(folder, "__init__.py"))
        and (above := os.path.dirname(folder)) != folder
    ):
        folder = above
    return folder


@functools.cache
def holds_packages(folder: str) -> bool:
    """Return True if pip installed packages into `folder`.

    For each package, pip creates a folder named *.dist-info.
    """
    if not {*folder.split(os.sep)}.isdisjoint(_PACKAGE_FOLDERS):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False
