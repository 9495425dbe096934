"""What a profiler's trace says, for the terminal, as a picture and as a page: the verdict, the parts of a step, bounds, ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace.core.records import to_jsonable
from trainpace.diagnose import Kernel, ProfiledTraining, RankShares
from trainpace.report.charts import Picture
from trainpace.report.diagnosis import LEAST_SHARE, shares_chart
from trainpace.report.pages import page
from trainpace.report.phrases import number, percent, plural, span
from trainpace.report.screen import in_details, is_brief
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)

WORTH = 0.03
"""Of a step, the most that a change saves from which on it is worth a line on one screen."""
FEW_KERNELS = 3
MOST_RANKS = 64
APART = 0.05
"""Between the mean and the median step, from which on both are told."""


def print_profiled(p: ProfiledTraining, place: str) -> None:
    """On one screen the shares and the bounds; ranks and kernels in a line each, and as tables with --details."""
    print_lines(f"{place}: {source_words(p)}")
    print_verdict(verdict_words(p))
    columns = (words("where it goes", least=18), Column("ms"), Column("share"), words("", 1, 8))
    print_table(columns, _share_rows(p))
    least = WORTH if is_brief() else LEAST_SHARE
    if bounds := [b for b in p.bounds if b.at_most_ms >= least * p.step_ms]:
        rows = [
            (b.title, f"{number(b.at_most_ms)} ms", percent(b.at_most_ms / p.step_ms))
            for b in bounds
        ]
        print_table(
            (words("what a change could save", least=20), Column("at most"), Column("share")),
            rows,
            spaced=False,
        )
    with in_details("how to make each change"):
        print_notes(*(f"{b.title[:1].upper()}{b.title[1:]}: {b.how}" for b in bounds))
    if len(p.ranks) > 1:
        with in_details("each rank"):
            print_table(RANK_COLUMNS, rank_rows(p))
    with in_details("the kernels"):
        print_table(KERNEL_COLUMNS, kernel_rows(p))
    print_notes(*_notes(p))
    print_next("trainpace diagnose -- python train.py", "proves it where the script runs")


def _notes(p: ProfiledTraining) -> list[str]:
    """Ranks and kernels first, each in a line where their tables do not follow."""
    lines = [ranks_words(p)] if len(p.ranks) > 1 else []
    heavy = [k for k in p.kernels[:FEW_KERNELS] if k.ms >= LEAST_SHARE * p.step_ms]
    if is_brief() and heavy:
        named = ", ".join(f"{k.name} {percent(k.ms / p.step_ms)}" for k in heavy)
        lines.append(f"Heaviest {'kernels' if p.on_device else 'operators'}: {named}.")
    return [*lines, *p.warnings]


def source_words(p: ProfiledTraining) -> str:
    """What the numbers are from."""
    first = p.ranks[0]
    who = f"{len(p.ranks)} ranks" if len(p.ranks) > 1 else f"rank {first.rank}"
    on = f" on {first.device}" if first.device and p.on_device else ""
    if not first.told_by:
        return f"{who}{on}, recorded by {first.made_by}; no steps are marked."
    fewest = min(rank.steps for rank in p.ranks)
    each = " each" if len(p.ranks) > 1 else ""
    return (
        f"{who}{on}, recorded by {first.made_by}; {plural(fewest, 'step')}{each}, told by"
        f" {first.told_by}."
    )


def verdict_words(p: ProfiledTraining) -> str:
    top = p.shares[0]
    of = "a step" if p.ranks[0].told_by else "the whole trace"
    if not p.ranks[0].told_by:
        return (
            f"Verdict: {top.in_words}, {percent(top.share)} of {of}, which takes"
            f" {number(p.step_ms)} ms."
        )
    mean = (
        f", the mean step {number(p.step_ms)}"
        if abs(p.step_ms - p.median_ms) > APART * p.median_ms
        else ""
    )
    between = (
        ""
        if min(rank.steps for rank in p.ranks) < 2
        else f" ({span(p.median_ms_low, p.median_ms_high)})"
    )
    takes = f"The median step takes {number(p.median_ms)} ms{between}{mean}."
    return f"Verdict: {top.in_words}, {percent(top.share)} of {of}. {takes}"


def _share_rows(p: ProfiledTraining) -> list[tuple[str, str, str, float]]:
    """Causes, which add up; then what some of them consist of, which are the first to go where there is no room."""
    rows = [
        (s.in_words, number(s.ms), f"{100 * s.share:.1f} %", s.share)
        for s in p.shares
        if s.share >= LEAST_SHARE
    ]
    if len(p.compute) > 1:
        rows += [
            (f"- {k.in_words}", number(k.ms), f"{100 * k.share:.1f} %", k.share)
            for k in p.compute
            if k.share >= LEAST_SHARE
        ]
    hidden = sum(rank.hidden_ms for rank in p.ranks) / len(p.ranks)
    if hidden >= LEAST_SHARE * p.step_ms:
        rows.append(
            (
                "- exchange hidden behind computing",
                number(hidden),
                f"{100 * hidden / p.step_ms:.1f} %",
                0.0,
            )
        )
    return rows


def ranks_words(p: ProfiledTraining) -> str:
    slowest, fastest = (choose(p.ranks, key=lambda r: r.median_ms) for choose in (max, min))
    ends = list(dict.fromkeys(number(rank.median_ms) for rank in (fastest, slowest)))
    steps = f"{len(p.ranks)} ranks: median steps of {' to '.join(ends)} ms"
    if p.straggler is None:
        return f"{steps}; none makes the others wait."
    late = next(rank for rank in p.ranks if rank.rank == p.straggler)
    rest = [rank for rank in p.ranks if rank is not late]
    more = {
        name: ms - sum(rank.causes_ms[name] for rank in rest) / len(rest)
        for name, ms in late.causes_ms.items()
        if name != "communication"
    }
    cause = max(more, key=lambda name: more[name])
    in_words = next(s.in_words for s in p.shares if s.cause == cause)
    spends = f"which spends {number(max(0.0, more[cause]))} ms more than they do in {in_words}"
    return f"{steps}; they wait for rank {late.rank}, {spends}."


RANK_COLUMNS = (
    words("rank", least=4),
    Column("steps", 3),
    Column("median ms"),
    Column("computing"),
    Column("exchange"),
    Column("hidden", 2),
    Column("data", 1),
    Column("launching", 1),
    Column("waiting", 2),
)
KERNEL_COLUMNS = (
    words("kernel", least=24),
    Column("ms a step"),
    Column("share"),
    Column("number", 1),
    words("kind", 2, 10),
)


def rank_rows(p: ProfiledTraining) -> list[Sequence[str]]:
    return [_rank_row(rank, rank.rank == p.straggler) for rank in p.ranks[:MOST_RANKS]]


def _rank_row(r: RankShares, late: bool) -> Sequence[str]:
    causes = ("compute", "communication"), ("data", "launch", "logging")
    first, last = ([number(r.causes_ms[cause]) for cause in group] for group in causes)
    return [
        f"{r.rank}{' ◀' if late else ''}",
        str(r.steps),
        number(r.median_ms),
        *first,
        number(r.hidden_ms),
        *last,
    ]


def kernel_rows(p: ProfiledTraining) -> list[Sequence[str]]:
    return [_kernel_row(k, p.step_ms) for k in p.kernels]


def _kernel_row(k: Kernel, step_ms: float) -> Sequence[str]:
    return [k.name, number(k.ms), f"{100 * k.ms / step_ms:.1f} %", number(k.count), k.kind]


def profiled_pictures(p: ProfiledTraining) -> list[Picture | None]:
    return [shares_chart(p.shares, p.verdict, source_words(p))]


def profiled_page(p: ProfiledTraining, place: str) -> str:
    """The page as text. `place`: the trace's file or folder."""
    bounds = [
        [b.title, f"{number(b.at_most_ms)} ms", percent(b.at_most_ms / p.step_ms), b.how]
        for b in p.bounds
    ]
    lines = [
        verdict_words(p),
        f"{place}: {source_words(p)}",
        *([ranks_words(p)] if len(p.ranks) > 1 else []),
    ]
    return page(
        "profiled.html",
        f"What a trace shows: {place}",
        lines,
        profiled_pictures(p),
        to_jsonable(p),
        p=p,
        bounds=bounds,
        ranks=rank_rows(p) if len(p.ranks) > 1 else [],
        rank_heads=[column.name for column in RANK_COLUMNS],
        kernels=kernel_rows(p),
        kernel_heads=[column.name for column in KERNEL_COLUMNS],
    )
