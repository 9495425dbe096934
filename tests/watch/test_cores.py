"""Tests of the share of time that a thread waits for a core."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainpace.watch import records_of
from trainpace.watch.inside import observers, patches, start

BUSY = "while True: pass"
MEASURED = """
import time
from trainpace.watch.inside import observers
before, end = observers.scheduled(), time.process_time() + 0.5
while time.process_time() < end: pass
print(observers.delayed_share(before))
"""

NEEDS_SCHEDSTAT = pytest.mark.skipif(observers.scheduled() is None, reason="no schedstat")


@pytest.mark.slow
@NEEDS_SCHEDSTAT
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


@NEEDS_SCHEDSTAT
def test_delayed_share_without_elapsed_time_is_none():
    now = observers.scheduled()
    assert observers.delayed_share(now._replace(ran_ns=now.ran_ns + 10**12)) is None


def test_the_line_that_sets_the_number_of_threads_is_noted_before_the_first_step_only():
    notes, given = [], []
    recorder = SimpleNamespace(steps=0, log=SimpleNamespace(note=lambda **note: notes.append(note)))
    patches._set_threads(recorder)(given.append, 4)
    recorder.steps = 1
    patches._set_threads(recorder)(given.append, 2)
    assert given == [4, 2]
    assert [note["threads"] for note in notes] == [4]
    assert Path(notes[0]["threads_by"].partition(":")[0]) == Path(__file__)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_number_of_threads_set_in_the_environment_by_the_script_is_noted(
    tmp_path, monkeypatch, is_changed
):
    monkeypatch.setenv("TRAINPACE_WATCH", str(tmp_path))
    monkeypatch.setenv(start.THREADS, "7")
    monkeypatch.setattr(start, "THREADS_BEFORE", "1" if is_changed else "7")
    log = start._new_log(torch)
    log.flush()
    log.close()
    (note,) = records_of(Path(log.path))
    assert bool(note["threads_by"]) is is_changed
