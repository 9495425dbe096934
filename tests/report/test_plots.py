"""Plots in characters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.report.charts import tick_step
from trainpace.report.terminal import HEIGHT, bars, chart

points = st.dictionaries(st.integers(1, 512), st.floats(0.001, 1e5), min_size=1, max_size=80).map(
    lambda d: sorted(d.items())
)
widths = st.integers(60, 200)


@given(points, points, widths)
def test_a_plot_fits_and_shows_both_series(measured, foreseen, width):
    marked = {measured[-1][0]}
    lines = chart(measured, marked, "title", foreseen, width)
    assert all(len(line) <= width for line in lines[1:])
    assert HEIGHT - 3 <= len(lines) - 3 <= HEIGHT + 3
    scale = [i for i, line in enumerate(lines) if "┤" in line or "└" in line]
    assert len({below - above for above, below in itertools.pairwise(scale)}) == 1, "ticks are evenly far apart"
    body = "\n".join(lines[1:-1])
    assert body.count("▲") == 1
    assert f"▲{measured[-1][0]}" in lines[-1]
    # neighbours may share a column with the mark
    assert "●" in body or measured[-1][0] - measured[0][0] < 20
    assert body.count("○") <= len(foreseen)


def test_what_is_twice_as_high_is_drawn_twice_as_high():
    lines = chart([(1, 50.0), (2, 100.0)], (), "", (), 60)
    zero = next(i for i, line in enumerate(lines) if "└" in line)
    high, low = (zero - i for i, line in enumerate(lines) if "●" in line)
    assert high == pytest.approx(2 * low, abs=1)
    assert lines[1].startswith("100 ┤")


@given(st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_round_and_few(span, most):
    step = tick_step(span, most)
    assert float(f"{step:e}".partition("e")[0]) in (1.0, 2.0, 5.0)
    assert span / step <= most + 1e-6
    assert span / step > most / 2.6


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(40, 200))
def test_bars_are_as_long_as_their_values(values, width):
    rows = [(f"rung {i}", v, f"{v:.2f}x", i % 2 == 0) for i, v in enumerate(values)]
    lines = bars(rows, width)
    assert all(len(line) <= width for line in lines)
    lengths = [line.count("█") + line.count("░") for line in lines]
    for value, length in zip(values, lengths, strict=True):
        assert length == pytest.approx(max(1, max(lengths) * value / max(values)), abs=0.51)
