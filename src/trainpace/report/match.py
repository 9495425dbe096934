"""A ranking of servers and the offers themselves: for the terminal, as JSON, as a picture and as a page."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval
from trainpace.job import JobConditions
from trainpace.offers import (
    SNAPSHOT_KNOWN_ON,
    Binding,
    Job,
    Match,
    Pick,
    Ranking,
    Rejected,
    is_stale,
    near_misses,
)
from trainpace.report.assumptions import software_lines, taken_for_granted
from trainpace.report.charts import Axis, Chart, Mark, Picture, Series, series
from trainpace.report.demands import demands, price_date, steps_in_words, tokens_in_words
from trainpace.report.evidence import evidence_rows, print_evidence
from trainpace.report.next_steps import print_next_after_match
from trainpace.report.pages import page
from trainpace.report.phrases import (
    devices,
    duration,
    interval,
    number,
    percent,
    plural,
    sentence,
    span,
    usd,
)
from trainpace.report.screen import in_details, is_brief
from trainpace.report.step_charts import Timed, step_breakdown
from trainpace.report.terminal import (
    Column,
    print_bars,
    print_lines,
    print_named,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.traced import evidence_json
from trainpace.workload import Workload

if TYPE_CHECKING:
    from trainpace.verbs.match import Matches, MatchRequest

FEWEST_SHOWN = 3
MOST_POINTS = 300
"""Points of the chart beside the front: the cheapest of the rest."""
MOST_ROWS = 60
FIRST_ROWS = 15
MOST_BARS = 8
MOST_REJECTED = 12
_UNMET: dict[Binding, str] = {
    "memory": "No server has enough memory.",
    "batch": "No server can divide this global batch.",
    "device": "No server has a GPU that can run this.",
    "deadline": "No server meets the deadline.",
    "budget": "No server meets the budget.",
    "failures": "No server can finish this.",
}
Nearest = tuple[Binding, str, Match | Rejected]
"""What binds, by how much, and the choice that comes nearest."""


def print_ranking(
    answer: Matches, by: str, top: int, today: datetime.date, request: MatchRequest | None = None
) -> None:
    """The cheapest, the fastest, the knee between them; the chart; the table. `request`: what the next command goes on from."""
    workload, ranking, job = answer.workload, answer.ranking, answer.job
    print_lines(f"{workload.model}: {asked(answer, by)}")
    if not ranking.matches:
        _print_none(workload, ranking, answer.nearest, job)
        return
    first = ranking.matches[0]
    print_verdict(_verdict(answer.picks))
    with in_details("what an hour less costs"):
        print_named("", three(answer.picks))
    if is_brief():
        _print_three(answer.picks)
    print_lines(*answer.recorded)
    beside = [*within_limits(ranking, job), *in_mixed_precision(answer)]
    print_lines(*beside)
    with in_details("cost against time"):
        print_lines(*[""] * bool(beside))
        drawn = _print_front(ranking.matches)
    shown = _shown(ranking.matches, top)
    columns = (
        words("#", least=3),
        words("server", least=14),
        words("region", 7),
        words("GPUs"),
        words("run", 3),
        Column("step ms", 4),
        Column("hours"),
        Column("90 %", 1),
        Column("cost"),
        Column("$/h", 2),
        Column("GiB", 5),
        Column("$/1000 steps", 8),
        Column("kWh", 9),
    )
    with in_details("the ranking"):
        print_table(columns, [_cells(rank, m) for rank, m in shown], spaced=not drawn)
        print_lines("* No other option is both faster and cheaper.", _overhead(first, job))
        print_lines("Energy is estimated from the TDP of the GPUs alone.")
        _print_not_listed(ranking)
    print_lines(*[answer.journal_note] * bool(answer.journal_note))
    _print_notes(
        [p.match for p in answer.picks] if is_brief() else [m for _, m in shown],
        job.conditions,
        today,
    )
    with in_details("measurements by others"):
        print_evidence(answer.evidence)
    print_next_after_match(first, workload, request)


def _print_three(picks: Sequence[Pick]) -> None:
    columns = (
        words("", least=8),
        words("server", least=20),
        Column("hours"),
        Column("90 %"),
        Column("cost"),
        Column("$/h", 1),
    )
    lengths = [pick.match.forecast.sequence_length for pick in picks]
    rows = [
        (
            _NAMES[pick.name],
            _short(pick.match),
            number(pick.match.mean_hours),
            interval(pick.match.hours),
            usd(pick.match.mean_usd),
            usd(_hourly(pick.match)),
            *([number((pick.match.forecast.samples_per_second or 0.0) * length)] if length else []),
        )
        for pick, length in zip(picks, lengths, strict=True)
    ]
    print_table([*columns, Column("tokens/s", 2)] if all(lengths) else columns, rows)
    pick = next((pick for pick in picks if pick.as_fast is not None), None)
    if pick is not None and pick.as_fast is not None:
        shown = any(pick.as_fast is other.match for other in picks)
        print_lines(
            f"Forecasts cannot tell {_short(pick.as_fast)} from the {_NAMES[pick.name].lower()}"
            f"{'.' if shown else f': it takes {usd_and_hours(pick.as_fast)}.'}"
        )


def _print_not_listed(ranking: Ranking) -> None:
    short = sum(r.binding == "memory" for r in ranking.rejected)
    reasons = {"with too little memory": short, "for other reasons": len(ranking.rejected) - short}
    if ranking.rejected:
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        print_lines(f"Not listed: {counted} (--json says which and why).")


def asked(answer: Matches, by: str) -> str:
    """What was compared: the model's training, in which format, and how many servers can do it."""
    workload, job, matches = answer.workload, answer.job, answer.ranking.matches
    formats = " or ".join(
        dict.fromkeys(m.forecast.execution.precision for m in matches) or job.precisions
    )
    parts = [
        steps_in_words(answer),
        workload.sample if workload.sequence_length else "",
        formats,
        workload.optimizer_in_words,
        "NHWC" if job.channels_last else "",
        "torch.compile" if job.compile else "",
    ]
    return f"{', '.join(filter(None, parts))}. {plural(len(matches), 'option')}, ranked by {by}."


def _verdict(picks: Sequence[Pick]) -> str:
    said = [f"{_NAMES[pick.name]}: {usd_and_hours(pick.match)}." for pick in picks]
    return " ".join(said)


_NAMES = {"cheapest": "Cheapest", "knee": "In between", "fastest": "Fastest"}


def three(picks: Sequence[Pick]) -> list[tuple[str, str]]:
    """Each with its server, the interval of its time, and what an hour is worth there."""
    lines = []
    for pick in picks:
        m = pick.match
        between = span(3600 * m.hours.low, 3600 * m.hours.high, duration)
        said = (
            f"{server(m)}: {usd_and_hours(m)} ({between} in 9 of 10 cases), {usd(_hourly(m))} an"
            " hour"
        )
        said += f"{tokens_in_words(m.forecast)}."
        said += _against_cheaper(pick)
        if pick.as_fast is not None:
            said += (
                f" Forecasts cannot tell {server(pick.as_fast)} from it, for"
                f" {usd_and_hours(pick.as_fast)}."
            )
        lines.append((_NAMES[pick.name], said))
    return lines


def _against_cheaper(pick: Pick) -> str:
    """What the time that a pick saves costs; where it saves hours, what one hour is worth."""
    if pick.hours_less is None or pick.usd_more is None or pick.hour_less_usd is None:
        return ""
    said = (
        f" {duration(3600 * pick.hours_less)} less than the option before, for {usd(pick.usd_more)}"
        " more"
    )
    if pick.hours_less < 1:
        return f"{said}."
    return f"{said}: one hour more would save {usd(pick.hour_less_usd)}."


def within_limits(ranking: Ranking, job: Job) -> list[str]:
    """Deadline and budget, and how many options they leave."""
    limits = [f"the deadline of {duration(job.deadline_s)}"] if job.deadline_s is not None else []
    limits += [f"the budget of {usd(job.budget_usd)}"] if job.budget_usd is not None else []
    if not limits:
        return []
    left, every = len(ranking.matches), len(ranking.matches) + len(ranking.missed)
    leave = "leaves" if len(limits) == 1 else "leave"
    if not ranking.matches:
        return [sentence(f"{' and '.join(limits)} {leave} none of {every:,} options.")]
    return [
        sentence(
            f"{' and '.join(limits)} {leave} {left:,} of {every:,} options; the others are not"
            " shown."
        )
    ]


def in_mixed_precision(answer: Matches) -> list[str]:
    """What the cheapest server would take in mixed precision, where nobody asked for a format."""
    m = answer.mixed
    if m is None or not answer.picks or m.mean_usd >= answer.picks[0].match.mean_usd:
        return []
    name = m.forecast.execution.precision
    return [
        f"In mixed precision ({name}) the cheapest takes {usd_and_hours(m)}: --precision amp_bf16"
        " --precision amp_fp16."
    ]


def _print_front(matches: Sequence[Match]) -> bool:
    """The options that no other beats in both, as bars of cost from the fastest to the cheapest; whether there were enough."""
    front = sorted(
        (m for m in matches if m.on_front and math.isfinite(m.mean_usd)), key=lambda m: m.mean_hours
    )
    if len(front) < FEWEST_SHOWN:
        return False
    rows = [
        (duration(3600 * m.mean_hours), m.mean_usd, f"{usd(m.mean_usd)} {_short(m)}", True)
        for m in front
    ]
    print_bars("Cost against time, of the options that no other beats in both", rows)
    return True


def _short(m: Match) -> str:
    return (
        f"{m.offer.provider},"
        f" {devices(m.offer.count * m.nodes, m.offer.device)}{', spot' if m.spot else ''}"
    )


def _hourly(m: Match) -> float | None:
    price = m.offer.spot_price_usd_per_hour if m.spot else m.offer.price_usd_per_hour
    return None if price is None else price * m.nodes


def _cells(rank: int, m: Match) -> list[str]:
    f, offer = m.forecast, m.offer
    assert f.step is not None
    nodes = f"{m.nodes} x " if m.nodes > 1 else ""
    name = (
        f"{nodes}{offer.provider}"
        f" {offer.instance_type.removeprefix('Standard_')}{' (spot)' if m.spot else ''}"
    )
    return [
        f"{rank}{'*' if m.on_front else ''}",
        name,
        offer.region,
        devices(offer.count, offer.device),
        _run(f.execution),
        number(f.step.total_ms),
        number(m.mean_hours),
        interval(m.hours),
        usd(m.mean_usd),
        usd(_hourly(m)),
        number(f.memory.allocated_gib if f.memory else 0.0),
        number(1e3 * m.mean_usd / m.time.steps),
        number(m.time.kwh),
    ]


def _run(e: Execution) -> str:
    """Precision, micro-batch, and ZeRO-1 or FSDP with the number of GPUs where those are not all."""
    micro = f"{e.micro_batch}x{e.accumulation}" if e.accumulation > 1 else f"{e.micro_batch}"
    sharding = {0: "", 3: "FSDP"}.get(e.zero_stage, f"ZeRO-{e.zero_stage}")
    return " ".join(
        filter(
            None, (e.precision, micro, f"{sharding}/{e.shard_size}" if e.shard_size else sharding)
        )
    )


def _shown(matches: Sequence[Match], top: int) -> list[tuple[int, Match]]:
    """With their ranks: the first `top`, and what else is on the front, thinned where that is long."""
    ranked = list(enumerate(matches, 1))
    front = [(rank, m) for rank, m in ranked[top:] if m.on_front]
    every = max(1, math.ceil(len(front) / max(FEWEST_SHOWN, top // 2)))
    return [*ranked[:top], *front[::-every][::-1]]  # counted from the fastest, which is shown


def _overhead(first: Match, job: Job) -> str:
    share = 1 - first.time.goodput
    overhead = percent(share) if share >= 0.01 else "less than 1 %"
    line = f"Overhead of option 1 (start-up, checkpoints, failures): {overhead} of its time."
    if job.conditions.checkpoint_every_s is not None or first.time.checkpoints == 1:
        return line
    return f"{line} Best checkpoint interval: {duration(first.time.checkpoint_interval_s)}."


def _print_none(workload: Workload, ranking: Ranking, close: Nearest | None, job: Job) -> None:
    if close is None:
        print_verdict("No server was considered.", good=False)
        return
    binding, reason, choice = close
    print_verdict(f"{_UNMET[binding]} The closest is {server(choice)}: {reason}.", good=False)
    if binding == "failures":
        return
    if isinstance(choice, Match) and job.deadline_s is not None and job.budget_usd is not None:
        limits = f"{duration(job.deadline_s)} and {usd(job.budget_usd)}"
        print_lines(f"No server meets both the deadline and the budget, {limits}.")
        names = ("Cheapest that meets the deadline", "Fastest within the budget")
        for name, met in zip(names, near_misses(ranking, job), strict=True):
            print_lines(
                f"{name}: {'none' if met is None else f'{server(met)}, {usd_and_hours(met)}'}."
            )
    if isinstance(choice, Match):
        print_lines(f"The closest takes {usd_and_hours(choice)}.")
    elif binding == "memory":
        recompute = "" if job.checkpointing or workload.checkpointed else "--checkpointing, "
        print_lines(
            f"Try {recompute}a smaller --global-batch if that is the limit, or more --max-nodes."
        )
    else:
        print_lines("Try another --global-batch, --precision, or fewer restrictions on servers.")
    if len(ranking.missed) + len(ranking.rejected) > 1:
        slow, unable = len(ranking.missed), len(ranking.rejected)
        print_lines(f"{slow} are too slow or too expensive, {unable} cannot run it at all.")


def _print_notes(shown: Sequence[Match], conditions: JobConditions, today: datetime.date) -> None:
    stale = [m for m in shown if is_stale(m.offer, today)]
    if stale and is_brief():
        print_lines(
            f"{plural(len(stale), 'price')} may be old: trainpace offers --refresh fetches today's."
        )
    elif stale:
        dated = sorted({m.offer.as_of for m in stale if m.offer.as_of})
        dates = " to ".join(dict.fromkeys([*dated[:1], *dated[-1:]]))
        undated = sum(m.offer.as_of is None for m in stale)
        parts = [f"{undated} are as known on {SNAPSHOT_KNOWN_ON} and may be older"] * bool(undated)
        parts += [f"{len(stale) - undated} are from {dates}"] * bool(dates)
        print_lines(
            f"Old prices: {'; '.join(parts)}. `trainpace offers --refresh` fetches today's."
        )
    loading = ", assuming that data loading keeps up (--loader-rate)"
    if conditions.samples_per_cpu_s or conditions.sample_bytes:
        loading = ""
    print_notes(
        f"Forecasts, not measurements{loading}. Assumed: a GPU fails every"
        f" {number(conditions.device_mtbf_h or math.inf)} h, a spot server is preempted every"
        f" {number(conditions.preemption_mean_h)} h, storage reads and writes"
        f" {number(conditions.storage_gb_per_s)} GB/s, a host CPU is typical of its card where it"
        " is not published (--host).",
        *taken_for_granted([m.forecast for m in shown]),
        *software_lines([m.forecast for m in shown]),
    )


def cost_against_time(matches: Sequence[Match], picks: Sequence[Pick] = ()) -> Chart | None:
    """The three `picks` are named, without them the ends of the front. None where nothing finishes."""
    able = [
        m
        for m in matches
        if math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd) and m.mean_usd > 0
    ]
    front = sorted((m for m in able if m.on_front), key=lambda m: m.mean_hours)
    if not front:
        return None
    rest = sorted((m for m in able if not m.on_front), key=lambda m: m.mean_usd)[:MOST_POINTS]
    ends = (
        {"fastest": front[0], "cheapest": front[-1]} if len(front) > 1 else {"cheapest": front[0]}
    )
    ends = {_NAMES[pick.name].lower(): pick.match for pick in picks} or ends
    shown = f"all {len(able)}"
    if len(able) > len(front) + len(rest):
        shown = f"{len(front)} on the front and the {len(rest)} cheapest others of {len(able)}"
    bounds = [
        replace(m.usd, high=m.usd.high if math.isfinite(m.usd.high) else m.mean_usd) for m in front
    ]
    return Chart(
        title="Cost against time",
        finding=" ".join(cheapest_and_fastest(able)),
        x=Axis(label="hours of the whole job", unit="h", scale="log10"),
        y=Axis(label="cost of the whole job", unit="$", scale="log10"),
        series=(
            *([_points("worse in both time and cost", "muted", rest)] if rest else []),
            series(
                "no other is both faster and cheaper",
                "line",
                "best",
                [(m.mean_hours, m.mean_usd) for m in front],
            ),
            _points("the same, with the 90 % interval of the cost", "best", front, bounds),
        ),
        marks=tuple(
            Mark(
                axis="point",
                at=m.mean_hours,
                y=m.mean_usd,
                text=f"{name}: {server(m)}",
                tone="best",
            )
            for name, m in ends.items()
        ),
        nearest="point",
        note=f"Shown: {shown}. Forecasts, not measurements.",
    )


def _points(
    name: str, tone: str, matches: Sequence[Match], bounds: Sequence[Interval] = ()
) -> Series:
    points = ((m.mean_hours, m.mean_usd) for m in matches)
    return series(name, "points", tone, points, bounds, labels=tuple(map(server, matches)))


def cheapest_and_fastest(matches: Sequence[Match]) -> list[str]:
    best, fastest = min(matches, key=lambda m: m.mean_usd), min(matches, key=lambda m: m.mean_hours)
    between = span(3600 * best.hours.low, 3600 * best.hours.high, duration)
    sentences = [f"Cheapest: {server(best)}, {usd_and_hours(best)} ({between} in 9 of 10 cases)."]
    return (
        sentences
        if fastest is best
        else [*sentences, f"Fastest: {server(fastest)}, {usd_and_hours(fastest)}."]
    )


def usd_and_hours(m: Match) -> str:
    return f"{usd(m.mean_usd)} in {duration(3600 * m.mean_hours)}"


def server(choice: Match | Rejected) -> str:
    nodes = f"{choice.nodes} x " if choice.nodes > 1 else ""
    spot = ", spot" if isinstance(choice, Match) and choice.spot else ""
    offer = choice.offer
    return (
        f"{nodes}{offer.provider} {offer.instance_type}"
        f" ({devices(offer.count, offer.device)}{spot})"
    )


def ranking_json(answer: Matches, today: datetime.date) -> dict[str, Any]:
    """The documented contract of `match --json`: the three picks, rows in rank order, those that miss, those that cannot, what
    binds."""
    workload, ranking, job, close = answer.workload, answer.ranking, answer.job, answer.nearest
    binds = None
    if close is not None:
        binding, reason, choice = close
        close_by = (
            _match_json(choice, today) if isinstance(choice, Match) else _server_json(choice, today)
        )
        binds = {"binding": binding, "reason": reason, "nearest": close_by}
    return {
        "record": "Matches",
        "schema_version": 1,
        "model": workload.model,
        "global_batch": job.global_batch,
        "recorded": list(answer.recorded),
        "deadline_s": job.deadline_s,
        "budget_usd": job.budget_usd,
        "picks": [
            {
                "pick": pick.name,
                "hour_less_usd": pick.hour_less_usd,
                **_match_json(pick.match, today),
            }
            for pick in answer.picks
        ],
        "rows": [
            _match_json(match, today, rank) for rank, match in enumerate(ranking.matches, start=1)
        ],
        "missed": [_match_json(match, today) for match in ranking.missed],
        "rejected": [
            {
                **_server_json(r, today),
                "binding": r.binding,
                "reason": r.reason,
                "short_gib": r.short_gib,
            }
            for r in ranking.rejected
        ],
        "binds": binds,
        "evidence": evidence_json(answer.evidence),
    }


def _server_json(choice: Match | Rejected, today: datetime.date) -> dict[str, Any]:
    offer, nodes = choice.offer, choice.nodes
    return {
        "provider": offer.provider,
        "instance_type": offer.instance_type,
        "region": offer.region,
        "gpu": offer.device,
        "gpus_per_node": offer.count,
        "nodes": nodes,
        "num_gpus": offer.count * nodes,
        "price_source": offer.source,
        "price_as_of": offer.as_of,
        "price_stale": is_stale(offer, today),
    }


def _match_json(m: Match, today: datetime.date, rank: int | None = None) -> dict[str, Any]:
    f, time = m.forecast, m.time
    assert f.step is not None
    assert f.step_time_interval_ms is not None
    assert f.memory is not None
    price = m.offer.spot_price_usd_per_hour if m.spot else m.offer.price_usd_per_hour
    return {
        "rank": rank,
        **_server_json(m, today),
        "spot": m.spot,
        "pareto": m.on_front,
        "price_usd_per_hour": None if price is None else price * m.nodes,
        "precision": f.execution.precision,
        "batch": f.execution.micro_batch,
        "accumulation": f.execution.accumulation,
        "zero_stage": f.execution.zero_stage,
        "shard_size": f.execution.shard_size,
        "steps": time.steps,
        "step_time_ms": f.step.total_ms,
        "step_time_ms_low": f.step_time_interval_ms.low,
        "step_time_ms_high": f.step_time_interval_ms.high,
        "usd_per_step": _finite(m.mean_usd / time.steps),
        "hours": _finite(m.mean_hours),
        "hours_low": _finite(m.hours.low),
        "hours_high": _finite(m.hours.high),
        "usd": _finite(m.mean_usd),
        "usd_low": _finite(m.usd.low),
        "usd_high": _finite(m.usd.high),
        "egress_usd": m.egress_usd,
        "energy_kwh": None if time.kwh is None else _finite(time.kwh),
        "goodput": time.goodput,
        "checkpoints": time.checkpoints,
        "checkpoint_interval_s": time.checkpoint_interval_s,
        "time_s": {
            name: _finite(getattr(time, name))
            for name in time.__struct_fields__
            if name.endswith("_s")
        },
        "peak_memory_gib": f.memory.allocated_gib,
        "capacity_gib": f.capacity_gib,
        "provenance": f.provenance,
        "warnings": list(f.warnings),
        "notes": list(f.notes),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def match_page(
    answer: Matches, by: str, why_none: str, data: dict[str, Any], today: datetime.date
) -> str:
    """The page as text. `why_none`: what binds where nothing meets the demands. `data`: `match --json`, of which the page keeps
    the rows that it shows."""
    workload, ranking, job = answer.workload, answer.ranking, answer.job
    matches = ranking.matches
    shown = [(rank, m) for rank, m in enumerate(matches, 1) if rank <= MOST_ROWS or m.on_front]
    data = {
        **data,
        "rows": [data["rows"][rank - 1] for rank, _ in shown],
        "missed": data["missed"][:MOST_REJECTED],
    }
    data["rejected"] = []
    sentences = [f"No server meets this. {why_none}", *within_limits(ranking, job)]
    if matches:
        trust = "Forecasts, not measurements: the intervals should hold in 9 of 10 cases."
        said = [f"{name}: {what}" for name, what in three(answer.picks)]
        sentences = [
            *said,
            *answer.recorded,
            *within_limits(ranking, job),
            *in_mixed_precision(answer),
            trust,
        ]
        stale = sum(is_stale(m.offer, today) for _, m in shown)
        if stale:
            sentences.append(
                f"{stale} of the prices shown are old: trainpace offers --refresh fetches today's."
            )
    reasons = list(dict.fromkeys(f"{r.offer.device}: {r.reason}." for r in ranking.rejected))
    left_out = reasons[:MOST_REJECTED]
    if len(reasons) > MOST_REJECTED:
        left_out.append(f"And {len(reasons) - MOST_REJECTED} more.")
    return page(
        "match.html",
        f"{workload.model}: which server",
        sentences,
        match_pictures(ranking, answer.picks),
        data,
        bool(matches),
        asked(answer, by),
        shown=shown,
        first_rows=FIRST_ROWS,
        further=len(matches) - len(shown),
        left_out=left_out,
        server=server,
        hourly=_hourly,
        price_date=price_date,
        evidence=evidence_rows(answer.evidence),
        demands=demands(answer, by, _hourly(answer.picks[0].match) if answer.picks else None),
    )


def match_pictures(ranking: Ranking, picks: Sequence[Pick] = ()) -> list[Picture | None]:
    front = [m for m in ranking.matches if m.on_front]
    shown = [(m, m.forecast.step) for m in front[:: max(1, math.ceil(len(front) / MOST_BARS))]]
    steps = [
        Timed("", server(m), step, m.forecast.step_time_interval_ms)
        for m, step in shown
        if step is not None
    ]
    return [cost_against_time(ranking.matches, picks), step_breakdown(steps)]
