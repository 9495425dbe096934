"""One look for every verb: what it is about, a line of verdict, a table, plots in characters, notes, and what comes next."""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainpace.report.plots import WIDEST, Points, chart
from trainpace.report.screen import Rows, Screen, holding, screen
from trainpace.report.streams import visible

LOG_WIDTH = 118
LEAST_WIDTH = 20
BAR_WIDTH = 24
"""Characters of a bar that shows a share of the whole, in a column of its own."""
GOOD, BAD, HEAD, BAR = "bold color(28)", "bold color(160)", "bold", "color(32)"
"""Colours with a contrast of at least 3 : 1 against white and against black, which the tests compute."""
_BLANK = "    \n"
_RULE = Box(f"{2 * _BLANK} ── \n{5 * _BLANK}")
_ASCII_RULE = Box(f"{2 * _BLANK} -- \n{5 * _BLANK}", ascii=True)
_UNITS = r"%|µs|us|ms|s|min|h|days|d|B|kB|MB|GB|KiB|MiB|GiB|GB/s|GFLOP/s|TFLOP/s|samples|samples/s|epochs|steps|W|x|M|T|kWh"
_NUMBER_AND_UNIT = re.compile(rf"(?<=[\d.]) (?=(?:{_UNITS})(?![\w/]))")
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_TIED = "\u00a0"  # textwrap does not break a line there
GAP, NARROW_GAP = 3, 2
LONGEST_WORD = 24
"""A longer word (a path, the name of a server) may be broken."""
FEWEST_ROWS, FEWEST_NAMED = 3, 2
"""Rows that stay of a table, and names of a list, however much else there is on a screen."""


class Column(NamedTuple):
    """One of a table's. Where there is no room, the columns of the highest `rank` are left out first; those of rank 0 stay.

    `least`: words may be wrapped, and bars drawn shorter, to this width; 0: a number, which is never wrapped.
    """

    name: str
    rank: int = 0
    least: int = 0

    @property
    def words(self) -> bool:
        """Set flush left, and wrapped where it must be."""
        return self.least > 0


def words(name: str, rank: int = 0, least: int = 10) -> Column:
    return Column(name, rank, least)


class Layout(NamedTuple):
    """The width of every column that is shown, by its index, and the blanks between two."""

    widths: dict[int, int]
    gap: int


class _Visible(Console):
    """Control characters in what it prints are made visible; those of colours, rich's own, are no text. A reader that has seen
    enough is not ours to end the program for, as rich does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def console() -> Console:
    """Colours in a terminal, or where FORCE_COLOR asks for them; a log file gets plain text of a fixed width.

    `FILE.py:two:` is no picture.
    """
    held = screen()
    file = None if held is None else held.end
    if sys.stdout.isatty():
        return _Visible(highlight=False, emoji=False, file=file)
    columns = os.environ.get("COLUMNS", "")
    width = max(LEAST_WIDTH, int(columns)) if columns.isascii() and columns.isdigit() else LOG_WIDTH
    forced = bool(os.environ.get("FORCE_COLOR"))
    return _Visible(
        highlight=False,
        emoji=False,
        no_color=None if forced else True,
        force_terminal=forced,
        width=width,
        file=file,
    )


@contextmanager
def one_screen(details: bool) -> Iterator[None]:
    """What is printed within, on one screen, with a last line that names what `details` shows beside it."""
    if details:
        yield
        return
    with holding(_name_aside):
        yield


def _name_aside(held: Screen) -> None:
    """As many of them as one line has room for."""
    if not held.aside:
        return
    *names, last = held.aside
    line = f"More with --details: {', '.join(names)}{' and ' if names else ''}{last}."
    while names and cell_len(line) > console().width:
        line = f"More with --details: {', '.join(names)} and more."
        names.pop()
    print_lines(line)


def print_verdict(sentence: str, good: bool | None = None) -> None:
    """The answer, in one sentence or two. `good`: yes or no, which the words say too."""
    out = console()
    first, space, rest = wrapped(sentence, out.width).partition(" ")
    text = Text(style=HEAD)
    text.append(first, style="" if good is None else GOOD if good else BAD)
    text.append(space + rest)
    out.print(text, soft_wrap=True)


def print_table(
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[str | float]],
    left: int = 1,
    title: str = "",
    spaced: bool = True,
    keep: Sequence[int] = (),
    filled_only: bool = False,
) -> None:
    """A table of which the columns that there is room for are shown, the others named below.

    Plain names: the first `left` are columns of words, the others of numbers, and all of them stay. Where not even the
    columns that must stay fit, every row becomes a paragraph. `spaced`: with an empty line before it. A cell that is a number is
    a share, which is drawn as a bar. On one screen with much else the last rows are left out, those of the numbers `keep` last.
    `filled_only`: without the columns that are empty in every row.
    """
    made = [
        c if isinstance(c, Column) else Column(c, least=10 if i < left else 0)
        for i, c in enumerate(columns)
    ]
    cells = [
        [cell if isinstance(cell, str) else "█" * round(BAR_WIDTH * cell) for cell in row]
        for row in rows
    ]
    if filled_only:
        filled = [i for i in range(len(made)) if any(row[i] for row in cells)]
        made, cells = [made[i] for i in filled], [[row[i] for i in filled] for row in cells]

    def write(shown: Sequence[int]) -> None:
        _print_rows(made, [cells[i] for i in shown], len(cells) - len(shown), title, spaced)

    held = screen()
    if held is None:
        write(range(len(cells)))
    else:
        held.add(Rows(len(cells), write, keep, max(FEWEST_ROWS, len(keep))))


def _print_rows(
    made: Sequence[Column], cells: Sequence[Sequence[str]], more: int, title: str, spaced: bool
) -> None:
    """`more`: how many rows there are beside these."""
    out = console()
    chosen = layout(made, cells, out.width)
    if spaced:
        out.print()
    if title:
        print_lines(title)
    if chosen is None:
        for row in cells:
            named = [
                (c.name, cell)
                for c, cell in zip(made, row, strict=True)
                if cell and "█" not in cell
            ]
            print_lines("", *(f"{name}: {cell}" if name else cell for name, cell in named))
        _count_more(more, "row")
        out.print()
        return
    with out.capture() as captured:
        out.print(_drawn(out, made, cells, chosen))
    lines = (
        line.rstrip() for line in captured.get().splitlines()
    )  # a log file needs no blanks at the ends
    out.file.write("\n".join([*lines, ""]))
    _count_more(more, "row")
    hidden = [
        c.name
        for i, c in enumerate(made)
        if i not in chosen.widths and c.name and any(row[i] for row in cells)
    ]
    if hidden:
        print_lines(f"Columns hidden for lack of width: {', '.join(hidden)}.")
    out.print()


def print_named(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Names in a column of their own, and what is said of them wrapped beside it, or below where there is no room."""
    named = list(lines)
    if not named:
        return

    def write(shown: Sequence[int]) -> None:
        _print_named(title, [named[i] for i in shown], len(named) - len(shown))

    held = screen()
    if held is None:
        write(range(len(named)))
    else:
        held.add(Rows(len(named), write, (), FEWEST_NAMED))


def _print_named(title: str, named: Sequence[tuple[str, str]], more: int) -> None:
    out = console()
    if title:
        print_lines(title)
    indent, longest = 2 if title else 0, max(len(name) for name, _ in named)
    beside = out.width - indent - longest - NARROW_GAP
    for name, text in named:
        if beside >= LEAST_WIDTH:
            block = wrapped(text, beside, "").replace(
                "\n", "\n" + " " * (indent + longest + NARROW_GAP)
            )
            line = f"{' ' * indent}{name:<{longest + NARROW_GAP}}{block}".rstrip()
        else:
            line = "\n".join(
                wrapped(part, out.width) for part in (name, f"  {text}") if part.strip()
            )
        out.print(Text(line), soft_wrap=True)
    _count_more(more, "line")
    out.print()


def _count_more(more: int, what: str) -> None:
    if more:
        print_lines(f"... {more:,} more {what}{'' if more == 1 else 's'} (--details)")


def _drawn(
    out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: Layout
) -> Table:
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
    tallest = max(
        wrapped(columns[i].name, width, "", 1).count("\n") for i, width in chosen.widths.items()
    )
    for i, width in chosen.widths.items():
        # headers stand on the rule; vertical="bottom" would let the cells sink too
        name = wrapped(columns[i].name, width, "", 1)
        name = "\n" * (tallest - name.count("\n")) + name
        justify: Literal["left", "right"] = "left" if columns[i].words else "right"
        table.add_column(Text(name), justify=justify, width=width, overflow="fold")
    longest = {i: max(cell_len(row[i]) for row in rows) for i in chosen.widths} if rows else {}
    for row in rows:
        table.add_row(
            *(
                _cell(broken(row[i], width), min(1.0, width / (longest[i] or 1)))
                for i, width in chosen.widths.items()
            )
        )
    return table


def _cell(text: str, share: float) -> Text:
    """A bar is drawn shorter where there is less room."""
    if text.strip("█"):
        return Text(text)
    return Text("█" * max(len(text) > 0, round(share * len(text))), style=BAR)


def print_lines(*lines: str) -> None:
    """Plain lines, wrapped to the width with what follows indented; a number stays with its unit."""
    out = console()
    for line in lines:
        out.print(Text(wrapped(line, out.width)), soft_wrap=True)


def print_notes(*lines: str) -> None:
    """Lines, the most important first, of which one screen with much else has the first only."""

    def write(shown: Sequence[int]) -> None:
        print_lines(*(lines[i] for i in shown))
        _count_more(len(lines) - len(shown), "note")

    held = screen()
    if held is None:
        write(range(len(lines)))
    elif lines:
        held.add(Rows(len(lines), write, (), 1))


def print_chart(points: Points, marked: Collection[float], title: str, line: Points = ()) -> None:
    _print_plot(chart(points, marked, title, line, console().width))


def print_bars(title: str, rows: Sequence[tuple[str, float, str, bool]]) -> None:
    _print_plot([title, *bars(rows, console().width)])


def _print_plot(lines: Iterable[str]) -> None:
    """Lines as they are, and an empty one; only a title that is too long is wrapped."""
    out = console()
    for line in (*lines, ""):
        text = Text(line if cell_len(line) <= out.width else wrapped(line, out.width))
        text.highlight_regex("[█●▲\u2801-\u28ff]+", BAR)
        out.print(text, soft_wrap=True)


def print_next(command: str | Sequence[str], why: str = "") -> None:
    """What to do next: a command to be copied, and what it gives. Several words are quoted as a shell needs them."""
    out = console()
    line = command if isinstance(command, str) else shlex.join(command)
    room = out.width - len("Next: ") - len(line)
    text = Text.assemble((f"Next: {line if room >= 0 else _continued(line, out.width)}", HEAD))
    if why and len(why) + 4 <= room:
        text.append(f"  ({why})")
    elif why:
        indent, width = " " * 6, max(LEAST_WIDTH, out.width)
        text.append(
            f"\n{textwrap.fill(why, width, initial_indent=indent, subsequent_indent=indent)}"
        )
    out.print(text, soft_wrap=True)


def wrapped(line: str, width: int, indent: str = "  ", least: int = LEAST_WIDTH) -> str:
    """One line as several of at most `width` characters."""
    tied = _NUMBER_AND_UNIT.sub(_TIED, line)
    own = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(
        tied.strip(),
        max(width, least),
        initial_indent=own,
        subsequent_indent=own + indent,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_TIED, " ")


def broken(text: str, width: int) -> str:
    """Words that are longer than a line, broken behind a dot, a slash, a colon or a hyphen: `self_attn.` and then `v_proj`."""
    words = []
    for word in text.split(" "):
        lines = [""]
        for part in re.split(r"(?<=[-./:])", word) if cell_len(word) > width else [word]:
            if lines[-1] and cell_len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        words.append("\n".join(lines))
    return " ".join(words)


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


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    chosen = layout(columns, rows, console().width)
    return chosen is not None and len(chosen.widths) == len(columns)


def layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Layout | None:
    """The first that fits of: all on one line, headers on two lines, words wrapped, columns left out. None: not even the
    columns of rank 0 fit."""
    widest = [max((cell_len(row[i]) for row in rows), default=1) for i in range(len(columns))]
    natural = [max(1, cell_len(c.name), cells) for c, cells in zip(columns, widest, strict=True)]
    wrapped_head = [
        max(1, _longest_word(c.name), cells) for c, cells in zip(columns, widest, strict=True)
    ]
    least = [_least(c, [row[i] for row in rows], wrapped_head[i]) for i, c in enumerate(columns)]
    shown = list(range(len(columns)))
    while True:
        for gap in (GAP, NARROW_GAP):
            room = width - gap * (len(shown) - 1)
            for wished in (natural, wrapped_head):
                if sum(wished[i] for i in shown) <= room:
                    return Layout(_widened({i: wished[i] for i in shown}, natural, room), gap)
        if sum(least[i] for i in shown) <= room:
            widths = {i: wrapped_head[i] for i in shown}
            while sum(widths.values()) > room:
                widths[max((i for i in shown if widths[i] > least[i]), key=widths.__getitem__)] -= 1
            return Layout(widths, NARROW_GAP)
        droppable = [i for i in shown if columns[i].rank]
        if not droppable:
            return None
        shown.remove(max(droppable, key=lambda i: (columns[i].rank, i)))


def _widened(widths: dict[int, int], natural: Sequence[int], room: int) -> dict[int, int]:
    """Spare width goes to headers that then fit on one line, those that need least first."""
    for i in sorted(widths, key=lambda i: natural[i] - widths[i]):
        if natural[i] - widths[i] <= room - sum(widths.values()):
            widths[i] = natural[i]
    return widths


def _least(column: Column, cells: Sequence[str], natural: int) -> int:
    if not column.words:
        return natural
    longest = max(map(_longest_word, (column.name, *cells)))
    return min(natural, max(column.least, min(longest, LONGEST_WORD)))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def bars(rows: Sequence[tuple[str, float, str, bool]], width: int = 80) -> list[str]:
    """A bar each for (label, value, what is said of it, whether it counts); light where it does not. Lengths are from zero."""
    label = min(max(len(row[0]) for row in rows), max(8, width // 3))
    room = max(8, min(WIDEST, width) - label - max(len(row[2]) for row in rows) - 3)
    longest = max(row[1] for row in rows) or 1.0
    return [
        f"{name if len(name) <= label else f'{name[: label - 1]}…':<{label}}"
        f" {('█' if counts else '░') * max(1, round(room * value / longest))} {end}"
        for name, value, end, counts in rows
    ]
