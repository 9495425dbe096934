"""Tests of capturing the model: number format, errors, time limit and alarms."""

import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

from made_logs import read_log
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import load
from trainpace.watch import read_recording, watch
from trainpace.watch.inside.capture import BETWEEN, Capture, _number_format, at_most
from trainpace.watch.inside.event_log import EventLogWriter
from trainpace.watch.inside.recorder import Recorder
from trainpace.workload import Workload

NEEDS_ALARMS = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms here")


@pytest.mark.parametrize(
    ("dtype", "named"),
    [("float32", ""), ("float64", "fp64"), ("bfloat16", "bf16"), ("float16", "fp16")],
)
def test_number_format_comes_from_weights_or_autocast(dtype, named):
    model = nn.Linear(2, 2, dtype=getattr(torch, dtype))
    assert _number_format(model) == named
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _number_format(model) == "amp_bf16"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("Tensor.item() cannot be called on meta tensors."),
            "RuntimeError: Tensor.item() cannot be called on meta tensors",
        ),
        (TrainpaceError("two samples are too few."), "two samples are too few"),
    ],
)
def test_capture_error_is_noted_without_a_workload(tmp_path, error, told):
    capture = Capture(Recorder(EventLogWriter(str(tmp_path / "a.trail"), {})))
    capture.copies = [nn.Linear(2, 2)]

    def fails():
        raise error

    capture.attempt(fails)
    capture.recorder.log.flush()
    assert read_log((tmp_path / "a.trail").read_bytes())[1] == [{"no_workload": told}]
    assert not capture.copies


SCRIPT = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTMCell(1, 8, dtype=torch.float64)
    def forward(self, x):
        h = c = torch.zeros(len(x), 8, dtype=x.dtype, device=x.device)
        t = 0
        while t < x.shape[1] or ENDLESS:
            h, c = self.cell(x[:, t % 4 : t % 4 + 1], (h, c))
            t += 1
        return h.square().mean() + OTHERWISE
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    loss = net(torch.rand(2, 4, dtype=torch.float64))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def _recorded(folder, endless="False", otherwise="0"):
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("ENDLESS", endless).replace("OTHERWISE", otherwise))
    assert watch([sys.executable, str(path)], folder / "recording") == 0
    (rank,) = read_recording(folder / "recording").ranks
    return rank


def test_float64_model_is_recorded_as_fp64(tmp_path):
    rank = _recorded(tmp_path)
    assert (rank.number_format, rank.no_workload) == ("fp64", "")
    assert (tmp_path / "recording" / "workload.json").exists()


def test_data_dependent_model_is_recorded_with_the_reason(tmp_path):
    rank = _recorded(tmp_path, otherwise="float(h.sum().item())")
    assert "train.py line 13" in rank.no_workload
    assert not (tmp_path / "recording" / "workload.json").exists()


@NEEDS_ALARMS
def test_at_most_raises_timeout_and_restores_the_alarm():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append("mine"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"), at_most(0.05):
            time.sleep(5)
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
        with at_most(5.0):
            pass
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.1)
        assert rung == ["mine"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@NEEDS_ALARMS
def test_at_most_has_no_effect_in_another_thread():
    done = []

    def work():
        with at_most(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


@NEEDS_ALARMS
@pytest.mark.slow
def test_endless_tracing_is_stopped_after_20_seconds(tmp_path):
    """The script still has its steps and exit code, but no workload.

    On the meta device the model calls its cell forever, so the test does not depend on the
    machine's speed.
    """
    rank = _recorded(tmp_path, endless="x.device.type == 'meta'")
    assert rank.steps >= 2
    assert "tracing the model takes longer than 20 s" in rank.no_workload
    assert not (tmp_path / "recording" / "workload.json").exists()


TOWERS = """
import torch
from torch import nn
texts, images = nn.Linear(4, 8), nn.Linear(6, 8)
optimizer = torch.optim.SGD([*texts.parameters(), *images.parameters()], 0.1)
for step in range(5):
    logits = texts(torch.rand(3, 4)) @ images(torch.rand(3, 6)).T
    loss = nn.functional.cross_entropy(logits, torch.arange(3))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_workload_notes_a_matmul_between_modules(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TOWERS)
    assert watch([sys.executable, str(path)], tmp_path / "recording") == 0
    assert BETWEEN in load(tmp_path / "recording" / "workload.json", Workload).notes
