"""Verdict, why, next for the terminal."""

from trainpace.diagnose import IN_WORDS, Advice, Diagnosis
from trainpace.report.columns import Column, bar, words
from trainpace.report.phrases import span
from trainpace.report.terminal import BAR_WIDTH, print_head, print_lines, print_next, print_table, print_verdict
from trainpace.units import format_duration, format_number

LEAST_SHARE = 0.005
NOTHING_WORTH = "No change here is worth making; a faster device, fewer FLOPs or a lower precision would help."


def print_diagnosis(d: Diagnosis, folder: str) -> None:
    step = f"{format_number(d.step_ms)} ms ({span(d.step_ms_low, d.step_ms_high)})"
    print_head(f"A step takes {step}, as recorded in {folder}")
    most = max(d.shares, key=lambda s: s.share, default=None)
    share = ""
    if most is not None and most.in_words == IN_WORDS[d.verdict]:
        share = f", {100 * most.share:.0f} % of the step{'' if most.proved else ', seen but not proved'}"
    roof = ""
    if d.verdict == "compute" and d.share_of_roof is not None:
        roof = f" Forward and backward reach {d.share_of_roof:.0%} of the rate of a large matrix multiplication on this device."
    print_verdict(f"Verdict: {IN_WORDS[d.verdict]}{share}.{roof}")
    rows = [
        [s.in_words, format_number(s.ms), f"{100 * s.share:.1f} %", "yes" if s.proved else "", "█" * round(BAR_WIDTH * s.share)]
        for s in d.shares if s.share >= LEAST_SHARE
    ]  # fmt: skip
    print_table([words("where it goes", least=18), Column("ms"), Column("share"), words("proved", 1, 6), bar(2)], rows)
    print_lines(*(f"Why: {line}" for line in d.why), *(f"Note: {line}" for line in d.warnings))
    if d.advice:
        columns = [
            words("what to change", least=16), Column("saves a step"), Column("an epoch", 1), Column("the job", 1),
            Column("at most", 2),
        ]  # fmt: skip
        print_table(columns, [[a.title, *savings(a, d)] for a in d.advice])
    print_lines(*(f"{a.title}: {a.how}" for a in d.advice))
    for a in d.not_worth:
        epoch = d.seconds_an_epoch(a.saves_ms)
        saved = f"{format_number(a.saves_ms)} ms a step" if epoch is None else f"{format_duration(epoch)} an epoch"
        print_lines(f"Not worth it: {a.title} saves {saved}.")
    if not d.advice:
        print_lines(NOTHING_WORTH)
    if not d.proofs:
        print_next("trainpace diagnose -- python train.py", "with your own command: interventions prove the shares")
    else:
        timeline = ["trainpace", "watch", "--from", folder, "--timeline"]
        print_next(timeline, "the same steps on a timeline, worker by worker")


def savings(a: Advice, d: Diagnosis) -> list[str]:
    """What a change saves in a step, an epoch and the job, and in a step at most."""
    epoch = d.seconds_an_epoch(a.saves_ms)
    job = None if epoch is None or d.epochs is None else epoch * d.epochs
    return [
        f"{format_number(a.saves_ms)} ms ({100 * a.saves_ms / d.step_ms:.0f} %)",
        *("" if seconds is None else format_duration(seconds) for seconds in (epoch, job)), f"{format_number(a.ceiling_ms)} ms",
    ]  # fmt: skip
