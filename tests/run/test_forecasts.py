"""Inputs of ladder forecasts."""

import textwrap
from types import SimpleNamespace

import pytest

from ladder_world import forecast_of_ms
from nouns import machine_profile, workload
from trainpace.core.errors import TimedOut, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Device, HostLinks
from trainpace.forecast import Forecaster
from trainpace.forecast.collectives import gloo_seconds
from trainpace.measure.calibration import AllReduce
from trainpace.measure.loader_worker import costs
from trainpace.run import step_forecasts as forecasts
from trainpace.run.ladder import Setup
from trainpace.run.step_forecasts import LadderForecasts, MeasuredCompute, links_of, rank_threads
from trainpace.run.trial import LoaderSettings

TASK = """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end: pass
        return torch.zeros(3), 0
def task():
    model = torch.nn.Linear(3, 2)
    return model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), Data()
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "busy_task.py").write_text(textwrap.dedent(TASK))
    return f"{tmp_path / 'busy_task.py'}:task"


def test_sample_cost_is_timed_once_for_all_batches(task):
    four, eight = costs(task, None, [4, 8], False, 0)
    assert (four.batch_size, eight.batch_size) == (4, 8)
    assert four.sample_wall_ms == eight.sample_wall_ms > 0
    assert four.send_ms == 0


def test_single_host_links_reproduce_measured_all_reduce():
    timed = AllReduce(
        ranks=2,
        backend="gloo",
        sizes_bytes=(4,),
        time_ms=(1.0,),
        latency_us=200,
        bandwidth_gb_per_s=2.0,
    )
    import numpy as np

    seconds = gloo_seconds(
        "all_reduce", np.array([8e6]), np.array([2.0]), np.array([False]), 2.0, links_of(timed)
    )
    assert seconds[0] == pytest.approx(200e-6 + 8e6 / 2e9)


def test_threads_per_rank_follow_cores_setup_or_environment(monkeypatch):
    monkeypatch.setattr(forecasts, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    four = Setup(task="t", execution=Execution(nproc_per_node=4))
    assert rank_threads(four) == 2
    assert rank_threads(Setup(task="t", execution=Execution(), threads=3)) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert rank_threads(four) == 1


def setup(**rest) -> Setup:
    return Setup(task="resnet18", execution=Execution(**rest.pop("execution", {})), **rest)


def test_own_settings_are_forecast_only_after_measurement(tmp_path, monkeypatch):
    """After a measurement, setups with the same own settings are forecast by ratio."""
    seen = LadderForecasts(tmp_path, "cpu", lambda: None, lambda _: None, 100)
    monkeypatch.setattr(
        seen, "_forecast", lambda s: forecast_of_ms(10.0 if s.execution.micro_batch == 1 else 20.0)
    )
    monkeypatch.setattr(seen, "_workload", lambda _: workload())
    own = {"settings": {"pad": False, "data.shards": "{shards}"}}
    bare, padded = setup(), setup(**own)
    before = [MeasuredCompute(bare, 30.0)]
    [told] = seen.forecast([padded], before)
    assert told.reason == forecasts.OWN_SETTINGS
    [told] = seen.forecast(
        [setup(**own, execution={"micro_batch": 2})], [*before, MeasuredCompute(padded, 12.0)]
    )
    assert told.step_ms == pytest.approx(24.0)
    [told] = seen.forecast([setup(settings={"data.shards": "{shards}"})], before)
    assert told.step_ms == pytest.approx(30.0)
    [told] = seen.forecast([setup(environment={"MALLOC_MMAP_MAX_": "0"})], before)
    assert told.reason == forecasts.OWN_SETTINGS


def test_unknown_rates_give_a_reason_instead_of_forecast(tmp_path, monkeypatch):
    seen = LadderForecasts(tmp_path, "cpu", lambda: None, lambda _: None, 100)
    monkeypatch.setattr(seen, "_forecast", lambda _: forecast_of_ms(None))
    shards = setup(loader=LoaderSettings(shards=str(tmp_path / "none")))
    plain, not_made = seen.forecast([setup(), shards], [])
    assert "no such rate" in plain.reason
    assert not_made.step_ms is None


def test_untimed_samples_give_a_reason_instead_of_forecast(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise TrainpaceError("the disk is gone.")

    monkeypatch.setattr(forecasts, "loader_costs", fails)
    found = LadderForecasts(tmp_path, "cpu", lambda: None, lambda _: None, 100).forecast(
        [Setup(task="t.py:t", execution=Execution())], []
    )
    assert "the disk is gone" in found[0].reason


def test_failed_calibration_still_forecasts_from_measured_trials(tmp_path, monkeypatch):
    tries = []

    def too_busy():
        tries.append(1)
        raise TimedOut("calibrating this machine took longer than 340 s.")

    seen = LadderForecasts(tmp_path, "cpu", too_busy, lambda _: None, 100)
    monkeypatch.setattr(seen, "_workload", lambda _: workload())
    known = [MeasuredCompute(setup(execution={"micro_batch": 4, "accumulation": 4}), 80.0)]
    (first,) = seen.forecast([known[0].setup], [])
    assert "340 s" in first.reason
    workers = setup(
        execution={"micro_batch": 4, "accumulation": 4}, loader=LoaderSettings(workers=2)
    )
    larger, other = (
        setup(execution={"micro_batch": 16}),
        setup(execution={"micro_batch": 16, "precision": "amp_bf16"}),
    )
    same, larger, other = seen.forecast([workers, larger, other], known)
    assert same.step_ms == larger.step_ms == pytest.approx(80)
    assert "without a profile" in same.basis
    widths = [f.interval_ms.high / f.interval_ms.low for f in (same, larger)]
    assert 1 < widths[0] < widths[1]
    assert other.step_ms is None  # fp32 does not show the effect of bf16
    assert len(tries) == 1


def test_unmeasured_node_links_are_not_forecast(tmp_path, monkeypatch):
    seen = LadderForecasts(tmp_path, "cpu", lambda: None, lambda _: None, 100)
    monkeypatch.setattr(seen, "_workload", lambda _: workload())
    assert "between the nodes" in seen.forecast([setup(execution={"nnodes": 2})], [])[0].reason


def test_precision_without_rates_scales_by_fp32_ratio(tmp_path, monkeypatch):
    """After one bf16 measurement, another micro-batch is forecast by the gain of fp32, with a note."""
    ms = {16: 10.0, 8: 15.0, 1: 50.0}

    def forecast(setup):
        e = setup.execution
        return forecast_of_ms(ms[e.micro_batch] if e.precision == "fp32" else None)

    seen = LadderForecasts(tmp_path, "cpu", lambda: None, lambda _: None, 100)
    monkeypatch.setattr(seen, "_forecast", forecast)
    half, known = (
        {"precision": "amp_bf16", "micro_batch": 8},
        {"precision": "amp_bf16", "micro_batch": 16},
    )
    found = seen.forecast([setup(execution=half)], [MeasuredCompute(setup(execution=known), 4.0)])[
        0
    ]
    assert found.step_ms == pytest.approx(6.0)
    assert "of fp32" in found.basis
    assert (
        seen.forecast([setup(execution=half)], [MeasuredCompute(setup(), 4.0)])[0].step_ms is None
    )


def test_local_ranks_use_measured_all_reduce(tmp_path, monkeypatch):
    """Two ranks with half the samples each still pay for the all-reduce; a slower all-reduce raises the forecast."""

    def seen(latency_us: float) -> float:
        here = LadderForecasts(tmp_path, "cpu", machine_profile, lambda _: None, 10)
        timed = AllReduce(
            ranks=2,
            backend="gloo",
            sizes_bytes=(4,),
            time_ms=(1.0,),
            latency_us=latency_us,
            bandwidth_gb_per_s=1.0,
        )
        monkeypatch.setattr(forecasts, "measure_allreduce", lambda *_: timed)
        monkeypatch.setattr(here, "_workload", lambda _: workload())
        monkeypatch.setattr(here, "_profile", lambda *_: machine_profile())
        found = here.forecast([setup(execution={"micro_batch": 8, "nproc_per_node": 2})], [])[0]
        assert found.step_ms is not None, found.reason
        assert found.holds(found.step_ms)
        return found.interval_ms.high

    assert seen(1e6) > seen(10) > 0


def test_timed_node_links_are_used_and_only_ddp_overlaps(tmp_path, monkeypatch):
    asked = []

    def forecast(self, execution):
        cluster = self.target.cluster
        asked.append((execution.engine, cluster.nodes, cluster.host_links))
        return forecast_of_ms(100.0 if execution.engine == "ddp" else 150.0)

    links = HostLinks(
        start_us=1.0, message_us=1.0, host_us_per_mib={}, gb_per_s=1.0, link_share=1.0
    )
    seen = LadderForecasts(
        tmp_path, "cpu", lambda: None, lambda _: None, 10, between_nodes=lambda: links
    )
    monkeypatch.setattr(Forecaster, "forecast", forecast)
    monkeypatch.setattr(seen, "_workload", lambda _: workload())
    device = Device(name="c", vendor="", architecture="", kind="cpu")
    monkeypatch.setattr(seen, "_profile", lambda *_: SimpleNamespace(device=device, kernels=None))
    sizes = {"nnodes": 2, "zero_stage": 3}
    ddp, fsdp = seen.forecast([setup(execution={"nnodes": 2}), setup(execution=sizes)], [])
    assert (ddp.step_ms, fsdp.step_ms) == (100.0, 150.0)
    assert ddp.interval_ms.high > 120.0  # what its own forecast reaches
    assert all((nodes, its) == (2, links) for _, nodes, its in asked)
