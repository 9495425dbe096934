"""A ranking of servers as a page: which to take, cost against time with the Pareto front, the ranks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from trainpace.offers.match import Job, Match, Ranking
from trainpace.offers.offer import is_stale
from trainpace.report.charts.breakdown import Timed, step_breakdown
from trainpace.report.charts.chart import Picture
from trainpace.report.charts.servers import cost_against_time, server
from trainpace.report.pages.figure import drawn, lines, section, table
from trainpace.report.pages.frame import document
from trainpace.units import format_duration, format_number, format_usd
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
    found = ranking.matches
    title = f"{workload.model}: which server"
    shown = _shown(found)
    rows = [data["rows"][rank - 1] for rank, _ in shown]
    kept = {**data, "rows": rows, "missed": data["missed"][:MOST_REJECTED], "rejected": []}
    if not found:
        return document(title, [f"No server meets this. {why_none}"], _rest(ranking), kept, answer=False)
    ways = "1 way" if len(found) == 1 else f"{len(found)} ways"
    what = f"{found[0].steps:,} steps of {job.global_batch:,} samples; {ways} to train it, ranked by {by}."
    best, fastest = min(found, key=lambda m: m.mean_usd), min(found, key=lambda m: m.mean_hours)
    said = [f"Cheapest: {server(best)}, {format_usd(best.mean_usd)} ({_usd(best)}) in {_hours(best)}."]
    if fastest is not best:
        said.append(
            f"Fastest: {server(fastest)}, {_hours(fastest)} for {format_usd(fastest.mean_usd)} ({_usd(fastest)})."
        )
    stale = sum(is_stale(m.offer, today) for _, m in shown)
    said.append("Forecasts, not measurements: the intervals should hold 9 of 10 cases.")
    if stale:
        said.append(f"{stale} of the prices shown are old: trainpace offers --refresh fetches today's.")
    body = lines([what], "soft") + "".join(drawn(picture) for picture in match_pictures(ranking))
    body += section("Ranks", _table(shown, len(found))) + _rest(ranking)
    return document(title, said, body, kept)


def match_pictures(ranking: Ranking) -> list[Picture]:
    """Cost against time, and the steps of the front."""
    plot = cost_against_time(ranking.matches)
    front = [m for m in ranking.matches if m.on_front]
    every = max(1, -(-len(front) // MOST_BARS))
    steps = [Timed("", server(m), m.forecast.step, m.forecast.step_time_interval_ms) for m in front[::every]
             if m.forecast.step is not None]  # fmt: skip
    return [*([] if plot is None else [plot]), *([step_breakdown(steps)] if steps else [])]


def _shown(found: Sequence[Match]) -> list[tuple[int, Match]]:
    """(rank, match): the first, and the front wherever it lies."""
    return [(rank, m) for rank, m in enumerate(found, 1) if rank <= MOST_ROWS or m.on_front]


def _table(shown: Sequence[tuple[int, Match]], found: int) -> str:
    note = "* No other is both faster and cheaper."
    if found > len(shown):
        note += f" {found - len(shown)} further ranks are in trainpace match --json."
    first, rest = shown[:FIRST_ROWS], shown[FIRST_ROWS:]
    more = f"<details><summary>{len(rest)} more ranks</summary>{_rows(rest)}</details>" if rest else ""
    return _rows(first) + more + lines([note], "note")


def _rows(shown: Sequence[tuple[int, Match]]) -> str:
    head = ["#", "server", "region", "run", "step ms", "hours", "90 %", "cost", "90 %", "price of"]
    rows = [
        [f"{rank}{' *' if m.on_front else ''}", server(m), m.offer.region,
         f"{m.forecast.execution.precision}, {m.forecast.execution.micro_batch} x {m.forecast.execution.accumulation}",
         "" if m.forecast.step is None else format_number(m.forecast.step.total_ms), format_number(m.mean_hours),
         f"{format_number(m.hours.low)} to {format_number(m.hours.high)}", format_usd(m.mean_usd), _usd(m), m.offer.as_of or "?"]
        for rank, m in shown
    ]  # fmt: skip
    return table(head, rows, left=4, hits=[i for i, (_, m) in enumerate(shown) if m.on_front])


def _rest(ranking: Ranking) -> str:
    reasons = list(dict.fromkeys(f"{r.offer.device}: {r.reason}." for r in ranking.rejected))
    more = [f"And {len(reasons) - MOST_REJECTED} more."] if len(reasons) > MOST_REJECTED else []
    missed = [f"{len(ranking.missed)} more miss the deadline or the budget."] if ranking.missed else []
    return section("Left out", lines([*missed, *reasons[:MOST_REJECTED], *more], "soft"))


def _usd(m: Match) -> str:
    return f"{format_usd(m.usd.low)} to {format_usd(m.usd.high)}"


def _hours(m: Match) -> str:
    return format_duration(3600 * m.mean_hours)
