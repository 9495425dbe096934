"""A ranking of servers for the terminal."""

import datetime
import math
from collections.abc import Sequence

from trainpace.execution import Execution
from trainpace.job import JobConditions
from trainpace.offers import (
    SNAPSHOT_KNOWN_ON,
    Binding,
    Job,
    Match,
    Ranking,
    Rejected,
    cheapest_in_time,
    fastest_within_budget,
    is_stale,
)
from trainpace.report.charts.servers import cheapest_and_fastest, server, usd_and_hours
from trainpace.report.columns import Column, words
from trainpace.report.phrases import devices, interval, number, plural
from trainpace.report.terminal import print_head, print_lines, print_next, print_table, print_verdict
from trainpace.units import format_duration, format_number, format_usd
from trainpace.workload import Workload

FEWEST_SHOWN = 3


def print_ranking(
    workload: Workload,
    ranking: Ranking,
    job: Job,
    close: tuple[Binding, str, Match | Rejected] | None,
    by: str,
    top: int,
    today: datetime.date,
    spec: str | None = None,
) -> None:
    if not ranking.matches:
        _print_none(workload, ranking, close, job)
        return
    first = ranking.matches[0]
    print_head(f"{workload.model}: {ranked_by(ranking.matches, job, by)}")
    shown = _shown(ranking.matches, top)
    rank_of = {id(match): i for i, match in enumerate(ranking.matches, start=1)}
    print_verdict(" ".join(cheapest_and_fastest(ranking.matches)))
    _print_table(shown, rank_of)
    print_lines("* No other option is both faster and cheaper.", _overhead(first, job))
    if ranking.missed:
        print_lines(f"{len(ranking.missed)} more miss the deadline or the budget.")
    short = sum(r.binding == "memory" for r in ranking.rejected)
    others = len(ranking.rejected) - short
    if short or others:
        parts = [f"{short} with too little memory"] * bool(short) + [f"{others} for other reasons"] * bool(others)
        print_lines(f"Not listed: {', '.join(parts)} (--json says which and why).")
    _print_notes(shown, job.conditions, today)
    e = first.forecast.execution
    measure = [
        "trainpace",
        "measure",
        _trainable(spec, workload),
        "--batch",
        str(e.micro_batch),
        "--precision",
        e.precision,
    ]
    print_next([*measure, "--device", "cuda"], "on option 1, rented for a few minutes: real steps narrow the interval")


def ranked_by(matches: Sequence[Match], job: Job, by: str) -> str:
    return (
        f"{matches[0].steps:,} steps of {job.global_batch:,} samples. {plural(len(matches), 'option')}, ranked by {by}."
    )


def _trainable(spec: str | None, workload: Workload) -> str:
    """A saved workload cannot be trained, but the model that it was traced from."""
    return workload.model if spec is None or (spec.endswith(".json") and ":" not in spec) else spec


def _print_table(shown: Sequence[Match], rank_of: dict[int, int]) -> None:
    """Hours and dollars are always shown, other columns as far as they fit."""
    columns = (
        words("#", least=3), words("server", least=14), words("region", 6), words("GPUs"), words("run", 3), Column("step ms", 2),
        Column("hours"), Column("90 %", 1), Column("cost"), Column("GiB", 5), Column("$/1000 steps", 7), Column("kWh", 8),
    )  # fmt: skip
    print_table(columns, [[f"{rank_of[id(m)]}{'*' if m.on_front else ''}", *_cells(m)] for m in shown])


def _cells(m: Match) -> list[str]:
    f = m.forecast
    assert f.step is not None
    return [
        _named(m), m.offer.region, devices(m.offer.count, m.offer.device),
        _run(m), format_number(f.step.total_ms), format_number(m.mean_hours),
        interval(m.hours), format_usd(m.mean_usd),
        format_number(f.memory.allocated_gib if f.memory else 0.0), format_number(1e3 * m.usd_per_step),
        number(m.kwh),
    ]  # fmt: skip


def _run(m: Match) -> str:
    execution = m.forecast.execution
    micro = f"{execution.micro_batch}" + (f"x{execution.accumulation}" if execution.accumulation > 1 else "")
    return " ".join(filter(None, (execution.precision, micro, _sharding(execution))))


def _sharding(execution: Execution) -> str:
    """ZeRO-1 or FSDP, and over how many GPUs where those are not all; nothing for plain data parallelism."""
    name = {0: "", 3: "FSDP"}.get(execution.zero_stage, f"ZeRO-{execution.zero_stage}")
    return f"{name}/{execution.shard_size}" if execution.shard_size else name


def _shown(matches: Sequence[Match], top: int) -> list[Match]:
    """The first `top`, and what else is on the front, thinned where that is long."""
    front = [m for m in matches[top:] if m.on_front]
    most = max(FEWEST_SHOWN, top // 2)
    every = max(1, -(-len(front) // most))
    return [*matches[:top], *front[::-every][::-1]]  # counted from the fastest, which is shown


def _overhead(first: Match, job: Job) -> str:
    share = 1 - first.time.goodput
    overhead = f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"
    line = f"Overhead of option 1 (start-up, checkpoints, failures): {overhead} of its time."
    if job.conditions.checkpoint_every_s is not None or first.time.checkpoints == 1:
        return line
    return f"{line} Best checkpoint interval: {format_duration(first.time.checkpoint_interval_s)}."


_UNMET: dict[Binding, str] = {
    "memory": "No server has enough memory.", "batch": "No server can divide this global batch.",
    "device": "No server has a GPU that can run this.", "deadline": "No server meets the deadline.",
    "budget": "No server meets the budget.", "failures": "No server can finish this.",
}  # fmt: skip


def _print_none(
    workload: Workload, ranking: Ranking, close: tuple[Binding, str, Match | Rejected] | None, job: Job
) -> None:
    if close is None:
        print_verdict("No server was considered.", good=False)
        return
    binding, reason, choice = close
    print_verdict(f"{_UNMET[binding]} The closest is {server(choice)}: {reason}.", good=False)
    if binding == "failures":
        return
    if isinstance(choice, Match) and job.deadline_s is not None and job.budget_usd is not None:
        limits = f"{format_duration(job.deadline_s)} and {format_usd(job.budget_usd)}"
        print_lines(f"No server meets both the deadline and the budget, {limits}.")
        for name, met in (
            ("Cheapest that meets the deadline", cheapest_in_time(ranking, job)),
            ("Fastest within the budget", fastest_within_budget(ranking, job)),
        ):
            print_lines(f"{name}: {'none' if met is None else f'{server(met)}, {usd_and_hours(met)}'}.")
    if isinstance(choice, Match):
        print_lines(f"The closest takes {usd_and_hours(choice)}.")
    elif binding == "memory":
        recompute = "" if job.checkpointing or workload.checkpointed else "--checkpointing, "
        print_lines(f"Try {recompute}a smaller --global-batch if that is the limit, or more --max-nodes.")
    else:
        print_lines("Try another --global-batch, --precision, or fewer restrictions on servers.")
    if len(ranking.missed) + len(ranking.rejected) > 1:
        slow, unable = len(ranking.missed), len(ranking.rejected)
        print_lines(f"{slow} are too slow or too expensive, {unable} cannot run it at all.")


def _print_notes(shown: Sequence[Match], conditions: JobConditions, today: datetime.date) -> None:
    stale = [m for m in shown if is_stale(m.offer, today)]
    if stale:
        dated = sorted({m.offer.as_of for m in stale if m.offer.as_of})
        dates = f"{dated[0]} to {dated[-1]}" if len(dated) > 1 else dated[0] if dated else ""
        undated = sum(m.offer.as_of is None for m in stale)
        parts = [f"{undated} are as known on {SNAPSHOT_KNOWN_ON} and may be older"] * bool(undated)
        parts += [f"{len(stale) - undated} are from {dates}"] * bool(dates)
        print_lines(f"Old prices: {'; '.join(parts)}. `trainpace offers --refresh` fetches today's.")
    loading = "" if conditions.samples_per_cpu_s or conditions.sample_bytes else (
        ", assuming that data loading keeps up (`trainpace loader` tells, and --loader-rate takes it into account)"
    )  # fmt: skip
    print_lines(
        f"Forecasts, not measurements{loading}. Assumed: a GPU fails every {format_number(conditions.device_mtbf_h or math.inf)}"
        f" h, a spot server is preempted every {format_number(conditions.preemption_mean_h)} h, storage reads and writes"
        f" {format_number(conditions.storage_gb_per_s)} GB/s; energy is estimated from the TDP of the GPUs alone."
    )


def _named(m: Match) -> str:
    nodes = f"{m.nodes} x " if m.nodes > 1 else ""
    return f"{nodes}{m.offer.provider} {m.offer.instance_type.removeprefix('Standard_')}{' (spot)' if m.spot else ''}"
