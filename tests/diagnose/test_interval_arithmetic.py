"""Interval arithmetic compared with counting whole numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainpace.diagnose.traces import Spans, closed, own_us, sweep, union

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(stretches):
    starts = np.array([start for start, _ in stretches], float)
    return starts, starts + np.array([length for _, length in stretches], float)


def covered(stretches, low=0, high=80):
    return {
        moment
        for start, length in stretches
        for moment in range(start, start + length)
        if low <= moment < high
    }


@given(STRETCHES)
def test_union_merges_overlapping_intervals(stretches):
    found = union(*arrays(stretches))
    assert found.total_us() == len(covered(stretches))
    assert (found.start_us[1:] > found.end_us[:-1]).all()
    assert (found.end_us > found.start_us).all()


@given(STRETCHES, STRETCHES, st.integers(0, 40), st.integers(41, 80))
def test_sweep_masks_sets_that_cover_each_interval(one, other, low, high):
    marks = np.array([low + 3.0, 200.0])
    cut = sweep(low, high, [union(*arrays(one)), union(*arrays(other))], marks)
    assert cut.width_us.sum() == high - low
    assert low + 3.0 in [*cut.start_us, float(high)] or low + 3 > high
    for mask, stretches in zip(cut.within, (one, other), strict=True):
        assert cut.width_us[mask].sum() == len(covered(stretches, low, high))
    both, either = cut.within[0] & cut.within[1], cut.within[0] | cut.within[1]
    a, b = covered(one, low, high), covered(other, low, high)
    assert (cut.width_us[both].sum(), cut.width_us[either].sum()) == (len(a & b), len(a | b))


@given(STRETCHES, st.integers(0, 10))
def test_closing_gaps_keeps_only_longer_gaps(stretches, gap):
    before = union(*arrays(stretches))
    after = closed(before, gap)
    assert after.total_us() >= before.total_us()
    assert (after.start_us[1:] - after.end_us[:-1] > gap).all()


def test_own_time_excludes_called_operators():
    spans = Spans(
        np.array([0.0, 1.0, 2.0, 6.0, 12.0]), np.array([10.0, 5.0, 4.0, 9.0, 13.0]), np.arange(5)
    )
    assert own_us(spans).tolist() == [3.0, 2.0, 2.0, 3.0, 1.0]


@given(st.recursive(st.just(()), lambda inner: st.lists(inner, max_size=3), max_leaves=12))
def test_own_times_sum_to_outer_span(tree):
    starts, ends = [], []

    def lay(node, at):
        number = len(starts)
        starts.append(at)
        ends.append(0.0)
        at += 1.0
        for inner in node:
            at = lay(inner, at)
        ends[number] = at + 1.0
        return at + 1.0

    lay(tree, 0.0)
    spans = Spans(np.array(starts), np.array(ends), np.zeros(len(starts), np.int64))
    assert own_us(spans).sum() == ends[0] - starts[0]
