"""How fast a folder's storage writes and reads one large file, past the page cache as far as the system allows."""

import errno
import os
import tempfile
import time

from trainpace.core.errors import TrainpaceError, os_reason
from trainpace.core.host import drop_from_cache, filesystem_of, share_in_cache
from trainpace.core.records import Record

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
