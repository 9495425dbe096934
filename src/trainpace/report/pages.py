"""Pages through Jinja: everything is escaped, and figures are in people's units. `page` makes a file that fetches nothing.

A page file holds its scripts and styles inline: `report/vendor/` as released by others, `report/assets/` and the palette our own.
A server hands out `SCRIPTS` and `STYLES` by name, so that its pages need no inline script.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainpace.records import to_jsonable
from trainpace.report.charts import (
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    Picture,
    Segment,
    Series,
    css_variables,
    sentence,
)
from trainpace.units import format_count, format_duration, format_number, format_usd

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
        loader=jinja2.ChoiceLoader(loaders), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    formats = {"number": format_number, "duration": format_duration, "usd": format_usd, "count": format_count}
    env.filters.update({name: _or_none(function) for name, function in formats.items()})
    env.filters.update(
        percent=_or_none(lambda value, digits=1, sign=False: f"{value:{'+' if sign else ''}.{digits}f} %"),
        per_cent=_or_none(lambda part: f"{100 * part:.0f} %"),
        range=_or_none(lambda interval, form=format_number: f"{form(interval.low)} to {form(interval.high)}"),
        share=lambda part: f"{100 * part:.3f}%", record=to_jsonable, sentence=sentence,
    )  # fmt: skip
    env.globals.update(tables_of=tables_of, placed=_placed, duration=format_duration, usd=format_usd)
    return env


def _or_none(function: Any) -> Any:
    return lambda value, *args, **more: NONE if value is None else function(value, *args, **more)


_own = functools.cache(environment)


@functools.cache
def asset(name: str) -> str:
    """The text of one of `SCRIPTS` or `STYLES`; page.css with the palette's variables before it."""
    from importlib.resources import files

    folder = "vendor" if name in _VENDORED else "assets"
    text = (files("trainpace.report") / folder / name).read_text(encoding="utf-8")
    return css_variables() + text if name == "page.css" else text


def page(
    template: str, title: str, verdict: Sequence[str], pictures: Sequence[Picture], data: object, answer: bool = True,
    subtitle: str = "", styles: Sequence[str] = (), **context: Any,
) -> str:  # fmt: skip
    """The whole file. `verdict`: sentences, the most important first; `answer` False where it is no. `data` is kept inside as
    JSON. `styles`: those that are in the template. The page's own policy forbids it to fetch anything."""
    from importlib.metadata import version

    drawn = any(isinstance(picture, Chart) for picture in pictures)
    sheets = [asset(name) for name in STYLES if drawn or name == "page.css"]
    scripts = [asset(name) for name in SCRIPTS] if drawn else []
    script_hashes = _hashes(scripts) or "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes([*sheets, *styles])}; base-uri 'none'; form-action 'none';"
        f" script-src {script_hashes}"
    )
    return _own().get_template(template).render(
        title=title, verdict=verdict, pictures=pictures, data=data, answer=answer, subtitle=subtitle, policy=policy,
        sheets=sheets, scripts=scripts, version=version("trainpace"), **context,
    )  # fmt: skip


def rendered(template: str, **context: Any) -> Markup:
    """One of this room's templates; its text is safe to put into another."""
    from markupsafe import Markup

    return Markup(_own().get_template(template).render(**context))


def figure(picture: Picture) -> Markup:
    return rendered("figure.html", picture=picture)


def _hashes(texts: Sequence[str]) -> str:
    import base64
    import hashlib

    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


def _placed(bar: Bar) -> list[tuple[Segment, float]]:
    """(segment, where it begins), in the chart's unit."""
    return list(zip(bar.segments, itertools.accumulate((s.value for s in bar.segments), initial=0.0), strict=False))


Table = tuple[str, Sequence[str], Sequence[Sequence[str]], int]


def tables_of(picture: Picture) -> Iterator[Table]:
    """(title, head, rows, columns of words) of everything that a picture shows."""
    if isinstance(picture, BarChart):
        yield from (_bars_table(group, picture) for group in picture.groups)
        return
    yield from (_series_table(s, picture) for s in picture.series if s.x)
    if picture.marks:
        rows = [
            [m.text, _exact(m.at, picture.y if m.axis == "y" else picture.x), "" if m.y is None else _exact(m.y, picture.y)]
            for m in picture.marks
        ]  # fmt: skip
        yield "Named places", ["what", "at", "height"], rows, 1


def _series_table(s: Series, chart: Chart) -> Table:
    columns: list[tuple[str, Sequence[str]]] = [("", s.labels)] if s.labels else []
    columns.append((chart.x.words, [_exact(x, chart.x) for x in s.x]))
    for name, values in ((chart.y.words, s.y), ("from", s.low), ("to", s.high)):
        if values:
            columns.append((name, ["" if y is None else _exact(y, chart.y) for y in values]))
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return s.name, [name for name, _ in columns], rows, 1 if s.labels else 0


def _bars_table(group: BarGroup, chart: BarChart) -> Table:
    names = [name for name, _ in chart.key]
    whole, ranged = len(names) > 1, any(bar.low is not None for bar in group.bars)
    rows = []
    for bar in group.bars:
        values = {s.name: s.value for s in bar.segments}
        numbers = [*map(values.get, names), *([bar.total] if whole else []), *([bar.low, bar.high] if ranged else [])]
        rows.append([bar.label, *("" if value is None else format_number(value) for value in numbers)])
    head = ["", *names, *(["together"] if whole else []), *(["from", "to"] if ranged else [])]
    unit = f" ({chart.unit})" if chart.unit else ""
    return f"{group.title}: {chart.label}{unit}" if group.title else f"{chart.label}{unit}", head, rows, 1


def _exact(value: float, axis: Axis) -> str:
    return f"${format_number(value)}" if axis.unit == "$" else format_number(value)
