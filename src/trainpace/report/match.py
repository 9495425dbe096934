"""Report sections and JSON for server rankings, offers and schedules."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval, JobTime
from trainpace.core.units import format_count
from trainpace.job import Answer, assumed_in_words
from trainpace.offers import (
    OWN,
    SNAPSHOT_KNOWN_ON,
    Binding,
    Job,
    Match,
    Offer,
    Pick,
    Ranking,
    Rejected,
    is_stale,
    near_misses,
)
from trainpace.report.charts import Axis, Chart, Mark, Picture, Series, series
from trainpace.report.forecast import can_be_measured, spec_of
from trainpace.report.journal import evidence_sections
from trainpace.report.phrases import (
    devices,
    duration,
    given,
    interval,
    number,
    percent,
    plural,
    rate_in_words,
    sentence,
    software_lines,
    span,
    trace_notes,
    usd,
)
from trainpace.report.sections import (
    Charts,
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    Table,
    brief,
    details,
    named,
    say,
    tabulate,
    words,
)
from trainpace.report.steps import Timed, step_breakdown
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.match import Matches, MatchRequest
from trainpace.verbs.measure import MeasureRequest
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import forwarded
from trainpace.verbs.training import USUAL_BATCH

if TYPE_CHECKING:
    from trainpace.verbs.match import OffersRequest
    from trainpace.verbs.schedule import ScheduleRequest

FEWEST_SHOWN = 3
MOST_POINTS = 300
"""Maximum number of chart points besides the Pareto front. The cheapest servers are used."""
PAGE_ROWS = 60
"""Number of rows in a page's ranking, besides the Pareto front."""
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
_NAMES = {"cheapest": "Cheapest", "knee": "In between", "fastest": "Fastest"}


def _short(m: Match) -> str:
    gpus = devices(m.offer.count * m.nodes, m.offer.device)
    return f"{m.offer.provider}, {gpus}{', spot' if m.spot else ''}"


def _gpus(offer: Offer) -> str:
    return devices(offer.count, offer.device)


def _ranked_server(m: Match) -> str:
    nodes = f"{m.nodes} x " if m.nodes > 1 else ""
    kind = m.offer.instance_type.removeprefix("Standard_")
    return f"{nodes}{m.offer.provider} {kind}{' (spot)' if m.spot else ''}"


def _price_of(offer: Offer) -> str:
    own = "your own" if offer.provider == OWN else None
    return own or offer.as_of or f"{SNAPSHOT_KNOWN_ON} or before"


def _run(e: Execution) -> str:
    """Return precision, micro-batch and sharding. The shard size is shown if it is not all GPUs."""
    micro = f"{e.micro_batch}x{e.accumulation}" if e.accumulation > 1 else f"{e.micro_batch}"
    sharding = {0: "", 3: "FSDP"}.get(e.zero_stage, f"ZeRO-{e.zero_stage}")
    size = f"/{e.shard_size}" if e.shard_size else ""
    return " ".join(filter(None, (e.precision, micro, f"{sharding}{size}")))


_PICKED = (
    words("", least=8, cell="name", form=_NAMES.get),
    words("server", least=20, cell="match", form=_short),
    Column("hours", cell="match.mean_hours"),
    Column("90% interval", cell="match.hours", form=interval),
    Column("cost", cell="match.mean_usd", form=usd),
    Column("$/h", 1, cell="match.usd_per_hour", form=usd),
    Column("fits", 3, cell="match.forecast.fit_probability", form=percent),
)
_TOKENS = Column("tokens/s", 2, cell="match.forecast.tokens_per_second")
_RANKED = (
    words("#", least=3, cell=lambda r: f"{r.rank}{'*' * r.match.on_front}"),
    words("server", least=14, cell="match", form=_ranked_server),
    words("region", 7, cell="match.offer.region"),
    words("GPUs", cell="match.offer", form=_gpus),
    words("run", 3, cell="match.forecast.execution", form=_run),
    Column("step ms", 4, cell="match.forecast.step.total_ms"),
    Column("hours", cell="match.mean_hours"),
    Column("90% interval", 1, cell="match.hours", form=interval),
    Column("cost", cell="match.mean_usd", form=usd),
    Column("cost, 90%", 10, cell=lambda ranked: interval(ranked.match.usd, form=usd)),
    Column("$/h", 2, cell="match.usd_per_hour", form=usd),
    Column("GiB", 5, cell="match.forecast.memory.allocated_gib"),
    Column("fits", 5, cell="match.forecast.fit_probability", form=percent),
    Column(
        "$/1000 steps",
        8,
        cell=lambda ranked: number(1e3 * ranked.match.mean_usd / ranked.match.time.steps),
    ),
    Column("kWh", 9, cell="match.time.kwh"),
    words("price of", 11, 10, "match.offer", _price_of),
)


class _Ranked(NamedTuple):
    rank: int
    match: Match


def match_sections(
    answer: Matches,
    by: str = "",
    top: int = PAGE_ROWS,
    today: datetime.date | None = None,
    request: MatchRequest | None = None,
) -> Iterator[Section]:
    """Convert a ranking to sections.

    Args:
        answer: The ranking.
        by: Criterion of the ranking.
        top: Number of rows besides the Pareto front.
        today: Date to compute the age of prices. Today by default.
        request: The original request. Its options go into the suggested next command.
    """
    ranking, job, picks = answer.ranking, answer.job, answer.picks
    today = today or datetime.date.today()
    yield say(f"{answer.workload.model}: {asked(answer, by)}")
    if not ranking.matches:
        yield from _none(answer)
        yield Lines(within_limits(ranking, job), only="page")
        yield named("", _demands(answer, by), only="page", aside="what was asked")
        yield from _rejected(ranking)
        return
    first = ranking.matches[0]
    yield Headline(" ".join(f"{_NAMES[p.name]}: {usd_and_hours(p.match)}." for p in picks))
    yield from details("what an hour less costs", named("", three(picks)))
    yield from _three(picks)
    yield say(*answer.recorded, *within_limits(ranking, job), *_in_mixed_precision(answer))
    yield Charts(lambda: match_pictures(ranking, picks))
    yield from details("cost against time", *_front(ranking.matches))
    shown = _shown(ranking.matches, top)
    yield from details("the ranking", *_ranking(shown, first, job))
    yield from details("what was asked", named("", _demands(answer, by)))
    yield from _rejected(ranking)
    yield Lines([answer.journal_note] if answer.journal_note else [])
    yield _old_prices(answer, today)
    yield from brief(_assumptions(answer, [p.match for p in picks]))
    yield from details("", _assumptions(answer, [m for _, m in shown]))
    yield from evidence_sections(answer.evidence)
    yield from _next(first, answer, request)


def _front(matches: Sequence[Match]) -> Iterator[Table]:
    """Show the Pareto front of time and cost, from the fastest option to the cheapest."""
    front = _front_of(matches)
    if len(front) >= FEWEST_SHOWN:
        most = max(m.mean_usd for m in front)
        columns = (
            words("no other is both faster and cheaper", least=16, cell=_short),
            Column("time", cell=lambda m: duration(3600 * m.mean_hours)),
            Column("cost", cell=lambda m: usd(m.mean_usd)),
            words("", 1, 8, lambda m: m.mean_usd / most),
        )
        yield tabulate(front, columns)


def _front_of(matches: Sequence[Match]) -> list[Match]:
    return sorted((m for m in matches if _is_priced(m) and m.on_front), key=_hours)


def _ranking(shown: Sequence[_Ranked], first: Match, job: Job) -> Iterator[Section]:
    best = [i for i, (_, m) in enumerate(shown) if m.on_front]
    yield tabulate(shown, _RANKED, best=best)
    yield say(
        "* No other option is both faster and cheaper.",
        _overhead(first, job),
        "Energy is estimated from the TDP of the GPUs alone.",
    )


def match_title(answer: Matches) -> str:
    return f"{answer.workload.model}: which server"


def _hours(m: Match) -> float:
    return m.mean_hours


def _is_priced(m: Match) -> bool:
    return math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd)


def _three(picks: Sequence[Pick]) -> Iterator[Section]:
    """Show the three picks in the short answer."""
    tokens = all(pick.match.forecast.sequence_length for pick in picks)
    yield from brief(tabulate(picks, (*_PICKED, tokens and _TOKENS)))
    for pick in picks:
        if pick.as_fast is not None:
            shown = any(pick.as_fast is other.match for other in picks)
            costs = "" if shown else f", for {usd_and_hours(pick.as_fast)}"
            server_and_name = (
                f"{_short(pick.as_fast)} is as fast as the {_NAMES[pick.name].lower()}"
            )
            yield from brief(say(f"{server_and_name} within the forecast's error{costs}."))
            return


def _demands(answer: Matches, by: str) -> list[tuple[str, str]]:
    """Restate the question, for readers who see only the answer."""
    job, schedule = answer.job, answer.job.schedule
    work = f"{schedule.max_steps or 0:,} steps"
    if schedule.epochs is not None:
        work = f"{plural(schedule.epochs, 'epoch')} of {schedule.samples_per_epoch:,} samples"
    return [
        ("the job", work),
        ("global batch", f"{job.global_batch:,} samples"),
        ("deadline", duration(job.deadline_s, "none")),
        ("budget", usd(job.budget_usd, "none")),
        *([("ranked by", by)] if by else []),
    ]


def _rejected(ranking: Ranking) -> Iterator[Section]:
    """Count the servers that cannot run the job. Pages also list the reasons."""
    if not ranking.rejected:
        return
    short = sum(r.binding == "memory" for r in ranking.rejected)
    counts = {"with too little memory": short, "for other reasons": len(ranking.rejected) - short}
    counted = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if ranking.matches:
        line = f"Not listed: {counted} (--json says which and why)."
        yield from details("the ranking", say(line))
    reasons = list(dict.fromkeys(f"{r.offer.device}: {r.reason}." for r in ranking.rejected))
    more = len(reasons) - MOST_REJECTED
    reasons[MOST_REJECTED:] = [f"And {more} more."] if more > 0 else []
    yield Lines(reasons, only="page", aside="servers that cannot run the job")


def asked(answer: Matches, by: str) -> str:
    """Describe the comparison: the training, its precision, and the number of suitable servers."""
    workload, job, matches = answer.workload, answer.job, answer.ranking.matches
    formats = dict.fromkeys(m.forecast.execution.precision for m in matches) or job.precisions
    usual = f" (assumed: {USUAL_BATCH} for each GPU of eight; --global-batch)" * answer.usual_batch
    samples = f"{job.global_batch:,} samples"
    parts = [
        f"{matches[0].time.steps:,} steps of {samples}{usual}"
        if matches
        else f"{samples} per step{usual}",
        workload.sample if workload.sequence_length else "",
        " or ".join(formats),
        workload.optimizer_in_words,
        "NHWC" if job.channels_last else "",
        "torch.compile" if job.compile else "",
    ]
    options = plural(len(matches), "option")
    return f"{', '.join(filter(None, parts))}. {options}{given(by, ', ranked by {}')}."


def three(picks: Sequence[Pick]) -> list[tuple[str, str]]:
    """Describe each pick: its server, its time interval, and the cost of an hour saved."""
    lines = []
    for pick in picks:
        m = pick.match
        f = m.forecast
        tokens = (
            f", {rate_in_words(f.samples_per_second, f.sequence_length)}"
            if f.sequence_length
            else ""
        )
        text = (
            f"{_server_and_time(m)}, {usd(m.usd_per_hour)} per hour{tokens}."
            f"{_against_cheaper(pick)}"
        )
        if pick.as_fast is not None:
            text += (
                f" {server(pick.as_fast)} is as fast within the forecast's error, for"
                f" {usd_and_hours(pick.as_fast)}."
            )
        lines.append((_NAMES[pick.name], text))
    return lines


def _server_and_time(m: Match) -> str:
    between = span(3600 * m.hours.low, 3600 * m.hours.high, duration)
    return f"{server(m)}: {usd_and_hours(m)} (90% interval {between})"


def _against_cheaper(pick: Pick) -> str:
    """Compare a pick with the previous one: cost of the time saved, per hour if it saves hours."""
    if pick.hours_less is None or pick.usd_more is None or pick.hour_less_usd is None:
        return ""
    text = (
        f" {duration(3600 * pick.hours_less)} less than the option before, for {usd(pick.usd_more)}"
        " more"
    )
    if pick.hours_less < 1:
        return f"{text}."
    return f"{text}: one hour more would save {usd(pick.hour_less_usd)}."


def within_limits(ranking: Ranking, job: Job) -> list[str]:
    """Describe how many options meet the deadline and the budget."""
    limits = [f"the deadline of {duration(job.deadline_s)}"] if job.deadline_s is not None else []
    limits += [f"the budget of {usd(job.budget_usd)}"] if job.budget_usd is not None else []
    if not limits:
        return []
    met, every = len(ranking.matches), len(ranking.matches) + len(ranking.missed)
    leave = f"{' and '.join(limits)} {'leaves' if len(limits) == 1 else 'leave'}"
    if not met:
        return [sentence(f"{leave} none of {every:,} options.")]
    return [sentence(f"{leave} {met:,} of {every:,} options; the others are not shown.")]


def _in_mixed_precision(answer: Matches) -> list[str]:
    """Describe the cost with mixed precision on the cheapest server, if no precision was given."""
    m = answer.mixed
    if m is None or not answer.picks or m.mean_usd >= answer.picks[0].match.mean_usd:
        return []
    return [
        f"In mixed precision ({m.forecast.execution.precision}) the cheapest takes"
        f" {usd_and_hours(m)}: --precision amp_bf16 --precision amp_fp16."
    ]


def _shown(matches: Sequence[Match], top: int) -> list[_Ranked]:
    """Return the first `top` options and the rest of the Pareto front, thinned if it is long."""
    ranked = [_Ranked(*pair) for pair in enumerate(matches, 1)]
    front = [one for one in ranked[top:] if one.match.on_front]
    every = max(1, math.ceil(len(front) / max(FEWEST_SHOWN, top // 2)))
    # Thinned from the fastest option, which is always shown.
    return [*ranked[:top], *front[::-every][::-1]]


def _overhead(first: Match, job: Job) -> str:
    share = 1 - first.time.goodput
    overhead = percent(share) if share >= 0.01 else "less than 1%"
    line = f"Overhead of option 1 (start-up, checkpoints, failures): {overhead} of its time."
    if job.conditions.checkpoint_every_s is not None or first.time.checkpoints == 1:
        return line
    return f"{line} Best checkpoint interval: {duration(first.time.checkpoint_interval_s)}."


def _none(answer: Matches) -> Iterator[Section]:
    """Name the limit that no server meets, the closest server, and what to try."""
    if answer.nearest is None:
        yield Headline("No server was considered.", good=False)
        return
    binding, reason, choice = answer.nearest
    ranking, job = answer.ranking, answer.job
    yield Headline(
        f"{_UNMET[binding]} The closest is {server(choice)}{given(reason, ': {}')}.", good=False
    )
    if binding == "failures":
        return
    slow, unable = len(ranking.missed), len(ranking.rejected)
    several = f"{slow} are too slow or too expensive, {unable} cannot run it at all."
    lines = _within_one_limit(ranking, job) if isinstance(choice, Match) else []
    if isinstance(choice, Match):
        lines.append(f"The closest takes {usd_and_hours(choice)}.")
    elif binding == "memory":
        recomputes = job.checkpointing or answer.workload.checkpointed
        recompute = "" if recomputes else "--checkpointing, "
        lines.append(
            f"Try {recompute}a smaller --global-batch if that is the limit, or more --max-nodes."
        )
    else:
        lines.append("Try another --global-batch, --precision, or fewer restrictions on servers.")
    yield say(*lines, slow + unable > 1 and several)


def _within_one_limit(ranking: Ranking, job: Job) -> list[str]:
    """Name the best option within each of two limits, if none meets both."""
    if job.deadline_s is None or job.budget_usd is None:
        return []
    cheapest, fastest = (
        f"{server(met)}, {usd_and_hours(met)}" if met else "none"
        for met in near_misses(ranking, job)
    )
    limits = f"{duration(job.deadline_s)} and {usd(job.budget_usd)}"
    return [
        f"No server meets both the deadline and the budget, {limits}.",
        f"Cheapest that meets the deadline: {cheapest}.",
        f"Fastest within the budget: {fastest}.",
    ]


def _old_prices(answer: Matches, today: datetime.date) -> Lines:
    stale = sum(is_stale(pick.match.offer, today) for pick in answer.picks)
    fetch = "may be old: trainpace offers --refresh fetches today's."
    return say(stale and f"{plural(stale, 'price')} {fetch}")


def _assumptions(answer: Matches, shown: Sequence[Match]) -> Notes:
    conditions, forecasts = answer.job.conditions, [m.forecast for m in shown]
    loading = ", assuming that data loading keeps up (--loader-rate)"
    if answer.recorded or conditions.sample_bytes:
        loading = ""
    return Notes(
        [
            f"Forecasts, not measurements{loading}. Assumed: a GPU fails every"
            f" {number(conditions.device_mtbf_h or math.inf)} h, a spot server is preempted every"
            f" {number(conditions.preemption_mean_h)} h, storage reads and writes"
            f" {number(conditions.storage_gb_per_s)} GB/s, and a host CPU that is not published is"
            " typical of its card (--host).",
            *filter(None, [assumed_in_words(answer.assumed)]),
            *trace_notes(forecasts),
            *software_lines(forecasts),
        ]
    )


def _next(first: Match, answer: Matches, asked: MatchRequest | None) -> Iterator[Next]:
    """Suggest measuring the first option, or else showing the parts of its step."""
    e, offer = first.forecast.execution, first.offer
    spec = spec_of(answer.workload, asked)
    fixed = ["batch", "precision", "accumulate", "gpu", "global_batch", "timeout"]
    run = {"batch": e.micro_batch, "precision": e.precision}
    if e.activation_checkpointing == "none" and can_be_measured(spec, asked, fixed):
        same = forwarded(asked, MeasureRequest, fixed, {**run, "device": "cuda"})
        why = "on option 1, rented for a few minutes: real steps narrow the interval"
        yield Next(["trainpace", "measure", spec, *same], why)
        return
    options: dict[str, Any] = {"gpu": offer.device, "num_gpus": offer.count}
    if first.nodes > 1:
        options |= {"nodes": first.nodes, "network": offer.network_gb_per_s}
    options |= run
    options |= {"accumulate": e.accumulation if e.accumulation > 1 else None}
    options |= {"zero": e.zero_stage, "shard_size": e.shard_size}
    if asked and asked.global_batch == e.global_batch:
        options["global_batch"] = e.global_batch
    if e.activation_checkpointing != "none":
        options["checkpointing"] = e.activation_checkpointing
    if answer.recorded:  # The steps include the work of this server's host.
        options |= {"cores": offer.vcpus, "host": offer.host}
    same = forwarded(asked, ForecastRequest, [*fixed, "host", "checkpointing"], options)
    yield Next(["trainpace", "forecast", spec, *same], "option 1: where the time of its step goes")


def cost_against_time(matches: Sequence[Match], picks: Sequence[Pick] = ()) -> Chart | None:
    """Draw cost over time, with names at the picks or else at the ends of the front.

    None if no option finishes.
    """
    able = [m for m in matches if _is_priced(m) and m.mean_usd > 0]
    front = _front_of(able)
    if not front:
        return None
    rest = sorted((m for m in able if not m.on_front), key=lambda m: m.mean_usd)[:MOST_POINTS]
    shown = f"all {len(able)}"
    if len(able) > len(front) + len(rest):
        shown = f"{len(front)} on the front and the {len(rest)} cheapest others of {len(able)}"
    line = series("no other is both faster and cheaper", "line", "best", map(_point, front))
    on_front = _points("the same, with the 90% interval of the cost", "best", front, with_usd=True)
    others = [_points("worse in both time and cost", "muted", rest)] if rest else []
    return Chart(
        title="Cost against time",
        finding=" ".join(cheapest_and_fastest(able)),
        x=Axis(label="hours of the whole job", unit="h", scale="log10"),
        y=Axis(label="cost of the whole job", unit="$", scale="log10"),
        series=(*others, line, on_front),
        marks=_named(front, picks),
        nearest="point",
        note=f"Shown: {shown}. Forecasts, not measurements.",
    )


def _named(front: Sequence[Match], picks: Sequence[Pick]) -> tuple[Mark, ...]:
    ends = {"fastest": front[0], "cheapest": front[-1]}
    named = {_NAMES[pick.name].lower(): pick.match for pick in picks} or ends
    return tuple(
        Mark(axis="point", at=m.mean_hours, y=m.mean_usd, text=f"{name}: {server(m)}", tone="best")
        for name, m in named.items()
    )


def cheapest_and_fastest(matches: Sequence[Match]) -> list[str]:
    best, fastest = min(matches, key=lambda m: m.mean_usd), min(matches, key=_hours)
    sentences = [f"Cheapest: {_server_and_time(best)}."]
    if fastest is not best:
        sentences.append(f"Fastest: {server(fastest)}, {usd_and_hours(fastest)}.")
    return sentences


def _point(m: Match) -> tuple[float, float]:
    return m.mean_hours, m.mean_usd


def _points(name: str, tone: str, matches: Sequence[Match], with_usd: bool = False) -> Series:
    bounds = [_finite(m) for m in matches] if with_usd else []
    labels = tuple(map(server, matches))
    return series(name, "points", tone, map(_point, matches), bounds, labels=labels)


def _finite(m: Match) -> Interval:
    return m.usd if math.isfinite(m.usd.high) else replace(m.usd, high=m.mean_usd)


def usd_and_hours(m: Match) -> str:
    return f"{usd(m.mean_usd)} in {duration(3600 * m.mean_hours)}"


def server(choice: Match | Rejected) -> str:
    nodes = f"{choice.nodes} x " if choice.nodes > 1 else ""
    spot = ", spot" if isinstance(choice, Match) and choice.spot else ""
    offer = choice.offer
    return f"{nodes}{offer.provider} {offer.instance_type} ({_gpus(offer)}{spot})"


def match_pictures(ranking: Ranking, picks: Sequence[Pick] = ()) -> list[Picture | None]:
    front = [m for m in ranking.matches if m.on_front]
    timed = [
        Timed("", server(m), m.forecast.step, m.forecast.step_time_interval_ms)
        for m in front[:: max(1, math.ceil(len(front) / MOST_BARS))]
        if m.forecast.step is not None
    ]
    return [cost_against_time(ranking.matches, picks), step_breakdown(timed)]


def match_page_json(answer: Matches, today: datetime.date) -> dict[str, Any]:
    """Return the JSON of a page. It is limited to the rows that the page shows."""
    data = answer.as_json(today)
    shown = _shown(answer.ranking.matches, PAGE_ROWS)
    rows = [data["rows"][rank - 1] for rank, _ in shown]
    return data | {"rows": rows, "missed": data["missed"][:MOST_REJECTED], "rejected": []}


_OFFERED = (
    words("provider", cell="provider"),
    words("server", least=16, cell="instance_type"),
    words("region", 3, cell="region"),
    words("GPUs", cell=_gpus),
    Column("$/h", cell="price_usd_per_hour", form=usd),
    Column("spot $/h", 1, cell="spot_price_usd_per_hour", form=usd),
    Column(
        "Gbit/s", 4, cell=lambda o: f"{8 * o.network_gb_per_s:g}" if o.network_gb_per_s else "-"
    ),
    words("as of", 2, 7, lambda o: o.as_of or "undated"),
)


def offers_sections(
    offers: Sequence[Offer], today: datetime.date, asked: OffersRequest | None = None
) -> Iterator[Section]:
    """Convert servers on offer to sections."""
    offers = sorted(offers, key=lambda o: o.price_usd_per_hour)
    least = ""
    if offers:
        price, kind = usd(offers[0].price_usd_per_hour), offers[0].instance_type
        least = f", from {price} per hour ({offers[0].provider} {kind})"
    yield Headline(f"{plural(len(offers), 'offer')}{least}.")
    yield tabulate(offers, _OFFERED)
    yield say("Gbit/s: bandwidth between servers of one kind, if several can be joined.")
    stale = sum(is_stale(offer, today) for offer in offers)
    if stale:
        undated = f"undated ones are as known on {SNAPSHOT_KNOWN_ON} and may be older"
        are = "price is" if stale == 1 else "prices are"
        yield say(f"{stale} {are} old: {undated}. --json shows every source.")
        filters = [] if asked is None else forwarded(asked, type(asked), ["refresh"])
        yield Next(["trainpace", "offers", *filters, "--refresh"], "fetches today's prices")


def settings_sections(combined: Any) -> Iterator[Section]:
    """Show the settings that a schedule read from files."""
    if combined is None:
        return
    columns = (
        words("setting", cell="name"),
        words("value", cell="{.value}"),
        words("from", least=16, cell="{0.file}: {0.key}"),
    )
    yield tabulate(combined.values.values(), columns)
    yield say(*(f"{sentence(note.severity)}: {note.file}: {note.text}" for note in combined.notes))


NOT_CARRIED = ("sequence_length", "checkpoint_every", "mtbf")
"""Schedule options that `match` does not support, or that mean something else there."""


def schedule_sections(a: Answer, asked: ScheduleRequest | None = None) -> Iterator[Section]:
    """Convert the numbers of a schedule to sections."""
    if a.time is not None:
        yield _schedule_verdict(a, a.time.total_s)
    yield Table((words(""), words("", least=16)), _schedule_rows(a))
    if a.time is not None:
        yield from _speedups(a, a.time.total_s)
    yield Lines(_learning_rates(a))
    yield Notes([f"Note: {note}." for note in a.notes])
    yield from _after_schedule(a, asked)


def _after_schedule(a: Answer, asked: ScheduleRequest | None) -> Iterator[Next]:
    """Suggest `trainpace plan` with the same files if no step time is known, else `match`."""
    if a.execution is None:
        return
    if asked is not None and asked.config and "step_time" in a.solved:
        model = "resnet50"
        if a.schedule.sequence_length:  # Usually stands beside the other files.
            model = f"transformers:{Path(asked.config[0]).with_name('config.json')}"
        job = {"gpu": "H100", "network": 50.0 if a.execution.nnodes > 1 else None}
        job |= {"nodes": asked.nnodes, "num_gpus": asked.nproc_per_node, "batch": asked.micro_batch}
        same = forwarded(asked, PlanRequest, ("price", "checkpoint_every"), job)
        why = "the time by forecast, and what shortens it; put your model and GPU in place"
        yield Next(["trainpace", "plan", model, *same], why)
    elif a.schedule.samples and a.schedule.epochs:
        job = {"samples": a.schedule.samples, "epochs": a.schedule.epochs}
        job |= {"global_batch": a.execution.global_batch}
        same = forwarded(asked, MatchRequest, NOT_CARRIED, job)
        why = "servers for this job; put your model, FILE.py:FUNCTION, in place of resnet50"
        yield Next(["trainpace", "match", "resnet50", *same], why)


def _speedups(a: Answer, total_s: float) -> Iterator[Section]:
    if a.speedups:
        columns = (
            Column("speed-up", cell="{.ratio:.4g}x"),
            Column("of the old speed", cell="{.percent_of_old_speed:.4g}%"),
            Column("of the old time", cell=lambda s: f"{100 * s.share_of_old_time:.3g}%"),
            Column("total then", cell=lambda s: duration(s.new_time_s(total_s))),
        )
        yield tabulate(a.speedups, columns)
        yield say("363% means 3.63 times as fast (old time / new time), not 363% faster.")


def _learning_rates(a: Answer) -> list[str]:
    rate = a.learning_rate
    if rate is None:
        return []
    rules = (
        ("linear", rate.linear, rate.linear_factor, rate.linear_source),
        ("square root", rate.square_root, rate.square_root_factor, rate.square_root_source),
    )
    values = ((f"x {factor:.4g}" if v is None else f"{v:.4g}") for _, v, factor, _ in rules)
    return [
        f"The global batch is {rate.new_global_batch}, and the learning rate was tuned at"
        f" {rate.old_global_batch}. Nothing is changed for you; these are the usual rules:",
        *(
            f"  {name}: {value}, {source.partition(': ')[2]}"
            for (name, _, _, source), value in zip(rules, values, strict=True)
        ),
        f"  {rate.limit}",
    ]


def _schedule_verdict(a: Answer, total_s: float) -> Headline:
    cost = given(usd(a.cost_usd, ""), " for {}")
    total = f"{duration(total_s)}{cost}"
    if a.meets_limit is None or a.limit_s is None:
        return Headline(f"The training takes {total}.")
    limit = duration(a.limit_s)
    batch = a.execution and a.execution.global_batch
    needs = {
        ("step_time",): f"A step may take at most {duration(a.step_time_s)}",
        ("samples",): f"An epoch may have at most {given(a.schedule.samples, '{:,}')} samples",
        (
            "micro_batch",
            "global_batch",
        ): f"The global batch must be at least {given(batch, '{:,}')}",
    }
    for names, need in needs.items():
        if set(names) <= set(a.solved):
            return Headline(f"{need}, for the training to end within {limit}{cost}.")
    if a.meets_limit:
        return Headline(f"Yes: {total} is within {limit}.", good=True)
    return Headline(f"No: {total} is {duration(total_s - a.limit_s)} over {limit}.", good=False)


def _schedule_rows(a: Answer) -> list[tuple[str, str]]:
    """Return the numbers of a schedule. Arrows mark computed values."""
    t, rate, schedule = a.time, a.throughput_samples_per_s, a.schedule
    needed = given("step_time" in a.solved, "  <- needed")
    fits = given("epochs" in a.solved, "  <- fits")
    tokens = (rate or 0.0) * (schedule.sequence_length or 0)
    gpus = a.gpus_choice and a.gpus_choice.data_parallel_size
    rows = [
        *_batch_rows(a),
        ("samples per epoch", given("samples" in a.solved and schedule.samples, "{:,}  <- fit")),
        ("epochs", given(schedule.epochs, f"{{:g}}{fits}")),
        ("steps", given(t and t.steps, "{:,}")),
        ("step time", given(duration(a.step_time_s, ""), f"{{}}{needed}")),
        ("throughput", given(number(rate, ""), f"{{}} samples/s{needed}")),
        ("", given(tokens and format_count(tokens), "{} tokens/s")),
        ("data-parallel GPUs", given(gpus, "{:,}  <- needed")),
        *(_time_rows(t) if t else ()),
        ("cost", usd(a.cost_usd, "")),
    ]
    return [(name, text) for name, text in rows if text]


def _time_rows(t: JobTime) -> list[tuple[str, str]]:
    return [
        ("runs in sequence", given(t.repeats > 1 and t.repeats)),
        ("of which", _parts_of_time(t)),
        ("training time", duration(t.total_s)),
    ]


def _parts_of_time(t: JobTime) -> str:
    parts = {
        "steps": t.stepping_s,
        "start-up": t.startup_s,
        "evaluation": t.evaluation_s,
        "checkpoints": t.checkpoint_s,
        "failures": t.failures_s,
    }
    shown = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds]
    return ", ".join(shown) if len(shown) > 1 else ""


def _batch_rows(a: Answer) -> list[tuple[str, str]]:
    e = a.execution
    if e is None:
        return []
    formula = (
        f"{e.micro_batch} micro-batch x {e.accumulation} accumulation x {e.data_parallel_size}"
        " data parallel"
    )
    needed = "  <- needed" if {"micro_batch", "global_batch"} <= set(a.solved) else ""
    rows = [("global batch", f"{e.global_batch:,} samples = {formula}{needed}")]
    if e.data_parallel_size != e.world_size:
        sizes = f"(tp {e.tp} x pp {e.pp} x cp {e.cp}) = {e.data_parallel_size}"
        rows.append(("data parallel", f"{e.world_size} GPUs / {sizes}"))
    if a.epoch is not None:
        partial = a.epoch.last_step_samples != e.global_batch
        last = f", the last of {a.epoch.last_step_samples} samples" if partial else ""
        rows.append(("steps per epoch", f"{a.epoch.steps:,}{last}"))
    return rows
