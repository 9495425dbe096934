"""Small plots in characters: a curve over the batch size, and bars. Legible in a log file; nothing hangs on colour."""

import math
from collections.abc import Collection, Iterator, Sequence

from trainpace.units import format_number

HEIGHT, WIDEST, LEAST = 13, 92, 24
"""Rows, about: as many as give every tick of the scale the same distance."""
MOST_TICKS = 6
Points = Sequence[tuple[float, float]]


def chart(points: Points, marked: Collection[float], title: str, behind: Points = (), width: int = 80) -> list[str]:
    """Lines of a plot from zero, `width` columns wide at most: dots, a triangle where x is marked (and x below the axis), and
    rings for a second series behind them."""
    every = [*points, *behind]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    step = tick_step(max(y for _, y in every) or 1.0, MOST_TICKS - 1)
    ticks = math.ceil((max(y for _, y in every) or step) / step - 1e-9)
    top = ticks * step
    rows = ticks * max(1, round((HEIGHT - 1) / ticks))
    labels = {i * rows // ticks: format_number(i * step) for i in range(ticks + 1)}
    margin = max(map(len, labels.values()))
    columns = max(LEAST, min(WIDEST, width) - margin - 2)
    cells = [[" "] * columns for _ in range(rows + 1)]

    def column(x: float) -> int:
        return round((x - left) / max(right - left, 1e-9) * (columns - 1))

    def put(x: float, y: float, sign: str) -> None:
        cells[round(y / top * rows)][column(x)] = sign

    for x, y in behind:
        put(x, y, "○")
    for x, y in sorted(points, key=lambda point: point[0] in marked):
        put(x, y, "▲" if x in marked else "●")
    lines = [title]
    for i in reversed(range(rows + 1)):
        edge = "└" if i == 0 else "┤" if i in labels else "│"
        body = "".join(cells[i])
        lines.append(f"{labels.get(i, ''):>{margin}} {edge}{body.replace(' ', '─') if i == 0 else body.rstrip()}")
    named = {column(x): format_number(x) for x in _ticks(left, right)}
    lines.append(" " * (margin + 2) + _beside(named, columns, 0.5))
    jumps = {column(x): f"▲{format_number(x)}" for x in sorted(marked) if left <= x <= right}
    return [*lines, " " * (margin + 2) + _beside(jumps, columns, 0.0)] if jumps else lines


def bars(rows: Sequence[tuple[str, float, str, bool]], width: int = 80) -> list[str]:
    """A bar each for (label, value, what is said of it, whether it counts); light where it does not. Lengths are from zero."""
    label = min(max(len(row[0]) for row in rows), max(8, width // 3))
    room = max(8, min(WIDEST, width) - label - max(len(row[2]) for row in rows) - 3)
    longest = max(row[1] for row in rows) or 1.0
    return [
        f"{_cut(name, label):<{label}} {('█' if counts else '░') * max(1, round(room * value / longest))} {said}"
        for name, value, said, counts in rows
    ]


def tick_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most `most` of them make the span."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1.0, 2.0, 5.0, 10.0) if times * power >= rough * (1 - 1e-9))


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


def _beside(named: dict[int, str], columns: int, anchor: float) -> str:
    """Labels at their columns (`anchor` 0: beginning there; 0.5: centred), the first and the last always; those that would
    touch another are left out."""
    line, at = [" "] * columns, sorted(named)
    for i in dict.fromkeys([*at[:1], *at[-1:], *at]):
        text = named[i]
        start = max(0, min(i - int(anchor * (len(text) - 1)), columns - len(text)))
        if all(c == " " for c in line[max(0, start - 1) : start + len(text) + 1]):
            line[start : start + len(text)] = text
    return "".join(line).rstrip()


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"
