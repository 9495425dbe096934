"""Jumps are found where they are, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.execution import Execution
from trainpace.forecast import Forecaster, Target
from trainpace.forecast.explanations import find_jumps
from trainpace.hardware import Cluster, find_device
from trainpace.trace.trace import trace

BATCHES = list(range(1, 71))


@given(st.floats(0.1, 10), st.floats(0, 100))
def test_a_line_has_none(slope, start):
    assert find_jumps(BATCHES, start + slope * np.array(BATCHES)) == []


@given(st.integers(12, 58), st.floats(0.2, 1.0))
def test_a_step_is_found_with_its_size(at, share):
    line = 5 + 2.0 * np.array(BATCHES, dtype=float)
    size = share * line[at]
    line[at:] += size
    ((index, excess),) = find_jumps(BATCHES, line)
    assert index == at
    assert abs(excess - size) < 1e-6


@pytest.mark.parametrize("device", ["P100", "T4", "V100"])
def test_vgg_jumps_after_multiples_of_16_and_resnet_does_not(device):
    """What the Training Cost Calculator's authors measured; docs/jumps.md says why."""
    run, card = Execution(precision="fp32"), find_device(device)
    found = {}
    for name in ("vgg16", "resnet50"):
        found[name] = Forecaster(trace(name), Target(Cluster(device=card))).jumps(run, BATCHES)
    assert [jump.batch for jump in found["vgg16"]] == [17, 33, 49, 65]
    assert found["resnet50"] == ()
    for jump in found["vgg16"]:
        assert 0.02 * jump.before_ms < jump.excess_ms < jump.after_ms - jump.before_ms
        assert jump.causes
        assert all("conv" in cause for cause in jump.causes)


def test_few_points_have_none():
    assert find_jumps([1, 2, 3], np.array([1.0, 2.0, 30.0])) == []
