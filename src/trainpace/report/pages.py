"""HTML rendering of sections, by Jinja templates that escape everything.

A page file contains its scripts and styles. `report/vendor/` holds third-party releases.
`report/assets/` and the palette are our own. A server serves `SCRIPTS` and `STYLES` by name
instead, so its pages need no inline script.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainpace.core.records import to_jsonable
from trainpace.forecast import alike
from trainpace.report.charts import TEXTURES, BarChart, BarGroup, Chart, Picture, css_variables
from trainpace.report.phrases import duration, given, interval, number, percent, sentence, usd, when
from trainpace.report.sections import Charts, Column, Drawing, Section, Table, words
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
    env.filters |= {name: functools.partial(f, none=NONE) for name, f in formats.items()}
    env.filters.update(
        percent=_percent,
        share=lambda part: f"{100 * part:.3f}%",
        record=to_jsonable,
        sentence=sentence,
        alike=alike,
        command=lambda words: words if isinstance(words, str) else shlex.join(words),
        without_bars=_without_bars,
    )
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


def page(title: str, sections: Iterable[Section], data: object) -> str:
    """Return an answer as one HTML file. Its content security policy forbids loading anything.

    Args:
        title: Heading of the page.
        sections: The answer. Sections for the short terminal answer are skipped.
        data: The answer's JSON, which is stored in the page.
    """
    from importlib.metadata import version

    shown = [section for section in sections if section.only != "brief" and section.size != 0]
    parts = [part for part in map(_part, shown) if part["kind"] != "Charts" or part["pictures"]]
    drawn = any(isinstance(chart, Chart) for part in parts for chart in part["pictures"])
    sheets = list(map(asset, STYLES if drawn else STYLES[1:]))
    scripts = list(map(asset, SCRIPTS if drawn else ()))
    styles = [asset(section.style) for section in shown if isinstance(section, Drawing)]
    allowed = _hashes(scripts) or "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes([*sheets, *styles])}; base-uri"
        f" 'none'; form-action 'none'; script-src {allowed}"
    )
    return rendered(
        "page.html",
        title=title,
        parts=parts,
        data=data,
        policy=policy,
        sheets=sheets,
        scripts=scripts,
        version=version("trainpace"),
    )


def _part(section: Section) -> dict[str, Any]:
    """Return the template variables of a section."""
    drawn = section.draw() if isinstance(section, Charts) else ()
    pictures = [chart for chart in drawn if chart is not None]
    heading = "charts" if pictures else section.aside or getattr(section, "title", "")
    return {
        "kind": type(section).__name__,
        "section": section,
        "heading": sentence(heading),
        "pictures": pictures,
    }


def _without_bars(table: Table) -> Table:
    """Return a table without its bars. Charts show those."""
    indices = range(len(table.columns))
    shown = [i for i in indices if all(isinstance(row[i], str) for row in table.rows)]
    rows = [[row[i] for i in shown] for row in table.rows]
    return Table([table.columns[i] for i in shown], rows, best=table.best)


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


def tables_of(picture: Picture) -> Iterator[Table]:
    """Yield tables with all numbers of a chart."""
    if isinstance(picture, BarChart):
        yield from (_bars_table(group, picture) for group in picture.groups)
    else:
        x, y = picture.x.words, picture.y.words
        for s in picture.series:
            columns = (("", s.labels), (x, s.x), (y, s.y), ("from", s.low), ("to", s.high))
            yield _table(s.name, columns)
        marks = picture.marks
        texts, places, heights = (
            [m.text for m in marks],
            [m.at for m in marks],
            [m.y for m in marks],
        )
        yield _table("Named places", [("what", texts), ("at", places), ("height", heights)])


def _bars_table(group: BarGroup, chart: BarChart) -> Table:
    bars, unit = group.bars, given(chart.unit, " ({})")
    columns: list[tuple[str, Sequence[Any]]] = [("", [bar.label for bar in bars])]
    parts = [{s.name: s.value for s in bar.segments} for bar in bars]
    columns += [(name, [values.get(name) for values in parts]) for name in chart.legend]
    columns += [("together", [bar.total for bar in bars])] if len(chart.legend) > 1 else []
    columns += [(name, [getattr(bar, end) for bar in bars]) for name, end in ENDS]
    return _table(f"{given(group.title, '{}: ')}{chart.label}{unit}", columns)


ENDS = (("from", "low"), ("to", "high"))


def _table(title: str, columns: Sequence[tuple[str, Sequence[Any]]]) -> Table:
    """Return a table from columns of texts or numbers, without the columns that are empty."""
    shown = [(name, cells) for name, cells in columns if any(cell is not None for cell in cells)]
    texts = [
        [cell if isinstance(cell, str) else number(cell, "") for cell in cells]
        for _, cells in shown
    ]
    heads = [words(name) if isinstance(cells[0], str) else Column(name) for name, cells in shown]
    return Table(heads, list(zip(*texts, strict=True)), title)
