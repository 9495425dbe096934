"""A diagnosis for the terminal, as pictures and as a page: the verdict, why, the interventions, and what to change."""

from collections.abc import Iterable, Sequence

from trainpace.core.outcome import Interval
from trainpace.core.records import to_jsonable
from trainpace.diagnose import IN_WORDS, WORTH, Advice, Diagnosis, Proof, Share
from trainpace.report.among_ranks import print_ranks, ranks_chart
from trainpace.report.charts import Bar, BarChart, BarGroup, Picture, bar
from trainpace.report.pages import page
from trainpace.report.phrases import duration, number, percent, span
from trainpace.report.screen import in_details
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.report.watch import timeline_context
from trainpace.watch import Timeline

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
    "bf16": "the model in bf16",
}
PROVED = (
    "Trainpace removed this cause for some steps of this training, or timed it separately; what is"
    " not proved is estimated from recorded times"
)


def nothing_worth(d: Diagnosis) -> str:
    """That nothing is advised, and what was not tried."""
    tried = any(p.trial == "bf16" and p.settles for p in d.proofs)
    others = "a faster device may" if tried else "a lower precision or a faster device may"
    return f"No change known here saves {percent(WORTH)} of a step; {others}."


def print_diagnosis(
    d: Diagnosis, folder: str, again: Sequence[str] = (), notes: Iterable[str] = ()
) -> None:
    """`again`: of a recording without interventions, the command that would prove it. `notes`: of the run itself."""
    step = f"{number(d.step_ms)} ms ({span(d.step_ms_low, d.step_ms_high)})"
    print_lines(f"A step takes {step}, as recorded in {folder}")
    most = max(d.shares, key=lambda s: s.share, default=None)
    share = roof = ""
    if most is not None and most.in_words == IN_WORDS[d.verdict]:
        share = (
            f", {percent(most.share)} of the step{'' if most.proved else ', seen but not proved'}"
        )
    if d.verdict == "compute" and d.share_of_roof is not None and d.share_of_roof >= LEAST_ROOF:
        measured = "the FLOP/s measured for a large matrix product in the same number format"
        # a convolution may need fewer multiplications than its definition, by which FLOPs are counted
        roof = (
            f" While computing, the model reaches {percent(d.share_of_roof)} of {measured}."
            if d.share_of_roof <= 1
            else (
                f" While computing, the model exceeds {measured}: convolutions may need fewer"
                " multiplications than are counted, or another program slowed that product down."
            )
        )
    print_verdict(f"Verdict: {IN_WORDS[d.verdict]}{share}.{roof}")
    rows = [
        (s.in_words, number(s.ms), f"{100 * s.share:.1f} %", "yes" if s.proved else "", s.share)
        for s in d.shares
        if s.share >= LEAST_SHARE
    ]
    causes = (
        words("where it goes", least=18),
        Column("ms"),
        Column("share"),
        words("proved", 1, 6),
        words("", 2, 8),
    )
    print_table(causes, rows)
    with in_details("what proved means"):
        print_lines(f"Proved: {PROVED}.")
    print_lines(
        *(f"Why: {line}" for line in d.why), *(f"Note: {line}" for line in (*d.warnings, *notes))
    )
    if d.advice:
        columns = [
            words("what to change", least=16),
            Column("saves a step"),
            Column("an epoch", 1),
            Column("the job", 1),
            Column("at most", 2),
        ]
        print_table(columns, [[a.title, *savings(a, d)] for a in d.advice], filled_only=True)
        if d.job_by and d.job_steps is not None:
            print_lines(f"The job's length is taken from {d.job_by}; --epochs N changes it.")
    print_notes(*(f"{a.title}: {a.how}" for a in d.advice))
    if d.together is not None:
        print_ranks(d.together)
    with in_details("what is not worth a change"):
        for a in d.not_worth:
            epoch = d.seconds_an_epoch(a.saves_ms)
            saved = (
                f"{number(a.saves_ms)} ms a step"
                if epoch is None
                else f"{duration(epoch)} an epoch"
            )
            print_lines(
                f"Not worth it: {a.title} saves {saved if a.saves_ms > 0 else 'nothing here'}."
            )
    if not d.advice:
        print_lines(nothing_worth(d))
    if again:
        print_next(again, "proves the shares, by taking one cause after another away")
    else:
        print_next(
            ["trainpace", "watch", "--from", folder, "--timeline"], "the same steps on a timeline"
        )


def savings(a: Advice, d: Diagnosis) -> list[str]:
    """What a change saves in a step, an epoch and the job, and in a step at most."""
    epoch, job = d.seconds_an_epoch(a.saves_ms), d.seconds_a_job(a.saves_ms)
    return [
        f"{saved_ms(a)} ({percent(a.saves_ms / d.step_ms)})",
        *(duration(seconds, "") for seconds in (epoch, job)),
        f"{number(a.ceiling_ms)} ms",
    ]


def saved_ms(a: Advice) -> str:
    """What a change saves in a step; "up to", where a part of that stays, or it is all of its cause's time."""
    is_most = a.at_most or a.saves_ms > MOST_OF_ALL * a.ceiling_ms
    return f"{'up to ' if is_most else ''}{number(a.saves_ms)} ms"


def shares_chart(shares: Sequence[Share], verdict: str, note: str) -> BarChart:
    """A bar a cause, the longest first; together they are the step."""
    shown = [s for s in shares if s.share >= LEAST_SHARE]
    top = next((s for s in shown if s.cause == verdict), shown[0])
    parts = [("of the step", _TONES.get(s.cause, "muted"), max(s.ms, 0.0)) for s in shown]
    ends = [f"{number(s.ms)} ms, {s.share:.1%}{', proved' if s.proved else ''}" for s in shown]
    bars = (bar(s.in_words, end, [part]) for s, end, part in zip(shown, ends, parts, strict=True))
    return BarChart(
        title="Where a step's time goes",
        finding=f"{top.share:.0%} of a step is {top.in_words}.",
        label="time of the mean step",
        unit="ms",
        groups=(BarGroup(bars=tuple(bars)),),
        note=note,
    )


def proofs_chart(d: Diagnosis) -> BarChart | None:
    """The step as it is beside the step without a cause; None where no intervention was tried."""
    if not d.proofs:
        return None
    strongest = max(d.proofs, key=lambda p: p.saved_ms)
    return BarChart(
        title="Proved by removing the cause",
        finding=(
            f"With {_PROOFS.get(strongest.trial, strongest.trial)} a step takes"
            f" {number(strongest.without_ms)} ms instead of {number(strongest.plain_ms)}."
        ),
        label="time of a step",
        unit="ms",
        groups=tuple(
            BarGroup(title=f"With {_PROOFS.get(p.trial, p.trial)}", bars=_proof_bars(p))
            for p in d.proofs
        ),
        note=(
            "Whiskers: 90 % interval of the step without the cause, from alternating blocks of"
            " steps."
        ),
    )


def _proof_bars(p: Proof) -> tuple[Bar, Bar]:
    plain = f"{number(p.plain_ms)} ms"
    without = f"{number(p.without_ms)} ms, {number(p.saved_ms)} less"
    low, high = (max(p.plain_ms - saved_ms, 0.0) for saved_ms in (p.high_ms, p.low_ms))
    between = Interval(low=low, high=high, coverage=0.9, basis="alternating blocks of steps")
    return (
        bar("as it is", plain, [("as it is", "muted", p.plain_ms)]),
        bar("without", without, [("without", "best", p.without_ms)], between),
    )


def diagnosis_page(d: Diagnosis, command: str, timeline: Timeline | None = None) -> str:
    """The page as text. `command`: what was run."""
    step = f"{number(d.step_ms)} ms ({span(d.step_ms_low, d.step_ms_high)})"
    answer = f"What slows it down: {IN_WORDS[d.verdict]}. A step takes {step}."
    return page(
        "diagnosis.html",
        f"What slows it down: {command}",
        [answer, *d.why],
        diagnosis_pictures(d),
        to_jsonable(d),
        styles=() if timeline is None else ("timeline.css",),
        d=d,
        advice=[[a.title, *savings(a, d), a.how] for a in d.advice],
        not_worth=[
            f"Not worth it: {a.title} saves {number(a.saves_ms)} ms a step." for a in d.not_worth
        ],
        nothing=nothing_worth(d),
        timeline=None if timeline is None else timeline_context(timeline),
    )


def diagnosis_pictures(d: Diagnosis) -> list[Picture | None]:
    return [
        shares_chart(d.shares, d.verdict, f"Proved: {PROVED}."),
        ranks_chart(d.together),
        proofs_chart(d),
    ]
