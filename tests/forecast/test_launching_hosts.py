"""Host overhead follows the CPU rating. An unknown host widens the interval of launch-bound steps."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import cpu, machine_model, operators, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Figure, find_device, find_host, typical_host
from trainpace.core.outcome import STEP_PARTS, StepTime
from trainpace.forecast import CalibratedKernels, Forecaster, Target, fitted_constants
from trainpace.forecast.target import REFERENCE_POINTS, fitted_host_us, host_sensitivity
from trainpace.forecast.uncertainty import PARTS, composed_spread, widened

H100 = Cluster(device=find_device("H100"))
LAUNCHING = Execution(micro_batch=1, precision="bf16")


def forecast(host=None, batch=1, model=None):
    cluster = replace(H100, host=None if host is None else find_host(host))
    return Forecaster(model or workload(), Target(cluster)).forecast(
        replace(LAUNCHING, micro_batch=batch)
    )


def rated(points):
    """Return a host CPU with this rating."""
    return replace(
        find_host("EPYC 7742"), single_thread=Figure(value=points, source="test", kind="measured")
    )


def test_half_as_fast_host_doubles_launch_bound_step():
    target = Target(replace(H100, host=rated(REFERENCE_POINTS / 40)))
    assert target.host_factor == pytest.approx(40)
    fast = Target(replace(H100, host=rated(REFERENCE_POINTS / 20)))
    shared = Forecaster(workload(), fast)
    quick, slow = shared.forecast(LAUNCHING), shared.on(target).forecast(LAUNCHING)
    assert slow == Forecaster(workload(), target).forecast(LAUNCHING)
    work = [f.step.total_ms for f in (quick, slow)]
    assert work[1] / work[0] == pytest.approx(2, rel=0.02)
    assert quick.step.computing_ms == pytest.approx(slow.step.computing_ms)


def test_library_calls_have_separate_host_time():
    c = replace(
        fitted_constants(), host_launch_us=3.0, host_library_us=20.0, host_optimizer_us=40.0
    )
    table = operators()  # two backward matmuls and one optimizer launch
    assert fitted_host_us(table, c).tolist() == [20.0, 40.0, 40.0]
    elementwise = replace(
        table,
        kind=("elementwise", "elementwise", "optimizer"),
        function=("add", "add", "_foreach_add_"),
    )
    assert fitted_host_us(elementwise, c).tolist() == [3.0, 6.0, 40.0]


def test_unnamed_host_is_assumed_typical():
    unnamed, typical = forecast(), forecast(typical_host(H100.device).name)
    assert unnamed.step.total_ms == pytest.approx(typical.step.total_ms, rel=1e-3)
    assert (unnamed.host, unnamed.host_assumed) == (typical.host, True)
    assert not typical.host_assumed


def test_named_host_narrows_launch_bound_interval():
    def width(f):
        return math.log(f.step_time_interval_ms.high / f.step_time_interval_ms.low)

    unnamed, named = forecast(), forecast(typical_host(H100.device).name)
    assert width(named) < width(unnamed)
    large = [forecast(host, batch=4096) for host in (None, "EPYC 7742")]
    assert large[0].step.total_ms == pytest.approx(large[1].step.total_ms, rel=0.01)
    assert width(large[0]) == pytest.approx(width(large[1]), rel=0.01)


def test_widened_interval_adds_variances_on_both_sides():
    spread = composed_spread(np.array([float(part == "launches") for part in PARTS]), H100.device)
    assert widened(spread, 0.0) == spread
    wide = widened(spread, 0.2)
    assert math.log(wide.low) == pytest.approx(
        -math.hypot(math.log(spread.low), 1.645 * 0.2), rel=1e-3
    )
    assert math.log(wide.high) == pytest.approx(
        math.hypot(math.log(spread.high), 1.645 * 0.2), rel=1e-3
    )


def sensitivity(step):
    return float(
        host_sensitivity(
            {name: np.array(getattr(step, name)) for name in STEP_PARTS}, np.array(step.total_ms)
        )
    )


def test_host_sensitivity_equals_slope_of_step_time():
    assert sensitivity(StepTime(forward_ms=5.0)) == 0
    assert sensitivity(StepTime()) == 0
    model = workload()
    slow, slower = (
        Forecaster(model, Target(replace(H100, host=rated(points)))).forecast(
            replace(LAUNCHING, micro_batch=256)
        )
        for points in (2000.0, 1960.0)
    )
    slope = math.log(slower.step.total_ms / slow.step.total_ms) / math.log(2000 / 1960)
    assert sensitivity(slow.step) == pytest.approx(slope, abs=0.1)


def test_calibrated_machine_ignores_named_host():
    target = Target(
        Cluster(device=cpu(), host=find_host("Grace")), CalibratedKernels(machine_model())
    )
    own = Target(Cluster(device=cpu()), CalibratedKernels(machine_model()))
    with_host, without = (Forecaster(workload(), t).forecast(Execution()) for t in (target, own))
    assert with_host.step == without.step
    assert with_host.host == without.host == ""
