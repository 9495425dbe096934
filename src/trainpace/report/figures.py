"""Charts as files for papers: PNG, SVG or PDF, through matplotlib (the extra `figures`), in the light palette."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainpace.errors import TrainpaceError
from trainpace.records import written_aside
from trainpace.report.charts.chart import Axis, Bar, BarChart, Chart, Mark, Picture, Series
from trainpace.report.charts.palette import INK, LINE, SOFT, TONES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH_IN, HEIGHT_IN = 6.4, 3.7
DOTS_PER_INCH = 200
BAR_IN = 0.27
"""Height of a row of bars."""
NO_DATE: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
"""The same chart gives the same file."""


def check_suffix(path: str) -> None:
    """Raises TrainpaceError for a file that is none of the three."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise TrainpaceError(f"{path} is no picture that can be written.", "End its name with .png, .svg or .pdf.")


def save_figures(pictures: Sequence[Picture], path: str) -> list[Path]:
    """The first as `path`, every other beside it with its title in its name; the files written.

    Raises TrainpaceError where there is nothing to draw, or matplotlib is not installed.
    """
    check_suffix(path)
    if not pictures:
        raise TrainpaceError("there is nothing to draw: nothing could be forecast or measured.")
    first = Path(path)
    files = [first, *(first.with_name(f"{first.stem}-{_slug(p.title)}{first.suffix}") for p in pictures[1:])]
    for picture, file in zip(pictures, files, strict=True):
        with written_aside(file) as aside, _settings():
            suffix = file.suffix.lower()
            figure = chart_figure(picture) if isinstance(picture, Chart) else bars_figure(picture)
            figure.savefig(aside, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=NO_DATE[suffix])
    return files


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _settings() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise TrainpaceError(
            "pictures as files need matplotlib, which is not installed.", "pip install 'trainpace[figures]'"
        ) from None
    return mpl.rc_context({
        "font.size": 8, "font.family": "sans-serif", "svg.hashsalt": "trainpace", "text.color": INK[0],
        "axes.labelcolor": SOFT[0], "xtick.color": SOFT[0], "ytick.color": SOFT[0], "axes.edgecolor": LINE[0], "grid.color": LINE[0], "axes.titlesize": 9,
        "text.parse_math": False,
    })  # fmt: skip


def _figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def chart_figure(chart: Chart) -> Figure:
    """Series and marks over a pair of axes, the key above them."""
    figure = _figure(HEIGHT_IN)
    axes = figure.add_subplot()
    axes.set_title(chart.title, loc="left", pad=26)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    _scaled(axes, "x", chart.x)
    _scaled(axes, "y", chart.y)
    for series in chart.series:
        _draw(axes, series)
    for mark in chart.marks:
        _mark(axes, mark)
    _limits(axes, chart)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=7,
        borderaxespad=0.2,
        columnspacing=1.2,
    )
    return figure


def _scaled(axes: Any, which: str, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from trainpace.units import format_number

    getattr(axes, f"set_{which}label")(axis.words)
    if axis.scale != "linear":
        getattr(axes, f"set_{which}scale")("log", base=2 if axis.scale == "log2" else 10)
        getattr(axes, f"{which}axis").set_minor_formatter(NullFormatter())
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))


def _limits(axes: Any, chart: Chart) -> None:
    for which, axis in (("x", chart.x), ("y", chart.y)):
        ends = {side: value for side, value in ((0, axis.low), (1, axis.high)) if value is not None}
        low, high = getattr(axes, f"get_{which}lim")()
        getattr(axes, f"set_{which}lim")(ends.get(0, low), ends.get(1, high))


def _draw(axes: Any, s: Series) -> None:
    colour = TONES[s.tone][0]
    if s.kind == "area":
        axes.fill_between(s.x, s.low, s.high, color=colour, alpha=0.85, linewidth=0, label=s.name)
        return
    known = [i for i, y in enumerate(s.y) if y is not None]
    x, y = [s.x[i] for i in known], [s.y[i] for i in known]
    if s.kind == "line":
        axes.plot(x, y, color=colour, linestyle="--" if s.dashed else "-", linewidth=1.4, label=s.name)
        if s.low:
            axes.fill_between(s.x, s.low, s.high, color=colour, alpha=0.18, linewidth=0)
        return
    if s.low:
        axes.vlines(x, [s.low[i] for i in known], [s.high[i] for i in known], color=colour, alpha=0.6, linewidth=1)
    sizes = [8 + 180 * s.sizes[i] for i in known] if s.sizes else 12
    axes.scatter(x, y, s=sizes, color=colour, alpha=0.75 if s.sizes else 1.0, linewidth=0, label=s.name, zorder=3)


def _mark(axes: Any, mark: Mark) -> None:
    colour = TONES[mark.tone][0]
    if mark.axis == "x":
        axes.axvline(mark.at, color=colour, linestyle=":", linewidth=1.1)
        axes.annotate(mark.text, (mark.at, 1), xycoords=("data", "axes fraction"), xytext=(-2, -2), textcoords="offset points",
                      rotation=90, ha="right", va="top", fontsize=6.5, color=colour)  # fmt: skip
    elif mark.axis == "y":
        axes.axhline(mark.at, color=colour, linestyle="--", linewidth=1.1)
        axes.annotate(mark.text, (1, mark.at), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
                      ha="right", va="bottom", fontsize=7, color=colour)  # fmt: skip
    else:
        axes.plot([mark.at], [mark.y], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour)
        across = axes.transAxes.inverted().transform(axes.transData.transform((mark.at, mark.y or 0.0)))[0]
        end = across > 0.6
        axes.annotate(mark.text, (mark.at, mark.y), xytext=(-7 if end else 7, 5), textcoords="offset points",
                      ha="right" if end else "left", fontsize=7, color=colour)  # fmt: skip


def bars_figure(chart: BarChart) -> Figure:
    """Level bars, group under group, with what stands at their ends."""
    rows = sum(len(group.bars) + bool(group.title) for group in chart.groups)
    figure = _figure(0.9 + BAR_IN * rows)
    axes = figure.add_subplot()
    axes.set_title(chart.title, loc="left", pad=22 if len(chart.key) > 1 else 6)
    names, at = [], 0
    longest = max((chart.longest(group) for group in chart.groups), default=1.0)
    seen: set[str] = set()
    for group in chart.groups:
        scale = longest / chart.longest(group)
        if group.title:
            names.append((at, group.title))
            at += 1
        for bar in group.bars:
            _bar(axes, at, bar, scale, seen)
            names.append((at, bar.label))
            at += 1
    axes.set_yticks([y for y, _ in names], [name for _, name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.3)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_xticks([])
    if len(chart.key) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=7, borderaxespad=0.2)
    return figure


def _bar(axes: Any, at: int, bar: Bar, scale: float, seen: set[str]) -> None:
    left = 0.0
    for s in bar.segments:
        if s.value > 0:
            label = None if s.name in seen else s.name
            seen.add(s.name)
            colour = TONES[s.tone][0]
            axes.barh(
                at, s.value * scale, left=left, height=0.7, color=colour, edgecolor="white", linewidth=0.5, label=label
            )
            left += s.value * scale
    end = left
    if bar.low is not None and bar.high is not None:
        low, high = bar.low * scale, bar.high * scale
        axes.errorbar([left], [at], xerr=[[max(left - low, 0)], [max(high - left, 0)]], fmt="none", ecolor=INK[0], elinewidth=1,
                      capsize=2)  # fmt: skip
        end = max(left, high)
    axes.annotate(bar.said, (end, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
