"""Fewer threads are tried if the threads have less than one core each."""

import os
import socket

import pytest
import torch

from trainpace.watch.inside import observers
from trainpace.watch.inside import trials as module
from trainpace.watch.inside.event_log import PARTS, EventLogWriter, Step
from trainpace.watch.inside.observers import Scheduled
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trials import FEWER_THREADS, PLAIN, Trials

STEP = Step(0, 1, 0, 0, 1, 0, 0.0, 0.0, (0,) * len(PARTS))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(observers, "usable_cores", lambda: 4)
    monkeypatch.setattr(observers, "own_threads", lambda: 4)
    return Recorder(
        EventLogWriter(str(tmp_path / "process-1-here.trail"), {"host": socket.gethostname()})
    )


def another(recorder, name="process-2-here", steps=1, host=None):
    log = EventLogWriter(
        os.path.join(os.path.dirname(recorder.log.path), f"{name}.trail"),
        {"host": host or socket.gethostname()},
    )
    for _ in range(steps):
        log.step(STEP)
    log.flush()
    return log.path


def test_one_core_per_thread_needs_no_fewer_threads(recorder):
    assert observers.fewer_threads(recorder) == 0


@pytest.mark.parametrize(("others", "threads"), [(1, 2), (3, 1), (9, 1)])
def test_threads_are_reduced_if_processes_share_the_cores(recorder, others, threads):
    for n in range(others):
        another(recorder, f"process-{n + 2}-here")
    assert observers.fewer_threads(recorder) == threads


@pytest.mark.parametrize(
    "other",
    [{"steps": 0}, {"host": "elsewhere"}, {"name": "worker-2-here"}],
    ids=["no step", "another host", "a worker"],
)
def test_processes_without_local_training_use_no_core(recorder, other):
    another(recorder, **other)
    assert observers.fewer_threads(recorder) == 0


def test_ended_processes_use_no_core(recorder):
    path = another(recorder)
    os.utime(path, (1, 1))
    assert observers.fewer_threads(recorder) == 0


def test_damaged_event_logs_are_ignored(recorder):
    with open(another(recorder), "wb") as file:
        file.write(b"{}")
    assert observers.fewer_threads(recorder) == 0


@pytest.mark.parametrize(("waited", "threads"), [(0.05, 0), (0.3, 1)])
def test_waiting_for_a_core_reduces_the_threads(recorder, monkeypatch, waited, threads):
    recorder.scheduled = Scheduled(1, 1, 1)
    monkeypatch.setattr(observers, "delayed_share", lambda since: waited)
    assert observers.fewer_threads(recorder) == threads


def test_fewer_threads_blocks_alternate_with_plain_blocks(recorder, monkeypatch):
    set_to = [4]
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(module, "end", lambda recorder: None)
    another(recorder)
    trials = Trials(
        recorder,
        {"block_steps": 2, "rounds": 2, "warm_up_steps": 1, "limit_s": 60, "only_steps": True},
    )
    recorder.trials = trials
    threads_of = {}
    for number in range(40):
        trials.at_step(Step(recorder.trial, 1, number, 0, 1, 0, 0.0, 0.0, (0,) * len(PARTS)))
        if trials.left:
            threads_of.setdefault(recorder.active_trial, set()).add(set_to[-1])
    assert threads_of == {PLAIN: {4}, FEWER_THREADS: {2}}
    # set only on a change, because a script may set the threads itself
    assert set_to[1:] == [2, 4, 2]
