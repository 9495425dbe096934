"""Tests of what is counted in the operators of a step."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from made_logs import read_log
from trainpace import measure as accelerator
from trainpace.measure.kernels import DeviceWork
from trainpace.watch.inside import observers
from trainpace.watch.inside.event_log import BACKWARD, FORWARD, OTHER, EventLogWriter
from trainpace.watch.inside.recorder import Recorder


@pytest.mark.parametrize(("thread_us", "is_large"), [(5, False), (50, True)])
def test_large_operators_are_judged_by_cpu_time(tmp_path, monkeypatch, thread_us, is_large):
    """A matmul takes milliseconds of wall time, with little or much CPU time."""
    clock = itertools.count(0, thread_us * 1000)
    monkeypatch.setattr(observers, "time", SimpleNamespace(thread_time_ns=lambda: next(clock)))
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.part = FORWARD
    a = torch.rand(1024, 1024)
    end = observers.count_one_step(recorder)
    a @ a
    end()
    recorder.log.flush()
    (counted,) = (
        r["counted"] for r in read_log((tmp_path / "a.trail").read_bytes())[1] if "counted" in r
    )
    assert counted["operators"] == 1
    assert (counted["large_operators_ns"] > 20_000) is is_large


@pytest.mark.parametrize(("samples", "share"), [(1, 1.0), (8, 0.0)])
@pytest.mark.parametrize("outputs", [16, 1])  # one output must not count as a single sample
def test_single_sample_counts_as_matrix_vector_product(tmp_path, samples, outputs, share):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.part = FORWARD
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs)
    )
    end = observers.count_one_step(recorder)
    loss = model(torch.rand(samples, 32)).sum()
    recorder.part = BACKWARD
    loss.backward()
    end()
    (counted,) = (note["counted"] for note in notes_of(recorder) if "counted" in note)
    assert counted["flops"] > counted["product_flops"] > 0
    assert counted["one_row_flops"] == share * counted["product_flops"]
    assert counted["products_ns"] > 0


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (12, 12)])
def test_rows_of_attention_count_all_heads(heads, rows):
    query, keys = torch.rand(heads, 1, 8), torch.rand(heads, 8, 20)
    assert observers.rows_of(torch.ops.aten.bmm.default, (query, keys)) == rows
    assert observers.rows_of(torch.ops.aten.convolution.default, (query, keys)) == 0


@pytest.mark.parametrize(("within_s", "times"), [(1e9, observers.REPEATS), (0.0, 1)])
def test_slow_optimizer_is_timed_once(tmp_path, monkeypatch, within_s, times):
    parameter = torch.nn.Parameter(torch.rand(8))
    parameter.grad = torch.rand(8)
    optimizer = torch.optim.Adam([parameter])
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.optimizer = lambda: optimizer
    timed = []
    monkeypatch.setattr(observers, "_time_ns", lambda step: timed.append(step) or 10**6)
    observers.note_optimizers(recorder, within_s)
    (noted,) = (
        note["optimizer_variants_ms"]
        for note in notes_of(recorder)
        if "optimizer_variants_ms" in note
    )
    assert len(timed) == len(noted) * (times + 1)  # and one untimed step that creates the state


@pytest.fixture
def device(monkeypatch):
    """Pretend that the CPU is an accelerator."""
    for name, value in (
        ("in_use", lambda: "cpu:0"),
        ("synchronize", lambda kind: None),
        ("free_gib", lambda kind: 9.0),
    ):
        monkeypatch.setattr(accelerator, name, value)
    monkeypatch.setattr(observers, "SIDE_ON_ACCELERATOR", 128)


def notes_of(recorder):
    recorder.log.flush()
    return [r for r in read_log(Path(recorder.log.path).read_bytes())[1] if isinstance(r, dict)]


@pytest.mark.parametrize(
    ("dtype", "others"), [(torch.float32, {"amp_bf16", "tf32"}), (torch.bfloat16, set())]
)
def test_fp32_accelerator_is_also_timed_in_other_formats(tmp_path, device, dtype, others):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.matmul_dtype = dtype
    chosen = torch.get_float32_matmul_precision()
    observers.note_rate(recorder)
    notes = {key: value for note in notes_of(recorder) for key, value in note.items()}
    assert notes["matmul_gflops"] > 0
    assert set(notes.get("other_gflops", {})) == others
    assert torch.get_float32_matmul_precision() == chosen


def test_an_optimizer_is_copied_only_if_it_fits_in_free_memory(device, monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1000))])
    assert observers._can_be_copied(optimizer)
    monkeypatch.setattr(accelerator, "free_gib", lambda kind: 1e-6)
    assert not observers._can_be_copied(optimizer)


def test_device_work_of_a_step_is_noted(tmp_path, monkeypatch):
    work = DeviceWork(7.0, 2.0, {"a" * 200: 3.0, "a" * 300: 2.0})
    monkeypatch.setattr(accelerator, "device_work", lambda kind: lambda: work)
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    observers.profile_one_step(recorder)()
    (note,) = notes_of(recorder)
    assert note == {
        "device_busy_ms": 7.0,
        "device_copies_ms": 2.0,
        "device_kernels_ms": {"a" * observers.LONGEST_NAME: 5.0},
    }


def test_the_slowest_operators_are_noted_with_the_lines_that_call_them(tmp_path):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    a = torch.rand(1024, 1024, requires_grad=True)
    end = observers.count_one_step(recorder)
    recorder.part = FORWARD
    loss = (a @ a).sum()
    recorder.part = BACKWARD
    loss.backward()
    end()
    (slow,) = (note["slow_operators"] for note in notes_of(recorder) if "slow_operators" in note)
    by_name = {(name, bool(line)): (line, share) for name, line, share in slow}
    line, share = by_name["aten.mm", True]
    assert f"{Path(__file__).name}:" in line
    assert by_name["aten.mm", False][1] > share > 0.05  # two matmuls in the backward pass
    assert sum(share for *_, share in slow) <= 1


def test_operators_outside_modules_count_if_gradients_flow_through_them(tmp_path):
    """Models of plain functions call operators outside modules. Preparing a batch is own code."""
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    weights = torch.rand(64, 64, requires_grad=True)
    end = observers.count_one_step(recorder)
    x = torch.rand(64, 64).add(1).sqrt()
    assert recorder.part == OTHER
    loss = (x @ weights).relu().sum()
    loss.item()
    with torch.no_grad():  # a manual average and update of the weights
        average = x.mul(0.9).add(weights, alpha=0.1)
        weights.sub_(average)
    end()
    (counted,) = (note["counted"] for note in notes_of(recorder) if "counted" in note)
    assert counted["operators"] == 3
    assert counted["forward_flops"] == 2 * 64**3
    assert counted["outside_ns"] > 0


def test_gaps_between_operators_outside_modules_count_as_forward(tmp_path):
    """A loop may read a value between two operators. A metric after the last one is own code."""
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.part = OTHER
    x = torch.rand(4, requires_grad=True)
    outside = observers._OutsideModules()
    for start, ended, flows in (
        (1_000_000, 1_010_000, True),
        (1_015_000, 1_018_000, False),
        (1_020_000, 1_030_000, True),
    ):
        outside.sees(start, ended, is_outside=True, flows=flows, reads=False)
    assert outside.ns == 30_000
    outside.sees(1_035_000, 1_040_000, is_outside=True, flows=False, reads=True)
    outside.sees(9_000_000, 9_500_000, is_outside=True, flows=False, reads=False)
    assert outside.ns <= 30_000 + observers.LONGEST_GAP_NS
    end = observers.count_one_step(recorder)
    y = x * 2
    for _ in range(3):
        y = y * y.max().item()
    z = y.sum()
    [z.item() for _ in range(20)]
    recorder.part = BACKWARD
    z.backward()
    recorder.part = OTHER
    float(y.detach().sum())
    end()
    (counted,) = (note["counted"] for note in notes_of(recorder) if "counted" in note)
    assert counted["values_read"] == 3
