"""Pages through Jinja: everything is escaped, and figures are in people's units. `page` makes a file that fetches nothing.

A page file holds its scripts and styles inline: `report/vendor/` as released by others, `report/assets/` and the palette our own.
A server hands out `SCRIPTS` and `STYLES` by name, so that its pages need no inline script.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
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
from trainpace.report.streams import visible

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


NONE = "–"
"""Stands where nothing is known."""
SCRIPTS = ("uPlot.iife.min.js", "charts.js")
"""In the order in which a page with charts loads them."""
STYLES = ("uPlot.min.css", "page.css")
_VENDORED = ("uPlot.iife.min.js", "uPlot.min.css")


def environment(*packages: str) -> jinja2.Environment:
    """Templates of this room, and before them those of `packages`."""
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
    return NONE if value is None else f"{value:{'+' if sign else ''}.{digits}f} %"


_own = functools.cache(environment)


@functools.cache
def asset(name: str) -> str:
    """The text of one of `SCRIPTS` or `STYLES`; page.css with the palette's variables before it."""
    from importlib.resources import files

    folder = "vendor" if name in _VENDORED else "assets"
    text = (files("trainpace.report") / folder / name).read_text(encoding="utf-8")
    return css_variables() + text if name == "page.css" else text


def page(
    template: str,
    title: str,
    verdict: Sequence[str],
    pictures: Sequence[Picture | None],
    data: object,
    answer: bool = True,
    subtitle: str = "",
    styles: Sequence[str] = (),
    **context: Any,
) -> str:
    """The whole file. `verdict`: sentences, the most important first; `answer` False where it is no. A picture may be None: there
    are no data for it. `data` is kept inside as JSON. `styles`: assets that stand in the template itself. The page's own policy
    forbids it to fetch anything."""
    from importlib.metadata import version

    drawn = any(isinstance(picture, Chart) for picture in pictures)
    sheets = [asset(name) for name in STYLES if drawn or name == "page.css"]
    scripts = [asset(name) for name in SCRIPTS] if drawn else []
    script_hashes, style_hashes = (
        _hashes(scripts) or "'none'",
        _hashes([*sheets, *map(asset, styles)]),
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src {style_hashes}; base-uri 'none'; form-action"
        f" 'none'; script-src {script_hashes}"
    )
    return (
        _own()
        .get_template(template)
        .render(
            title=title,
            verdict=verdict,
            pictures=pictures,
            data=data,
            answer=answer,
            subtitle=subtitle,
            policy=policy,
            sheets=sheets,
            scripts=scripts,
            version=version("trainpace"),
            **context,
        )
    )


def rendered(template: str, **context: Any) -> Markup:
    """One of this room's templates; its text is safe to put into another."""
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


Table = tuple[str, Sequence[str], Sequence[Sequence[str]], int]


def tables_of(picture: Picture) -> Iterator[Table]:
    """(title, head, rows, columns of words) of everything that a picture shows."""
    if isinstance(picture, BarChart):
        yield from (_bars_table(group, picture) for group in picture.groups)
        return
    if isinstance(picture, HeatMap):
        return  # is one
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


def _bars_table(group: BarGroup, chart: BarChart) -> Table:
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
    """What each part takes in all, of a bar in which it may come several times."""
    return {
        name: math.fsum(s.value for s in bar.segments if s.name == name)
        for name in {s.name for s in bar.segments}
    }


def _table(title: str, columns: Sequence[tuple[str, Sequence[str]]], left: int) -> Table:
    return (
        title,
        [name for name, _ in columns],
        list(zip(*(cells for _, cells in columns), strict=True)),
        left,
    )


def _exact(value: float | None, axis: Axis) -> str:
    return f"{'$' if axis.unit == '$' and value is not None else ''}{number(value, '')}"
