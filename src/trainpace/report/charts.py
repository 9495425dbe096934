"""Chart records, their colors, and drawing with matplotlib and with characters.

Pages draw the same records with charts.js and figures.html. Each color has a meaning. All
colors are distinguishable for color-blind readers, on light and dark pages. The hues are those of
Okabe and Ito (2008, "Color Universal Design"). They are darkened or lightened to a contrast of at
least 3:1 against the page (WCAG 2.2, 1.4.11), which tests/report/test_palette.py computes.
Neighbors in a stack also differ in lightness.

Terminals get a plot of braille characters with eight dots per cell. Papers get PNG, SVG or PDF
files by matplotlib (the extra `figures`) in the light palette.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Interval
from trainpace.core.records import Record, written_aside
from trainpace.core.units import format_number
from trainpace.report.sections import Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = ("#ffffff", "#14191f")
INK = ("#1b2530", "#e8edf2")
SOFT = ("#566270", "#a3b0bd")
LINE = ("#dde3e9", "#36414c")

# Meanings that share a color (separated by spaces), with the color on a light and a dark page.
_HUES = (
    ("measured first forward parameters", ("#0063a8", "#58b4f0")),
    ("forecast second", ("#b85c00", "#f0a030")),
    ("best third optimizer states", ("#00795a", "#2fc79a")),
    ("jump fourth", ("#a8327c", "#e88fc4")),
    ("limit data", ("#b3261e", "#ff8a80")),
    ("ideal", ("#66727f", "#8f9ca9")),
    ("muted own_code", ("#7b8794", "#77838f")),
    ("fifth host_overhead", ("#806a00", "#d8c440")),
    ("sixth", ("#5e4bb0", "#b0a2f5")),
    ("backward gradients", ("#c06a10", "#f0a030")),
    ("communication activations", ("#7a3fa8", "#c39bf0")),
    ("host_to_device", ("#35748a", "#7cc6dc")),
    ("idle reserve", ("#808b97", "#6f7b87")),
)
TEXTURES = {
    "activations": "stripes",
    "communication": "stripes",
    "states": "dots",
    "host_overhead": "dots",
}
"""Textures for tones that resemble their neighbor to color-blind readers or on gray paper."""
TONES = {tone: pair for tones, pair in _HUES for tone in tones.split()}
"""Colors by meaning, as (on a light page, on a dark page)."""
SERIES_TONES = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Tones for series without a meaning of their own, in order of use."""


class Axis(Record, kw_only=False):
    """Axis of a chart, with its label and unit.

    `low` and `high` are set if the axis should not end with the data.
    """

    label: str
    unit: str = ""
    scale: Literal["linear", "log10", "log2"] = "linear"
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class Series(Record, kw_only=False):
    """Values over x. A `y` of None is unknown.

    x must be ascending for lines and areas. A line can have an interval from `low` to `high`.
    Points can have a spread from `low` to `high`, `labels`, and `sizes` as shares of the largest
    point's area. An area is filled between `low` and `high`. Areas are not stacked when they are
    drawn: their values must already be stacked.
    """

    name: str
    kind: Literal["line", "points", "area"]
    tone: str
    x: Sequence[float]
    y: Sequence[float | None] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    labels: Sequence[str] = ()
    sizes: Sequence[float] = ()
    dashed: bool = False

    def __post_init__(self) -> None:
        columns = [c for c in (self.y, self.low, self.high, self.labels, self.sizes) if c]
        values = [*self.x, *self.y, *self.low, *self.high]
        assert all(len(column) == len(self.x) for column in columns), "columns differ in length"
        assert self.kind == "points" or sorted(self.x) == list(self.x), "x does not ascend"
        assert all(v is None or math.isfinite(v) for v in values), "a value is not finite"


class Mark(Record, kw_only=False):
    """Labeled line or point.

    Depending on `axis`, it is a vertical line at x = `at`, a horizontal line at y = `at`, or the
    point (`at`, `y`).
    """

    axis: Literal["x", "y", "point"]
    at: float
    text: str
    tone: str
    y: float | None = None


class Chart(Record):
    """Series over one pair of axes.

    Attributes:
        finding: Sentence that describes the chart, also for screen readers.
        nearest: Values that a pointer over the chart shows: all values at the nearest x, or those
            of the nearest point.
        note: Source of the numbers.
    """

    title: str
    finding: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    nearest: Literal["x", "point"] = "x"
    note: str = ""


class Segment(Record, kw_only=False):
    """Part of a bar. It begins at the end of the previous part."""

    name: str
    tone: str
    value: float


class Bar(Record, kw_only=False):
    """Horizontal bar made of segments.

    Its interval is `low` to `high`, and `end_label` is the text at its end.
    """

    label: str
    segments: Sequence[Segment]
    end_label: str
    low: float | None = None
    high: float | None = None

    @property
    def placed(self) -> Iterator[tuple[Segment, float]]:
        """Segments and their starts in the chart's unit."""
        starts = itertools.accumulate((s.value for s in self.segments), initial=0.0)
        return zip(self.segments, starts, strict=False)

    @property
    def total(self) -> float:
        return math.fsum(segment.value for segment in self.segments)


class BarGroup(Record, kw_only=False):
    """Bars that share a scale and are compared with each other."""

    bars: Sequence[Bar]
    title: str = ""


class BarChart(Record):
    """Horizontal bars, such as parts of steps or speed-ups.

    `one_scale` is True if all groups share a scale.
    """

    title: str
    finding: str
    label: str
    groups: Sequence[BarGroup]
    unit: str = ""
    one_scale: bool = True
    note: str = ""

    @property
    def legend(self) -> dict[str, str]:
        """Tone of every part above 0 by its name, in order of appearance."""
        bars = [bar for group in self.groups for bar in group.bars]
        return {s.name: s.tone for bar in bars for s in bar.segments if s.value > 0}

    def longest(self, group: BarGroup) -> float:
        """Return the value that fills the width of the chart.

        Wide intervals are truncated, because they would make the bars tiny.
        """
        bars = [bar for g in (self.groups if self.one_scale else (group,)) for bar in g.bars]
        most = max((bar.total for bar in bars), default=0.0) or 1.0
        return max([most, *(min(bar.high, MOST_INTERVAL * most) for bar in bars if bar.high)])


MOST_INTERVAL = 2.5
"""Limit for drawing intervals, as a multiple of the longest bar or the highest curve."""

Picture = Chart | BarChart


def series(
    name: str,
    kind: Literal["line", "points"],
    tone: str,
    points: Iterable[tuple[float, float | None]],
    intervals: Iterable[Interval | None] = (),
    **more: Any,
) -> Series:
    """Return a series through `points` (x, y).

    Intervals of y are drawn only if every point has one.
    """
    x, y = tuple(zip(*points, strict=True)) or ((), ())
    bounds = [(i.low, i.high) for i in intervals if i is not None]
    low, high = zip(*bounds, strict=True) if bounds and len(bounds) == len(x) else ((), ())
    return Series(
        name=name, kind=kind, tone=tone, x=tuple(map(float, x)), y=y, low=low, high=high, **more
    )


def ideal_line(points: Iterable[tuple[float, float]]) -> Series:
    return series("ideal (proportional)", "line", "ideal", points, dashed=True)


def bar(
    label: str,
    end_label: str,
    parts: Iterable[tuple[str, str, float]],
    interval: Interval | None = None,
) -> Bar:
    """Return a bar with the parts (name, tone, value). `interval` is that of the whole bar."""
    segments = tuple(Segment(name=name, tone=tone, value=value) for name, tone, value in parts)
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return Bar(label=label, end_label=end_label, segments=segments, low=low, high=high)


def tick_step(span: float, most: int) -> float:
    """Return a tick distance of 1, 2 or 5 times a power of ten, for at most `most` ticks."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        times * power for times in (1.0, 2.0, 5.0, 10.0) if times * power >= rough * (1 - 1e-9)
    )


def css_variables() -> str:
    """Return CSS variables for both color schemes. Printed pages use the light scheme."""
    pairs = {"--page": PAGE, "--ink": INK, "--soft": SOFT, "--line": LINE}
    pairs |= {f"--tone-{name}": pair for name, pair in TONES.items()}
    textures = "".join(f";--texture-{tone}:{texture}" for tone, texture in TEXTURES.items())
    light, dark = (";".join(f"{name}:{pair[i]}" for name, pair in pairs.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light dark;{light}{textures}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not(.paper){{{dark}}}}}\n"
    )


SUFFIXES = (".png", ".svg", ".pdf")
WIDTH_IN, HEIGHT_IN = 6.4, 3.7
DOTS_PER_INCH = 200
BAR_IN = 0.27
"""Height of a bar's row, in inches."""
FEW_POWERS_RATIO = 16.0
"""Ratio of the ends of a logarithmic axis below which it gets ticks between the powers of ten."""
HATCHES = {"stripes": "////", "dots": "xxxx"}
"""Hatches of matplotlib by texture. matplotlib's own dots would make an SVG of 250 KB."""
NO_DATE: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}
"""File metadata without a date, so that equal charts give equal files."""


def check_suffix(path: str) -> None:
    """Raise TrainpaceError if the file extension is not in SUFFIXES."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise TrainpaceError(
            f"Cannot write a figure to {path}.", "Its name must end with .png, .svg or .pdf."
        )


def save_figures(charts: Sequence[Picture | None], path: str) -> list[Path]:
    """Save the first chart as `path`, and the others next to it with their titles as names.

    Returns:
        The paths of the files.

    Raises:
        TrainpaceError: There is nothing to draw, or matplotlib is not installed.
    """
    check_suffix(path)
    pictures = [chart for chart in charts if chart is not None]
    if not pictures:
        raise TrainpaceError("There is nothing to draw: nothing could be forecast or measured.")
    first = Path(path)
    slugs = (
        re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-") for picture in pictures[1:]
    )
    files = [first, *(first.with_name(f"{first.stem}-{slug}{first.suffix}") for slug in slugs)]
    for picture, file in zip(pictures, files, strict=True):
        with written_aside(file) as aside, _settings():
            suffix = file.suffix.lower()
            _figure_of(picture).savefig(
                aside, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=NO_DATE[suffix]
            )
    return files


def _figure_of(picture: Picture) -> Figure:
    if isinstance(picture, Chart):
        return chart_figure(picture)
    return bars_figure(picture)


def _settings() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        missing = "Figures need matplotlib, which is not installed."
        raise TrainpaceError(missing, "pip install 'trainpace[figures]'") from None
    return mpl.rc_context(
        {
            "font.size": 8,
            "font.family": "sans-serif",
            "svg.hashsalt": "trainpace",
            "text.color": INK[0],
            "axes.labelcolor": SOFT[0],
            "xtick.color": SOFT[0],
            "ytick.color": SOFT[0],
            "axes.edgecolor": LINE[0],
            "grid.color": LINE[0],
            "text.parse_math": False,
            "hatch.linewidth": 0.5,
            "hatch.color": "white",
        }
    )


def _figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def chart_figure(chart: Chart) -> Figure:
    figure = _figure(HEIGHT_IN)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(xlabel=chart.x.words, ylabel=chart.y.words)
    for series in chart.series:
        _DRAW[series.kind](axes, series)
    _scale(axes.xaxis, chart.x, axes.set_xscale, axes.get_xlim)
    _scale(axes.yaxis, chart.y, axes.set_yscale, axes.get_ylim)
    axes.margins(y=0.15)  # Leaves room for the labels of vertical marks.
    axes.set_xlim(chart.x.low, chart.x.high)  # None keeps the automatic limit.
    axes.set_ylim(chart.y.low, chart.y.high)
    _legend(figure, ncols=3)
    figure.draw_without_rendering()  # This places the axes. Labels need their positions.
    taken: list[Any] = []
    for mark in sorted(chart.marks, key=lambda mark: (mark.axis, mark.at)):
        _mark(axes, mark, taken, ringed=not any(s.sizes for s in chart.series))
    return figure


def _scale(mpl_axis: Any, axis: Axis, set_scale: Any, get_limits: Any) -> None:
    """Give an axis of matplotlib its scale and its tick labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.scale != "linear":
        set_scale("log", base=2 if axis.scale == "log2" else 10)
        mpl_axis.set_minor_formatter(NullFormatter())
        low, high = get_limits()
        if axis.scale == "log10" and high < FEW_POWERS_RATIO * low:
            mpl_axis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 8)))
    mpl_axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))


def _legend(figure: Figure, ncols: int, **options: Any) -> None:
    look = {"frameon": False, "fontsize": 7, "columnspacing": 1.2}
    figure.legend(loc="outside upper left", ncols=ncols, **look, **options)


def _filled(tone: str) -> dict[str, Any]:
    """Return the color and the texture of a filled shape."""
    hatch = HATCHES.get(TEXTURES.get(tone, ""))
    return {"facecolor": TONES[tone][0], "edgecolor": "white", "hatch": hatch}


def _draw_area(axes: Any, s: Series) -> None:
    axes.fill_between(s.x, s.low, s.high, label=s.name, alpha=0.92, linewidth=0, **_filled(s.tone))


def _draw_line(axes: Any, s: Series) -> None:
    color, style = TONES[s.tone][0], "--" if s.dashed else "-"
    y = [math.nan if value is None else value for value in s.y]
    axes.plot(s.x, y, color=color, linestyle=style, linewidth=1.4, label=s.name)
    if s.low:
        axes.fill_between(s.x, s.low, s.high, color=color, alpha=0.18, linewidth=0)


def _draw_points(axes: Any, s: Series) -> None:
    color, y = TONES[s.tone][0], [math.nan if value is None else value for value in s.y]
    if s.low:
        axes.vlines(s.x, s.low, s.high, color=color, alpha=0.6, linewidth=1)
    sizes = [8 + 180 * size for size in s.sizes] or 12
    alpha = 0.75 if s.sizes else 1.0
    axes.scatter(s.x, y, s=sizes, color=color, alpha=alpha, linewidth=0, label=s.name, zorder=3)


_DRAW = {"area": _draw_area, "line": _draw_line, "points": _draw_points}
_PLACES = {
    "x": [(side * 3, -9 - 9 * row) for row in range(6) for side in (1, -1)],
    "y": [(-3, 3), (-3, -9)],
    "point": [(side * 6, up) for up in (-2, 7, -11, 16, -20, 25, -29, 38) for side in (1, -1)],
}
"""Places of a mark's label relative to the mark, in points, in order of preference."""


def _mark(axes: Any, mark: Mark, taken: list[Any], ringed: bool) -> None:
    """Draw a mark, and its label if there is room inside the axes and between other labels.

    If `ringed` is True, a point gets a ring around it.
    """
    from matplotlib.patheffects import withStroke

    color = TONES[mark.tone][0]
    at: tuple[Any, Any] = (mark.at, mark.y)
    over = axes.transData
    if mark.axis == "x":
        axes.axvline(mark.at, color=color, linestyle=":", linewidth=1.1)
        at, over = (mark.at, 1.0), axes.get_xaxis_transform()
    elif mark.axis == "y":
        axes.axhline(mark.at, color=color, linestyle="--", linewidth=1.1)
        at, over = (1.0, mark.at), axes.get_yaxis_transform()
    elif ringed:
        axes.plot(*at, "o", markersize=8, markerfacecolor="none", markeredgecolor=color)
    for place in _PLACES[mark.axis]:
        text = axes.annotate(
            mark.text,
            at,
            xycoords=over,
            xytext=place,
            textcoords="offset points",
            fontsize=6.5,
            ha="left" if place[0] > 0 else "right",
            color=color,
            zorder=5,  # Above the points.
            in_layout=False,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
        box, room = text.get_window_extent().padded(2), axes.bbox.padded(6)
        inside = room.containsx(box.x0) and room.containsx(box.x1) and room.containsy(box.y0)
        if inside and not box.count_overlaps(taken):
            taken.append(box)
            return
        text.remove()


def bars_figure(chart: BarChart) -> Figure:
    from matplotlib.patches import Patch

    names: list[str] = []
    longest = max((chart.longest(group) for group in chart.groups), default=1.0)
    figure = _figure(0.0)
    axes = figure.add_subplot()
    for group in chart.groups:
        names += [group.title] if group.title else []
        for bar in group.bars:
            _bar(axes, len(names), bar, longest / chart.longest(group), longest)
            names.append(bar.label)
    figure.set_figheight(0.9 + BAR_IN * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, longest * 1.3), ylim=(len(names) - 0.4, -0.6), xticks=[])
    axes.spines[:].set_visible(False)
    if len(chart.legend) > 1:
        parts = [Patch(label=name, **_filled(tone)) for name, tone in chart.legend.items()]
        _legend(figure, ncols=4, handles=parts)
    return figure


def _bar(axes: Any, at: int, bar: Bar, scale: float, longest: float) -> None:
    for s, start in bar.placed:
        look = _filled(s.tone)
        axes.barh(at, s.value * scale, left=start * scale, height=0.7, linewidth=0.5, **look)
    end = bar.total * scale
    if bar.low is not None and bar.high is not None:
        low, high = (min(v * scale, longest) for v in (bar.low, bar.high))
        spread = [[max(end - low, 0)], [max(high - end, 0)]]
        axes.errorbar([end], [at], xerr=spread, color=INK[0], elinewidth=1, capsize=2)
        end = max(end, high)
    label = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    axes.annotate(bar.end_label, (end, at), **label)


PLOT_ROWS, WIDEST, LEAST = 13, 92, 24
"""Rows, maximum columns and minimum columns of a character plot. The number of rows is adjusted so
that ticks have equal distances.
"""
MOST_TICKS = 6
ACROSS, UP = 2, 4
"""Columns and rows of dots in a braille character."""
_BITS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Bits of a braille character by column, from bottom to top."""


def plot(
    points: Points, marked: Collection[float], title: str, line: Points = (), width: int = 80
) -> list[str]:
    """Return the lines of a plot whose y axis starts at zero, at most `width` columns wide.

    The curve goes through `line`, and `points` lie on top of it. Every x in `marked` has a
    triangle.
    """
    every = [*points, *line]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    highest = max(y for _, y in every)
    step = tick_step(highest or 1.0, MOST_TICKS - 1)
    ticks = max(1, math.ceil(highest / step - 1e-9))
    rows = ticks * max(1, round((PLOT_ROWS - 1) / ticks))
    labels = {i * rows // ticks: format_number(i * step) for i in range(ticks + 1)}
    margin = max(map(len, labels.values()))
    columns = max(LEAST, min(WIDEST, width) - margin - 2)

    def across(x: float) -> float:
        return (x - left) / max(right - left, 1e-9)

    def column(x: float) -> int:
        return round(across(x) * (columns - 1))

    cells = _curve([(across(x), y / (ticks * step)) for x, y in sorted(line)], columns, rows)
    over = [*points, *(point for point in line if point[0] in marked)]
    for x, y in sorted(over, key=lambda point: point[0] in marked):
        cells[round(y / (ticks * step) * rows)][column(x)] = "▲" if x in marked else "●"
    indent = " " * (margin + 2)
    named = {column(x): format_number(x) for x in _ticks(left, right)}
    below = [label_line(named, columns, 0.5)]
    if marked:
        below.append(label_line({column(x): f"▲{format_number(x)}" for x in marked}, columns, 0.0))
    return [title, *_scaled(cells, labels, margin), *(indent + text for text in below)]


def _scaled(cells: list[list[str]], labels: dict[int, str], margin: int) -> list[str]:
    """Return rows from top to bottom, with the scale on the left and an axis below."""
    lines = []
    for i in reversed(range(len(cells))):
        edge = "└" if i == 0 else "┤" if i in labels else "│"
        body = "".join(cells[i])
        body = body.rstrip() if i else body.replace(" ", "─")
        lines.append(f"{labels.get(i, ''):>{margin}} {edge}{body}")
    return lines


def _curve(points: Points, columns: int, rows: int) -> list[list[str]]:
    """Draw a curve of braille dots. Return rows of cells, bottom row first.

    Points are fractions of the width and height. The curve runs through the middle of the cells in
    which `plot` puts its points.
    """
    dots: set[tuple[int, int]] = set()
    wide = ACROSS * (columns - 1) + 1
    at = [(round(x * (wide - 1)), y * UP * rows + (UP - 1) / 2) for x, y in points]
    for (x0, y0), (x1, y1) in itertools.pairwise(at if len(at) != 1 else at * 2):
        last = round(y0)
        for x in range(x0, x1 + 1):
            y = round(y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1))
            # Fill the column between this dot and the last one, so that the curve has no gaps.
            dots |= {(x, between) for between in range(min(last + 1, y), max(last - 1, y) + 1)} | {
                (x, y)
            }
            last = y
    cells = [[" "] * columns for _ in range(rows + 1)]
    braille: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = min(y // UP, rows), x // ACROSS
        braille[cell] = braille.get(cell, 0) | _BITS[x % ACROSS][y % UP]
    for (row, column), bits in braille.items():
        cells[row][column] = chr(0x2800 + bits)
    return cells


def _ticks(left: float, right: float) -> Iterator[float]:
    """Yield both ends, and round numbers between them."""
    yield left
    if right > left:
        step = max(1.0, tick_step(right - left, MOST_TICKS))
        x = math.ceil(left / step + 0.5) * step  # At least half a step from the left end.
        while x < right - step / 2:
            yield x
            x += step
        yield right


def label_line(named: dict[int, str], columns: int, anchor: float) -> str:
    """Return a line with labels at their columns.

    With `anchor` 0 a label starts at its column, and with 0.5 it is centered there. The first and
    the last label are always shown. Others are dropped if they would touch another one.
    """
    line, at = [" "] * columns, sorted(named)
    for i in dict.fromkeys([*at[:1], *at[-1:], *at]):
        text = named[i]
        start = max(0, min(i - int(anchor * (len(text) - 1)), columns - len(text)))
        if all(c == " " for c in line[max(0, start - 1) : start + len(text) + 1]):
            line[start : start + len(text)] = text
    return "".join(line).rstrip()
