"""The cores that this process may use, and how long the training thread was ready to run and had none, by Linux's scheduler
(proc(5), schedstat)."""

import threading
from typing import NamedTuple

from trainpace.core.host import thread_times

SETTLED_STEP = 3
"""What it waited before, while others were still importing and compiling, says nothing of the steps."""


class Scheduled(NamedTuple):
    """Nanoseconds that a thread was on a core, and that it waited for one, since it began."""

    thread: int
    ran_ns: int
    waited_ns: int


def scheduled(thread: int | None = None) -> Scheduled | None:
    """Of this thread, or the one of that number; None where the system does not say. Threads that only help it are left out:
    while they wait for work they give their core away again and again, and would seem to have none.
    """
    thread = thread or threading.get_native_id()
    times = thread_times(thread)
    return None if times is None else Scheduled(thread, *times)


def delayed_share(since: Scheduled) -> float | None:
    """The share of the time since then, in which the thread could have run, that it had no core; None where it is not known."""
    if (now := scheduled(since.thread)) is None or now.ran_ns <= since.ran_ns:
        return None
    ran, waited = now.ran_ns - since.ran_ns, max(0, now.waited_ns - since.waited_ns)
    return waited / (ran + waited)
