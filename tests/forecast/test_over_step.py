"""The memory curve over a step agrees with the forecast's peak memory."""

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import forecast, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.records import from_json, to_json
from trainpace.forecast.explanations import memory_over_step
from trainpace.workload import Workload, load_workload

T4 = find_device("T4")


@pytest.fixture(scope="module")
def model():
    return load_workload("mobilenet_v2", ("fp32",))


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("devices", [1, 4])
def test_memory_curve_maximum_equals_peak_memory(model, batch, accumulation, devices):
    e = Execution(
        micro_batch=batch,
        accumulation=accumulation,
        nproc_per_node=devices,
        optimizer=model.optimizer,
    )
    f = forecast(model, e, Cluster(device=T4, devices_per_node=devices))
    curve = memory_over_step(model.form("fp32"), e, f.step, f.memory)
    assert curve.total_gib.max() == pytest.approx(f.memory.allocated_gib, rel=0.02)
    assert (np.diff(curve.at_ms) >= -1e-9).all()
    assert curve.at_ms[0] >= 0
    parts = (
        f.step.forward_ms / accumulation + f.step.backward_ms / accumulation + f.step.optimizer_ms
    )
    assert curve.at_ms[-1] == pytest.approx(parts)
    assert curve.activations_gib[-1] < 0.5 * curve.activations_gib.max()


def test_sharded_execution_has_no_memory_curve(model):
    for change in ({"zero_stage": 2, "nproc_per_node": 4},):
        e = Execution(micro_batch=8, optimizer=model.optimizer, **change)
        f = forecast(model, e, Cluster(device=T4, devices_per_node=4))
        assert memory_over_step(model.form("fp32"), e, f.step, f.memory) is None


def test_trace_without_moments_has_no_memory_curve():
    old = workload()
    e = Execution(micro_batch=8, optimizer=old.optimizer)
    f = forecast(old, e, Cluster(device=T4))
    assert memory_over_step(old.form("fp32"), e, f.step, f.memory) is None


def test_moments_survive_json_round_trip_even_if_absent(model):
    again = from_json(to_json(model), Workload)
    assert np.array_equal(again.forms["fp32"].memory.moments, model.forms["fp32"].memory.moments)
    text = to_json(workload()).replace('"moments":[],', "").replace(',"moments":[]', "")
    assert len(from_json(text, Workload).forms["fp32"].memory.moments) == 0


def test_invalid_moments_are_rejected():
    memory = workload().forms["fp32"].memory
    with pytest.raises(ValueError, match="moments"):
        replace(memory, moments=np.array([[np.nan] * 5]))
    with pytest.raises(ValueError, match="moments"):
        replace(memory, moments=np.ones((2, 3)))
