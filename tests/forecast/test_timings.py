"""Operator times of a calibrated machine: interpolation and extrapolation of micro-benchmarks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import FORM, cpu, forecast, machine_model, operators, timed_products, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.records import from_json, to_json
from trainpace.forecast import MachineModel
from trainpace.forecast.timings import (
    UNTIMED_SD,
    ClassFit,
    Interpolator,
    Process,
    machine_spread,
    machine_times,
    step_factor,
)


def test_uniform_slowdown_extends_to_untimed_sizes():
    known = timed_products(slowdown=1.5)
    other = timed_products(slowdown=1.5, noise=0.0, seed=9)
    process = Process(
        np.log(known.dims[:, :4]),
        np.log(known.seconds / FORM.seconds(known.kind, known.flops, known.bytes)),
        known.fits["gemm"],
    )
    mean, sd = process.at(np.log(other.dims[:, :4]))
    assert np.abs(mean - np.log(1.5)).max() < 0.05
    assert (sd < 0.3).all()


def test_process_interpolates_and_is_uncertain_between_distant_points():
    x = np.linspace(0, 8, 30)[:, None]
    y = np.sin(x[:, 0])
    process = Process(x, y, ClassFit(length_scale=1.0, noise=0.05))
    mean, sd = process.at(np.array([[3.0], [4.1]]))
    assert mean == pytest.approx(np.sin([3.0, 4.1]), abs=0.1)
    sparse = Process(x[[0, -1]], y[[0, -1]], ClassFit(length_scale=1.0, noise=0.05))
    assert sparse.at(np.array([[4.0]]))[1] > 3 * sd[0]
    # the ratio is constant beyond the last size
    assert process.at(np.array([[80.0]]))[0] == pytest.approx(process.at(np.array([[8.0]]))[0])
    assert np.abs(process.left_out()[5:-5]).max() < 0.1


def test_untimed_operator_uses_formula_with_wide_spread():
    o = operators()
    predicted = Interpolator(timed_products(), FORM).predict(o, 4)
    assert predicted.log_sd[2] == UNTIMED_SD
    traffic = (o.read_bytes + o.written_bytes)[2, 0]
    assert predicted.seconds[2] == pytest.approx(traffic / FORM.bytes_per_s + FORM.start_s)
    assert (predicted.log_sd[:2] < UNTIMED_SD / 2).all()


@given(st.integers(1, 60), st.integers(1, 60))
def test_larger_batch_is_not_faster_on_calibrated_machine(a, b):
    run = Execution(micro_batch=min(a, b))
    model, w = machine_model(), workload(m=64, n=256, k=256)
    first, second = (
        forecast(w, replace(run, micro_batch=n), Cluster(device=cpu()), model=model).step.total_ms
        for n in sorted((a, b))
    )
    assert (
        second >= first * 0.97
    )  # the interpolated ratio may dip slightly between micro-benchmarks


def test_measured_networks_correct_step_and_set_interval():
    w, run, cluster = workload(m=64, n=512, k=512), Execution(micro_batch=8), Cluster(device=cpu())
    plain = forecast(w, run, cluster, model=machine_model())
    steady = forecast(w, run, cluster, model=machine_model(step_factors=(1.2, 1.21, 1.19, 1.2)))
    shaky = forecast(w, run, cluster, model=machine_model(step_factors=(0.9, 1.6, 1.2, 1.2)))
    assert steady.step.total_ms == pytest.approx(1.2 * plain.step.total_ms, rel=0.01)
    assert steady.provenance == "calibrated"
    assert "4 random networks" in steady.step_time_interval_ms.basis

    def width(f):
        return f.step_time_interval_ms.high / f.step_time_interval_ms.low

    assert width(steady) < width(shaky)
    assert step_factor(machine_model()) == 1.0


def test_uncertain_operators_widen_interval():
    model = machine_model()
    times, log_sd = machine_times(operators(), 8, model, Interpolator(model.timings, model.form))
    sure = machine_spread(model, times.device_s, np.zeros(3))
    unsure = machine_spread(model, times.device_s, log_sd + 1)
    assert unsure.high > sure.high


def test_fp32_calibration_rejects_16_bit_precision():
    run = Execution(micro_batch=8, precision="bf16")
    found = forecast(workload(), run, Cluster(device=cpu()), model=machine_model())
    assert found.step is None
    assert "fp32 only" in found.reason


def test_machine_model_survives_json_round_trip():
    model = machine_model(step_factors=(1.1, 1.2))
    back = from_json(to_json(model), MachineModel)
    w, run, cluster = workload(), Execution(micro_batch=4), Cluster(device=cpu())
    assert forecast(w, run, cluster, model=back).step == forecast(w, run, cluster, model=model).step


@pytest.mark.parametrize("change", [{"seconds": np.zeros(60)}, {"flops": np.ones(3)}, {"kind": ()}])
def test_invalid_timings_are_rejected(change):
    with pytest.raises(TrainpaceError):
        replace(timed_products(), **change)
