"""A small plot in characters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainpace.units import format_number

WIDTH, HEIGHT = 72, 14


def chart(points: Sequence[tuple[float, float]], marked: Collection[float], title: str) -> list[str]:
    """Lines of a plot from zero: dots, and an arrow where x is marked."""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x, y in sorted(points, key=lambda point: point[0] in marked):
        column = round((x - left) / max(right - left, 1e-9) * (WIDTH - 1))
        row = HEIGHT - 1 - round(y / top * (HEIGHT - 1))
        cells[row][column] = "▲" if x in marked else "·"
    scale = [format_number(top * (HEIGHT - 1 - i) / (HEIGHT - 1)) for i in range(HEIGHT)]
    width = max(map(len, scale))
    lines = [title]
    lines += [f"{label:>{width}} │{''.join(row).rstrip()}" for label, row in zip(scale, cells, strict=True)]
    lines.append(" " * width + " └" + "─" * WIDTH)
    ends = f"{format_number(left)}{format_number(right):>{WIDTH - len(format_number(left))}}"
    lines.append(" " * (width + 2) + ends)
    return lines
