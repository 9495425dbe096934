"""Tests of estimates for all steps from a few counted ones."""

import pytest

from trainpace.watch.inside.event_log import PARTS, Step
from trainpace.watch.ranks import Counted


def steps(*micro_steps, own_ns=100):
    parts = tuple(own_ns if part == "other" else 0 for part in PARTS)
    return [
        Step(0, micro, number, 0, 1, 0, 0.0, 0.0, parts) for number, micro in enumerate(micro_steps)
    ]


def test_typical_value_ignores_disturbed_steps():
    notes = {
        1: {"operators": 10, "large_ns": 12},
        2: {"operators": 10, "large_ns": 800},
        3: {"operators": 99, "large_ns": 900},
    }
    counted = Counted(notes, steps(1, 1, 1, 1, 1))
    assert (counted.typical("operators"), counted.typical("large_ns")) == (10, 12)


def test_typical_value_weights_steps_by_their_backward_passes():
    """With ten operators per backward pass and 1, 1 and 4 passes, a step has 20 operators."""
    every = steps(4, *[1, 1, 4] * 10)
    for numbers in ((1, 2), (2, 3), (1, 2, 3), (3, 4, 5, 6)):
        counted = Counted({n: {"operators": 10 * every[n].micro_steps} for n in numbers}, every)
        assert counted.typical("operators") == pytest.approx(20, abs=1)


def test_values_are_zero_without_counted_steps():
    assert Counted({}, steps(1, 1)).typical("operators") == 0
    assert Counted({}, steps(1, 1)).outside(steps(1)) == 0


@pytest.mark.parametrize(
    ("counted_own", "outside_ns", "share"),
    [(100, 0, 0.0), (700, 600, 0.0), (660, 600, 0.4), (60, 30, 0.3)],
)
def test_outside_share_corrects_for_counting_overhead(counted_own, outside_ns, share):
    """Own code takes 100 ns. Counting makes operators several times slower but not the rest."""
    every = steps(1, 1, 1, own_ns=counted_own)
    counted = Counted({n: {"outside_ns": outside_ns} for n in (1, 2)}, every)
    assert counted.outside(steps(1, 1, own_ns=100)) == pytest.approx(share)


def test_typical_value_comes_from_the_median_step():
    notes = {n: {"flops": 1e6 * n, "large_ns": 10 * n} for n in (1, 2, 3)}
    assert Counted(notes, steps(1, 1, 1, 1)).typical("large_ns") == 20


def test_short_accumulation_at_the_epoch_end_is_ignored():
    counted = Counted({1: {"large_ns": 10}, 2: {"large_ns": 900}}, steps(4, 4, 4, 4, 1, 4, 4, 4))
    assert counted.typical("large_ns") == 10
