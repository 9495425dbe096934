"""What a few counted steps say of all steps."""

import pytest

from trainpace.watch.inside.event_log import PARTS, Step
from trainpace.watch.ranks import Counted


def steps(*micro_steps, own_ns=100):
    parts = tuple(own_ns if part == "other" else 0 for part in PARTS)
    return [
        Step(0, micro, number, 0, 1, 0, 0.0, 0.0, parts) for number, micro in enumerate(micro_steps)
    ]


def test_where_steps_are_alike_those_that_were_disturbed_do_not_count():
    notes = {
        1: {"operators": 10, "large_ns": 12},
        2: {"operators": 10, "large_ns": 800},
        3: {"operators": 99, "large_ns": 900},
    }
    counted = Counted(notes, steps(1, 1, 1, 1, 1))
    assert (counted.typical("operators"), counted.typical("large_ns")) == (10, 12)


def test_where_every_third_step_updates_more_all_steps_count_by_their_backward_passes():
    """Of ten operators a backward pass, in steps of 1, 1 and 4 of them: 20 a step, whichever steps were counted."""
    every = steps(4, *[1, 1, 4] * 10)
    for numbers in ((1, 2), (2, 3), (1, 2, 3), (3, 4, 5, 6)):
        counted = Counted({n: {"operators": 10 * every[n].micro_steps} for n in numbers}, every)
        assert counted.typical("operators") == pytest.approx(20, abs=1)


def test_nothing_counted_is_nothing():
    assert Counted({}, steps(1, 1)).typical("operators") == 0
    assert Counted({}, steps(1, 1)).outside(steps(1)) == 0


@pytest.mark.parametrize(
    ("counted_own", "outside_ns", "share"),
    [(100, 0, 0.0), (700, 600, 0.0), (660, 600, 0.4), (60, 30, 0.3)],
)
def test_the_share_of_own_code_that_gradients_flow_through(counted_own, outside_ns, share):
    """Of 100 ns as long as nobody counts, which makes operators several times as long and the rest not."""
    every = steps(1, 1, 1, own_ns=counted_own)
    counted = Counted({n: {"outside_ns": outside_ns} for n in (1, 2)}, every)
    assert counted.outside(steps(1, 1, own_ns=100)) == pytest.approx(share)


def test_steps_of_different_sizes_count_with_the_middle_one():
    notes = {n: {"flops": 1e6 * n, "large_ns": 10 * n} for n in (1, 2, 3)}
    assert Counted(notes, steps(1, 1, 1, 1)).typical("large_ns") == 20


def test_one_short_accumulation_at_an_epochs_end_changes_nothing():
    counted = Counted({1: {"large_ns": 10}, 2: {"large_ns": 900}}, steps(4, 4, 4, 4, 1, 4, 4, 4))
    assert counted.typical("large_ns") == 10
