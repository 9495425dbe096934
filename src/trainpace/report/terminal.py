"""One look for every verb: a table, a line of verdict, a line of what next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LOG_WIDTH = 118


def console() -> Console:
    """Colours in a terminal only; a log file gets plain text of a fixed width. `FILE.py:two:` is no picture."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    return Console(highlight=False, emoji=False, no_color=True, width=int(os.environ.get("COLUMNS", LOG_WIDTH)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, title: str = "") -> None:
    """A table whose first `left` columns are words and whose others are numbers."""
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_lines(*lines: str) -> None:
    """Plain lines, wrapped to the width."""
    for line in lines:
        console().print(line, markup=False)
