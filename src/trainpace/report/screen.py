"""One screen an answer: what a verb prints is held back until it is whole, and long tables are cut to the lines that are left.

Nothing is held outside of `holding`, as for --details: then everything is printed at once, and whole.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

LINES = 24
"""Of a terminal as it opens."""


class Held(io.StringIO):
    """Text on its way to stdout: as much a terminal as that is, and of the same encoding, so that it looks the same."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout.isatty()


class Rows(NamedTuple):
    """What can be cut: `write` prints the rows of these numbers. Those of `keep` go last, and `least` of them stay."""

    total: int
    write: Callable[[Sequence[int]], None]
    keep: Sequence[int]
    least: int

    def shown(self, n: int) -> list[int]:
        others = (i for i in range(self.total) if i not in self.keep)
        return sorted([*self.keep, *others][:n])


class Screen:
    """`aside`: what is not shown, in the words of those who would have printed it."""

    def __init__(self) -> None:
        self.blocks: list[Held | Rows] = [Held()]
        self.aside: list[str] = []

    @property
    def end(self) -> Held:
        last = self.blocks[-1]
        assert isinstance(last, Held)
        return last

    def add(self, rows: Rows) -> None:
        self.blocks += [rows, Held()]

    def text(self) -> str:
        """All of it, in at most LINES lines where cutting its tables is enough; those that take most are cut first."""
        rows = {i: block for i, block in enumerate(self.blocks) if isinstance(block, Rows)}
        sizes = {i: min(block.total, LINES) for i, block in rows.items()}
        drawn: dict[tuple[int, int], str] = {}
        while True:
            for i, n in sizes.items():
                if (i, n) not in drawn:
                    drawn[i, n] = _written(rows[i], rows[i].shown(n))
            # a last row takes the line that would say that there is one
            best = {
                i: max(
                    m
                    for m in range(n, rows[i].total + 1)
                    if _lines(drawn.get((i, m))) <= _lines(drawn[i, n])
                )
                for i, n in sizes.items()
            }
            parts = (
                b.getvalue() if isinstance(b, Held) else drawn[i, best[i]]
                for i, b in enumerate(self.blocks)
            )
            text = _tidy("".join(parts))
            shrinkable = [i for i, n in sizes.items() if n > min(rows[i].least, rows[i].total)]
            if text.count("\n") <= LINES:
                return text
            if not shrinkable:
                return _tight(text)
            sizes[max(shrinkable, key=lambda i: drawn[i, sizes[i]].count("\n"))] -= 1


_SCREEN: ContextVar[Screen | None] = ContextVar("screen", default=None)


def screen() -> Screen | None:
    """The one that holds what is printed; None where nothing does."""
    return _SCREEN.get()


@contextmanager
def holding(end: Callable[[Screen], None]) -> Iterator[None]:
    """Hold what is printed within, and print it at the end, after what `end` adds; also where an error ends it."""
    made = Screen()
    token = _SCREEN.set(made)
    try:
        yield
        end(made)
    finally:
        _SCREEN.reset(token)
        if text := made.text():
            print(text, end="", flush=True)


@contextmanager
def in_details(name: str) -> Iterator[None]:
    """What is printed within stands under --details alone. `name`: what it is, in a few words that go on in a sentence."""
    held = _SCREEN.get()
    if held is None:
        yield
        return
    shown, held.blocks = held.blocks, [Held()]
    try:
        yield
    finally:
        left_out, held.blocks = held.blocks, shown
        empty = all(isinstance(block, Held) and not block.getvalue().strip() for block in left_out)
        if not empty and name not in held.aside:
            held.aside.append(name)


def is_brief() -> bool:
    """Whether this answer is cut to a screen, for a short form of what stands under --details."""
    return _SCREEN.get() is not None


def _written(rows: Rows, shown: Sequence[int]) -> str:
    token = _SCREEN.set(made := Screen())
    try:
        rows.write(shown)
    finally:
        _SCREEN.reset(token)
    return made.end.getvalue()


def _lines(text: str | None) -> float:
    return math.inf if text is None else text.count("\n")


def _tight(text: str) -> str:
    """Without as many of the empty lines as are too many, the last ones first, and where that is not enough without rules."""
    while text.count("\n") > LINES and "\n\n" in text:
        before, _, after = text.rpartition("\n\n")
        text = f"{before}\n{after}"
    return text if text.count("\n") <= LINES else re.sub(r"(?m)^[─-]{9,}\n", "", text)


def _tidy(text: str) -> str:
    """Without the empty lines that what was left out leaves behind."""
    return re.sub(r"\n{3,}", "\n\n", text.lstrip("\n")).rstrip("\n") + "\n" if text.strip() else ""
