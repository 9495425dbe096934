"""Whether a file that the script writes is written by another program too, which restoring it would rob of what it wrote.

By inotify(7), which only Linux has. Not seen: programs on other hosts, and those that had the file open all the time, for which
`watch.restoring` looks.
"""

import contextlib
import ctypes
import os
import stat
import struct
from typing import Any

_MODIFIED, _CLOSED_WRITTEN, _OPENED, _OVERFLOW = 0x2, 0x8, 0x20, 0x4000
_EVENT = struct.Struct("iIII")
_BUFFER = 65536


class Writers:
    """Counts how often a file was opened for writing by this process, and how often it was closed after that by any."""

    def __init__(self) -> None:
        self._inotify = -1
        with contextlib.suppress(AttributeError, OSError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._accounts: dict[int, dict[str, Any]] = {}
        self._watches: dict[str, int] = {}

    def __contains__(self, place: str) -> bool:
        return place in self._watches

    def watch(self, place: str) -> bool:
        """Begin to count for the file that is there now; false where that cannot be."""
        if self._inotify < 0:
            return False
        mask = (
            _MODIFIED | _CLOSED_WRITTEN | _OPENED
        )  # openings and changes only keep two equal events from being merged
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(place), mask)
        if watch < 0:
            return False
        self._watches[place] = watch
        self._accounts[watch] = {
            "place": place,
            "inode": os.stat(place).st_ino,
            "opened": 0,
            "closed": 0,
        }
        return True

    def opened(self, place: str) -> None:
        """Count an opening by this process, which follows."""
        self._read()
        self._accounts[self._watches[place]]["opened"] += 1

    def accounts(self) -> list[dict[str, Any]]:
        """For every file, openings that are not closed by now included as `open`."""
        self._read()
        here = _open_for_writing() if self._accounts else []
        return [
            {**account, "open": here.count(account["inode"])} for account in self._accounts.values()
        ]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, _BUFFER):
                at = 0
                while at < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + length
                    lost = self._accounts.values() if mask & _OVERFLOW else ()
                    for account in lost:
                        account["closed"] = 2**31  # unknown, and so taken to be another's
                    if mask & _CLOSED_WRITTEN and watch in self._accounts:
                        self._accounts[watch]["closed"] += 1


def _open_for_writing() -> list[int]:
    """The inodes of the regular files that this process has open for writing, one for each opening."""
    import fcntl

    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISREG(about.st_mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & (
                os.O_WRONLY | os.O_RDWR
            ):
                found.append(about.st_ino)
    return found
