"""Facts about the host: file systems and the page cache."""

import os
from pathlib import Path


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
