"""A ranking of servers for the terminal."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

from trainpace.execution import Execution
from trainpace.forecast.job import JobConditions
from trainpace.offers.match import Binding, Job, Match, Ranking, Rejected, cheapest_in_time, fastest_within_budget
from trainpace.offers.offer import is_stale
from trainpace.offers.snapshot import SNAPSHOT_KNOWN_ON
from trainpace.report.terminal import console, print_lines, print_table
from trainpace.units import format_duration, format_number, format_usd
from trainpace.workload import Workload

WIDE, WIDER, WIDEST = 96, 112, 140
"""Columns of the terminal from which the table shows intervals; memory; regions, dollars a step and energy."""
SEPARATOR = 3
"""Columns between two of the table's."""
LEAST_ROOM = 16
FEWEST_SHOWN = 3
MOST_REGION = 14


def print_ranking(
    workload: Workload,
    ranking: Ranking,
    job: Job,
    close: tuple[Binding, str, Match | Rejected] | None,
    by: str,
    top: int,
    today: datetime.date,
) -> None:
    """The best rows and the Pareto front, a verdict, what next, how old the prices are."""
    if not ranking.matches:
        _print_none(workload, ranking, close, job)
        return
    first = ranking.matches[0]
    print_lines(
        f"{workload.model}: {first.steps:,} steps of {job.global_batch:,} samples. {len(ranking.matches)} ways to train it,"
        f" ranked by {by}."
    )
    shown = _shown(ranking.matches, top)
    rank_of = {id(match): i for i, match in enumerate(ranking.matches, start=1)}
    _print_table(shown, rank_of, console().width)
    print_lines(_verdict(ranking.matches))
    print_lines(_next(first, job))
    if ranking.missed:
        print_lines(f"{len(ranking.missed)} more miss the deadline or the budget.")
    short = sum(r.binding == "memory" for r in ranking.rejected)
    others = len(ranking.rejected) - short
    if short or others:
        parts = [f"{short} for want of memory"] * bool(short) + [f"{others} for other reasons"] * bool(others)
        print_lines(f"Left out: {', '.join(parts)} (--json says which and why).")
    _print_notes(shown, job.conditions, today)


def _print_table(shown: Sequence[Match], rank_of: dict[int, int], width: int) -> None:
    """As many columns as there is room for; the servers' names take what is left."""
    columns = ["#", "server", "GPUs", "step ms", "hours", "cost"]
    rows = [[f"{rank_of[id(m)]}{'*' if m.on_front else ''}", "", *_cells(m)] for m in shown]

    def insert(at: int, name: str, cell: Callable[[Match], str]) -> None:
        columns.insert(at, name)
        for row, match in zip(rows, shown, strict=True):
            row.insert(at, cell(match))

    if width >= WIDE:
        insert(3, "run", _run)
        insert(6, "90 %", lambda m: f"{format_number(m.hours.low)} to {format_number(m.hours.high)}")
    if width >= WIDER:
        insert(
            len(columns), "GiB", lambda m: format_number(m.forecast.memory.allocated_gib if m.forecast.memory else 0.0)
        )
    if width >= WIDEST:
        insert(len(columns), "$/1000 steps", lambda m: format_number(1e3 * m.usd_per_step))
        insert(len(columns), "kWh", lambda m: "-" if m.kwh is None else format_number(m.kwh))
        insert(2, "region", lambda m: _shortened(m.offer.region, MOST_REGION))
    taken = sum(max(len(columns[i]), *(len(row[i]) for row in rows)) + SEPARATOR for i in range(len(columns)) if i != 1)
    room = max(LEAST_ROOM, width - taken - SEPARATOR)
    names = [_server(match, room) for match in shown]
    for row, match, name in zip(rows, shown, names, strict=True):
        alike = names.count(name) > 1 and "region" not in columns and match.offer.region
        row[1] = _server(match, room, f" {_shortened(match.offer.region, MOST_REGION)}") if alike else name
    print_table(columns, rows, left=columns.index("step ms"))


def _cells(m: Match) -> list[str]:
    f = m.forecast
    assert f.step is not None
    return [
        f"{m.offer.count} x {m.offer.device}" if m.offer.count > 1 else m.offer.device,
        format_number(f.step.total_ms), format_number(m.mean_hours), format_usd(m.mean_usd),
    ]  # fmt: skip


def _run(m: Match) -> str:
    execution = m.forecast.execution
    micro = f"{execution.micro_batch}" + (f"x{execution.accumulation}" if execution.accumulation > 1 else "")
    return " ".join(filter(None, (execution.precision, micro, _sharding(execution))))


def _sharding(execution: Execution) -> str:
    """ZeRO-1 or FSDP, and over how many GPUs where those are not all; nothing for plain data parallelism."""
    name = {0: "", 3: "FSDP"}.get(execution.zero_stage, f"ZeRO-{execution.zero_stage}")
    return f"{name}/{execution.shard_size}" if execution.shard_size else name


def _server(m: Match, room: int, region: str = "") -> str:
    before = f"{m.nodes} x " if m.nodes > 1 else ""
    after = f"{region}{' spot' if m.spot else ''}"
    name = f"{m.offer.provider} {m.offer.instance_type.removeprefix('Standard_')}"
    return f"{before}{_shortened(name, room - len(before) - len(after))}{after}"


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(0, room - 1)]}…"


def _shown(matches: Sequence[Match], top: int) -> list[Match]:
    """The first `top`, and what else is on the front, thinned where that is long."""
    front = [m for m in matches[top:] if m.on_front]
    most = max(FEWEST_SHOWN, top // 2)
    every = max(1, -(-len(front) // most))
    return [*matches[:top], *front[::-every][::-1]]  # counted from the fastest, which is shown


def _verdict(matches: Sequence[Match]) -> str:
    cheapest, fastest = min(matches, key=lambda m: m.mean_usd), min(matches, key=lambda m: m.mean_hours)
    line = "* No other is both faster and cheaper."
    line += f" Cheapest: {_named(cheapest)}, {format_usd(cheapest.mean_usd)} in {_hours(cheapest)}."
    if fastest is not cheapest:
        line += f" Fastest: {_named(fastest)}, {_hours(fastest)} for {format_usd(fastest.mean_usd)}."
    return line


def _next(first: Match, job: Job) -> str:
    f = first.forecast
    lost = 1 - first.time.goodput
    parts = f"{100 * lost:.0f} % of its time is not steps" if lost >= 0.01 else "all but 1 % of its time is steps"
    line = f"On the first, {parts}; a checkpoint every {format_duration(first.time.checkpoint_interval_s)} loses least."
    if job.conditions.checkpoint_every_s is not None or first.time.checkpoints == 1:
        line = f"On the first, {parts}."
    return (
        f"{line} Next: rent it for some minutes and run `trainpace measure` at batch {f.execution.micro_batch},"
        f" which narrows the interval."
    )


def _print_none(
    workload: Workload, ranking: Ranking, close: tuple[Binding, str, Match | Rejected] | None, job: Job
) -> None:
    if close is None:
        print_lines("No server was considered.")
        return
    binding, reason, choice = close
    if binding == "failures":
        print_lines(f"No server finishes this. On {_named(choice)}, {reason}.")
        return
    if isinstance(choice, Match) and job.deadline_s is not None and job.budget_usd is not None:
        limits = f"{format_duration(job.deadline_s)} and {format_usd(job.budget_usd)}"
        print_lines(f"No server meets both the deadline and the budget, {limits}.")
        for said, found in (
            ("Cheapest that meets the deadline", cheapest_in_time(ranking, job)),
            ("Fastest within the budget", fastest_within_budget(ranking, job)),
        ):
            met = "none" if found is None else f"{_named(found)}, {_hours(found)} for {format_usd(found.mean_usd)}"
            print_lines(f"{said}: {met}.")
    print_lines(f"No server meets this: {binding} binds. At the nearest, {_named(choice)}, {reason}.")
    if isinstance(choice, Match):
        print_lines(f"Nearest choice: {_named(choice)}, {_hours(choice)} for {format_usd(choice.mean_usd)}.")
    elif binding == "memory":
        recompute = "" if job.checkpointing or workload.checkpointed else "--checkpointing, "
        print_lines(f"Try {recompute}a smaller --global-batch where that is the limit, or more --max-nodes.")
    else:
        print_lines("Try another --global-batch, --precision, or fewer restrictions on servers.")
    if len(ranking.missed) + len(ranking.rejected) > 1:
        print_lines(f"{len(ranking.missed)} are too slow or too dear, {len(ranking.rejected)} cannot do it at all.")


def _print_notes(shown: Sequence[Match], conditions: JobConditions, today: datetime.date) -> None:
    stale = [m for m in shown if is_stale(m.offer, today)]
    if stale:
        dated = sorted({m.offer.as_of for m in stale if m.offer.as_of})
        dates = f"{dated[0]} to {dated[-1]}" if len(dated) > 1 else dated[0] if dated else ""
        undated = sum(m.offer.as_of is None for m in stale)
        parts = [f"{undated} of these prices were known on {SNAPSHOT_KNOWN_ON} and may be older"] * bool(undated)
        parts += [f"{len(stale) - undated} are of {dates}"] * bool(dates)
        print_lines(f"Stale prices: {'; '.join(parts)}. `trainpace offers --refresh` fetches today's.")
    print_lines(
        f"Forecasts, not measurements{_loading(conditions)}. Assumed: a GPU fails every"
        f" {format_number(conditions.device_mtbf_h or math.inf)} h, a spot server is taken away every"
        f" {format_number(conditions.preemption_mean_h)} h, storage takes {format_number(conditions.storage_gb_per_s)} GB/s;"
        " energy is an estimate from TDP, of the GPUs alone."
    )


def _loading(conditions: JobConditions) -> str:
    if conditions.samples_per_cpu_s or conditions.sample_bytes:
        return ""
    return ", as if loading data kept up (--loader-rate, from `trainpace loader`, says whether it does)"


def _named(choice: Match | Rejected) -> str:
    nodes = f"{choice.nodes} x " if choice.nodes > 1 else ""
    spot = " (spot)" if isinstance(choice, Match) and choice.spot else ""
    return f"{nodes}{choice.offer.provider} {choice.offer.instance_type}{spot}"


def _hours(match: Match) -> str:
    return format_duration(3600 * match.mean_hours)
