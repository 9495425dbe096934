"""Report sections for plans: changes, settings and rejected alternatives."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from trainpace.core.units import format_count, hours_from_s
from trainpace.job import assumed_in_words
from trainpace.plan import Change, Plan, Projection, config_line, forecast_of
from trainpace.report.charts import (
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    Mark,
    Picture,
    bar,
    ideal_line,
    series,
)
from trainpace.report.journal import evidence_sections
from trainpace.report.phrases import (
    ABOVE_ONE,
    WHY_ABOVE_ONE,
    devices,
    duration,
    given,
    number,
    percent,
    plural,
    rate_in_words,
    sentence,
    span,
    to_the_same_loss,
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
    Verbatim,
    brief,
    details,
    named,
    say,
    tabulate,
    words,
)
from trainpace.report.steps import step_and_memory
from trainpace.verbs.plan import Planned
from trainpace.verbs.request import forwarded
from trainpace.verbs.run import RunRequest
from trainpace.workload import Workload

if TYPE_CHECKING:
    from trainpace.verbs.plan import PlanRequest

MOST_KEPT = 3
"""Changes that stay in the short answer, even if it is longer than a screen."""
COMPARED = (
    "{plan.fitting:,} of {plan.searched:,} configurations fit in memory and were compared, all with"
    " the same global batch unless stated. These are forecasts, not measurements: change one thing"
    " at a time and measure."
)
IN_BRIEF = (
    "Forecasts, not measurements, of {plan.fitting:,} configurations that fit: change one thing at"
    " a time and measure."
)
DOES_NOT_FIT = (
    "The current setup does not fit in memory. With {many} it does, and the job takes {job}."
)
SCRIPT_CHANGES = (
    "Changes to the script itself, at the recorded pace (not part of the plan's savings)"
)


def plan_title(answer: Planned) -> str:
    cluster = answer.setting.cluster
    gpus = devices(cluster.num_devices, cluster.device.name)
    return f"{answer.setting.workload.model} on {gpus}: what to change"


def plan_sections(
    answer: Planned,
    written: Iterable[Section] = (),
    code: Sequence[tuple[int, Change]] = (),
    following: Iterable[Next] = (),
) -> Iterator[Section]:
    """Convert a plan to sections.

    Args:
        answer: The plan and the problem that it solves.
        written: Sections about settings files that were written.
        code: Numbered changes that need PyTorch code.
        following: Next commands.
    """
    plan, workload = answer.plan, answer.setting.workload
    yield say(_about(answer))
    target = plan.target
    if target is None or plan.best is None:
        yield Headline(f"No: {plan.reason}", good=False)
        yield say(given(plan.nearest, "Nearest: {}"))
        return
    yield Headline(verdict(plan, target, 0 if plan.in_code else len(code)))
    yield say(*_why(plan), *_costs(plan, target), within_limit(target, plan.time_limit_s))
    yield Charts(lambda: plan_pictures(answer))
    yield from _changes(plan)
    yield Lines(_to_the_same_loss(answer, plan.best.choice.execution.global_batch))
    choices = tabulate(_choices(plan), _CHOICES, filled=True)
    yield from details("the settings before and after", choices)
    if plan.changes:
        then = f"{config_line(plan.best.choice)}: {_step_and_rate(plan.best, workload)}"
        yield from brief(named("", [("Then", then)]))
    yield from details("the fastest for each number of GPUs", *_cluster_sizes(plan))
    yield named("Maybe: measure it before you adopt it", maybes(plan))
    yield from details("what was rejected", tabulate(plan.rejected, _REJECTED))
    assumed = [assumed_in_words(plan.assumed)] if plan.assumed else []
    notes = [*filter(None, [plan.corrected]), *workload.notes, *assumed]
    yield from brief(Notes([IN_BRIEF.format(plan=plan), *notes]))
    yield from details("", Notes([COMPARED.format(plan=plan), *notes]))
    yield from evidence_sections(answer.evidence)
    changes = [
        (a.title, f"saves {duration(saved_s)}. {a.how}") for a, saved_s in answer.script_changes
    ]
    yield named(SCRIPT_CHANGES, changes)
    yield from written
    yield from _code(code)
    if plan.changes:
        yield from following


def _code(code: Sequence[tuple[int, Change]]) -> Iterator[Section]:
    """Show changes as lines of PyTorch."""
    if code:
        intro = "In PyTorch, where `model`, `loss_fn`, `inputs` stand for your own:"
        lines = [
            f"  # change {n}: {change.title}\n{textwrap.indent(change.code, '  ')}"
            for n, change in code
        ]
        aside = "the changes as lines of PyTorch"
        yield from details(aside, say(intro), Verbatim("\n".join([*lines, ""])))


def plan_next(
    command: Sequence[str], file: str | None, task: str | None, asked: PlanRequest | None = None
) -> Next:
    """Return the command that carries out a plan.

    `command` is the one that made the plan. If the plan has no file yet, it is repeated to save it.
    """
    if file is None:
        why = "saves the plan; `trainpace run plan.json` then measures every change"
        return Next([*command, "--output", "plan.json"], why)
    # In `run` the price is per node, and `command` runs the script.
    same = forwarded(asked, RunRequest, ["price", "command", "config"])
    run = ["trainpace", "run", file, *(["--task", task] if task else []), *same]
    return Next(run, "makes the changes one by one, and measures each")


def _about(answer: Planned) -> str:
    """Describe the model, the cluster and the current setup, including its defaults."""
    workload, cluster, e = answer.setting.workload, answer.setting.cluster, answer.plan.start
    accumulated = f" x {e.accumulation}" if e.accumulation > 1 else ""
    sample = f"{workload.sample}, " if workload.sequence_length else ""
    return (
        f"{workload.model}: {format_count(workload.parameters)} parameters,"
        f" {sample}{workload.optimizer_in_words}, on"
        f" {devices(cluster.num_devices, cluster.device.name)}; now batch"
        f" {e.micro_batch} per GPU{accumulated}, {e.precision}"
    )


def verdict(plan: Plan, target: Projection, in_code: int = 0) -> str:
    """Return the gain of a plan and its number of changes.

    `in_code` is the number of changes that the written files cannot express.
    """
    if not plan.changes:
        return (
            f"Nothing to change: {job_range(target)}. No other configuration saves more than the"
            " forecast's error."
        )
    many = plural(target.changes, "change")
    many += f", {in_code} of which your own code has to make" if in_code else ""
    if plan.now is None or not plan.start_fits:
        return DOES_NOT_FIT.format(many=many, job=job_range(target))
    return (
        f"{job_range(target)} instead of {duration(plan.now.job_s)},"
        f" {plan.now.job_s / target.job_s:.3g} times as fast, with {many}."
    )


def job_range(outlook: Projection) -> str:
    """Return the time of the whole job with its 90% interval."""
    return duration(outlook.job_s) + given(_interval(outlook), " (90% interval {})")


def _why(plan: Plan) -> list[str]:
    """Return the reason for the recommended choice, and its possible problems."""
    if plan.target is not plan.best:
        return [
            "The fastest by forecast, as asked for: it is within the forecast's error of the"
            " recommendation without --fastest."
        ]
    return [sentence(plan.because), *(f"Careful: {caution}." for caution in plan.cautions)]


def _costs(plan: Plan, target: Projection) -> list[str]:
    if target.cost_usd is None or not plan.changes:
        return []
    was = None if plan.now is None else plan.now.cost_usd
    before = "" if was is None else f" instead of {usd(was)}"
    return [f"The job costs {usd(target.cost_usd)}{before}."]


def within_limit(target: Projection, limit_s: float | None) -> str:
    """Return a sentence about the job's time limit, or "" if there is none."""
    if limit_s is None:
        return ""
    limit, over_s = duration(limit_s), target.job_s - limit_s
    if over_s > 0:
        return f"The batch job's time limit of {limit} is {duration(over_s)} too short for it."
    if target.job_high_s is not None and target.job_high_s > limit_s:
        return f"The batch job's time limit of {limit} may be too short for it."
    return f"The batch job's time limit of {limit} is enough for it."


def _to_the_same_loss(answer: Planned, batch: int) -> list[str]:
    scale = answer.setting.noise_scale
    if scale is None:
        return []
    before = answer.plan.start.global_batch
    return [
        f"Times are to the same loss, at a gradient noise scale of {number(scale)} samples. This"
        " estimate uses the best learning rate of every batch size and the measured noise scale"
        " (McCandlish et al. 2018).",
        *([] if batch == before else [to_the_same_loss(before, batch, scale)]),
    ]


def maybes(plan: Plan) -> list[tuple[str, str]]:
    """Return changes within the forecast's error, with their saving and that error."""
    assert plan.best is not None
    job_s = plan.best.job_s
    return [
        (
            f"{'everything at once: ' if m.fastest and ', ' in m.title else ''}{m.title}",
            f"{percent(m.saved_s / job_s)} less by forecast ({duration(m.saved_s)}); differences"
            f" below {percent(m.told_apart)} are within its error",
        )
        for m in plan.maybe
    ]


def _changes(plan: Plan) -> Iterator[Section]:
    if not plan.changes:
        return
    so_far = list(accumulate(change.forecast_saved_s for change in plan.changes))
    order = list(plan.changes)
    columns = [
        words("", least=2, cell=lambda change: str(order.index(change) + 1)),
        words("what to change, in this order", cell="title"),
        Column("saves", cell=_saving),
        Column("90% interval", 1, cell=at_least),
        Column(
            "so far",
            4,
            cell=lambda change: "" if change.makes_fit else duration(so_far[order.index(change)]),
        ),
        words("effort", 3, cell=lambda change: _effort(change, plan.in_code)),
        words("risk", 2, cell="risk"),
    ]
    # Without "so far" each change fits on one line.
    short = [column for column in columns if column.name != "so far"]
    keep = range(min(len(plan.changes), MOST_KEPT))
    yield from brief(tabulate(plan.changes, short, filled=True, keep=keep))
    yield from details("", tabulate(plan.changes, columns))
    first = (
        "The current setup does not fit in memory. With change 1 the job takes"
        f" {duration(plan.left_s[0])}; savings count from there."
    )
    reasons = []
    for n, change in enumerate(plan.changes, 1):
        keys = "" if plan.in_code else settings_of(change)
        reasons.append((f"{n}", f"{'; '.join(filter(None, (keys, change.risk_reason)))}."))
    aside = "the settings and risks of each change"
    yield from details(aside, say(plan.changes[0].makes_fit and first), named("", reasons))


def _saving(change: Change) -> str:
    return "makes it fit" if change.makes_fit else duration(change.forecast_saved_s)


def _effort(change: Change, in_code: bool) -> str:
    return "code change" if in_code and change.effort == "config key" else change.effort


def at_least(change: Change) -> str:
    """Return the lower end of a change's saving.

    A recommended change may save nothing by itself, because later changes need it.
    """
    least_s = change.saved_at_least_s
    if least_s is None or change.makes_fit:
        return ""
    return f"at least {duration(least_s)}" if least_s >= 0 else "maybe nothing"


def settings_of(change: Change) -> str:
    return ", ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in change.settings.items()
    )


def _step_and_rate(outlook: Projection, workload: Workload) -> str:
    """Return the step time. Models of token sequences also get their throughput."""
    step = f"{number(outlook.step_ms)} ms per step"
    if not workload.sequence_length:
        return step
    samples = 1e3 * outlook.choice.execution.global_batch / outlook.step_ms
    return f"{step}, {rate_in_words(samples, workload.sequence_length)}"


def _interval(outlook: Projection) -> str:
    if outlook.job_low_s is None or outlook.job_high_s is None:
        return ""
    return span(outlook.job_low_s, outlook.job_high_s, duration)


_CHOICES = (
    words("", cell="name"),
    Column("job", cell="outlook.job_s", form=duration),
    Column("90% interval", 2, cell="outlook", form=_interval),
    Column("step ms", 1, cell="outlook.step_ms"),
    Column("GiB per GPU", 3, cell="outlook.needed_gib"),
    Column("fits", 4, cell="outlook.fit_probability", form=percent),
    Column("GPUs", 4, cell="outlook.num_devices"),
    Column("cost", 5, cell="outlook.cost_usd", form=usd),
    words("settings", least=16, cell="outlook.choice", form=config_line),
)
_REJECTED = (
    words("considered and rejected", cell="title"),
    words("why", cell="why"),
    Column("the job takes longer by", 1, cell="lost_s", form=duration),
)


class _Choice(NamedTuple):
    name: str
    outlook: Projection


def _choices(plan: Plan) -> list[_Choice]:
    fits = "" if plan.start_fits else " (does not fit)"
    named = [(f"now{fits}", plan.now), ("recommended", plan.best)]
    named.append(("fastest by forecast", plan.fastest))
    return [_Choice(name, outlook) for name, outlook in named if outlook is not None]


def _cluster_sizes(plan: Plan) -> Iterator[Section]:
    if len(plan.pareto) < 2:
        return
    first = plan.pareto[0]
    efficiency = {
        p.num_devices: first.job_s * first.num_devices / (p.job_s * p.num_devices)
        for p in plan.pareto
    }
    columns = [
        Column("GPUs", cell="{.num_devices}"),
        Column("job", cell="job_s", form=duration),
        Column("cost", cell="cost_usd", form=usd),
        Column("efficiency", cell=lambda p: f"{efficiency[p.num_devices]:.0%}"),
        words("settings", 1, 16, "choice", config_line),
    ]
    yield tabulate(plan.pareto, columns, filled=True)
    yield say(max(efficiency.values()) >= ABOVE_ONE and WHY_ABOVE_ONE)


def plan_pictures(answer: Planned) -> list[Picture | None]:
    plan, setting = answer.plan, answer.setting
    if plan.target is None:
        return []
    ends = [("current", plan.start), ("with the changes", plan.end)]
    both = [(name, forecast_of(setting, e)) for name, e in ends]
    return [
        plan_ladder(plan) if plan.changes else None,
        *step_and_memory(both),
        cluster_chart(plan.pareto),
    ]


def plan_ladder(plan: Plan) -> BarChart:
    """Draw the time of the job after each change, with the saving of the change."""
    left = plan.left_s
    bars = [_job_bar("current", duration(left[0]), left[0])] if plan.start_fits else []
    for i, (change, before, after) in enumerate(zip(plan.changes, left, left[1:], strict=False), 1):
        difference = f"{'-' if before >= after else '+'}{duration(abs(before - after))}"
        end = f"{duration(after)} ({'makes it fit' if change.makes_fit else difference})"
        bars.append(_job_bar(f"{i}. {change.title}", end, after, before - after))
    count = 0 if plan.target is None else plan.target.changes
    many, job = plural(count, "change"), duration(left[-1])
    share = left[-1] / left[0] - 1
    finding = (
        f"{many} {'brings' if count == 1 else 'bring'} the job from {duration(left[0])}"
        f" to {job}, {abs(share):.0%} {'more' if share > 0 else 'less'}."
    )
    return BarChart(
        title="The whole job, change by change",
        finding=finding if plan.start_fits else DOES_NOT_FIT.format(many=many, job=job),
        label="hours of the whole job",
        unit="h",
        groups=(BarGroup(bars=tuple(bars)),),
        note="Forecasts, not measurements. Each change is applied on top of those before it.",
    )


def _job_bar(title: str, end: str, left_s: float, gone_s: float | None = None) -> Bar:
    gone = (
        [] if gone_s is None else [("saved by this change", "best", hours_from_s(max(gone_s, 0.0)))]
    )
    return bar(title, end, [("left of the job", "first", hours_from_s(left_s)), *gone])


def cluster_chart(points: Sequence[Projection]) -> Chart | None:
    """Draw the hours of the fastest choice over the number of GPUs, next to perfect scaling."""
    if len(points) < 2:
        return None
    points = sorted(points, key=lambda p: p.num_devices)
    first, last = points[0], points[-1]
    hours = [(p.num_devices, hours_from_s(p.job_s)) for p in points]
    efficiency = first.job_s * first.num_devices / (last.job_s * last.num_devices)
    costs = ("" if p.cost_usd is None else f", {usd(p.cost_usd)}" for p in points)
    labels = (
        f"{p.num_devices} GPUs: {duration(p.job_s)}{cost}"
        for p, cost in zip(points, costs, strict=True)
    )
    shortest = duration(last.job_s)
    return Chart(
        title="Time of the job against the number of GPUs",
        finding=(
            f"{last.num_devices} GPUs take {shortest}, {first.num_devices} take"
            f" {duration(first.job_s)}: {efficiency:.0%} of a perfect speed-up."
        ),
        x=Axis(label="GPUs", scale="log2"),
        y=Axis(label="hours of the whole job", unit="h", scale="log10"),
        series=(
            ideal_line((n, hours[0][1] * first.num_devices / n) for n, _ in hours),
            series("the fastest option", "points", "forecast", hours, labels=tuple(labels)),
        ),
        marks=(
            Mark(axis="point", at=last.num_devices, y=hours[-1][1], text=shortest, tone="best"),
        ),
        nearest="point",
        note="Forecasts, not measurements.",
    )
