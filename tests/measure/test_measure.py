"""Real steps in real child processes."""

import pytest

from trainpace.errors import TrainpaceError
from trainpace.measure import measure, profile_this_cpu

TASK = """
import time, torch
from torch import nn
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x):
        time.sleep(0.02)
        return self.layer(x)
def task():
    model = Slow()
    data = [(torch.randn(8), i % 2) for i in range(64)]
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), data
"""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(TASK)
    return file


def test_a_planted_delay_is_measured_where_it_is(task):
    m = measure(f"{task}:task", 4, seconds=1.5)
    assert m.step.forward_ms >= 20  # no upper bound: the machine may be busy
    assert m.step.forward_ms > max(m.step.backward_ms, m.step.optimizer_ms)
    assert m.interval_ms.low <= m.median_ms <= m.interval_ms.high
    assert len(m.warmup_ms) >= 2
    assert len(m.step_times_ms) >= 10
    assert m.samples_per_second == pytest.approx(4e3 / m.median_ms)
    assert not any("/" in value for value in m.environment.values())


def test_the_model_really_trains(task):
    m = measure(f"{task}:task", 64, seconds=1.5)
    assert m.losses[-1] < m.losses[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [(("time.sleep(0.02)", "1 / 0"), "ZeroDivisionError"), (("nn.CrossEntropyLoss()", "(lambda out, y: out.sum() * float('nan'))"), "became"), (("time.sleep(0.02)", "import os; os.abort()"), "SIGABRT"),
     (("time.sleep(0.02)", "time.sleep(99)"), "longer than")],
)  # fmt: skip
def test_what_goes_wrong_is_one_sentence(task, change, word):
    task.write_text(TASK.replace(*change))
    with pytest.raises(TrainpaceError, match=word) as caught:
        measure(f"{task}:task", 4, seconds=0.2, timeout_s=12)
    assert "\n" not in str(caught.value)


def test_no_cuda_here_is_said(task):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(TrainpaceError, match=r"CUDA"):
        measure(f"{task}:task", 4, device="cuda")


def test_this_cpu_has_plausible_figures():
    profile = profile_this_cpu()
    assert 1e-3 < profile.device.fp32_tflops.value < 50
    assert 1 < profile.device.memory_bandwidth_gb_per_s.value < 2000
    assert profile.device.fp32_tflops.kind == "measured"
    assert 0.1 < profile.kernels.host_us_per_launch < 500
