"""What a picture shows, as data: no HTML and no pixels. The pages (charts.js, figures.html) and matplotlib draw the same records.

Colours stand for meanings, for light and dark pages, and are told apart by eyes of every kind: hues are Okabe and Ito's (2008,
"Color Universal Design"), darkened or lightened until each is at contrast 3:1 or more against its page (WCAG 2.2, 1.4.11);
tests/report/test_palette.py computes it. Neighbours in a stack differ in lightness too.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Interval
from trainpace.core.records import Record

PAGE = ("#ffffff", "#14191f")
INK = ("#1b2530", "#e8edf2")
SOFT = ("#566270", "#a3b0bd")
LINE = ("#dde3e9", "#36414c")

_HUES = (
    ("measured first forward parameters", ("#0063a8", "#58b4f0")),
    ("forecast second", ("#b85c00", "#f0a030")),
    ("best third optimizer states", ("#00795a", "#2fc79a")),
    ("jump fourth", ("#a8327c", "#e88fc4")),
    ("limit data", ("#b3261e", "#ff8a80")),
    ("ideal", ("#66727f", "#8f9ca9")),
    ("muted", ("#7b8794", "#77838f")),
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
"""What is drawn over a tone whose neighbour in a stack looks alike to an eye without green, or on grey paper."""
TONES = {tone: pair for tones, pair in _HUES for tone in tones.split()}
"""Colour (on a light page, on a dark page) by what it stands for."""
SERIES_TONES = ("first", "second", "third", "fourth", "fifth", "sixth")
"""For series that have no meaning of their own, in this order."""


class Axis(Record):
    """A label and a unit; `low` and `high` where the axis should not end with its data."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log10", "log2"] = "linear"
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class Series(Record):
    """Values over x, which ascends for lines and areas.

    line: `y`, and between `low` and `high` its band. points: `y`, from `low` to `high` its spread, `labels` and `sizes` (the
    share of the largest point's area, 0 to 1) one a point. area: filled between `low` and `high`, which are stacked by
    whoever makes the chart. `y` is None where nothing is known.
    """

    name: str
    kind: Literal["line", "points", "area"]
    tone: str
    x: tuple[float, ...]
    y: tuple[float | None, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()
    dashed: bool = False

    def __post_init__(self) -> None:
        _check_tone(self.tone)
        columns = {
            "y": self.y,
            "low": self.low,
            "high": self.high,
            "labels": self.labels,
            "sizes": self.sizes,
        }
        for name, column in columns.items():
            if column and len(column) != len(self.x):
                raise TrainpaceError(
                    f"series {self.name!r} has {len(self.x)} x and {len(column)} {name}."
                )
        if bool(self.low) != bool(self.high) or not (
            self.low if self.kind == "area" else self.y or not self.x
        ):
            raise TrainpaceError(f"series {self.name!r} is a {self.kind} without its values.")
        if self.kind in ("line", "area") and any(
            b < a for a, b in zip(self.x, self.x[1:], strict=False)
        ):
            raise TrainpaceError(f"series {self.name!r} is a {self.kind}, and its x do not ascend.")
        values = (
            value
            for column in (self.x, self.y, self.low, self.high)
            for value in column
            if value is not None
        )
        if not all(map(math.isfinite, values)):
            raise TrainpaceError(f"series {self.name!r} has values that are not finite.")


class Mark(Record):
    """A named place: an upright line at x, a level line at y, or a point (`at`, `y`)."""

    axis: Literal["x", "y", "point"]
    at: float
    text: str
    tone: str
    y: float | None = None

    def __post_init__(self) -> None:
        _check_tone(self.tone)
        if (self.axis == "point") != (self.y is not None):
            raise TrainpaceError(f"mark {self.text!r}: a point, and only a point, has a y.")


class Chart(Record):
    """Series over one pair of axes. `finding` says in words what one should see; a screen reader reads it instead.

    `nearest`: whether a pointer reads all values at the nearest x, or the one nearest point. `note`: where the numbers come from.
    """

    title: str
    finding: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    nearest: Literal["x", "point"] = "x"
    note: str = ""


class Segment(Record):
    """A part of a bar; `at`: where it begins, if not where the one before it ends."""

    name: str
    tone: str
    value: float
    at: float | None = None

    def __post_init__(self) -> None:
        _check_tone(self.tone)
        if not (math.isfinite(self.value) and self.value >= 0):
            raise TrainpaceError(
                f"segment {self.name!r} is {self.value}; a part of a bar is 0 or more."
            )


class Bar(Record):
    """A level bar made of segments, which add up to what it shows; `low` to `high` is its interval. `said` stands at its end.
    With gaps between its segments it is a row of a Gantt chart."""

    label: str
    segments: tuple[Segment, ...]
    said: str
    low: float | None = None
    high: float | None = None

    @property
    def placed(self) -> list[tuple[Segment, float]]:
        """(segment, where it begins), in the chart's unit."""
        placed, end = [], 0.0
        for segment in self.segments:
            start = end if segment.at is None else segment.at
            placed.append((segment, start))
            end = start + segment.value
        return placed

    @property
    def total(self) -> float:
        return math.fsum(segment.value for segment in self.segments)

    @property
    def end(self) -> float:
        return max((start + segment.value for segment, start in self.placed), default=0.0)


class BarGroup(Record):
    """Bars on one scale, to be compared with each other."""

    bars: tuple[Bar, ...]
    title: str = ""


class BarChart(Record):
    """Level bars: stacked parts of a step, a ladder of speed-ups. Each group has a scale of its own unless `one_scale`."""

    title: str
    finding: str
    label: str
    groups: tuple[BarGroup, ...]
    unit: str = ""
    one_scale: bool = True
    note: str = ""

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """(name, tone) of every part that is anywhere above 0, in order of appearance; bars may differ in the tone of a part."""
        parts = [
            s for group in self.groups for bar in group.bars for s in bar.segments if s.value > 0
        ]
        return tuple({s.name: s.tone for s in reversed(parts)}.items())[::-1]

    def longest(self, group: BarGroup) -> float:
        """The length that fills the width. An interval that reaches far beyond the bars is cut, or it would flatten them."""
        bars = [bar for g in (self.groups if self.one_scale else (group,)) for bar in g.bars]
        most = max((bar.end for bar in bars), default=0.0) or 1.0
        return max(
            most, min(max((bar.high or 0.0 for bar in bars), default=0.0), MOST_INTERVAL * most)
        )


class Cell(Record):
    """One of a heat map's: a value that gives its shade, None where there is none and the reason is `said`. `mark`: a name for
    the cell that the answer is about."""

    value: float | None
    said: str
    mark: str = ""


class HeatMap(Record):
    """Values over two lists of choices, the least the darkest. Rows may have no cell (None) in a column."""

    title: str
    finding: str
    across: str
    down: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    unit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for name, cells in self.rows:
            if len(cells) != len(self.columns):
                raise TrainpaceError(
                    f"row {name!r} of a heat map has {len(cells)} cells in {len(self.columns)}"
                    " columns."
                )

    def shade(self, cell: Cell) -> int:
        """0 to SHADES - 1, by the logarithm of the value between the least and the greatest; -1 without a value."""
        if cell.value is None:
            return -1
        values = [
            c.value
            for _, cells in self.rows
            for c in cells
            if c is not None and c.value is not None
        ]
        low, high = min(values), max(values)
        if not 0 < low < high:
            return SHADES - 1
        return round((SHADES - 1) * math.log(high / cell.value) / math.log(high / low))


SHADES = 6
MOST_INTERVAL = 2.5
"""Times the longest bar, or the highest curve, to which an interval or a limit is drawn."""

Picture = Chart | BarChart | HeatMap


def series(
    name: str,
    kind: Literal["line", "points"],
    tone: str,
    points: Iterable[tuple[float, float | None]],
    intervals: Sequence[Interval | None] = (),
    **more: Any,
) -> Series:
    """A series through `points` (x, y), with the `intervals` of y where every point has one."""
    x, y = tuple(zip(*points, strict=True)) or ((), ())
    bounds = [(i.low, i.high) for i in intervals if i is not None]
    low, high = zip(*bounds, strict=True) if bounds and len(bounds) == len(x) else ((), ())
    return Series(
        name=name, kind=kind, tone=tone, x=tuple(map(float, x)), y=y, low=low, high=high, **more
    )


def ideal_line(points: Iterable[tuple[float, float]]) -> Series:
    return series("ideal: in proportion", "line", "ideal", points, dashed=True)


def bar(
    label: str, said: str, parts: Iterable[tuple[str, str, float]], interval: Interval | None = None
) -> Bar:
    """A bar of `parts` (name, tone, value), with the `interval` of the whole."""
    segments = tuple(Segment(name=name, tone=tone, value=value) for name, tone, value in parts)
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return Bar(label=label, said=said, segments=segments, low=low, high=high)


def tick_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most `most` of them make the span."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        times * power for times in (1.0, 2.0, 5.0, 10.0) if times * power >= rough * (1 - 1e-9)
    )


def _check_tone(tone: str) -> None:
    assert tone in TONES, f"no tone {tone!r}"


def css_variables() -> str:
    """`--ink`, `--page`, ..., `--tone-NAME` for both schemes; on paper, and with class `paper`, the light ones hold."""
    pairs = {"--page": PAGE, "--ink": INK, "--soft": SOFT, "--line": LINE}
    pairs |= {f"--tone-{name}": pair for name, pair in TONES.items()}
    textures = "".join(f";--texture-{tone}:{texture}" for tone, texture in TEXTURES.items())
    light, dark = (";".join(f"{name}:{pair[i]}" for name, pair in pairs.items()) for i in (0, 1))
    shades = "".join(f".shade{i}{{background:{_mixed(i)}}}" for i in range(SHADES))
    return (
        f":root{{color-scheme:light dark;{light}{textures}}}\n{shades}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not(.paper){{{dark}}}}}\n"
    )


def _mixed(shade: int) -> str:
    return f"color-mix(in srgb, var(--tone-first) {round(100 * shade_share(shade))}%, var(--page))"


def shade_share(shade: int) -> float:
    """How much of its colour a shade has; the rest is the page's. Text in the page's ink stays readable on all of them."""
    return 0.08 * shade
