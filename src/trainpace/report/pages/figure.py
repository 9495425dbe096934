"""A chart as HTML: a figure that `charts.js` draws, or bars that need no script; each with its finding in words and its data.

Every name that a user can choose is escaped, and nothing is in a style attribute, so that the strictest content policy holds.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from trainpace.records import to_jsonable
from trainpace.report.charts.chart import Axis, Bar, BarChart, BarGroup, Chart, Picture, Series
from trainpace.units import format_number


def chart_html(chart: Chart) -> str:
    """A `<figure class="chart">`: caption, key, the place of the canvas, the record as JSON, and a table of the data."""
    finding, name = html.escape(chart.finding), html.escape(f"{chart.title}: arrow keys read its values")
    keys = "".join(f"<li>{_swatch(s)}{html.escape(s.name)}</li>" for s in chart.series)
    return (
        f'<figure class="chart"><figcaption><h3>{html.escape(chart.title)}</h3><p>{finding}</p></figcaption>'
        f'<ul class="key">{keys}</ul><p class="axis">{html.escape(chart.y.words)}</p>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{name}">'
        '<div class="tip" aria-hidden="true" hidden></div><div class="said" role="status"></div></div>'
        f'<p class="axis x">{html.escape(chart.x.words)}</p>'
        f"{_note(chart.note)}{data_script(to_jsonable(chart))}"
        f"{_details([_series_table(s, chart) for s in chart.series if s.x] + _marks_table(chart))}</figure>"
    )


def bars_html(chart: BarChart) -> str:
    """A `<figure>` of level bars, drawn as SVG beside their names."""
    keys = "".join(
        f'<li><svg viewBox="0 0 22 12" aria-hidden="true"><rect width="22" height="12" rx="2" fill="var(--tone-{tone})"/></svg>'
        f"{html.escape(name)}</li>"
        for name, tone in chart.key
    )
    groups = "".join(_group(group, chart.longest(group)) for group in chart.groups)
    finding = html.escape(chart.finding, quote=True)
    key = f'<ul class="key">{keys}</ul>' if len(chart.key) > 1 else ""
    return (
        f"<figure><figcaption><h3>{html.escape(chart.title)}</h3><p>{finding}</p></figcaption>{key}"
        f'<div class="bars" role="img" aria-label="{finding}">{groups}</div>{_note(chart.note)}'
        f"{_details([_bars_table(group, chart) for group in chart.groups])}</figure>"
    )


def drawn(picture: Picture) -> str:
    """Whichever of the two it is."""
    return chart_html(picture) if isinstance(picture, Chart) else bars_html(picture)


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; nothing where nothing does."""
    inside = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>{inside}</section>" if inside else ""


def lines(texts: Sequence[str], kind: str = "") -> str:
    """Sentences, each a paragraph."""
    named = f' class="{kind}"' if kind else ""
    return "".join(f"<p{named}>{html.escape(text)}</p>" for text in texts)


MOST_UNFOLDED = 24


MANY_COLUMNS = 5


def folded(text: str, rows: int) -> str:
    """A long table closed until it is asked for."""
    return f"<details><summary>{rows} rows</summary>{text}</details>" if rows > MOST_UNFOLDED else text


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    hits: Sequence[int] = (),
    words: Sequence[int] = (),
) -> str:
    """A table whose first `left` columns, and those numbered in `words`, are words and whose others are numbers; rows in `hits`
    stand out."""

    in_words, hit = {*range(left), *words}, ' class="hit"'

    left_aligned = ' class="l"'

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{left_aligned if i in in_words else ''}>{html.escape(c)}</{tag[:2]}>" for i, c in enumerate(row)
        )

    body = "".join(f"<tr{hit if i in hits else ''}>{cells('td', row)}</tr>" for i, row in enumerate(rows))
    heads = cells('th scope="col"', head)
    # what may have to scroll sideways has to be reached by keyboard
    wide = ' tabindex="0" role="group" aria-label="A table that may scroll"' if len(head) >= MANY_COLUMNS else ""
    return f'<div class="wide"{wide}><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def data_script(data: object, name: str = "") -> str:
    """Data for a program to read, which no text in it can end."""
    inside = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    named = f' id="{name}"' if name else ""
    return f'<script type="application/json"{named}>{inside}</script>'


def _note(note: str) -> str:
    return f'<p class="note">{html.escape(note)}</p>' if note else ""


def _details(tables: Sequence[str]) -> str:
    return f"<details><summary>The figures</summary>{''.join(tables)}</details>"


def _swatch(s: Series) -> str:
    tone, dash = f"var(--tone-{s.tone})", ' stroke-dasharray="5 3"' if s.dashed else ""
    parts = []
    if s.kind == "area" or (s.kind == "line" and s.low):
        opacity = 0.92 if s.kind == "area" else 0.2
        parts.append(f'<rect width="22" height="12" fill="{tone}" opacity="{opacity}"/>')
    if s.kind == "line":
        parts.append(f'<line x2="22" y1="6" y2="6" stroke="{tone}" stroke-width="2"{dash}/>')
    if s.kind == "points":
        whisker = f'<line x1="11" x2="11" y2="12" stroke="{tone}" stroke-width="1.5"/>' if s.low else ""
        parts.append(f'{whisker}<circle cx="11" cy="6" r="3.5" fill="{tone}"/>')
    return f'<svg viewBox="0 0 22 12" aria-hidden="true">{"".join(parts)}</svg>'


def _series_table(s: Series, chart: Chart) -> str:
    columns = [(chart.x.words, [_exact(x, chart.x) for x in s.x])]
    if s.labels:
        columns.insert(0, ("", list(s.labels)))
    if s.y:
        columns.append((chart.y.words, ["" if y is None else _exact(y, chart.y) for y in s.y]))
    if s.low:
        columns += [("from", [_exact(v, chart.y) for v in s.low]), ("to", [_exact(v, chart.y) for v in s.high])]
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return f"<h4>{html.escape(s.name)}</h4>{table([name for name, _ in columns], rows, left=1 if s.labels else 0)}"


def _marks_table(chart: Chart) -> list[str]:
    if not chart.marks:
        return []
    rows = [
        [m.text, _exact(m.at, chart.y if m.axis == "y" else chart.x), "" if m.y is None else _exact(m.y, chart.y)]
        for m in chart.marks
    ]
    return [f"<h4>Named places</h4>{table(['what', 'at', 'height'], rows)}"]


def _exact(value: float, axis: Axis) -> str:
    return f"${format_number(value)}" if axis.unit == "$" else format_number(value)


def _group(group: BarGroup, longest: float) -> str:
    title = f"<h4>{html.escape(group.title)}</h4>" if group.title else ""
    return title + "".join(_bar(bar, longest) for bar in group.bars)


def _bar(bar: Bar, longest: float) -> str:
    parts, at = [], 0.0
    for s in bar.segments:
        width = 100 * s.value / longest
        if width > 0:
            tip = html.escape(f"{s.name}: {format_number(s.value)}")
            parts.append(
                f'<rect x="{at:.3f}%" y="1" width="{width:.3f}%" height="18" fill="var(--tone-{s.tone})" stroke="var(--page)"'
                f' stroke-width="0.75"><title>{tip}</title></rect>'
            )
            at += width
    if bar.low is not None and bar.high is not None:
        a, b = (f"{100 * v / longest:.3f}%" for v in (bar.low, bar.high))
        ends = "".join(f'<line x1="{x}" x2="{x}" y1="6" y2="14"/>' for x in (a, b))
        parts.append(
            f'<g stroke="var(--page)" stroke-width="4"><line x1="{a}" x2="{b}" y1="10" y2="10"/>{ends}</g>'
            f'<g stroke="var(--ink)" stroke-width="1.5"><line x1="{a}" x2="{b}" y1="10" y2="10"/>{ends}</g>'
        )
    return (
        f'<span class="label">{html.escape(bar.label)}</span><svg>{"".join(parts)}</svg>'
        f'<span class="end">{html.escape(bar.said)}</span>'
    )


def _bars_table(group: BarGroup, chart: BarChart) -> str:
    names = [name for name, _ in chart.key]
    whole = len(names) > 1
    ranged = any(bar.low is not None for bar in group.bars)
    rows = []
    for bar in group.bars:
        values = {s.name: s.value for s in bar.segments}
        row = [bar.label, *("" if name not in values else format_number(values[name]) for name in names)]
        row += [format_number(bar.total)] if whole else []
        if ranged:
            row += ["", ""] if bar.low is None else [format_number(bar.low), format_number(bar.high or 0.0)]
        rows.append(row)
    head = ["", *names, *(["together"] if whole else []), *(["from", "to"] if ranged else [])]
    unit = f" ({chart.unit})" if chart.unit else ""
    title = f"{group.title}: {chart.label}{unit}" if group.title else f"{chart.label}{unit}"
    return f"<h4>{html.escape(title)}</h4>{table(head, rows)}"
