"""Text rendering of sections for a terminal or a log file.

An answer is printed in full, or shortened to one screen. In the short answer, rows of long tables
are cut until at most `LINES` lines are left. The last line names what --details adds.
"""

import functools
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from trainpace.report.charts import plot
from trainpace.report.phrases import listed
from trainpace.report.sections import (
    Column,
    Drawing,
    Headline,
    Lines,
    Next,
    Notes,
    Plot,
    Section,
    Table,
    Verbatim,
)
from trainpace.report.streams import visible

LINES = 24
"""Height of a terminal at its default size."""
LOG_WIDTH = 118
LEAST_WIDTH = 20
BAR_WIDTH = 24
"""Width in characters of a bar for 100%."""
GOOD, BAD, HEAD, BAR = "bold color(28)", "bold color(160)", "bold", "color(32)"
"""Colors with a contrast of at least 3:1 against white and black. The tests compute it."""
_BLANK = "    \n"
_RULE = Box(f"{2 * _BLANK} ── \n{5 * _BLANK}")
_ASCII_RULE = Box(f"{2 * _BLANK} -- \n{5 * _BLANK}", ascii=True)
_UNITS = (
    "%|µs|us|ms|s|min|h|days|d|B|kB|MB|GB|KiB|MiB|GiB|GB/s|GFLOP/s|TFLOP/s|samples|samples/s"
    "|epochs|steps|W|x|M|T|kWh"
)
_NUMBER_AND_UNIT = re.compile(rf"(?<=[\d.]) (?=(?:{_UNITS})(?![\w/]))")
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_TIED = "\u00a0"  # textwrap does not break lines at this character.
GAP, NARROW_GAP = 3, 2
LONGEST_WORD = 24
"""Length in characters above which a word, such as a path, may be broken."""
FEWEST_ROWS = 3
"""Minimum rows of a table. If the screen is still too small, one row stays."""


class Layout(NamedTuple):
    """Width of each visible column by its index, and the gap between columns."""

    widths: dict[int, int]
    gap: int


class _Captured(io.StringIO):
    """Buffer for text on its way to stdout.

    It reports the encoding and terminal status of stdout, so rich draws in the same way.
    """

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.stdout, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.stdout.isatty()


class _Visible(Console):
    """Console that replaces control characters by visible symbols."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def put(self, text: str | Text) -> None:
        self.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)

    def wrap(self, line: str) -> None:
        """Print a line wrapped to the width. A number stays on one line with its unit."""
        self.put(wrapped(line, self.width))


def _console() -> _Visible:
    """Return a console. It has colors for a terminal or FORCE_COLOR.

    Otherwise it is plain and has a fixed width.
    """
    options: dict[str, Any] = {"highlight": False, "file": _Captured()}
    options["emoji"] = False  # Text such as `FILE.py:two:` must not become an emoji.
    if sys.stdout.isatty():
        return _Visible(**options)
    columns = os.environ.get("COLUMNS", "")
    width = max(LEAST_WIDTH, int(columns)) if re.fullmatch("[0-9]+", columns) else LOG_WIDTH
    forced = bool(os.environ.get("FORCE_COLOR"))
    no_color = None if forced else True
    return _Visible(no_color=no_color, force_terminal=forced, width=width, **options)


def show(sections: Iterable[Section], details: bool = True) -> None:
    """Print an answer, either in full or cut to one screen."""
    shown = [s for s in sections if type(s) in _DRAW and s.only != "page" and s.size != 0]
    if details:
        text = _tidy("".join(_drawn(s) for s in shown if s.only != "brief"))
    else:
        text = _one_screen([s for s in shown if s.only != "details"], _named_aside(shown))
    print(text, end="", flush=True)


def _named_aside(shown: Sequence[Section]) -> str:
    """Return the line that names the additions of --details, shortened to one line."""
    *names, last = dict.fromkeys(s.aside for s in shown if s.only == "details" and s.aside) or [""]
    if not last:
        return ""
    line = f"More with --details: {listed([*names, last])}."
    while names and cell_len(line) > _console().width:
        line = f"More with --details: {', '.join(names)} and more."
        names.pop()
    return line


def _fewest(section: Section, least: int) -> int:
    """Return the minimum number of rows of a section that stay on the screen.

    Tables keep `least` rows, or more if they name more rows to keep. Other sections keep one.
    """
    size = section.size or 0
    if isinstance(section, Table):
        return min(size, max(least, len(section.keep)))
    return min(size, 1)


def _one_screen(sections: Sequence[Section], last: str) -> str:
    """Cut tables to some rows, or else to one row each, until all sections fit on the screen."""
    text = _cut(sections, last, FEWEST_ROWS)
    return text if text.count("\n") <= LINES else _cut(sections, last, 1)


def _cut(sections: Sequence[Section], last: str, least: int) -> str:
    """Cut rows of the tallest section until all sections fit or no table has more than `least`."""
    most = {i: s.size or 0 for i, s in enumerate(sections) if isinstance(s, _CUTTABLE)}
    sizes = {i: min(size, LINES) for i, size in most.items()}
    end = _drawn(Lines([last])) if last else ""
    drawn = functools.cache(lambda i, n: _drawn(sections[i], n))

    def height(i: int, n: int) -> int:
        return int(drawn(i, n).count("\n"))

    def best(i: int, n: int) -> int:
        """Show one more row if it takes no more space than the line "1 more row"."""
        return n + 1 if n < most[i] and height(i, n + 1) <= height(i, n) else n

    while True:
        rows = {i: best(i, n) for i, n in sizes.items()}
        text = _tidy("".join(drawn(i, rows.get(i)) for i in range(len(sections))) + end)
        if text.count("\n") <= LINES:
            return text
        shrinkable = [i for i, n in sizes.items() if n > _fewest(sections[i], least)]
        if not shrinkable:
            return _tight(text)
        sizes[max(shrinkable, key=lambda i: height(i, sizes[i]))] -= 1


def _tight(text: str) -> str:
    """Remove blank lines, the last ones first, then the rules of tables, until the text fits."""
    while text.count("\n") > LINES and "\n\n" in text:
        before, _, after = text.rpartition("\n\n")
        text = f"{before}\n{after}"
    return text if text.count("\n") <= LINES else re.sub(r"(?m)^[─-]{9,}\n", "", text)


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text.strip("\n")) + "\n" if text.strip() else ""


def _drawn(section: Section, rows: int | None = None) -> str:
    """Return a section as text, limited to its first `rows` rows."""
    out = _console()
    _DRAW[type(section)](out, section, rows)
    assert isinstance(out.file, _Captured)
    return out.file.getvalue()


def _draw_headline(out: _Visible, part: Headline, _: int | None) -> None:
    first, space, rest = wrapped(part.text, out.width).partition(" ")
    text = Text(style=HEAD)
    text.append(first, style="" if part.good is None else GOOD if part.good else BAD)
    text.append(space + rest)
    out.put(text)


def _draw_lines(out: _Visible, part: Lines | Notes, rows: int | None) -> None:
    for line in part.lines[:rows]:
        out.wrap(line)
    _count_more(out, part.lines, rows, "note")


def _count_more(out: _Visible, every: Sequence[Any], rows: int | None, what: str) -> None:
    more = 0 if rows is None else len(every) - rows
    if more > 0:
        out.wrap(f"... {more:,} more {what}{'' if more == 1 else 's'} (--details)")


def _draw_table(out: _Visible, table: Table, rows: int | None) -> None:
    """Draw the columns that fit, and name the hidden ones below.

    If too few columns fit, each row becomes a paragraph.
    """
    others = [i for i in range(len(table.rows)) if i not in table.keep]
    cells = [_texts(table.rows[i]) for i in sorted([*table.keep, *others][:rows])]
    chosen = layout(table.columns, cells, out.width)
    out.print()
    if table.title:
        out.wrap(table.title)
    if chosen is None:
        _draw_paragraphs(out, table.columns, cells)
        _count_more(out, table.rows, rows, "row")
    else:
        with out.capture() as captured:
            out.print(_grid(out, table.columns, cells, chosen))
        # A log file needs no blanks at the ends of lines.
        out.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
        _count_more(out, table.rows, rows, "row")
        names = (c.name for i, c in enumerate(table.columns) if i not in chosen.widths)
        if hidden := ", ".join(filter(None, names)):
            out.wrap(f"Columns hidden for lack of width: {hidden}.")
    out.print()


def _texts(row: Sequence[str | float]) -> list[str]:
    return [c if isinstance(c, str) else "█" * round(BAR_WIDTH * c) for c in row]


def _draw_paragraphs(
    out: _Visible, columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> None:
    for row in rows:
        out.print()
        for column, cell in zip(columns, row, strict=True):
            if cell and "█" not in cell:
                out.wrap(f"{column.name}: {cell}" if column.name else cell)


def _draw_plot(out: _Visible, part: Plot, _: int | None) -> None:
    """Draw lines without wrapping, followed by a blank line. Only a long title is wrapped."""
    for line in (*plot(part.points, part.marked, part.title, part.line, out.width), ""):
        text = Text(line if cell_len(line) <= out.width else wrapped(line, out.width))
        text.highlight_regex("[●▲\u2801-\u28ff]+", BAR)
        out.put(text)


def _draw_verbatim(out: _Visible, part: Verbatim, _: int | None) -> None:
    out.put(part.text)


def _draw_drawing(out: _Visible, part: Drawing, _: int | None) -> None:
    for text in part.text(out.width):
        out.wrap(text) if isinstance(text, str) else out.put(text)


def _draw_next(out: _Visible, part: Next, _: int | None) -> None:
    """Draw a command that can be copied into a shell, and its purpose."""
    line = part.command if isinstance(part.command, str) else shlex.join(part.command)
    room = out.width - len("Next: ") - len(line)
    text = Text.assemble((f"Next: {line if room >= 0 else _continued(line, out.width)}", HEAD))
    if part.why and len(part.why) + 4 <= room:
        text.append(f"  ({part.why})")
    elif part.why:
        below = textwrap.fill(part.why, max(LEAST_WIDTH, out.width) - 6)
        text.append(f"\n{textwrap.indent(below, ' ' * 6)}")
    out.put(text)


_DRAW: Mapping[type[Section], Callable[[_Visible, Any, int | None], None]] = {
    Headline: _draw_headline,
    Lines: _draw_lines,
    Notes: _draw_lines,
    Table: _draw_table,
    Plot: _draw_plot,
    Verbatim: _draw_verbatim,
    Drawing: _draw_drawing,
    Next: _draw_next,
}
_CUTTABLE = (Table, Notes)


def _grid(
    out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: Layout
) -> RichTable:
    table = RichTable(
        box=_ASCII_RULE if out.options.ascii_only else _RULE,
        show_edge=False,
        pad_edge=False,
        padding=(0, chosen.gap - 1, 0, 0),
        show_header=any(columns[i].name for i in chosen.widths),
        header_style=HEAD,
    )
    names = {i: wrapped(columns[i].name, width, "", 1) for i, width in chosen.widths.items()}
    tallest = max(name.count("\n") for name in names.values())
    for i, width in chosen.widths.items():
        # Headers align to the rule. `vertical="bottom"` would lower the cells too.
        name = Text("\n" * (tallest - names[i].count("\n")) + names[i])
        justify: Literal["left", "right"] = "left" if columns[i].is_text else "right"
        table.add_column(name, justify=justify, width=width, overflow="fold")
    longest = {i: max([1, *(cell_len(row[i]) for row in rows)]) for i in chosen.widths}
    for row in rows:
        cells = (_cell(row[i], width, longest[i]) for i, width in chosen.widths.items())
        table.add_row(*cells)
    return table


def _cell(text: str, width: int, longest: int) -> Text:
    """Return a table cell. Bars are shortened if the longest does not fit."""
    if text.strip("█"):
        return Text(broken(text, width))
    return Text("█" * max(len(text) > 0, round(len(text) * min(1.0, width / longest))), style=BAR)


def wrapped(line: str, width: int, indent: str = "  ", least: int = LEAST_WIDTH) -> str:
    """Wrap a line to at most `width` characters."""
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
    """Break words that are longer than a line, after a dot, slash, colon or hyphen."""
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
    """Break a shell command with backslashes. Long words are not broken."""
    words, lines = _SHELL_WORD.findall(command), [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        before = len("Next: ") if len(lines) == 1 else 0
        if len(longer) + before + 2 > width and lines[-1].strip():
            lines.append(f"    {word}")
        else:
            lines[-1] = longer
    return " \\\n".join(lines)


def layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Layout | None:
    """Choose columns and their widths. None if even the columns of rank 0 do not fit."""
    sizes = [_sizes(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while (found := _fitted({i: sizes[i] for i in shown}, width)) is None:
        droppable = [i for i in shown if columns[i].rank]
        if not droppable:
            return None
        shown.remove(max(droppable, key=lambda i: (columns[i].rank, i)))
    return found


class Sizes(NamedTuple):
    """Widths of a column: full, with a wrapped header, and with wrapped cells too."""

    natural: int
    folded: int
    least: int


def _sizes(column: Column, cells: Sequence[str]) -> Sizes:
    widest = max([1, *map(cell_len, cells)])
    folded = max(widest, _longest_word(column.name))
    longest = max(map(_longest_word, (column.name, *cells)))
    least = min(folded, max(column.least, min(longest, LONGEST_WORD))) if column.is_text else folded
    return Sizes(max(widest, cell_len(column.name)), folded, least)


def _fitted(sizes: Mapping[int, Sizes], width: int) -> Layout | None:
    """Fit columns at full width, or else with wrapped headers, or else with wrapped cells."""
    for gap in (GAP, NARROW_GAP):
        room = width - gap * (len(sizes) - 1)
        for name in ("natural", "folded"):
            widths = {i: int(getattr(size, name)) for i, size in sizes.items()}
            if sum(widths.values()) <= room:
                return Layout(_widened(widths, sizes, room), gap)
    if sum(size.least for size in sizes.values()) > room:
        return None
    while sum(widths.values()) > room:
        widths[max((i for i in widths if widths[i] > sizes[i].least), key=widths.__getitem__)] -= 1
    return Layout(widths, NARROW_GAP)


def _widened(widths: dict[int, int], sizes: Mapping[int, Sizes], room: int) -> dict[int, int]:
    """Use spare width to show headers on one line. Headers that need the least come first."""
    for i in sorted(widths, key=lambda i: sizes[i].natural - widths[i]):
        if sizes[i].natural - widths[i] <= room - sum(widths.values()):
            widths[i] = sizes[i].natural
    return widths


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
