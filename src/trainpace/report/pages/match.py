"""A ranking of servers as a page: which to take, cost against time with the Pareto front, the ranks."""

import datetime
from typing import Any

from trainpace.offers import Job, Ranking, is_stale
from trainpace.report.charts.breakdown import Timed, step_breakdown
from trainpace.report.charts.chart import Picture
from trainpace.report.charts.servers import cheapest_and_fastest, cost_against_time, server
from trainpace.report.match import ranked_by
from trainpace.report.pages.render import page
from trainpace.workload import Workload

MOST_ROWS = 60
FIRST_ROWS = 15
MOST_BARS = 8
MOST_REJECTED = 12


def match_page(
    workload: Workload, ranking: Ranking, job: Job, by: str, why_none: str, data: dict[str, Any], today: datetime.date
) -> str:
    """The page as text. `why_none`: what binds where nothing meets the demands. `data`: `match --json`, of which the page keeps
    the rows that it shows."""
    matches = ranking.matches
    shown = [(rank, m) for rank, m in enumerate(matches, 1) if rank <= MOST_ROWS or m.on_front]
    data = {**data, "rows": [data["rows"][rank - 1] for rank, _ in shown], "missed": data["missed"][:MOST_REJECTED]}
    data["rejected"] = []
    sentences = [f"No server meets this. {why_none}"]
    if matches:
        sentences = [
            *cheapest_and_fastest(matches),
            "Forecasts, not measurements: the intervals should hold in 9 of 10 cases.",
        ]
        stale = sum(is_stale(m.offer, today) for _, m in shown)
        if stale:
            sentences.append(f"{stale} of the prices shown are old: trainpace offers --refresh fetches today's.")
    return page(
        "match.html", f"{workload.model}: which server", sentences, match_pictures(ranking), data, bool(matches),
        ranked_by(matches, job, by) if matches else "", shown=shown, first_rows=FIRST_ROWS, further=len(matches) - len(shown),
        left_out=_left_out(ranking), server=server,
    )  # fmt: skip


def match_pictures(ranking: Ranking) -> list[Picture]:
    plot = cost_against_time(ranking.matches)
    front = [m for m in ranking.matches if m.on_front]
    every = max(1, -(-len(front) // MOST_BARS))
    steps = [Timed("", server(m), m.forecast.step, m.forecast.step_time_interval_ms) for m in front[::every]
             if m.forecast.step is not None]  # fmt: skip
    return [*([] if plot is None else [plot]), *([step_breakdown(steps)] if steps else [])]


def _left_out(ranking: Ranking) -> list[str]:
    reasons = list(dict.fromkeys(f"{r.offer.device}: {r.reason}." for r in ranking.rejected))
    more = [f"And {len(reasons) - MOST_REJECTED} more."] if len(reasons) > MOST_REJECTED else []
    missed = [f"{len(ranking.missed)} more miss the deadline or the budget."] if ranking.missed else []
    return [*missed, *reasons[:MOST_REJECTED], *more]
