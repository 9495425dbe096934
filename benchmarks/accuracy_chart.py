"""The chart of forecast against measured step times, a panel for each generation of cards."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_tables import KINDS, Judged, errors_of, generation_rank, kind_of

from trainpace.core.hardware import Device

COLUMNS = 3
WIDTH_IN, ROW_IN = 8.2, 2.45
DOTS_PER_INCH = 150
COLOURS_IN_ALL = 200
BAND = 0.2
FEW_DECADES = 30.0
"""An axis whose ends are less apart than this has ticks at 2 and 5 too."""
UNSEEN = {
    "device": "the card was not in the fit",
    "family": "the family of the model was not in the fit",
}
COLOURS = dict(zip(KINDS, ("#0063a8", "#58b4f0", "#b85c00", "#00a37a", "#7b8794"), strict=True))
SOFT, LINE = "#566270", "#dde3e9"


def panel_of(device: Device) -> str:
    """The panel of a card: its generation, of Ampere three, as half of all runs are on its cards."""
    name, generation = device.name, device.architecture
    if generation != "Ampere" or name == "RTX 3090":
        return name if generation == "Ampere" else generation
    return "A100" if name.startswith("A100") else "Ampere, other cards"


def panels_of(rows: Sequence[Judged]) -> dict[str, list[Judged]]:
    """{panel: rows}, the newest generation first."""
    panels: dict[tuple[tuple[int, str], str], list[Judged]] = {}
    for row in rows:
        device = row.case.cluster.device
        panels.setdefault((generation_rank(device), panel_of(device)), []).append(row)
    return {name: panels[rank, name] for rank, name in sorted(panels)}


def draw(rows: Sequence[Judged], path: Path, left_out: str) -> None:
    """Write the chart of rows with their card ("device") or their family of models ("family") left out, as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from PIL import Image

    panels = panels_of(rows)
    cells = len(panels) + 1  # the legend's
    style: Any = {
        "font.size": 8,
        "axes.edgecolor": LINE,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "text.color": "#1b2530",
    }
    with rc_context(style):
        lines = -(-cells // COLUMNS)
        figure = Figure(figsize=(WIDTH_IN, 0.7 + ROW_IN * lines), layout="constrained")
        figure.suptitle(
            f"Forecast against measured time of a training step or forward pass; {UNSEEN[left_out]}",
            fontsize=11,
        )
        figure.supxlabel("measured time", fontsize=9)
        figure.supylabel("forecast time", fontsize=9)
        grid = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
        for axes, (name, of_panel) in zip(grid, panels.items(), strict=False):
            _panel(axes, name, of_panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        _legend(grid[len(panels)], rows)
        picture = io.BytesIO()
        figure.savefig(picture, dpi=DOTS_PER_INCH)
    small = (
        Image.open(picture)
        .convert("RGB")
        .quantize(COLOURS_IN_ALL, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    small.save(path, optimize=True)


def _panel(axes: Any, name: str, rows: Sequence[Judged]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    times = np.array([(row.measured_ms, row.forecast_ms) for row in rows])
    low, high = times.min() / 1.5, times.max() * 1.5
    ends = np.array([low, high])
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, box_aspect=1)
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=LINE, linewidth=0)
    axes.plot(ends, ends, color=SOFT, linewidth=0.7)
    for kind in sorted(COLOURS, key=lambda kind: -sum(kind_of(row.case) == kind for row in rows)):
        for alone in (True, False):
            chosen = [
                kind_of(row.case) == kind and (row.case.execution.world_size == 1) == alone
                for row in rows
            ]
            x, y = times[chosen].T
            axes.scatter(x, y, **_mark(COLOURS[kind], alone), zorder=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if high < FEW_DECADES * low else (1,), numticks=6)
        )
        axis.set_major_formatter(
            FuncFormatter(lambda ms, _: f"{ms:.15g} ms" if ms < 999 else f"{ms / 1e3:.15g} s")
        )
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7, length=2)
    axes.tick_params(which="minor", length=0)
    cards = sorted({row.case.cluster.device.name for row in rows})
    e = errors_of(rows)
    on = (
        f"on {len(cards)} cards" if len(cards) > 1 else "" if cards[0] == name else f"on {cards[0]}"
    )
    runs = f"{e.n:,} runs {on}".strip()
    axes.set_title(name, loc="left", fontsize=9, fontweight="bold", pad=14)
    axes.text(
        0,
        1.02,
        f"{runs}, median error {e.median:.0f} %",
        transform=axes.transAxes,
        fontsize=7,
        color=SOFT,
    )


def _mark(colour: str, alone: bool) -> dict[str, Any]:
    """A dot for one GPU, a ring for several."""
    if alone:
        return {"s": 6, "color": colour, "alpha": 0.55, "linewidths": 0}
    return {"s": 9, "facecolors": "none", "edgecolors": colour, "alpha": 0.7, "linewidths": 0.6}


def _legend(axes: Any, rows: Sequence[Judged]) -> None:
    present = {kind_of(row.case) for row in rows}
    for kind in (kind for kind in KINDS if kind in present):
        axes.scatter([], [], s=24, color=COLOURS[kind], linewidths=0, label=kind)
    axes.scatter(
        [],
        [],
        s=24,
        facecolors="none",
        edgecolors=SOFT,
        linewidths=0.9,
        label="a ring: several GPUs",
    )
    axes.plot([], [], color=SOFT, linewidth=0.7, label="forecast = measured")
    axes.fill_between([], [], color=LINE, label=f"within {100 * BAND:.0f} %")
    axes.legend(loc="center left", frameon=False, fontsize=8.5, labelspacing=0.6)
