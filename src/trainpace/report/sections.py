"""Building blocks of an answer: headline, lines, tables, notes, charts and next commands.

Each verb has one function that converts its record to sections. The terminal (`terminal.show`),
pages, shared pages (`pages.page`) and notebooks all render these sections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.report.phrases import number, percent

if TYPE_CHECKING:
    from trainpace.report.charts import Picture

Points = Sequence[tuple[float, float]]


class Column(NamedTuple):
    """Column of a table.

    Attributes:
        cell: Attribute of a record to show, such as "offer.device", a format such as "{.batch:,}",
            or a function that returns the cell. Only `tabulate` uses it.
        form: Format of the attribute. By default, numbers are formatted by `number`. Without a
            value, the cell is "-".
        rank: If the terminal is too narrow, columns with the highest rank are hidden first. Rank 0
            is never hidden.
        least: Minimum width of a column of text or bars. 0 means that the column has numbers, which
            are never wrapped.
    """

    name: str
    rank: int = 0
    least: int = 0
    cell: str | Callable[[Any], str | float] = ""
    form: Callable[[Any], Any] | None = None

    @property
    def is_text(self) -> bool:
        """True if the cells are text. Text is aligned left and wrapped if necessary."""
        return self.least > 0

    def of(self, record: Any) -> str | float:
        """Return the cell of a record."""
        if callable(self.cell):
            return self.cell(record)
        if "{" in self.cell:
            return self.cell.format(record)
        for name in self.cell.split("."):
            record = None if record is None else getattr(record, name)
        if self.form is not None:
            return self.form(record)
        return record if isinstance(record, str) else number(record)


def words(
    name: str,
    rank: int = 0,
    least: int = 10,
    cell: str | Callable[[Any], str | float] = "",
    form: Callable[[Any], Any] | None = None,
) -> Column:
    """Return a column of text or bars."""
    return Column(name, rank, least, cell, form)


class Section(Record, kw_only=True):
    """Base class of all sections.

    Attributes:
        only: Limits a section to the short answer ("brief"), to --details and pages ("details"), or
            to pages ("page").
        aside: Name of a section that the short answer omits. It continues "More with --details:
            ...".
    """

    only: Literal["", "brief", "details", "page"] = ""
    aside: str = ""

    @property
    def size(self) -> int | None:
        """Number of rows or lines. Sections with 0 are not drawn.

        None for sections that have neither, such as Headline.
        """
        names = {"rows", "lines"}.intersection(self.__struct_fields__)
        return len(getattr(self, names.pop())) if names else None


class Headline(Section, kw_only=False):
    """Answer in one to three sentences. `good` is True or False if the answer is a yes or a no."""

    text: str
    good: bool | None = None


class Lines(Section, kw_only=False):
    """Sentences, one per line."""

    lines: Sequence[str]


class Notes(Section, kw_only=False):
    """Sentences in order of importance. The short answer may drop all but the first."""

    lines: Sequence[str]


class Verbatim(Section, kw_only=False):
    """Text to copy, such as code or a diff. It is never wrapped."""

    text: str


class Table(Section, kw_only=False):
    """Table. Cells are text, also those with numbers.

    A cell of type float is a share of the whole, from 0 to 1. The terminal draws it as a bar. If
    the table is too long, the rows with indices in `keep` are cut last. `best` has the indices of
    the rows that a page highlights.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | float]]
    title: str = ""
    keep: Collection[int] = ()
    best: Collection[int] = ()


class Plot(Section, kw_only=False):
    """Curve in characters, for terminals.

    It has `points`, a `line`, and a triangle at every x in `marked`.
    """

    title: str
    points: Points
    marked: Collection[float] = ()
    line: Points = ()


class Charts(Section, kw_only=False):
    """Charts for pages and figure files. `draw` is called only if one of these was requested."""

    draw: Callable[[], Sequence[Picture | None]]


class Drawing(Section, kw_only=False):
    """Drawing such as a timeline: `html` for pages, and `text` for terminals of a given width.

    Both are called only when needed. `style` names the style sheet that the HTML needs.
    """

    html: Callable[[], Any]
    text: Callable[[int], Iterable[Any]]
    style: str = ""


class Next(Section, kw_only=False):
    """Command to run next, as a list of words or as a line, and the reason to run it."""

    command: str | Sequence[str]
    why: str = ""


S = TypeVar("S", bound=Section)


def details(aside: str, *sections: S) -> Iterator[S]:
    """Limit sections to --details and pages."""
    return (replace(section, only="details", aside=aside) for section in sections)


def brief(*sections: S) -> Iterator[S]:
    """Limit sections to the short answer."""
    return (replace(section, only="brief") for section in sections)


def pictures_of(sections: Iterable[Section]) -> list[Picture | None]:
    """Return every chart of an answer, in the order of the sections."""
    return [chart for part in sections if isinstance(part, Charts) for chart in part.draw()]


def say(*texts: object) -> Lines:
    """Return the texts as lines, without those that are empty, None or False."""
    return Lines([str(text) for text in texts if text])


def tabulate(
    records: Iterable[Any],
    columns: Iterable[Column | Literal[False]],
    filled: bool = False,
    **options: Any,
) -> Table:
    """Return a table with one row per record and the cells of its columns.

    Args:
        records: One value per row.
        columns: The columns with their `cell`. A column that is False is left out.
        filled: True to leave out columns that are empty in every row.
        options: Other fields of the table.
    """
    shown = [column for column in columns if column]
    rows = [[column.of(record) for column in shown] for record in records]
    return (filled_only if filled else Table)(shown, rows, **options)


def named(title: str, items: Iterable[tuple[str, str]], **options: Any) -> Table:
    """Return a table of names, each with a sentence or value."""
    return Table([words("", least=8), words("", least=20)], list(items), title, **options)


def shares_table(
    name: str,
    parts: Iterable[Sequence[Any]],
    whole: float,
    *more: Column,
    unit: str = "ms",
    form: Callable[[float], str] = number,
    digits: int = 0,
    least: float = 0.0,
    **options: Any,
) -> Table:
    """Return a table of parts with their values, shares of the whole, and bars.

    Args:
        name: Heading of the parts' names.
        parts: Name and value of each part, and what `more` needs.
        whole: The value of the whole.
        more: Columns before the bars. Their cells get a part.
        unit: Heading of the values.
        form: Format of a value.
        digits: Decimal digits of a share.
        least: Minimum share of a part that is shown.
        options: Other fields of the table.
    """
    columns = (
        words(name, least=18, cell=lambda part: part[0]),
        Column(unit, cell=lambda part: form(part[1])),
        Column("share", cell=lambda part: percent(part[1] / whole, digits=digits)),
        *more,
        words("", 1, 8, lambda part: part[1] / whole),
    )
    return tabulate([part for part in parts if part[1] >= least * whole], columns, **options)


def filled_only(
    columns: Sequence[Column], rows: Sequence[Sequence[str | float]], **options: Any
) -> Table:
    """Return a table without the columns that are empty or unknown in every row."""
    shown = [i for i in range(len(columns)) if any(row[i] not in ("", "-", 0.0) for row in rows)]
    return Table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows], **options)
