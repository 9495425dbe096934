"""Which cores the training had: how long its thread was ready to run and had none, by Linux's scheduler (proc(5), schedstat), and
how many all of its threads kept busy."""

import threading
import time
from typing import NamedTuple

SETTLED_STEP = 3
"""What it waited before, while others were still importing and compiling, says nothing of the steps."""


class Scheduled(NamedTuple):
    """Nanoseconds that a thread was on a core, and that it waited for one, since it began."""

    thread: int
    ran_ns: int
    waited_ns: int


def scheduled(thread: int | None = None) -> Scheduled | None:
    """Of this thread, or the one of that number; None where the system does not say. Threads that only help it are left out:
    while they wait for work they give their core away again and again, and would seem to have none."""
    thread = thread or threading.get_native_id()
    try:
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return Scheduled(thread, int(ran), int(waited)) if int(ran) else None


class Work(NamedTuple):
    """Nanoseconds that the threads of this process have computed, of those that have passed. A thread of OpenMP that waits for
    the others at the end of an operator computes too: it takes a core from whoever else wants it."""

    computed_ns: int
    passed_ns: int


def work() -> Work:
    return Work(time.process_time_ns(), time.perf_counter_ns())


def busy_cores(since: Work) -> float:
    """How many cores this process has kept busy since then; those of other processes, such as loader workers, do not count."""
    now = work()
    return max(0, now.computed_ns - since.computed_ns) / max(1, now.passed_ns - since.passed_ns)


def delayed_share(since: Scheduled) -> float | None:
    """The share of the time since then, in which the thread could have run, that it had no core; None where it is not known."""
    if (now := scheduled(since.thread)) is None or now.ran_ns <= since.ran_ns:
        return None
    ran, waited = now.ran_ns - since.ran_ns, max(0, now.waited_ns - since.waited_ns)
    return waited / (ran + waited)
