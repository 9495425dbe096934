"""Tests of the share of time that a thread waits for a core."""

import os
import subprocess
import sys

import pytest

from trainpace.watch.inside import observers

BUSY = "while True: pass"
MEASURED = """
import time
from trainpace.watch.inside import cores
before, end = cores.scheduled(), time.process_time() + 0.5
while time.process_time() < end: pass
print(cores.delayed_share(before))
"""

pytestmark = pytest.mark.skipif(observers.scheduled() is None, reason="the kernel does not say")


@pytest.mark.slow
def test_thread_sharing_its_core_is_delayed_most_of_the_time():
    one = min(os.sched_getaffinity(0))
    others = [
        subprocess.Popen(("taskset", "-c", str(one), sys.executable, "-c", BUSY)) for _ in range(2)
    ]
    try:
        command = ("taskset", "-c", str(one), sys.executable, "-c", MEASURED)
        share = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert share > 0.5  # two others have two thirds of the core


def test_delayed_share_of_an_unknown_thread_is_none():
    assert observers.scheduled(thread=2**22) is None
    assert observers.delayed_share(observers.Scheduled(2**22, 1, 1)) is None


def test_delayed_share_without_elapsed_time_is_none():
    now = observers.scheduled()
    assert observers.delayed_share(now._replace(ran_ns=now.ran_ns + 10**12)) is None
