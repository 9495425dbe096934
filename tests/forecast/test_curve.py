"""A curve over batch sizes gives the numbers that `forecast` gives one by one."""

import pytest
from msgspec.structs import replace

from nouns import stacked, workload
from trainpace.execution import Execution
from trainpace.forecast import forecast
from trainpace.forecast.curve import batch_curve
from trainpace.hardware import Cluster, find_device


def test_the_curve_is_the_forecast_of_every_batch():
    cluster = Cluster(device=find_device("A100"), devices_per_node=4)
    batches = [1, 2, 7, 31, 32, 33, 64, 500]
    for model in (workload(), stacked()):
        run = Execution(nproc_per_node=4, precision="bf16", optimizer=model.optimizer, zero_stage=1)
        curve = batch_curve(model, run, cluster, batches)
        for i, batch in enumerate(batches):
            one = forecast(model, replace(run, micro_batch=batch), cluster)
            assert curve.step_ms[i] == pytest.approx(one.step.total_ms)
            assert curve.low_ms[i] == pytest.approx(one.step_time_interval_ms.low)
            assert curve.high_ms[i] == pytest.approx(one.step_time_interval_ms.high)
            assert curve.allocated_gib[i] == pytest.approx(one.memory.allocated_gib)
            assert curve.fits[i] == one.fits


def test_a_curve_that_cannot_be_says_why():
    old = find_device("P100")
    assert "FP8" in batch_curve(workload(), Execution(precision="fp8"), Cluster(device=old), [1, 2])
