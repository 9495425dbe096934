"""How fast a folder's storage writes and reads one large file, past the page cache as far as the system allows."""

import errno
import os
import tempfile
import time
from pathlib import Path

from trainpace.errors import TrainpaceError, os_reason
from trainpace.records import Record

SIZE_BYTES = 256 * 2**20
_BLOCK_BYTES = 8 * 2**20
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_CACHED_SHARE = 0.1
"""Share of sampled pages already in memory from which on a read says nothing about the storage."""
_CACHED_SPEED_RATIO = 0.5
"""First read over second, likewise, where the system does not tell what is in memory."""


class Storage(Record):
    """Sequential throughput of one file. GB is 1e9 bytes.

    write: with fsync at the end. `read_from_cache`: the read probably came from memory, not from the storage. What the
    caches of a network server, of a virtual machine's host or of the drive itself hold cannot be seen from here.
    """

    filesystem: str | None
    size_bytes: int
    write_gb_per_s: float
    read_gb_per_s: float
    read_from_cache: bool


def measure_storage(folder: str | os.PathLike[str], size_bytes: int = SIZE_BYTES) -> Storage:
    """Write, flush and read a file of random bytes in `folder`. The file has no name, so nothing can leave it behind.

    Raises `TrainpaceError` for a folder that is missing, not writable or full.
    """
    if size_bytes < 2**20:
        raise TrainpaceError(
            f"a storage probe of {size_bytes} bytes is too small.", "Use at least 1 MiB."
        )
    block = os.urandom(min(_BLOCK_BYTES, size_bytes))  # random, for some filesystems compress
    filesystem = filesystem_of(folder)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            handle = file.fileno()
            write_s = _write_s(handle, block, size_bytes)
            evictable = drop_from_cache(handle)
            cached = share_in_cache(handle, size_bytes)
            first_s = _read_s(handle, len(block))
            second_s = _read_s(handle, len(block))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise TrainpaceError(
                f"{folder} has no room for the {size_bytes / 2**20:.0f} MiB of the storage probe.",
                "Free some space, probe another folder, or use a smaller size.",
            ) from None
        reason = f"cannot probe the storage of {folder}: {os_reason(error)}."
        raise TrainpaceError(reason, "Name a folder that can be written to.") from None
    from_cache = (
        cached > _CACHED_SHARE if cached is not None else second_s / first_s > _CACHED_SPEED_RATIO
    )
    return Storage(
        filesystem=filesystem,
        size_bytes=size_bytes,
        write_gb_per_s=size_bytes / write_s / 1e9,
        read_gb_per_s=size_bytes / first_s / 1e9,
        read_from_cache=from_cache or not evictable or filesystem in _MEMORY_FILESYSTEMS,
    )


def filesystem_of(folder: str | os.PathLike[str]) -> str | None:
    """The type of the filesystem that holds `folder`, such as ext4; None where the system does not tell."""
    import psutil

    place, kind, deepest = Path(folder).resolve(), None, -1
    for mount in psutil.disk_partitions(all=True):
        depth = len(Path(mount.mountpoint).parts)
        # of two mounts on one place the later one is seen
        if depth >= deepest and place.is_relative_to(mount.mountpoint):
            deepest, kind = depth, mount.fstype or None
    return kind


def _write_s(handle: int, block: bytes, size_bytes: int) -> float:
    start = time.perf_counter()
    written = 0
    while written < size_bytes:
        written += os.write(handle, block[: size_bytes - written])
    os.fsync(handle)
    return time.perf_counter() - start


def drop_from_cache(handle: int) -> bool:
    """Let the page cache forget a file's clean pages; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):  # macOS has no such call
        return False
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def share_in_cache(handle: int, size_bytes: int, samples: int = 32) -> float | None:
    """Share of sampled places that can be read without waiting; None where the system does not say."""
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


def _read_s(handle: int, block_bytes: int) -> float:
    os.lseek(handle, 0, os.SEEK_SET)
    buffer = bytearray(block_bytes)
    start = time.perf_counter()
    while os.readv(handle, [buffer]):
        pass
    return time.perf_counter() - start
