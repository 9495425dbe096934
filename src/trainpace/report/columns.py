"""Which columns of a table there is room for, and how wide they are. Numbers are never cut; words may go on below."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

GAP, NARROW_GAP = 3, 2
LONGEST_WORD = 24
"""A longer word (a path, the name of a server) may be broken."""


class Column(NamedTuple):
    """One of a table's. Where there is no room, the columns of the highest `rank` are left out first; those of rank 0 stay.

    `least`: words may be wrapped to this width; 0: a number, which is never wrapped.
    """

    name: str
    rank: int = 0
    least: int = 0

    @property
    def words(self) -> bool:
        """Set flush left, and wrapped where it must be."""
        return self.least > 0


def words(name: str, rank: int = 0, least: int = 10) -> Column:
    """A column of words."""
    return Column(name, rank, least)


def bar(rank: int = 0) -> Column:
    """A column of bars, which are drawn shorter where there is less room."""
    return Column("", rank, 8)


class Layout(NamedTuple):
    """The width of every column that is shown, by its index, and the blanks between two."""

    widths: dict[int, int]
    gap: int


def layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Layout | None:
    """The first that fits of: all on one line, headers on two lines, words wrapped, columns left out. None: not even the
    columns of rank 0 fit."""
    kept = list(range(len(columns)))
    while True:
        for gap in (GAP, NARROW_GAP):
            room = width - gap * (len(kept) - 1)
            for wished in (_natural, _with_wrapped_header):
                widths = {i: wished(columns[i], [row[i] for row in rows]) for i in kept}
                if sum(widths.values()) <= room:
                    return Layout(_widened(widths, columns, rows, room), gap)
        least = {i: _least(columns[i], [row[i] for row in rows]) for i in kept}
        if sum(least.values()) <= room:
            return Layout(_squeezed(widths, least, room), NARROW_GAP)
        droppable = [i for i in kept if columns[i].rank]
        if not droppable:
            return None
        kept.remove(max(droppable, key=lambda i: (columns[i].rank, i)))


def _widened(
    widths: dict[int, int], columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int
) -> dict[int, int]:
    """Spare width goes to headers that then fit on one line, those that need least first."""
    wished = {i: _natural(columns[i], [row[i] for row in rows]) for i in widths}
    widths, left = dict(widths), room - sum(widths.values())
    for i in sorted(widths, key=lambda i: wished[i] - widths[i]):
        more = wished[i] - widths[i]
        if more <= left:
            widths[i], left = wished[i], left - more
    return widths


def _squeezed(widths: dict[int, int], least: dict[int, int], room: int) -> dict[int, int]:
    widths = dict(widths)
    while sum(widths.values()) > room:
        i = max((i for i in widths if widths[i] > least[i]), key=lambda i: widths[i])
        widths[i] -= 1
    return widths


def _natural(column: Column, cells: Sequence[str]) -> int:
    return max(1, cell_len(column.name), *(cell_len(cell) for cell in cells))


def _with_wrapped_header(column: Column, cells: Sequence[str]) -> int:
    return max(1, _longest_word(column.name), *(cell_len(cell) for cell in cells))


def _least(column: Column, cells: Sequence[str]) -> int:
    natural = _with_wrapped_header(column, cells)
    if not column.words:
        return natural
    longest = max(_longest_word(text) for text in (column.name, *cells))
    return min(natural, max(column.least, min(longest, LONGEST_WORD)))


def _longest_word(text: str) -> int:
    return max((cell_len(word) for word in text.split()), default=0)
