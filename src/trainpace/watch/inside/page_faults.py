"""Pages of memory that the system found and cleared for this process. glibc gives the memory of large tensors back when they are
freed, and each page of it is cleared anew when the next tensor asks for it."""

import contextlib
import mmap
import os
import time

PAGES = 16 * 2**20 // mmap.PAGESIZE
REPEATS = 3
KEEPS = "MALLOC_MMAP_MAX_"
"""The variable under which glibc keeps freed memory."""


def count() -> int | None:
    """How many this process has had so far that needed no disk; None where its C library is not glibc, or its allocator was
    chosen by the user."""
    try:
        import resource

        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ImportError, ValueError, OSError):
        return None
    if KEEPS in os.environ or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if is_glibc else None


def cost_ns() -> float | None:
    """Nanoseconds that one takes here and now, by the fastest of some rounds over new pages; None where they are not counted."""
    rounds = [_round_ns() for _ in range(REPEATS)]
    known = [ns for ns in rounds if ns is not None]
    return min(known, default=None)


def _round_ns() -> float | None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        with contextlib.suppress(AttributeError, OSError):  # of a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        before, began = count(), time.perf_counter_ns()
        memory[:: mmap.PAGESIZE] = bytes(PAGES)
        took, after = time.perf_counter_ns() - began, count()
    return None if before is None or after is None or after <= before else took / (after - before)
