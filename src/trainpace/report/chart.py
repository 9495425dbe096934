"""A small plot in characters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainpace.units import format_number

WIDTH, HEIGHT = 72, 14
Points = Sequence[tuple[float, float]]


def chart(points: Points, marked: Collection[float], title: str, behind: Points = ()) -> list[str]:
    """Lines of a plot from zero: dots, an arrow where x is marked, and rings for a second series behind them."""
    every = [*points, *behind]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    top = max(y for _, y in every) or 1.0
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]

    def put(x: float, y: float, sign: str) -> None:
        column = round((x - left) / max(right - left, 1e-9) * (WIDTH - 1))
        cells[HEIGHT - 1 - round(y / top * (HEIGHT - 1))][column] = sign

    for x, y in behind:
        put(x, y, "○")
    for x, y in sorted(points, key=lambda point: point[0] in marked):
        put(x, y, "▲" if x in marked else "·" if not behind else "●")
    scale = [format_number(top * (HEIGHT - 1 - i) / (HEIGHT - 1)) for i in range(HEIGHT)]
    width = max(map(len, scale))
    lines = [title]
    lines += [f"{label:>{width}} │{''.join(row).rstrip()}" for label, row in zip(scale, cells, strict=True)]
    lines.append(" " * width + " └" + "─" * WIDTH)
    ends = f"{format_number(left)}{format_number(right):>{WIDTH - len(format_number(left))}}"
    lines.append(" " * (width + 2) + ends)
    return lines
