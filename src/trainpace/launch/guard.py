"""Runs a command; when it ends, or whoever asked is gone, ends all that it started. A script: the standard library only.

torchrun gives every rank a session of its own, so that killing its process group leaves them alive. On Linux this process
adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so none is out of its reach; elsewhere it ends its own process group.

    python guard.py READ_END COMMAND...     READ_END: of a pipe that the asker holds open
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1


def main() -> int:
    """The command's exit code, 128 + N where signal N killed it (as shells have it)."""
    asker = int(sys.argv[1])
    os.set_inheritable(asker, False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    handles, patience = [asker], _POLL_S
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # gone already, or an old kernel
            handles, patience = [asker, os.pidfd_open(process.pid)], 60.0
    while process.poll() is None and asker not in select.select(handles, [], [], patience)[0]:
        pass
    code = process.poll()
    end_descendants()
    return 128 + signal.SIGKILL if code is None else 128 - code if code < 0 else code


def end_descendants() -> None:
    """Kill until none is left: one may start another while it dies."""
    if not Path("/proc/self/stat").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        return
    while found := descendants(os.getpid()):
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def descendants(ancestor: int) -> list[int]:
    """Living processes below `ancestor`, from /proc/PID/stat (proc(5): after the name in brackets, the state and the parent)."""
    children: dict[int, list[int]] = {}
    dead = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(folder.name))
                if state in "ZX":
                    dead.add(int(folder.name))
    found, open_ = [], [ancestor]
    while open_:
        below = children.get(open_.pop(), [])
        open_ += below
        found += [process for process in below if process not in dead]
    return found


if __name__ == "__main__":
    sys.exit(main())
