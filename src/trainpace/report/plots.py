"""A plot in characters: a curve of braille dots, eight to a cell, with points and jumps over it.

An encoding without them gets ASCII through `streams.plain`, one character for one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from trainpace.core.units import format_number
from trainpace.report.charts import tick_step

HEIGHT, WIDEST, LEAST = 13, 92, 24
"""Rows, about: as many as give every tick of the scale the same distance."""
MOST_TICKS = 6
ACROSS, UP = 2, 4
"""Dots of a cell."""
_BITS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Of a braille character, by column and from below."""
Points = Sequence[tuple[float, float]]


def chart(
    points: Points, marked: Collection[float], title: str, line: Points = (), width: int = 80
) -> list[str]:
    """Lines of a plot from zero, `width` columns wide at most: a curve through `line`, `points` over it, and a triangle where x
    is marked (and x below the axis)."""
    every = [*points, *line]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    step = tick_step(max(y for _, y in every) or 1.0, MOST_TICKS - 1)
    ticks = math.ceil((max(y for _, y in every) or step) / step - 1e-9)
    top = ticks * step
    rows = ticks * max(1, round((HEIGHT - 1) / ticks))
    labels = {i * rows // ticks: format_number(i * step) for i in range(ticks + 1)}
    margin = max(map(len, labels.values()))
    columns = max(LEAST, min(WIDEST, width) - margin - 2)
    cells = _curve(
        [((x - left) / max(right - left, 1e-9), y / top) for x, y in sorted(line)], columns, rows
    )

    def column(x: float) -> int:
        return round((x - left) / max(right - left, 1e-9) * (columns - 1))

    for x, y in sorted(
        [*points, *((x, y) for x, y in line if x in marked)], key=lambda point: point[0] in marked
    ):
        cells[round(y / top * rows)][column(x)] = "▲" if x in marked else "●"
    lines = [title]
    for i in reversed(range(rows + 1)):
        edge = "└" if i == 0 else "┤" if i in labels else "│"
        body = "".join(cells[i])
        lines.append(
            f"{labels.get(i, ''):>{margin}}"
            f" {edge}{body.replace(' ', '─') if i == 0 else body.rstrip()}"
        )
    named = {column(x): format_number(x) for x in _ticks(left, right)}
    lines.append(" " * (margin + 2) + along(named, columns, 0.5))
    jumps = {column(x): f"▲{format_number(x)}" for x in sorted(marked) if left <= x <= right}
    return [*lines, " " * (margin + 2) + along(jumps, columns, 0.0)] if jumps else lines


def _curve(points: Points, columns: int, rows: int) -> list[list[str]]:
    """Rows of cells, the lowest first, with a curve through `points` (shares of width and height) in braille dots.

    A share of the height is drawn where a mark at it would stand: in the middle of its cell.
    """
    dots: set[tuple[int, int]] = set()
    wide = ACROSS * (columns - 1) + 1
    at = [(round(x * (wide - 1)), y * UP * rows + (UP - 1) / 2) for x, y in points]
    for (x0, y0), (x1, y1) in itertools.pairwise(at if len(at) != 1 else at * 2):
        last = round(y0)
        for x in range(x0, x1 + 1):
            y = round(y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1))
            dots |= {(x, between) for between in range(min(last + 1, y), max(last - 1, y) + 1)} | {
                (x, y)
            }
            last = y
    cells = [[" "] * columns for _ in range(rows + 1)]
    braille: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = min(y // UP, rows), x // ACROSS
        braille[cell] = braille.get(cell, 0) | _BITS[x % ACROSS][y % UP]
    for (row, column), bits in braille.items():
        cells[row][column] = chr(0x2800 + bits)
    return cells


def _ticks(left: float, right: float) -> Iterator[float]:
    """The ends, and round numbers between them."""
    yield left
    if right > left:
        step = max(1.0, tick_step(right - left, MOST_TICKS))
        x = math.ceil(left / step + 0.5) * step
        while x < right - step / 2:
            yield x
            x += step
        yield right


def along(named: dict[int, str], columns: int, anchor: float) -> str:
    """Labels at their columns (`anchor` 0: beginning there; 0.5: centred), the first and the last always; those that would
    touch another are left out."""
    line, at = [" "] * columns, sorted(named)
    for i in dict.fromkeys([*at[:1], *at[-1:], *at]):
        text = named[i]
        start = max(0, min(i - int(anchor * (len(text) - 1)), columns - len(text)))
        if all(c == " " for c in line[max(0, start - 1) : start + len(text) + 1]):
            line[start : start + len(text)] = text
    return "".join(line).rstrip()
