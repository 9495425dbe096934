"""Plots drawn with characters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.report.charts import PLOT_ROWS, plot, tick_step
from trainpace.report.streams import plain

points = st.dictionaries(st.integers(1, 512), st.floats(0.001, 1e5), min_size=1, max_size=80).map(
    lambda d: sorted(d.items())
)
widths = st.integers(60, 200)


def dots(body):
    """Return (column, height) of every braille dot of a plot, counted from below."""
    rows = [line[line.index(edge) + 1 :] for line in body for edge in "│┤└" if edge in line][::-1]
    places = {
        0x40: (0, 0),
        0x04: (0, 1),
        0x02: (0, 2),
        0x01: (0, 3),
        0x80: (1, 0),
        0x20: (1, 1),
        0x10: (1, 2),
        0x08: (1, 3),
    }
    return [
        (2 * column + across, 4 * row + up)
        for row, text in enumerate(rows)
        for column, c in enumerate(text)
        if "\u2800" < c <= "\u28ff"
        for bit, (across, up) in places.items()
        if (ord(c) - 0x2800) & bit
    ]


@given(points, points, widths)
def test_plot_fits_width_and_shows_both_series(measured, foreseen, width):
    marked = {measured[-1][0]}
    lines = plot(measured, marked, "title", foreseen, width)
    assert all(len(line) <= width for line in lines[1:])
    assert PLOT_ROWS - 3 <= len(lines) - 3 <= PLOT_ROWS + 3
    scale = [i for i, line in enumerate(lines) if "┤" in line or "└" in line]
    assert len({below - above for above, below in itertools.pairwise(scale)}) == 1, (
        "ticks are evenly far apart"
    )
    body = "\n".join(lines[1:-1])
    assert 1 <= body.count("▲") <= 2  # once on either series
    assert f"▲{measured[-1][0]}" in lines[-1]
    # Neighbors may share a column with the mark.
    assert "●" in body or measured[-1][0] - measured[0][0] < 20
    assert body.count("●") < len(measured)


def test_plot_height_is_proportional_to_value():
    lines = plot([(1, 50.0), (2, 100.0)], (), "", (), 60)
    zero = next(i for i, line in enumerate(lines) if "└" in line)
    high, low = (zero - i for i, line in enumerate(lines) if "●" in line)
    assert high == pytest.approx(2 * low, abs=1)
    assert lines[1].startswith("100 ┤")


def test_plotted_curve_is_exact_and_continuous():
    drawn = dots(plot((), (), "", [(x, 10.0 * x) for x in range(1, 11)], 60))
    columns = sorted({x for x, _ in drawn})
    assert columns == list(range(columns[0], columns[-1] + 1))
    lowest, highest = min(y for _, y in drawn), max(y for _, y in drawn)
    assert (highest - 1.5) / (lowest - 1.5) == pytest.approx(10, rel=0.15)
    steps = {
        max(y for x, y in drawn if x == at) - max(y for x, y in drawn if x == at - 1)
        for at in columns[1:]
    }
    assert steps <= {0, 1}, "a straight line has no stairs of a whole row"


def test_jump_is_drawn_as_vertical_line():
    drawn = dots(plot((), {5}, "", [(x, 10.0 if x < 5 else 40.0) for x in range(1, 9)], 60))
    tall = [
        x
        for x in {x for x, _ in drawn}
        if max(y for a, y in drawn if a == x) - min(y for a, y in drawn if a == x) > 1
    ]
    assert tall
    assert {y for x, y in drawn if x == 0} != {y for x, y in drawn if x == max(a for a, _ in drawn)}


def test_curve_is_drawn_in_ascii_without_braille():
    lines = plot((), {8}, "", [(x, 10.0 * x) for x in range(1, 11)], 60)
    drawn = [plain(line) for line in lines]
    assert all(line.isascii() for line in drawn)
    assert "?" not in "".join(drawn)
    assert [len(line) for line in drawn] == [len(line) for line in lines]
    assert sum(line.count(".") + line.count(":") + line.count("'") for line in drawn) > 40


@given(st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_round_and_few(span, most):
    step = tick_step(span, most)
    assert float(f"{step:e}".partition("e")[0]) in (1.0, 2.0, 5.0)
    assert span / step <= most + 1e-6
    assert span / step > most / 2.6
