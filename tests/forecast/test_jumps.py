"""Jumps are found where they are, and nowhere else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nouns import workload
from trainpace.execution import Execution
from trainpace.forecast.jumps import find_jumps, jumps_of
from trainpace.hardware import find_device

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


def test_causes_are_named_after_their_module():
    big = workload(m=128, n=4096, k=4096)
    run = Execution(precision="fp32")
    for jump in jumps_of(big, run, find_device("A100"), BATCHES):
        assert jump.after_ms > jump.before_ms
        assert all("layer" in cause or "optimizer" in cause for cause in jump.causes)


def test_few_points_or_an_unable_device_have_none():
    assert find_jumps([1, 2, 3], np.array([1.0, 2.0, 30.0])) == []
    assert jumps_of(workload(), Execution(precision="bf16"), find_device("T4"), BATCHES) == ()
