"""All-reduce calibration: the fit, and real ranks over gloo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.forecast import wire_bytes
from trainpace.measure.calibration import fit_latency_and_bandwidth, measure_allreduce

SIZES = [2.0**k for k in range(10, 27)]


def test_fit_recovers_planted_latency_and_bandwidth():
    latency, bandwidth = fit_latency_and_bandwidth(SIZES, [50e-6 + s / 4e9 for s in SIZES])
    assert latency == pytest.approx(50e-6)
    assert bandwidth == pytest.approx(4e9)


def test_fit_weights_relative_errors_equally():
    times = [(50e-6 + s / 4e9) * (1.1 if i % 2 else 0.9) for i, s in enumerate(SIZES)]
    latency, bandwidth = fit_latency_and_bandwidth(SIZES, times)
    assert latency == pytest.approx(50e-6, rel=0.1)
    assert bandwidth == pytest.approx(4e9, rel=0.1)


def test_fitted_latency_and_bandwidth_are_not_negative():
    # A line through these points would start below zero.
    latency, bandwidth = fit_latency_and_bandwidth([1e6, 2e6], [1e-3, 3e-3])
    assert latency == 0
    assert 5e8 < bandwidth < 1.1e9
    latency, bandwidth = fit_latency_and_bandwidth([1e6, 2e6], [3e-3, 1e-3])
    assert bandwidth is None
    assert 1e-3 < latency < 3e-3
    assert fit_latency_and_bandwidth([1e6], [1e-3])[0] >= 0


def test_all_reduce_wire_bytes_follow_ring_algorithm():
    assert wire_bytes("all_reduce", np.array(1.0), np.array([2, 4])).tolist() == [1.0, 1.5]


def ranks_in(folder):
    """Return (process, its files) of the ranks whose files are in `folder`."""
    out = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True).stdout
    lines = [
        line.split()
        for line in out.splitlines()
        if "measure.collectives" in line and "guard.py" not in line
    ]
    return [(int(words[0]), words[-2]) for words in lines if words[-2].startswith(str(folder))]


def all_end(folder):
    """Return True once all ranks have exited. Killed processes may take a moment."""
    deadline = time.monotonic() + 10
    while ranks_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not ranks_in(folder)


def test_all_reduce_is_timed_between_two_gloo_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    r = measure_allreduce(2, sizes_bytes=[1, 2**16, 2**22], repeats=5)
    assert r.sizes_bytes == (4, 2**16, 2**22)
    assert 0 < r.time_ms[0] < r.time_ms[2]
    assert r.latency_us > 0
    assert r.bandwidth_gb_per_s is not None
    assert 0.001 < r.bandwidth_gb_per_s < 1000
    assert all_end(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(
            {"ranks": 2, "backend": "nccl"}, "GPU for each of the 2 ranks", marks=pytest.mark.slow
        ),
        ({"ranks": 2, "timeout_s": 2, "repeats": 10**6}, "longer than 2 s"),
    ],
)
def test_failed_all_reduce_raises_one_line_and_leaves_no_process(
    arguments, word, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # The machine may have GPUs.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TrainpaceError, match=word) as caught:
        measure_allreduce(**arguments)
    assert "\n" not in str(caught.value)
    assert all_end(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_rank_ends_all_reduce_and_is_named(tmp_path):
    code = "from trainpace.measure.calibration import measure_allreduce; measure_allreduce(2, sizes_bytes=[2**26], repeats=10**6)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    asker = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        victim, deadline = [], time.monotonic() + 60
        while not victim and asker.poll() is None and time.monotonic() < deadline:
            met = list(tmp_path.glob("trainpace-*/store"))  # The ranks have joined and work.
            victim = [
                pid
                for pid, request in ranks_in(tmp_path)
                if met and '"rank": 1' in Path(request).read_text()
            ]
            time.sleep(0.1)
        time.sleep(1)
        os.kill(victim[0], signal.SIGKILL)
        message = asker.communicate(timeout=60)[1]
    finally:
        asker.kill()
        asker.communicate()
    assert (
        "rank 1 of an all-reduce between 2 ranks over gloo gave no answer: it died of SIGKILL"
        in message
    )
    assert all_end(tmp_path)
