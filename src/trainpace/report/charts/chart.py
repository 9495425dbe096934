"""What a picture shows, as data: no HTML, no pixels. Renderers (`report.pages`, `report.charts.figure`) draw the same record.

As JSON (`records.to_jsonable`) a `Chart` is what `assets/charts.js` draws:

    {"record": "Chart", "schema_version": 1, "title": "...", "finding": "...",
     "x": {"label": "batch size", "unit": "", "scale": "linear", "low": null, "high": null},
     "y": {"label": "step time", "unit": "ms", ...},
     "series": [{"name": "forecast", "kind": "line", "tone": "forecast", "x": [...], "y": [...], "low": [...], "high": [...],
                 "labels": [], "sizes": [], "dashed": false}],
     "marks": [{"axis": "x", "at": 16.5, "y": null, "text": "jump: +12 %", "tone": "jump"}], "nearest": "x", "note": "..."}
"""

import math
from typing import Literal

from trainpace.errors import TrainpaceError
from trainpace.records import Record
from trainpace.report.charts.palette import TONES

Scale = Literal["linear", "log10", "log2"]


class Axis(Record):
    """A label and a unit; `low` and `high` where the axis should not end with its data."""

    label: str
    unit: str = ""
    scale: Scale = "linear"
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """The axis' title with its unit."""
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
        _known(self.tone)
        columns = {"y": self.y, "low": self.low, "high": self.high, "labels": self.labels, "sizes": self.sizes}
        for name, column in columns.items():
            if column and len(column) != len(self.x):
                raise TrainpaceError(f"series {self.name!r} has {len(self.x)} x and {len(column)} {name}.")
        if bool(self.low) != bool(self.high) or not (self.low if self.kind == "area" else self.y or not self.x):
            raise TrainpaceError(f"series {self.name!r} is a {self.kind} without its values.")
        if self.kind in ("line", "area") and any(b < a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise TrainpaceError(f"series {self.name!r} is a {self.kind}, and its x do not ascend.")
        if not all(
            math.isfinite(v) for column in (self.x, self.y, self.low, self.high) for v in column if v is not None
        ):
            raise TrainpaceError(f"series {self.name!r} has values that are not finite.")


class Mark(Record):
    """A named place: an upright line at x, a level line at y, or a point (`at`, `y`)."""

    axis: Literal["x", "y", "point"]
    at: float
    text: str
    tone: str
    y: float | None = None

    def __post_init__(self) -> None:
        _known(self.tone)
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
    name: str
    tone: str
    value: float

    def __post_init__(self) -> None:
        _known(self.tone)
        if not (math.isfinite(self.value) and self.value >= 0):
            raise TrainpaceError(f"segment {self.name!r} is {self.value}; a part of a bar is 0 or more.")


class Bar(Record):
    """A level bar made of segments, which add up to what it shows; `low` to `high` is its interval. `said` stands at its end."""

    label: str
    segments: tuple[Segment, ...]
    said: str
    low: float | None = None
    high: float | None = None

    @property
    def total(self) -> float:
        """The bar's length, in the chart's unit."""
        return math.fsum(segment.value for segment in self.segments)


class BarGroup(Record):
    """Bars on one scale, to be compared with each other."""

    title: str
    bars: tuple[Bar, ...]


class BarChart(Record):
    """Level bars: stacked parts of a step, a ladder of speed-ups. Each group has a scale of its own unless `one_scale`."""

    title: str
    finding: str
    label: str
    unit: str
    groups: tuple[BarGroup, ...]
    one_scale: bool = True
    note: str = ""

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """(name, tone) of every part that is anywhere above 0, in order of appearance; bars may differ in the tone of a part."""
        parts = [s for group in self.groups for bar in group.bars for s in bar.segments if s.value > 0]
        return tuple({s.name: s.tone for s in reversed(parts)}.items())[::-1]

    def longest(self, group: BarGroup) -> float:
        """The length that fills the width. An interval that reaches far beyond the bars is cut, or it would flatten them."""
        bars = [bar for g in (self.groups if self.one_scale else (group,)) for bar in g.bars]
        most = max((bar.total for bar in bars), default=0.0) or 1.0
        return max(most, min(max((bar.high or 0.0 for bar in bars), default=0.0), MOST_INTERVAL * most))


MOST_INTERVAL = 2.5
"""Times the longest bar, or the highest curve, to which an interval or a limit is drawn."""

Picture = Chart | BarChart


def ideal_line(x: tuple[float, ...], y: tuple[float, ...]) -> Series:
    return Series(name="ideal: in proportion", kind="line", tone="ideal", x=x, y=y, dashed=True)


def sentence(text: str) -> str:
    """With a capital at its start, and names inside as they are."""
    return text[:1].upper() + text[1:]


def _known(tone: str) -> None:
    assert tone in TONES, f"no tone {tone!r}"
