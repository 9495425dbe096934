"""One look for every verb: what it is about, a line of verdict, a table, notes, and a command that comes next."""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainpace.report.columns import NARROW_GAP, Column, Layout, layout

LOG_WIDTH = 118
LEAST_WIDTH = 20
BAR_WIDTH = 24
"""Characters of a bar that shows a share of the whole, in a column of its own."""
GOOD, BAD, HEAD, BAR = "bold color(28)", "bold color(160)", "bold", "color(32)"
"""Colours with a contrast of at least 3 : 1 against white and against black, which the tests compute."""
_BLANK = "    \n"
_RULE = Box(f"{2 * _BLANK} ── \n{5 * _BLANK}")
_ASCII_RULE = Box(f"{2 * _BLANK} -- \n{5 * _BLANK}", ascii=True)
_UNITS = (
    r"%|µs|us|ms|s|min|h|days|d|B|kB|MB|GB|KiB|MiB|GiB|GB/s|GFLOP/s|TFLOP/s|samples|samples/s|epochs|steps|W|x|M|T|kWh"
)
_NUMBER_AND_UNIT = re.compile(rf"(?<=[\d.]) (?=(?:{_UNITS})(?![\w/]))")
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_TIED = "\u00a0"  # textwrap does not break a line there


def console() -> Console:
    """Colours in a terminal, or where FORCE_COLOR asks for them; a log file gets plain text of a fixed width.

    `FILE.py:two:` is no picture.
    """
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    columns = os.environ.get("COLUMNS", "")
    width = max(LEAST_WIDTH, int(columns)) if columns.isascii() and columns.isdigit() else LOG_WIDTH
    forced = bool(os.environ.get("FORCE_COLOR"))
    return Console(highlight=False, emoji=False, no_color=None if forced else True, force_terminal=forced, width=width)


def print_head(sentence: str) -> None:
    """What was asked: the model, the machine, the conditions."""
    _print(sentence)


def print_verdict(sentence: str, good: bool | None = None) -> None:
    """The answer, in one sentence or two. `good`: yes or no, which the words say too."""
    out = console()
    first, space, rest = wrapped(sentence, out.width).partition(" ")
    text = Text(style=HEAD)
    text.append(first, style="" if good is None else GOOD if good else BAD)
    text.append(space + rest)
    out.print(text, soft_wrap=True)


def print_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str]], left: int = 1, title: str = "", spaced: bool = True
) -> None:
    """A table of which the columns that there is room for are shown, the others named below.

    Plain names: the first `left` are columns of words, the others of numbers, and all of them stay. Where not even the
    columns that must stay fit, every row becomes a paragraph. `spaced`: with an empty line before it.
    """
    out = console()
    made = [c if isinstance(c, Column) else Column(c, least=10 if i < left else 0) for i, c in enumerate(columns)]
    cells = [list(row) for row in rows]
    chosen = layout(made, cells, out.width)
    if spaced:
        out.print()
    if title:
        print_head(title)
    if chosen is None:
        _print_paragraphs(out, made, cells)
        return
    left_out = [
        c.name for i, c in enumerate(made) if c.name and i not in chosen.widths and any(row[i] for row in cells)
    ]
    _write(out, _drawn(out, made, cells, chosen))
    if left_out:
        print_lines(f"Columns hidden for lack of width: {', '.join(left_out)}.")
    out.print()


def print_named(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Names in a column of their own, and what is said of them wrapped beside it, or below where there is no room."""
    out, said = console(), list(lines)
    if not said:
        return
    if title:
        print_head(title)
    indent, longest = 2 if title else 0, max(len(name) for name, _ in said)
    beside = out.width - indent - longest - NARROW_GAP
    for name, text in said:
        if beside >= LEAST_WIDTH:
            block = wrapped(text, beside, "").replace("\n", "\n" + " " * (indent + longest + NARROW_GAP))
            line = f"{' ' * indent}{name:<{longest + NARROW_GAP}}{block}".rstrip()
        else:
            line = "\n".join(wrapped(part, out.width) for part in (name, f"  {text}") if part.strip())
        out.print(Text(line), soft_wrap=True)
    out.print()


def _write(out: Console, shown: Table) -> None:
    """A log file needs no blanks at the ends of its lines."""
    with out.capture() as captured:
        out.print(shown)
    out.file.write("\n".join([*(line.rstrip() for line in captured.get().splitlines()), ""]))


def _drawn(out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: Layout) -> Table:
    named = any(columns[i].name for i in chosen.widths)
    box = _ASCII_RULE if out.options.ascii_only else _RULE
    table = Table(
        box=box,
        show_edge=False,
        pad_edge=False,
        padding=(0, chosen.gap - 1, 0, 0),
        show_header=named,
        header_style=HEAD,
    )
    tallest = max(wrapped(columns[i].name, width, "", 1).count("\n") for i, width in chosen.widths.items())
    for i, width in chosen.widths.items():
        # headers stand on the rule; vertical="bottom" would let the cells sink too
        name = wrapped(columns[i].name, width, "", 1)
        name = "\n" * (tallest - name.count("\n")) + name
        justify: Literal["left", "right"] = "left" if columns[i].words else "right"
        table.add_column(Text(name), justify=justify, width=width, overflow="fold")
    longest = {i: max(cell_len(row[i]) for row in rows) for i in chosen.widths} if rows else {}
    for row in rows:
        table.add_row(*(_cell(row[i], min(1.0, width / (longest[i] or 1))) for i, width in chosen.widths.items()))
    return table


def _cell(text: str, share: float) -> Text:
    """A bar is drawn shorter where there is less room."""
    if text.strip("█"):
        return Text(text)
    return Text("█" * max(len(text) > 0, round(share * len(text))), style=BAR)


def _print_paragraphs(out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    lines = []
    for row in rows:
        named = [(c.name, cell) for c, cell in zip(columns, row, strict=True) if cell and "█" not in cell]
        lines += ["", *(f"{name}: {cell}" if name else cell for name, cell in named)]
    print_lines(*lines, "")


def print_lines(*lines: str) -> None:
    """Plain lines, wrapped to the width with what follows indented; a number stays with its unit."""
    for line in lines:
        _print(line)


def print_plot(lines: Iterable[str]) -> None:
    """Lines as they are; only a title that is too long is wrapped."""
    out = console()
    for line in lines:
        text = Text(line if cell_len(line) <= out.width else wrapped(line, out.width))
        text.highlight_regex("[█●▲]+", BAR)
        out.print(text, soft_wrap=True)


def print_next(command: str | Sequence[str], why: str = "") -> None:
    """What to do next: a command to be copied, and what it gives. Several words are quoted as a shell needs them."""
    out = console()
    words = command if isinstance(command, str) else shlex.join(command)
    line = f"Next: {words}"
    text = Text()
    text.append("Next: ", style=HEAD)
    if len(line) > out.width:
        words = _continued(words, out.width)
    text.append(words, style=HEAD)
    if why and "\n" not in words and len(line) + len(why) + 4 <= out.width:
        text.append(f"  ({why})")
    elif why:
        text.append(
            f"\n{textwrap.fill(why, max(LEAST_WIDTH, out.width), initial_indent=' ' * 6, subsequent_indent=' ' * 6)}"
        )
    out.print(text, soft_wrap=True)


def wrapped(line: str, width: int, indent: str = "  ", least: int = LEAST_WIDTH) -> str:
    """One line as several of at most `width` characters."""
    tied = _NUMBER_AND_UNIT.sub(_TIED, line)
    own = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        tied.strip(), max(width, least), initial_indent=own, subsequent_indent=own + indent, break_on_hyphens=False,
        break_long_words=True,
    )  # fmt: skip
    return "\n".join(lines).replace(_TIED, " ")


def _continued(command: str, width: int) -> str:
    """With backslashes where it goes on, as a shell reads it; a word that is too long by itself stays whole."""
    words, lines = _SHELL_WORD.findall(command), [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        before = len("Next: ") if len(lines) == 1 else 0
        if len(longer) + before + 2 > width and lines[-1].strip():
            lines.append(f"    {word}")
        else:
            lines[-1] = longer
    return " \\\n".join(lines)


def _print(line: str) -> None:
    out = console()
    out.print(Text(wrapped(line, out.width)), soft_wrap=True)
