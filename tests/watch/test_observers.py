"""What is counted of a step's operators."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from made_trails import read_trail
from trainpace.watch.inside import observers
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import FORWARD, TrailWriter


@pytest.mark.parametrize(("thread_us", "is_large"), [(5, False), (50, True)])
def test_an_operator_is_large_by_what_its_thread_computes_and_not_by_what_it_waits(
    tmp_path, monkeypatch, thread_us, is_large
):
    """A matrix product of milliseconds: as of a tiny operator whose core another program takes, and as of a large one."""
    clock = itertools.count(0, thread_us * 1000)
    monkeypatch.setattr(observers, "time", SimpleNamespace(thread_time_ns=lambda: next(clock)))
    recorder = Recorder(TrailWriter(str(tmp_path / "a.trail"), {}))
    recorder.part = FORWARD
    a = torch.rand(1024, 1024)
    end = observers.count_one_step(recorder)
    a @ a
    end()
    recorder.trail.flush()
    (counted,) = (r["counted"] for r in read_trail((tmp_path / "a.trail").read_bytes())[1] if "counted" in r)
    assert counted["operators"] == 1
    assert (counted["large_operators_ns"] > 20_000) is is_large
