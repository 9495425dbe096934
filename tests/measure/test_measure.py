"""Probes with real training steps in child processes."""

import pytest

from trainpace.core.errors import OutOfMemory, TimedOut, TrainpaceError
from trainpace.measure import Conditions, calibrate, measure, probe

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
RAGGED = """
import torch
from torch import nn
SEEN = []
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        print("length", x.shape[1], flush=True)
        return self.layer(x.mean(dim=1))
class Data:
    def __len__(self): return 20
    def __getitem__(self, i): return torch.randn(3 + (40 if i == 17 else i % 3), 4), i % 2
    @staticmethod
    def collate_fn(samples):
        x = nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
        return x, torch.tensor([s[1] for s in samples])
def task():
    model = Mean()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), Data()
"""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(TASK)
    return file


def test_planted_forward_delay_is_measured_in_forward(task):
    m = measure(Conditions(model=f"{task}:task", seconds=1.5), 4)
    assert m.step.forward_ms >= 20  # no upper bound: the machine may be busy
    assert m.step.forward_ms > max(m.step.backward_ms, m.step.optimizer_ms)
    assert m.interval_ms.low <= m.median_ms <= m.interval_ms.high
    assert len(m.warmup_ms) >= 2
    assert m.loss == "CrossEntropyLoss"
    assert len(m.step_times_ms) >= 5
    assert m.samples_per_second == pytest.approx(4e3 / m.median_ms)
    assert not any("/" in value for value in m.environment.values())


def test_accumulation_multiplies_forward_time_and_batch(task):
    m = measure(Conditions(model=f"{task}:task", seconds=0.5, accumulation=3), 4)
    assert m.step.forward_ms >= 60
    assert m.execution.global_batch == 12
    assert m.samples_per_second == pytest.approx(12e3 / m.median_ms)


@pytest.mark.parametrize("precision", ["amp_bf16", "bf16"])
def test_cpu_measures_in_every_supported_precision(task, precision):
    m = measure(Conditions(model=f"{task}:task", seconds=0.2, precision=precision), 4)
    assert m.execution.precision == precision
    assert m.median_ms >= 20


def test_measured_steps_reduce_the_loss(task):
    m = measure(Conditions(model=f"{task}:task", seconds=1.5), 64)
    assert m.losses[-1] < m.losses[0]


@pytest.mark.slow
def test_peak_memory_grows_with_batch():
    small, large = (measure(Conditions(model="mobilenet_v2", seconds=0.0), n) for n in (2, 64))
    if small.peak_memory_gib is None:
        pytest.skip("this system does not tell a process' memory")
    assert 0 < small.peak_memory_gib < large.peak_memory_gib < large.reserved_memory_gib


def test_memory_is_measured_once_with_longest_samples(tmp_path, capfd):
    file = tmp_path / "ragged.py"
    file.write_text(RAGGED)
    m = measure(Conditions(model=f"{file}:task", seconds=0.0), 2)
    lengths = [
        int(line.split()[1])
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("length")
    ]
    assert lengths[-1] == 43  # after the clock, once
    assert lengths.count(43) == 1
    assert len(m.step_times_ms) + len(m.warmup_ms) == len(lengths) - 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("time.sleep(0.02)", "1 / 0"), "ZeroDivisionError"),
        (("nn.CrossEntropyLoss()", "(lambda out, y: out.sum() * float('nan'))"), "became"),
        (("time.sleep(0.02)", "import os; os.abort()"), "SIGABRT"),
        (("time.sleep(0.02)", "time.sleep(99)"), "longer than"),
    ],
)
def test_probe_failures_are_one_line_errors(task, change, word):
    task.write_text(TASK.replace(*change))
    timeout_s = 12 if word == "longer than" else 300
    with pytest.raises(TrainpaceError, match=word) as caught:
        measure(Conditions(model=f"{task}:task", seconds=0.2, timeout_s=timeout_s), 4)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TimedOut) == (word == "longer than")


def test_probe_records_out_of_memory():
    conditions = Conditions(model="vgg11", seconds=0.0, memory_limit_gib=0.4)
    with pytest.raises(OutOfMemory):
        measure(conditions, 2)
    failed = probe(conditions, 2, "a cpu")
    assert (failed.failure, failed.device, failed.execution.micro_batch) == (
        "out_of_memory",
        "a cpu",
        2,
    )


def test_probe_records_timeout(task):
    task.write_text(TASK.replace("time.sleep(0.02)", "time.sleep(99)"))
    failed = probe(Conditions(model=f"{task}:task", timeout_s=8), 4, "a cpu")
    assert failed.failure == "timeout"


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"accumulation": 0}, {"memory_limit_gib": 0.0}, {"timeout_s": 0.0}]
)
def test_conditions_reject_invalid_values(wrong):
    with pytest.raises(TrainpaceError):
        Conditions(model="resnet18", **wrong)


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_unsupported_cpu_precision_is_an_error(task, precision):
    with pytest.raises(TrainpaceError, match=r"GPU|engine"):
        measure(Conditions(model=f"{task}:task", precision=precision), 4)


@pytest.mark.parametrize("precision", ["amp_fp16", "fp16"])
def test_cpu_trains_in_16_bit_precision(task, precision):
    m = measure(Conditions(model=f"{task}:task", precision=precision, seconds=0.5), 4)
    assert m.execution.precision == precision
    assert len(m.losses) == len(m.step_times_ms) + len(
        m.warmup_ms
    )  # a scale that overflows would leave some out
    assert m.losses[-1] < m.losses[0]


def test_missing_cuda_is_an_error(task):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(TrainpaceError, match=r"CUDA"):
        measure(Conditions(model=f"{task}:task", device="cuda"), 4)


@pytest.mark.slow
@pytest.mark.long  # tests/cli/test_measuring.py calibrates too
def test_calibration_gives_plausible_cpu_figures():
    profile = calibrate(6.0)
    assert 1e-3 < profile.device.fp32_tflops.value < 50
    assert 1 < profile.device.memory_bandwidth_gb_per_s.value < 2000
    assert profile.device.fp32_tflops.kind == "measured"
    assert 0 <= profile.kernels.host_us_per_operator < 500
    assert len(profile.kernels.step_factors) >= 3
    assert all(0 < factor < 100 for factor in profile.kernels.step_factors)
    assert {"gemm", "conv", "conv_wgrad", "native_batch_norm"} <= set(
        profile.kernels.timings.classes()
    )
    assert profile.drift >= 0
    assert profile.machine.cpu.name == profile.device.name
