"""HTML rendering of sections, by Jinja templates that escape everything.

A page file contains its scripts and styles. `report/vendor/` holds third-party releases.
`report/assets/` and the palette are our own. A server serves `SCRIPTS` and `STYLES` by name
instead, so its pages need no inline script.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainpace.core.records import to_jsonable
from trainpace.forecast import alike
from trainpace.report.charts import (
    TEXTURES,
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    HeatMap,
    Picture,
    css_variables,
)
from trainpace.report.phrases import duration, interval, number, percent, sentence, usd, when
from trainpace.report.sections import Charts, Drawing, Named, Next, Section, Table
from trainpace.report.streams import visible

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


NONE = "–"
"""Text for an unknown value."""
SCRIPTS = ("uPlot.iife.min.js", "charts.js")
"""Scripts of a page with charts, in loading order."""
STYLES = ("uPlot.min.css", "page.css")
_VENDORED = ("uPlot.iife.min.js", "uPlot.min.css")


def environment(*packages: str) -> jinja2.Environment:
    """Return a Jinja environment with the templates of `packages`, then those of this package."""
    import jinja2

    loaders = [jinja2.PackageLoader(package) for package in (*packages, "trainpace.report")]
    env = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
    )
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    formats: dict[str, Any] = {
        "number": number,
        "duration": duration,
        "usd": usd,
        "per_cent": percent,
        "range": interval,
        "when": when,
    }
    env.filters.update(
        {name: functools.partial(function, none=NONE) for name, function in formats.items()}
    )
    env.filters.update(
        percent=_percent,
        share=lambda part: f"{100 * part:.3f}%",
        record=to_jsonable,
        sentence=sentence,
    )
    env.filters["alike"] = alike
    env.globals.update(tables_of=tables_of, duration=duration, usd=usd, textures=TEXTURES)
    return env


def _percent(value: float | None, digits: int = 1, sign: bool = False) -> str:
    return NONE if value is None else f"{value:{'+' if sign else ''}.{digits}f}%"


_own = functools.cache(environment)


@functools.cache
def asset(name: str) -> str:
    """Return the text of a script or style sheet. page.css starts with the palette's variables."""
    from importlib.resources import files

    folder = "vendor" if name in _VENDORED else "assets"
    text = (files("trainpace.report") / folder / name).read_text(encoding="utf-8")
    return css_variables() + text if name == "page.css" else text


def page(title: str, sections: Iterable[Section], data: object, shared: bool = False) -> str:
    """Return an answer as one HTML file. Its content security policy forbids loading anything.

    Args:
        title: Heading of the page.
        sections: The answer. Sections for the short terminal answer are skipped.
        data: The answer's JSON, which is stored in the page.
        shared: True to skip next commands, because they may contain file names.
    """
    from importlib.metadata import version

    parts = [_part(section) for section in sections if section.only != "brief"]
    drawn = any(isinstance(chart, Chart) for part in parts for chart in part["pictures"])
    sheets = [asset(name) for name in STYLES if drawn or name == "page.css"]
    scripts = [asset(name) for name in SCRIPTS] if drawn else []
    styles = [asset(name) for part in parts for name in part["styles"]]
    allowed = _hashes(scripts) or "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes([*sheets, *styles])}; base-uri"
        f" 'none'; form-action 'none'; script-src {allowed}"
    )
    return rendered(
        "page.html",
        title=title,
        parts=[part for part in parts if not (shared and part["kind"] == "Next")],
        data=data,
        policy=policy,
        sheets=sheets,
        scripts=scripts,
        version=version("trainpace"),
    )


def fragment(sections: Iterable[Section]) -> str:
    """Return an answer as HTML without styles, scripts and charts, for a notebook."""
    parts = [
        _part(s) for s in sections if s.only != "brief" and not isinstance(s, Charts | Drawing)
    ]
    return rendered("fragment.html", parts=parts)


def _part(section: Section) -> dict[str, Any]:
    """Return the template variables of a section."""
    part: dict[str, Any] = {
        "kind": type(section).__name__,
        "section": section,
        "heading": sentence(section.aside or getattr(section, "title", "")),
        "pictures": [],
        "styles": (),
    }
    match section:
        case Charts():
            pictures = [chart for chart in section.draw() if chart is not None]
            part |= {"pictures": pictures, "heading": "Charts" if pictures else ""}
        case Drawing():
            part |= {"html": section.html and section.html(), "styles": section.styles}
        case Table():
            part |= _table_part(section)
        case Named():
            part |= {"head": ["", ""], "rows": section.items, "words": [0, 1], "best": ()}
        case Next():
            command = section.command
            part["text"] = command if isinstance(command, str) else shlex.join(command)
    return part


def _table_part(table: Table) -> dict[str, Any]:
    """Return the template variables of a table without its bars. Charts show those."""
    shown = [
        i for i in range(len(table.columns)) if all(isinstance(row[i], str) for row in table.rows)
    ]
    return {
        "head": [table.columns[i].name for i in shown],
        "rows": [[row[i] for i in shown] for row in table.rows],
        "words": [n for n, i in enumerate(shown) if table.columns[i].words],
        "best": table.best,
    }


def rendered(template: str, **context: Any) -> Markup:
    """Render a template. The result is safe to insert into another template."""
    from markupsafe import Markup

    return Markup(_own().get_template(template).render(**context))


def figure(picture: Picture) -> Markup:
    return rendered("figure.html", picture=picture)


def _hashes(texts: Sequence[str]) -> str:
    import base64
    import hashlib

    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in texts
    )


TableRow = tuple[str, Sequence[str], Sequence[Sequence[str]], int]


def tables_of(picture: Picture) -> Iterator[TableRow]:
    """Yield (title, header, rows, number of text columns) for all numbers in a chart."""
    if isinstance(picture, BarChart):
        yield from (_bars_table(group, picture) for group in picture.groups)
        return
    if isinstance(picture, HeatMap):
        return  # A heat map is already a table.
    x, y = picture.x, picture.y
    for s in picture.series:
        values = [(x.words, s.x, x), (y.words, s.y, y), ("from", s.low, y), ("to", s.high, y)]
        columns = [
            (name, [_exact(v, axis) for v in column]) for name, column, axis in values if column
        ]
        if s.x:
            yield _table(
                s.name, [("", s.labels), *columns] if s.labels else columns, 1 if s.labels else 0
            )
    if picture.marks:
        rows = [
            [m.text, _exact(m.at, y if m.axis == "y" else x), _exact(m.y, y)] for m in picture.marks
        ]
        yield "Named places", ["what", "at", "height"], rows, 1


def _bars_table(group: BarGroup, chart: BarChart) -> TableRow:
    values = [_by_name(bar) for bar in group.bars]
    columns = [(name, [bar.get(name) for bar in values]) for name, _ in chart.key]
    if len(columns) > 1:
        columns.append(("together", [bar.total for bar in group.bars]))
    if any(bar.low is not None for bar in group.bars):
        columns += [
            ("from", [bar.low for bar in group.bars]),
            ("to", [bar.high for bar in group.bars]),
        ]
    shown = [(name, [number(value, "") for value in column]) for name, column in columns]
    title = f"{chart.label} ({chart.unit})" if chart.unit else chart.label
    labels = [bar.label for bar in group.bars]
    return _table(f"{group.title}: {title}" if group.title else title, [("", labels), *shown], 1)


def _by_name(bar: Bar) -> dict[str, float]:
    """Return the sum of each part of a bar by name. A name may occur several times."""
    return {
        name: math.fsum(s.value for s in bar.segments if s.name == name)
        for name in {s.name for s in bar.segments}
    }


def _table(title: str, columns: Sequence[tuple[str, Sequence[str]]], left: int) -> TableRow:
    return (
        title,
        [name for name, _ in columns],
        list(zip(*(cells for _, cells in columns), strict=True)),
        left,
    )


def _exact(value: float | None, axis: Axis) -> str:
    return f"{'$' if axis.unit == '$' and value is not None else ''}{number(value, '')}"
