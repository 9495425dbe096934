"""Detection of the files that a dataset reads.

After these files are dropped from the page cache, reading can be timed separately from computing.

Python's audit event "open" (PEP 578) reports files that Python code opens, including PIL and numpy.
/proc shows files that stay open. Files that a C++ library opens (OpenCV, torchvision.io, lmdb) are
not detected, but /proc/self/io counts the bytes read from them.
"""

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from trainpace.core.host import drop_from_cache, filesystem_of, share_in_cache

_CODE = (".py", ".pyc", ".so", ".pyd", ".pth")
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_CACHED_SHARE = 0.1
"""Share of the checked files that may stay cached."""
_CHECKED_FILES = 16
"""Approximate number of files to check."""
_recording: list[str] | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event != "open"
        or _recording is None
        or not isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        return
    if not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        _recording.append(os.fsdecode(arguments[0]))


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield a list that collects the paths that this process opens for reading, in order.

    At the end of the context, only paths of regular files that are not code are left.
    """
    global _recording, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # Python cannot remove an audit hook
        _hooked = True
    opened: list[str] = []
    _recording = opened
    try:
        yield opened
    finally:
        _recording = None
        opened[:] = [path for path in opened if _is_data(path)]


def held_open() -> set[str]:
    """Return the paths of files that this process has open or mapped.

    Call it before and after a dataset is loaded. The new files, such as an HDF5 file, are its data.
    """
    paths = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                paths.add(os.readlink(f"/proc/self/fd/{name}"))
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths |= {
            fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) == 6
        }
    return {
        path for path in paths if path.startswith("/") and ".so." not in path and _is_data(path)
    }


def bytes_read() -> int | None:
    """Return the number of bytes that this process has read by system calls, or None if unknown."""
    try:
        with open("/proc/self/io") as counters:
            return int(counters.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def drop(paths: Iterable[str]) -> str:
    """Drop files from the page cache.

    Returns:
        "" on success, or a sentence on why the next read would still come from the cache.
    """
    files = list(dict.fromkeys(paths))
    for path in files:
        drop_file(path)
    looked_at = files[:: max(1, len(files) // _CHECKED_FILES)]
    still_cached = 0
    for path in looked_at:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            still_cached += size > 0 and (share_in_cache(file.fileno(), size, samples=1) or 0.0) > 0
    time.sleep(0.01)  # the check for cached pages may itself start reading them
    for path in looked_at:
        drop_file(path)
    if still_cached <= _CACHED_SHARE * len(looked_at):
        return ""
    kind = filesystem_of(os.path.dirname(files[0]) or ".") or "this file system"
    return (
        f"files on {kind} cannot be dropped from the page cache, so reading and preprocessing are"
        " not distinguishable."
    )


def drop_file(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())  # dirty pages cannot be dropped
        drop_from_cache(file.fileno())


def _is_data(path: str) -> bool:
    if path.endswith(_CODE) or path.startswith(("/proc/", "/sys/", "/dev/")):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
