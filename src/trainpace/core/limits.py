"""What a command may take of this machine before its guard ends it: the last of the memory, or processes without end.

Address space is left alone: CUDA reserves terabytes of it, and torch maps what it may never touch. Limits of the kernel on
processes count all of a user's, not one command's. So the guard looks at what is left, twice a second and oftener as it gets
less, and walks through the command's processes only where little is left or many have come.

Needs the standard library alone, as `guard` does, which imports it by its own name.
"""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

BLAMED_FROM_BYTES = 256 << 20
"""A command that holds less than this is not what fills the memory."""
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.5, 0.02
_FASTEST_BYTES_PER_S = 20e9
"""At which several threads together fill fresh memory."""
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_FIRST_TO_GO = 500
"""Added to what the kernel's out-of-memory killer thinks of a process, in thousandths of the memory (proc(5), oom_score_adj)."""


class Limits(NamedTuple):
    """`least_free_bytes`: of memory, in the machine or in a control group; `most_processes`: that may live at a time."""

    least_free_bytes: int
    most_processes: int


class Overstep(NamedTuple):
    """What went beyond a limit: `processes`, or memory, of which `held_bytes` were the command's and `free_bytes` left."""

    processes: int = 0
    held_bytes: int = 0
    free_bytes: int = 0


def usual_limits(root: str = "/") -> Limits:
    """A hundredth of the memory stays free, and 2,000 processes are more than any training starts."""
    return Limits(min(_meminfo(root).get("MemTotal", 0) // 100, 1 << 30), 2000)


def free_bytes(root: str = "/") -> int | None:
    """Memory that can still be had, with swap and what the page cache would give back: of the machine, or less where a control
    group has a limit. None where nothing says so. Source: proc(5), the kernel's cgroup-v2 and cgroup-v1/memory documents.
    """
    machine = _meminfo(root)
    if "MemAvailable" not in machine:
        return None
    groups = [_left_in(folder, names) for folder, names in _limited_groups(root)]
    return min([machine["MemAvailable"], *groups]) + machine.get("SwapFree", 0)


class Watch:
    """Looks at what a command takes. `descendants` gives the ids of its processes."""

    def __init__(
        self, limits: Limits, descendants: Callable[[], list[int]], root: str = "/"
    ) -> None:
        self._limits, self._descendants, self._root = limits, descendants, root
        self._threads = _threads(root)
        self.pause_s = _SHORTEST_PAUSE_S

    def overstep(self) -> Overstep | None:
        """Where the command is beyond its limits now, how far; `pause_s` is then when to look again."""
        left = free_bytes(self._root)
        spare = float("inf") if left is None else left - self._limits.least_free_bytes
        self.pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, spare / _FASTEST_BYTES_PER_S))
        if left is not None and spare < 0:
            held = sum(_resident_bytes(process) for process in self._descendants())
            if held >= min(BLAMED_FROM_BYTES, self._limits.least_free_bytes):
                return Overstep(held_bytes=held, free_bytes=left)
        if (
            _threads(self._root) - self._threads > self._limits.most_processes
        ):  # of the whole machine, which is quick to ask
            count = len(self._descendants())
            if count > self._limits.most_processes:
                return Overstep(processes=count)
        return None


def offer_to_the_kernel(process: int) -> None:
    """Where memory runs out faster than anybody looks, let the kernel take this process and its children rather than others."""
    try:
        with open(f"/proc/{process}/oom_score_adj", "r+") as file:
            before = int(file.read())
            file.seek(0)
            file.write(str(max(before, _FIRST_TO_GO)))
    except (OSError, ValueError):
        return


def _limited_groups(root: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The control groups of this process that have a limit of memory, and the names of its files of limit and use."""
    for line in _text(root, "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            top, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(root, top, *parts[:depth])
            limit = _number(_text(folder, names[0]))
            if limit is not None and limit < 1 << 60:
                yield folder, names


def _left_in(folder: str, names: tuple[str, str]) -> int:
    limit, used = (_number(_text(folder, name)) or 0 for name in names)
    if limit - used > limit // 8:  # what follows is slow to ask on large machines
        return limit - used
    fields = (line.split() for line in _text(folder, "memory.stat").splitlines())
    values = {field[0].removeprefix("total_"): int(field[1]) for field in fields if len(field) == 2}
    return limit - used + sum(values.get(name, 0) for name in _RECLAIMABLE)


def _meminfo(root: str) -> dict[str, int]:
    """In bytes."""
    fields = (line.split() for line in _text(root, "proc/meminfo").splitlines())
    return {field[0].rstrip(":"): int(field[1]) << 10 for field in fields if field[2:] == ["kB"]}


def _threads(root: str) -> int:
    """All threads of the machine (proc(5), loadavg: after the slash of the fourth field)."""
    fields = _text(root, "proc/loadavg").split()
    return (_number(fields[3].rpartition("/")[2]) or 0) if len(fields) > 3 else 0


def _resident_bytes(process: int) -> int:
    pages = _text("/proc", f"{process}/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
