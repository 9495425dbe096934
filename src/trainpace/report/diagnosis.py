"""Report sections for diagnoses and profiler traces: cause, proof, ranks and fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from trainpace.core.outcome import Interval
from trainpace.diagnose import (
    IN_WORDS,
    WORTH,
    Advice,
    Diagnosis,
    ProfiledTraining,
    Proof,
    Share,
    faults_in_words,
)
from trainpace.report.charts import Bar, BarChart, BarGroup, Picture, bar
from trainpace.report.phrases import (
    duration,
    given,
    listed,
    number,
    percent,
    plural,
    sentence,
    span,
)
from trainpace.report.sections import (
    Charts,
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    brief,
    details,
    say,
    shares_table,
    tabulate,
    words,
)
from trainpace.watch import Recording, Together

LEAST_SHARE = 0.005
LEAST_ROOF = 0.01
MOST_OF_ALL = 0.99
_TONES = {
    "data": "data",
    "host_to_device": "host_to_device",
    "launch": "host_overhead",
    "compute": "forward",
    "contention": "backward",
    "threads": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "straggler": "communication",
    "logging": "backward",
}
_PROOFS = {
    "cached_batch": "the same batch again and again",
    "no_sync": "no communication between ranks",
    "muted": "no output",
    "few_samples": "a batch of two samples",
    "batch_on_device": "the batch on the device already",
    "fewer_threads": "fewer threads",
}
PROVED = (
    "Trainpace removed this cause for some steps of this training, or timed it separately; what is"
    " not proved is estimated from recorded times"
)


def nothing_worth(d: Diagnosis) -> str:
    """Report that no change is worthwhile, and list the changes that were not tried."""
    return (
        f"No change known here saves {percent(WORTH)} of a step; a lower precision or a faster"
        " device may."
    )


def diagnosis_sections(
    d: Diagnosis,
    folder: str = "",
    again: Sequence[str] = (),
    notes: Iterable[str] = (),
    timeline: Iterable[Section] = (),
) -> Iterator[Section]:
    """Convert a diagnosis to sections.

    Args:
        d: The diagnosis.
        folder: The recording's folder.
        again: Command that proves the shares, if the recording has no interventions.
        notes: Notes about the run.
        timeline: Sections of a timeline, for a page.
    """
    step = f"{number(d.step_ms)} ms ({span(d.step_ms_low, d.step_ms_high)})"
    yield say(f"A step takes {step}{given(folder, ', as recorded in {}')}")
    yield Headline(_verdict(d))
    yield Charts(lambda: diagnosis_pictures(d))
    causes = [(s.in_words, s.ms, s.proved) for s in d.shares]
    proved = words("proved", 1, 6, lambda cause: "yes" if cause[2] else "")
    yield shares_table("where it goes", causes, d.step_ms, proved, digits=1, least=LEAST_SHARE)
    yield from details("what proved means", say(f"Proved: {PROVED}."))
    yield Lines([f"Why: {line}" for line in d.why])
    yield Lines([f"Note: {line}" for line in (*d.warnings, *notes)])
    yield from _advice(d)
    yield from ranks_sections(d.together)
    not_worth = Lines([_not_worth(a, d) for a in d.not_worth])
    yield from details("what is not worth a change", not_worth)
    yield say(not d.advice and nothing_worth(d))
    yield from timeline
    if again:
        yield Next(again, "proves the cause by removing one suspect at a time")
    elif folder:
        command = ["trainpace", "watch", "--from", folder, "--timeline"]
        yield Next(command, "the same steps on a timeline")


def _advice(d: Diagnosis) -> Iterator[Section]:
    columns = [
        words("what to change", least=16, cell="title"),
        Column(
            "saved per step", cell=lambda a: f"{saved_ms(a)} ({percent(a.saves_ms / d.step_ms)})"
        ),
        Column("per epoch", 1, cell=lambda a: duration(d.seconds_an_epoch(a.saves_ms), "")),
        Column("the job", 1, cell=lambda a: duration(d.seconds_a_job(a.saves_ms), "")),
        Column("at most", 2, cell=lambda a: f"{number(a.ceiling_ms)} ms"),
    ]
    yield tabulate(d.advice, columns, filled=True)
    if d.advice and d.job_steps is not None:
        yield say(given(d.job_by, "The job's length is taken from {}; --epochs N changes it."))
    yield Notes([f"{a.title}: {a.how}" for a in d.advice])


def _verdict(d: Diagnosis) -> str:
    most = max(d.shares, key=lambda s: s.share, default=None)
    named = next((s.in_words for s in d.shares if s.cause == d.verdict), IN_WORDS[d.verdict])
    verdict = f"Verdict: {named}"
    if most is not None and most.cause == d.verdict:
        unproved = "" if most.proved else ", seen but not proved"
        verdict += f", {percent(most.share)} of the step{unproved}"
    if d.verdict != "compute" or d.share_of_roof is None or d.share_of_roof < LEAST_ROOF:
        return f"{verdict}."
    measured = "the FLOP/s measured for a large matmul in the same number format"
    if d.share_of_roof <= 1:
        reaches = f"reaches {percent(d.share_of_roof)} of {measured}"
        return f"{verdict}. While computing, the model {reaches}."
    # A convolution may need fewer multiplications than its definition. FLOPs are counted by the
    # definition.
    return (
        f"{verdict}. While computing, the model exceeds {measured}: convolutions may need fewer"
        " multiplications than are counted, or another program slowed that matmul down."
    )


def _not_worth(a: Advice, d: Diagnosis) -> str:
    epoch = d.seconds_an_epoch(a.saves_ms)
    saved = f"{number(a.saves_ms)} ms per step" if epoch is None else f"{duration(epoch)} per epoch"
    return f"Not worth it: {a.title} saves {saved if a.saves_ms > 0 else 'nothing here'}."


def saved_ms(a: Advice) -> str:
    """Return the saving of a change per step. "up to" marks an upper limit."""
    is_most = a.at_most or a.saves_ms > MOST_OF_ALL * a.ceiling_ms
    return f"{'up to ' if is_most else ''}{number(a.saves_ms)} ms"


def shares_chart(shares: Sequence[Share], verdict: str, note: str) -> BarChart:
    """Draw one bar per cause, the longest first. The bars add up to the step."""
    shown = [s for s in shares if s.share >= LEAST_SHARE]
    top = next((s for s in shown if s.cause == verdict), shown[0])
    bars = [
        bar(
            s.in_words,
            f"{number(s.ms)} ms, {s.share:.1%}{', proved' if s.proved else ''}",
            [("of the step", _TONES.get(s.cause, "muted"), max(s.ms, 0.0))],
        )
        for s in shown
    ]
    return BarChart(
        title="Where a step's time goes",
        finding=f"{top.share:.0%} of a step is {top.in_words}.",
        label="time of the mean step",
        unit="ms",
        groups=[BarGroup(bars)],
        note=note,
    )


def proofs_chart(d: Diagnosis) -> BarChart | None:
    """Draw the current step and the step without each cause. None without interventions."""
    if not d.proofs:
        return None
    strongest = max(d.proofs, key=lambda p: p.saved_ms)
    return BarChart(
        title="Proved by removing the cause",
        finding=(
            f"{_changed(strongest)} a step takes {number(strongest.without_ms)} ms instead of"
            f" {number(strongest.plain_ms)}."
        ),
        label="time of a step",
        unit="ms",
        groups=[BarGroup(_proof_bars(p), _changed(p)) for p in d.proofs],
        note=(
            "Whiskers: 90% interval of the step without the cause, from alternating blocks of"
            " steps."
        ),
    )


def _changed(p: Proof) -> str:
    return f"With {_PROOFS.get(p.trial, p.trial)}"


def _proof_bars(p: Proof) -> tuple[Bar, Bar]:
    plain = f"{number(p.plain_ms)} ms"
    without = f"{number(p.without_ms)} ms, {number(p.saved_ms)} less"
    low, high = (max(p.plain_ms - saved_ms, 0.0) for saved_ms in (p.high_ms, p.low_ms))
    between = Interval(low=low, high=high, coverage=0.9, basis="alternating blocks of steps")
    return (
        bar("current", plain, [("current", "muted", p.plain_ms)]),
        bar("without", without, [("without", "best", p.without_ms)], between),
    )


def diagnosis_pictures(d: Diagnosis) -> list[Picture | None]:
    return [
        shares_chart(d.shares, d.verdict, f"Proved: {PROVED}."),
        ranks_chart(d.together),
        proofs_chart(d),
    ]


def recorded_ranks_sections(recording: Recording) -> Iterator[Section]:
    """Show which rank is behind, and each rank's step time. Yields nothing for a single rank."""
    if recording.together is not None:
        yield Lines(list(faults_in_words(recording)))
        yield from ranks_sections(recording.together)


def ranks_sections(found: Together | None) -> Iterator[Section]:
    if found is not None:
        yield from details(
            "each rank's waiting and transfer, by collective",
            tabulate(found.ranks, _RANKS),
            tabulate(found.collectives, _COLLECTIVES),
            Lines(list(_clocks_and_links(found))),
        )


def _clocks_and_links(found: Together) -> Iterator[str]:
    for c in found.clocks:
        side = "ahead of" if c.wall_ms >= 0 else "behind"
        yield (
            f"The clock of {c.node} is {number(abs(c.wall_ms))} ms {side} that of the first rank's"
            f" node, give or take {number(c.uncertainty_ms)} ms."
        )
    for link in found.links:
        yield (
            f"Link from {link.sender} to {link.receiver}: {number(link.mb_per_step)} MB per step,"
            f" at {number(link.mbit_per_s)} Mbit/s while it sends."
        )


def ranks_chart(found: Together | None) -> BarChart | None:
    """Draw the mean step of each rank by its parts.

    If there are many ranks, only those that wait least are drawn.
    """
    if found is None:
        return None
    by_waiting = sorted(found.ranks, key=lambda r: r.waiting_ms)
    shown, more = by_waiting[:MOST_BARS], len(by_waiting[MOST_BARS:])
    bars = [
        bar(
            f"rank {r.rank} on {r.node}",
            f"{number(r.step_ms)} ms, {number(r.waiting_ms)} of them waiting",
            [(name, tone, getattr(r, field)) for field, name, tone in _PARTS],
        )
        for r in sorted(shown, key=lambda r: r.rank)
    ]
    least = by_waiting[0]
    return BarChart(
        title="Each rank's step",
        label="mean step",
        unit="ms",
        groups=[BarGroup(bars)],
        finding=(
            f"Rank {least.rank} on {least.node} waits least for the others:"
            f" {number(least.waiting_ms)} ms of a step."
        ),
        note=(
            f"Over {found.steps} steps. A rank waits from its own arrival at a collective to that"
            f" of the last one.{given(more, ' {} ranks that wait longer are not drawn.')}"
        ),
    )


MOST_BARS = 16
_PARTS = (
    ("compute_ms", "computing", "forward"),
    ("data_ms", "waiting for data", "data"),
    ("host_ms", "host", "host_overhead"),
    ("waiting_ms", "waiting for the last rank", "idle"),
    ("transfer_ms", "transfer", "communication"),
    ("undivided_ms", "other communication", "muted"),
)
_RANKS = (
    words("rank and node", least=12, cell=lambda r: f"{r.rank} on {r.node}"),
    Column("step ms", cell="step_ms"),
    Column("computing", cell="compute_ms"),
    Column("data", cell="data_ms"),
    Column("host", 1, cell="host_ms"),
    Column("waiting for the last", cell="waiting_ms"),
    Column("transfer", cell="transfer_ms"),
    Column("other communication", 2, cell="undivided_ms"),
    Column("input", 3, cell="input_elements"),
)
_COLLECTIVES = (
    words("collective", least=10, cell="name"),
    Column("per step", cell="per_step"),
    Column("exposed ms", cell="exposed_ms"),
    Column("waiting for the last", cell="waiting_ms"),
    Column("transfer", cell="transfer_ms"),
)


WORTH_A_LINE = 0.03
"""Minimum possible saving of a change for a line in the short answer, as a share of the step."""
FEW_KERNELS = 3
MOST_RANKS = 64
APART = 0.05
"""Relative difference of mean and median step above which both are printed."""


def profiled_title(place: str) -> str:
    return f"What a trace shows: {place}"


def profiled_sections(p: ProfiledTraining, place: str = "a trace") -> Iterator[Section]:
    """Convert a profiler trace to sections. `place` is its file or folder."""
    yield Lines([f"{place}: {source_words(p)}"])
    yield Headline(verdict_words(p))
    yield Charts(lambda: [shares_chart(p.shares, p.verdict, source_words(p))])
    shares = _shares(p)
    yield shares_table("where it goes", shares, p.step_ms, digits=1, least=LEAST_SHARE)
    yield from _bounds(p)
    ranks = p.ranks[:MOST_RANKS] if len(p.ranks) > 1 else ()
    yield from details("each rank", tabulate(ranks, _rank_columns(p.straggler)))
    yield from details("the kernels", tabulate(p.kernels, _kernel_columns(p.step_ms)))
    yield from _trace_notes(p)
    yield Next("trainpace diagnose -- python train.py", "proves it on the machine that trains")


def _bounds(p: ProfiledTraining) -> Iterator[Section]:
    """Show the maximum saving of each change, and how to make it."""
    columns = (
        words("what a change could save", least=20, cell="title"),
        Column("at most", cell=lambda b: f"{number(b.at_most_ms)} ms"),
        Column("share", cell=lambda b: percent(b.at_most_ms / p.step_ms)),
    )
    bounds = [b for b in p.bounds if b.at_most_ms >= LEAST_SHARE * p.step_ms]
    large = [b for b in bounds if b.at_most_ms >= WORTH_A_LINE * p.step_ms]
    yield from brief(tabulate(large, columns))
    yield from details("", tabulate(bounds, columns))
    how = Notes([f"{sentence(b.title)}: {b.how}" for b in bounds])
    yield from details("how to make each change", how)


def _trace_notes(p: ProfiledTraining) -> Iterator[Notes]:
    """Describe the ranks. The short answer also names the heaviest kernels; it has no table."""
    ranks = [ranks_words(p)] if len(p.ranks) > 1 else []
    heavy = [k for k in p.kernels[:FEW_KERNELS] if k.ms >= LEAST_SHARE * p.step_ms]
    named = listed(f"{k.name} {percent(k.ms / p.step_ms)}" for k in heavy)
    heaviest = f"Heaviest {'kernels' if p.on_device else 'operators'}: {named}."
    yield from brief(Notes([*ranks, *([heaviest] if heavy else []), *p.warnings]))
    yield from details("", Notes([*ranks, *p.warnings]))


def source_words(p: ProfiledTraining) -> str:
    """Return a sentence about the source of the numbers."""
    first = p.ranks[0]
    who = f"{len(p.ranks)} ranks" if len(p.ranks) > 1 else f"rank {first.rank}"
    on = f" on {first.device}" if first.device and p.on_device else ""
    if not first.told_by:
        return f"{who}{on}, recorded by {first.made_by}; no steps are marked."
    fewest = min(rank.steps for rank in p.ranks)
    each = " each" if len(p.ranks) > 1 else ""
    return (
        f"{who}{on}, recorded by {first.made_by}; {plural(fewest, 'step')}{each}, marked by"
        f" {first.told_by}."
    )


def verdict_words(p: ProfiledTraining) -> str:
    top = p.shares[0]
    verdict = f"Verdict: {top.in_words}, {percent(top.share)} of"
    if not p.ranks[0].told_by:
        return f"{verdict} the whole trace, which takes {number(p.step_ms)} ms."
    apart = abs(p.step_ms - p.median_ms) > APART * p.median_ms
    mean = f", the mean step {number(p.step_ms)}" if apart else ""
    several = min(rank.steps for rank in p.ranks) > 1
    between = f" ({span(p.median_ms_low, p.median_ms_high)})" if several else ""
    return f"{verdict} a step. The median step takes {number(p.median_ms)} ms{between}{mean}."


def _shares(p: ProfiledTraining) -> list[tuple[str, float]]:
    """Return causes with their time, followed by the parts of some causes.

    The causes add up to the step. The rows of parts are cut first.
    """
    parts = [(f"- {k.in_words}", k.ms) for k in p.compute] if len(p.compute) > 1 else []
    hidden_ms = fmean(rank.hidden_ms for rank in p.ranks)
    hidden = ("- communication hidden behind compute", hidden_ms)
    return [*((s.in_words, s.ms) for s in p.shares), *parts, hidden]


def ranks_words(p: ProfiledTraining) -> str:
    medians = [rank.median_ms for rank in p.ranks]
    ends = dict.fromkeys(map(number, (min(medians), max(medians))))
    steps = f"{len(p.ranks)} ranks: median steps of {' to '.join(ends)} ms"
    if p.straggler is None:
        return f"{steps}; none makes the others wait."
    late = next(rank for rank in p.ranks if rank.rank == p.straggler)
    others = [rank.causes_ms for rank in p.ranks if rank is not late]

    def more_ms(cause: str) -> float:
        return late.causes_ms[cause] - fmean(causes[cause] for causes in others)

    cause = max((c for c in late.causes_ms if c != "communication"), key=more_ms)
    in_words = next(s.in_words for s in p.shares if s.cause == cause)
    spends = f"which spends {number(max(0.0, more_ms(cause)))} ms more than they do in {in_words}"
    return f"{steps}; they wait for rank {late.rank}, {spends}."


def _rank_columns(straggler: int | None) -> list[Column]:
    def cause(name: str, field: str, rank: int = 0) -> Column:
        return Column(name, rank, cell=lambda r: number(r.causes_ms[field]))

    return [
        words("rank", least=4, cell=lambda r: f"{r.rank}{' ◀' if r.rank == straggler else ''}"),
        Column("steps", 3, cell=lambda r: str(r.steps)),
        Column("median ms", cell="median_ms"),
        cause("computing", "compute"),
        cause("communication", "communication"),
        Column("hidden", 2, cell="hidden_ms"),
        cause("data", "data", 1),
        cause("launching", "launch", 1),
        cause("waiting", "logging", 2),
    ]


def _kernel_columns(step_ms: float) -> list[Column]:
    return [
        words("kernel", least=24, cell="name"),
        Column("ms per step", cell="ms"),
        Column("share", cell=lambda k: percent(k.ms / step_ms, digits=1)),
        Column("number", 1, cell="count"),
        words("kind", 2, 10, "kind"),
    ]
