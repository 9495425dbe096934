"""Runs a command, and ends everything that the command started as soon as it ends or the process that wanted it is gone.

Killing a process group is not enough, since torchrun gives every rank a session of its own. On Linux this process adopts
orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so that no descendant is out of its reach; elsewhere it ends its own process group.

A script that needs the standard library alone, and starts the command before it imports the rest of what it needs:

    python guard.py LIFELINE LIMITS COMMAND...

LIFELINE is a socket (or a pipe, without limits) whose other end the process that wanted the command holds open; LIMITS are the
numbers of `limits.Limits`, as 1,2, or "" for none. A command that goes beyond them is ended, and the socket then says how far,
with the numbers of an `Overstep`.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from trainpace.core import limits

_PR_SET_CHILD_SUBREAPER = 36
_SIGPIPE, _SIGXFSZ = 13, 25
"""Python ignores them, and what it starts would as well."""
_POLL_S = 0.1


def main() -> int:
    """The command's exit code, 128 + N where signal N killed it (as shells have it)."""
    lifeline = int(sys.argv[1])
    os.set_inheritable(lifeline, False)
    child = os.posix_spawnp(sys.argv[3], sys.argv[3:], os.environ, setsigdef=(_SIGPIPE, _SIGXFSZ))
    _adopt_orphans()
    code = _wait(child, lifeline, _watch_of(child, sys.argv[2]))
    end_descendants(at_once=code is None)
    return 137 if code is None else 128 - code if code < 0 else code


def _adopt_orphans() -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


def _watch_of(child: int, numbers: str) -> "limits.Watch | None":
    if not numbers:
        return None
    import importlib

    sys.path.insert(0, os.path.dirname(__file__))
    module = importlib.import_module("limits")
    module.offer_to_the_kernel(child)
    watch: limits.Watch = module.Watch(
        module.Limits(*map(int, numbers.split(","))), lambda: descendants(os.getpid())
    )
    return watch


def _wait(child: int, lifeline: int, watch: "limits.Watch | None") -> int | None:
    """The child's exit code, negative for a signal; None once the lifeline is cut, or a limit was gone beyond."""
    import contextlib
    import select

    handles, timeout_s = [lifeline], _POLL_S
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old kernel
        handles, timeout_s = [lifeline, os.pidfd_open(child)], 60.0
    while (
        lifeline
        not in select.select(
            handles, [], [], min(timeout_s, watch.pause_s) if watch else timeout_s
        )[0]
    ):
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        overstep = watch.overstep() if watch else None
        if overstep:
            _end_group()  # at once: those that start others without end would be faster than a walk through them
            with contextlib.suppress(OSError):
                os.write(lifeline, ",".join(map(str, overstep)).encode())
            return None
    return None


def _end_group() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


def end_descendants(at_once: bool = True) -> None:
    """Kill until none is left: one may start another while it dies."""
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
        while os.waitpid(-1, os.WNOHANG)[
            0
        ]:  # so that they leave no entry behind, whoever adopts orphans above us
            pass
    except ChildProcessError:
        return


def descendants(ancestor: int) -> list[int]:
    """Living processes below `ancestor`, from /proc/PID/stat (proc(5): after the name in brackets, the state and the parent)."""
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


if __name__ == "__main__":
    sys.exit(main())
