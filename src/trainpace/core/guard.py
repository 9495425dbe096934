"""Run one command, and end all processes that it started.

The guard ends them when the command ends, or when the process that started the guard is gone.
Killing a process group is not enough, because torchrun gives every rank its own session. On Linux
the guard adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so it can reach every descendant. On
other systems it ends its own process group.

The guard also ends a command that uses up the memory or starts too many processes. The kernel's
resource limits (setrlimit) cannot do this. A limit on address space does not work: CUDA reserves
terabytes of it, and torch maps memory that it may never touch. The limit on processes counts all
processes of a user, not those of one command. Therefore the guard reads the free memory twice a
second, and more often as it shrinks. It walks through the command's processes only if little memory
is left or many threads have appeared.

This file is a script that only needs the standard library. It starts the command before it imports
other modules, to avoid a delay:

    python guard.py LIFELINE LIMITS COMMAND...

LIFELINE is the file descriptor of a socket. The process that starts the guard keeps the other end
open. Without limits, a pipe is enough. LIMITS is "least_free_bytes,most_processes" (see
`child.Limits`), or "" for no limits. If the command exceeds a limit, the guard ends it and sends
the numbers of a `child.Overstep` over the socket.
"""

import os
import sys

TYPE_CHECKING = False  # importing it from typing would delay the command
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PR_SET_CHILD_SUBREAPER = 36
_SIGPIPE, _SIGXFSZ = 13, 25
"""Signals that Python ignores.

The guard gives them their default action for the command, which would inherit the ignored signals.
"""
_POLL_S = 0.1
LEAST_BYTES_TO_BLAME = 256 << 20
"""Smallest memory use at which a command is ended when the machine runs out of memory.

If `least_free_bytes` is smaller, that number is used. A smaller command is not the cause.
"""
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.5, 0.02
_FASTEST_BYTES_PER_S = 20e9
"""Highest rate at which several threads together can fill new memory."""
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_OOM_PENALTY = 500
"""Out-of-memory score adjustment of a command, in thousandths of the memory (proc(5))."""


def main() -> int:
    """Run the command and return its exit code. For signal N it is 128 + N, as in shells."""
    lifeline = int(sys.argv[1])
    os.set_inheritable(lifeline, False)
    child = os.posix_spawnp(sys.argv[3], sys.argv[3:], os.environ, setsigdef=(_SIGPIPE, _SIGXFSZ))
    _adopt_orphans()
    watch = None
    if sys.argv[2]:
        _prefer_for_oom_kill(child)
        free, processes = map(int, sys.argv[2].split(","))
        watch = Watch(free, processes, lambda: descendants(os.getpid()))
    code = _wait(child, lifeline, watch)
    end_descendants(at_once=code is None)
    return 137 if code is None else 128 - code if code < 0 else code


def _adopt_orphans() -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


def _prefer_for_oom_kill(process: int) -> None:
    """Let the kernel kill this command first if memory runs out before the guard notices."""
    try:
        with open(f"/proc/{process}/oom_score_adj", "r+") as file:
            before = int(file.read())
            file.seek(0)
            file.write(str(max(before, _OOM_PENALTY)))
    except (OSError, ValueError):
        return


def _wait(child: int, lifeline: int, watch: "Watch | None") -> int | None:
    """Wait until the child ends, the lifeline is cut or a limit is exceeded.

    Returns:
        The child's exit code, negative for a signal. None if the lifeline was cut or a limit was
        exceeded, so that the child still has to be ended.
    """
    import contextlib
    import select

    handles, longest_s = [lifeline], _POLL_S
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old kernel
        handles, longest_s = [lifeline, os.pidfd_open(child)], 60.0
    while True:
        pause_s = min(longest_s, watch.pause_s) if watch else longest_s
        if lifeline in select.select(handles, [], [], pause_s)[0]:
            return None
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        overstep = watch.overstep() if watch else None
        if overstep:
            # kill the whole group at once: a fork bomb is faster than a walk through its processes
            _end_group()
            with contextlib.suppress(OSError):
                os.write(lifeline, ",".join(map(str, overstep)).encode())
            return None


def _end_group() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


def end_descendants(at_once: bool = True) -> None:
    """Kill descendants until none is left.

    One pass is not enough, because a dying process may start another.

    Args:
        at_once: Also send SIGKILL after a moment on systems without /proc. No effect on Linux.
    """
    import signal
    import time

    if not os.path.exists("/proc/self/stat"):
        _end_group()
        if at_once:
            time.sleep(_POLL_S)
            os.killpg(0, signal.SIGKILL)
        return
    while living := descendants(os.getpid()):
        for process in living:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.005)
    try:
        # Reap the dead children here. Otherwise the next ancestor that adopts orphans gets them,
        # and it may leave them as zombies.
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def descendants(ancestor: int) -> list[int]:
    """Return the ids of the living processes below `ancestor`.

    Source: proc(5). In /proc/PID/stat, the state and the parent follow the name in parentheses.
    """
    children: dict[int, list[int]] = {}
    dead = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(name))
            if state in "ZX":
                dead.add(int(name))
    living, ancestors = [], [ancestor]
    while ancestors:
        below = children.get(ancestors.pop(), [])
        ancestors += below
        living += [process for process in below if process not in dead]
    return living


# ---- limits


class Watch:
    """Check of a command's memory and processes against its limits.

    Args:
        least_free_bytes: Memory that must stay free in the machine and in each control group.
        most_processes: Number of processes that the command may run at a time.
        descendants: Function that returns the command's process ids.
    """

    def __init__(
        self,
        least_free_bytes: int,
        most_processes: int,
        descendants: "Callable[[], list[int]]",
        root: str = "/",
    ) -> None:
        self._least_free, self._most_processes = least_free_bytes, most_processes
        self._descendants, self._root = descendants, root
        self._threads_at_start = _threads(root)
        self.pause_s = _SHORTEST_PAUSE_S

    def overstep(self) -> "tuple[int, int, int] | None":
        """Return (processes, held bytes, free bytes) if a limit is exceeded now, else None.

        Also sets `pause_s`, the time until the next check in seconds.
        """
        left = free_bytes(self._root)
        spare = float("inf") if left is None else left - self._least_free
        self.pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, spare / _FASTEST_BYTES_PER_S))
        if left is not None and spare < 0:
            held = sum(_resident_bytes(process) for process in self._descendants())
            if held >= min(LEAST_BYTES_TO_BLAME, self._least_free):
                return 0, held, left
        # the number of threads of the machine is quick to read, that of the command is not
        if _threads(self._root) - self._threads_at_start > self._most_processes:
            count = len(self._descendants())
            if count > self._most_processes:
                return count, 0, 0
        return None


def free_bytes(root: str = "/") -> int | None:
    """Return the bytes that can still be allocated, including swap and reclaimable page cache.

    It is the minimum over the machine and its limited control groups. None if unknown. Source:
    proc(5) and the kernel's documents on cgroup-v2 and cgroup-v1/memory.
    """
    machine = meminfo(root)
    if "MemAvailable" not in machine:
        return None
    groups = [_left_in(folder, names) for folder, names in _limited_groups(root)]
    return min([machine["MemAvailable"], *groups]) + machine.get("SwapFree", 0)


def _limited_groups(root: str) -> "Iterator[tuple[str, tuple[str, str]]]":
    """Yield (folder, (limit file, usage file)) for each cgroup with a memory limit."""
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
            # cgroup v1 writes "no limit" as the largest number of pages
            if limit is not None and limit < 1 << 60:
                yield folder, names


def _left_in(folder: str, names: tuple[str, str]) -> int:
    limit, used = (_number(_text(folder, name)) or 0 for name in names)
    if limit - used > limit // 8:  # memory.stat is slow to read on large machines
        return limit - used
    fields = (line.split() for line in _text(folder, "memory.stat").splitlines())
    values = {field[0].removeprefix("total_"): int(field[1]) for field in fields if len(field) == 2}
    return limit - used + sum(values.get(name, 0) for name in _RECLAIMABLE)


def meminfo(root: str = "/") -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    fields = (line.split() for line in _text(root, "proc/meminfo").splitlines())
    return {field[0].rstrip(":"): int(field[1]) << 10 for field in fields if field[2:] == ["kB"]}


def _threads(root: str) -> int:
    """Return the number of threads of the machine (proc(5): loadavg, after the slash)."""
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


if __name__ == "__main__":
    sys.exit(main())
