"""A ranking of servers for the terminal."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from trainpace.offers.match import Binding, Job, Match, Ranking, Rejected
from trainpace.offers.offer import is_stale
from trainpace.offers.snapshot import SNAPSHOT_KNOWN_ON
from trainpace.report.terminal import console, print_lines, print_table
from trainpace.units import format_count, format_duration, format_number, format_usd
from trainpace.workload import Workload

NARROW, WIDE = 100, 130
FEWEST_SHOWN = 3


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
        _print_none(ranking, close)
        return
    first = ranking.matches[0]
    print_lines(
        f"{workload.model}: {first.steps:,} steps of {job.global_batch:,} samples. {len(ranking.matches)} ways to train it,"
        f" ranked by {by}; * is on the front where no other is both faster and cheaper."
    )
    shown = _shown(ranking.matches, top)
    width = console().width
    columns = _columns(width)
    rank_of = {id(match): i for i, match in enumerate(ranking.matches, start=1)}
    print_table(columns, [_cells(m, rank_of[id(m)], width) for m in shown], left=4)
    print_lines(_verdict(ranking.matches))
    print_lines(_next(first, job))
    if ranking.missed:
        print_lines(f"{len(ranking.missed)} more miss the deadline or the budget.")
    short = sum(r.binding == "memory" for r in ranking.rejected)
    others = len(ranking.rejected) - short
    if short or others:
        parts = [f"{short} for want of memory"] * bool(short) + [f"{others} for other reasons"] * bool(others)
        print_lines(f"Left out: {', '.join(parts)} (--json says which and why).")
    _print_ages(shown, today)


def _columns(width: int) -> list[str]:
    columns = ["#", "server", "GPUs", "run", "step ms", "hours", "cost"]
    if width >= NARROW:
        columns[6:6] = ["90 % of cases"]
        columns += ["GiB"]
    if width >= WIDE:
        columns += ["$ per 1000 steps", "kWh"]
    return columns


def _cells(m: Match, rank: int, width: int) -> list[str]:
    f = m.forecast
    assert f.step is not None and f.memory is not None
    execution = f.execution
    server = f"{m.offer.provider} {m.offer.instance_type}"
    if m.offer.region and width >= NARROW:
        server += f", {m.offer.region}"
    nodes = f"{m.nodes} x " if m.nodes > 1 else ""
    gpus = f"{m.offer.count} x {m.offer.device}" if m.offer.count > 1 else m.offer.device
    micro = f"{execution.micro_batch}" + (f" x {execution.accumulation}" if execution.accumulation > 1 else "")
    sharded = " FSDP" if execution.zero_stage == 3 else ""
    cells = [
        f"{rank}{'*' if m.on_front else ''}", f"{nodes}{server}{' (spot)' if m.spot else ''}", gpus,
        f"{execution.precision.removeprefix('amp_')} {micro}{sharded}", format_number(f.step.total_ms),
        format_number(m.mean_hours), format_usd(m.mean_usd),
    ]  # fmt: skip
    if width >= NARROW:
        cells[6:6] = [f"{format_number(m.hours.low)} to {format_number(m.hours.high)}"]
        cells.append(f"{format_number(f.memory.allocated_gib)} of {format_number(f.capacity_gib or 0.0)}")
    if width >= WIDE:
        cells += [format_usd(1e3 * m.usd_per_step), "-" if m.kwh is None else format_number(m.kwh)]
    return cells


def _shown(matches: Sequence[Match], top: int) -> list[Match]:
    """The first `top`, and what else is on the front, thinned where that is long."""
    front = [m for m in matches[top:] if m.on_front]
    most = max(FEWEST_SHOWN, top // 2)
    every = max(1, -(-len(front) // most))
    return [*matches[:top], *front[::every]]


def _verdict(matches: Sequence[Match]) -> str:
    cheapest, fastest = min(matches, key=lambda m: m.mean_usd), min(matches, key=lambda m: m.mean_hours)
    line = f"Cheapest: {_named(cheapest)}, {format_usd(cheapest.mean_usd)} in {_hours(cheapest)}."
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


def _print_none(ranking: Ranking, close: tuple[Binding, str, Match | Rejected] | None) -> None:
    if close is None:
        print_lines("No server was considered.")
        return
    binding, reason, choice = close
    print_lines(f"No server meets this: {binding} binds. At the nearest, {_named(choice)}, {reason}.")
    if isinstance(choice, Match):
        print_lines(f"Nearest choice: {_named(choice)}, {_hours(choice)} for {format_usd(choice.mean_usd)}.")
    elif binding == "memory":
        print_lines("Try --checkpointing, a smaller --global-batch where that is the limit, or more --max-nodes.")
    else:
        print_lines("Try another --global-batch, --precision, or fewer restrictions on servers.")
    if len(ranking.missed) + len(ranking.rejected) > 1:
        print_lines(f"{len(ranking.missed)} are too slow or too dear, {len(ranking.rejected)} cannot do it at all.")


def _print_ages(shown: Sequence[Match], today: datetime.date) -> None:
    stale = [m for m in shown if is_stale(m.offer, today)]
    if stale:
        dated = sorted({m.offer.as_of for m in stale if m.offer.as_of})
        dates = f"{dated[0]} to {dated[-1]}" if len(dated) > 1 else dated[0] if dated else ""
        undated = sum(m.offer.as_of is None for m in stale)
        parts = [f"{undated} of these prices were known on {SNAPSHOT_KNOWN_ON} and may be older"] * bool(undated)
        parts += [f"{len(stale) - undated} are of {dates}"] * bool(dates)
        print_lines(f"Stale prices: {'; '.join(parts)}. `trainpace offers --refresh` fetches today's.")
    print_lines(
        "Forecasts, not measurements. Energy is an estimate from TDP, of the GPUs alone. Failures: one GPU in 50,000 h;"
        " --spot, --mtbf, --storage change what is assumed."
    )


def _named(choice: Match | Rejected) -> str:
    nodes = f"{choice.nodes} x " if choice.nodes > 1 else ""
    spot = " (spot)" if isinstance(choice, Match) and choice.spot else ""
    return f"{nodes}{choice.offer.provider} {choice.offer.instance_type}{spot}"


def _hours(match: Match) -> str:
    return format_duration(3600 * match.mean_hours)
