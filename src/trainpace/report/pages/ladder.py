"""A climbed ladder as a page: how much faster in all, rung by rung, forecast beside measured."""

from __future__ import annotations

from trainpace.report.charts.changes import rung_times, speedups
from trainpace.report.charts.chart import Picture
from trainpace.report.ladder import LadderTable, cells_of, head_of
from trainpace.report.pages.figure import drawn, section, table
from trainpace.report.pages.frame import document


def ladder_page(t: LadderTable, data: object) -> str:
    """The page as text."""
    pictures = "".join(drawn(picture) for picture in ladder_pictures(t))
    kept = [i for i, row in enumerate(t.rows) if i and row.kept]
    return document(
        t.title, t.verdict, pictures + section("Rung by rung", table(head_of(t), cells_of(t), hits=kept)), data
    )


def ladder_pictures(t: LadderTable) -> list[Picture]:
    """The speed-up over the baseline, and every rung's forecast beside its measurement."""
    ladder = speedups(t.what, [(r.title, r.total, r.kept) for r in t.rows])
    times = rung_times(
        t.what,
        [(r.title, r.forecast_ms, r.forecast_interval_ms, r.measured_ms, r.measured_interval_ms) for r in t.rows],
    )
    foreseen = any(r.forecast_ms is not None for r in t.rows)
    return [*([] if ladder is None else [ladder]), *([times] if times.groups and (ladder is None or foreseen) else [])]
