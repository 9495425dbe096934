"""A climbed ladder as a page: how much faster in all, rung by rung, forecast beside measured."""

from trainpace.report.charts.changes import rung_times, speedups
from trainpace.report.charts.chart import Picture
from trainpace.report.ladder import LadderTable, cells_of, head_of
from trainpace.report.pages.render import page


def ladder_page(t: LadderTable, data: object) -> str:
    kept = [i > 0 and row.kept for i, row in enumerate(t.rows)]
    rows = list(zip(kept, cells_of(t), strict=True))
    return page("ladder.html", t.title, t.verdict, ladder_pictures(t), data, head=head_of(t), rows=rows)


def ladder_pictures(t: LadderTable) -> list[Picture]:
    ladder = speedups(t.what, [(r.title, r.total, r.kept) for r in t.rows])
    times = rung_times(
        t.what,
        [(r.title, r.forecast_ms, r.forecast_interval_ms, r.measured_ms, r.measured_interval_ms) for r in t.rows],
    )
    foreseen = any(r.forecast_ms is not None for r in t.rows)
    return [*([] if ladder is None else [ladder]), *([times] if times.groups and (ladder is None or foreseen) else [])]
