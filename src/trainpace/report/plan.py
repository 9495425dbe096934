"""A plan for the terminal, as pictures and as a page: changes, choices, what was rejected, how sensitive the choice is."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import Forecast
from trainpace.core.units import format_count, hours_from_s
from trainpace.diagnose import Advice
from trainpace.job import assumed_in_words
from trainpace.plan import Change, Layout, Plan, Projection, config_line
from trainpace.report.charts import (
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Cell,
    Chart,
    HeatMap,
    Mark,
    Picture,
    bar,
    ideal_line,
    series,
)
from trainpace.report.evidence import evidence_rows, print_evidence
from trainpace.report.pages import page
from trainpace.report.phrases import (
    ABOVE_ONE,
    WHY_ABOVE_ONE,
    devices,
    duration,
    number,
    percent,
    plural,
    rate_in_words,
    sentence,
    span,
    to_the_same_loss,
    usd,
)
from trainpace.report.screen import in_details, is_brief
from trainpace.report.step_charts import step_and_memory
from trainpace.report.streams import tell
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_named,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried
from trainpace.verbs.run import RunRequest
from trainpace.workload import Workload

if TYPE_CHECKING:
    from trainpace.forecast import Nearness
    from trainpace.verbs.plan import PlanRequest

COMPARED = (
    "{plan.fitting:,} of {plan.searched:,} configurations fit in memory and were compared, all with"
    " the same global batch unless stated. These are forecasts, not measurements: change one thing"
    " at a time and measure."
)
IN_BRIEF = (
    "Forecasts, not measurements, of {plan.fitting:,} configurations that fit: change one thing at"
    " a time and measure."
)
DOES_NOT_FIT = "As it is, it does not fit in memory. With {many} it does, and the job takes {job}."


def print_plan(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    noise_scale: float | None = None,
    evidence: Sequence[Nearness] = (),
) -> None:
    """The table of changes first, then the rest as lines. `noise_scale`: the plan's times are then to the same loss.
    `evidence`: what others measured near to the plan's end."""
    print_lines(_about(plan, workload, cluster))
    target = plan.target
    if target is None or plan.best is None:
        print_verdict(f"No: {plan.reason}", good=False)
        print_lines(*([f"Nearest: {plan.nearest}"] if plan.nearest else []))
        return
    print_verdict(verdict(plan, target))
    print_lines(*_why(plan))
    if plan.changes:
        _print_changes(plan)
    if noise_scale is not None:
        old, new = plan.start.global_batch, plan.best.choice.execution.global_batch
        print_lines(
            f"Times are to the same loss, at a gradient noise scale of {number(noise_scale)}"
            " samples: an estimate that takes every batch size at its own best learning rate and"
            " the noise scale as measured (McCandlish et al. 2018).",
            *([] if new == old else [to_the_same_loss(old, new, noise_scale)]),
        )
    with in_details("the settings before and after"):
        _print_choices(plan, plan.best, workload)
    if is_brief() and plan.changes:
        print_named("", [("Then", recommended_in_brief(plan.best, workload))])
    with in_details("the fastest for each number of GPUs"):
        _print_fleets(plan)
    print_named("Maybe: measure it before you adopt it", maybes(plan))
    with in_details("what was rejected"):
        print_named("Considered and rejected", ((r.title, r.why) for r in plan.rejected))
    with in_details("what could change the recommendation"):
        _print_sensitivity(plan)
    print_notes(
        (IN_BRIEF if is_brief() else COMPARED).format(plan=plan),
        *[plan.corrected] * bool(plan.corrected),
        *([assumed_in_words(plan.assumed)] if plan.assumed else []),
        *workload.notes,
    )
    with in_details("measurements by others"):
        print_evidence(evidence)


def print_code(changes: Sequence[tuple[int, Change]]) -> None:
    """Changes by their numbers as lines of PyTorch, as they are, to be copied."""
    if not changes:
        return
    with in_details("the changes as lines of PyTorch"):
        tell("In PyTorch, where `model`, `loss_fn`, `inputs` stand for your own:")
        for n, change in changes:
            tell(f"  # change {n}: {change.title}")
            tell(textwrap.indent(change.code, "  "))
        tell()


def print_plan_next(
    command: Sequence[str], file: str | None, task: str | None, asked: PlanRequest | None = None
) -> None:
    """The command that carries it out; a plan has to be kept first, by `command` with one option more."""
    if file is None:
        saving = "saves the plan; `trainpace run plan.json` then measures every change"
        print_next([*command, "--output", "plan.json"], saving)
    else:
        # dollars are a node's there, and the script's command is another way to climb
        same = carried(asked, RunRequest, ["price", "command", "config"])
        run = ["trainpace", "run", file, *(["--task", task] if task else []), *same]
        print_next(run, "makes the changes one by one, and measures each")


def _about(plan: Plan, workload: Workload, cluster: Cluster) -> str:
    """The first line: the model, the fleet, and how it trains now, where the defaults are that nobody stated."""
    parameters, fleet = (
        format_count(workload.parameters),
        devices(cluster.num_devices, cluster.device.name),
    )
    e = plan.start
    now = (
        f"batch {e.micro_batch} a GPU{f' x {e.accumulation}' if e.accumulation > 1 else ''},"
        f" {e.precision}"
    )
    sample = f"{workload.sample}, " if workload.sequence_length else ""
    return (
        f"{workload.model}: {parameters} parameters, {sample}{workload.optimizer_in_words}, on"
        f" {fleet}; now {now}"
    )


def verdict(plan: Plan, target: Projection) -> str:
    if not plan.changes:
        return (
            f"Nothing to change: {job_range(target)}. No other configuration is forecast to save"
            " more than forecasts can tell."
        )
    many = plural(len(plan.changes), "change")
    if plan.now is None or not plan.start_fits:
        return DOES_NOT_FIT.format(many=many, job=job_range(target))
    return (
        f"{job_range(target)} instead of {duration(plan.now.job_s)},"
        f" {plan.now.job_s / target.job_s:.3g} times as fast, with {many}."
    )


def job_range(outlook: Projection) -> str:
    """The whole job, with its 90 % interval."""
    job = duration(outlook.job_s)
    if outlook.job_low_s is None or outlook.job_high_s is None:
        return job
    return f"{job} ({span(outlook.job_low_s, outlook.job_high_s, duration)} in 9 of 10 cases)"


def _why(plan: Plan) -> list[str]:
    """Why the recommended choice is right, and what may go wrong with it; the fastest has no such reason."""
    if plan.target is not plan.best:
        return [
            "The fastest by forecast, as asked for: forecasts cannot tell it from what is"
            " recommended without --fastest."
        ]
    return [sentence(plan.because), *(f"Careful: {caution}." for caution in plan.cautions)]


def maybes(plan: Plan) -> list[tuple[str, str]]:
    """What forecasts cannot tell apart, with what it would save and what it would have to save."""
    assert plan.best is not None
    job_s = plan.best.job_s
    return [
        (
            f"{'everything at once: ' if m.fastest and ', ' in m.title else ''}{m.title}",
            (
                f"{percent(m.saved_s / job_s)} less by forecast ({duration(m.saved_s)}), and"
                f" forecasts tell {percent(m.told_apart)} apart"
            ),
        )
        for m in plan.maybe
    ]


def print_script_changes(changes: Sequence[tuple[Advice, float]]) -> None:
    """What a recording names beside the plan, at the pace at which it was recorded."""
    if changes:
        title = (
            "Changes to the script itself, at the recorded pace (not part of the plan's savings)"
        )
        print_named(
            title, ((a.title, f"saves {duration(saved_s)}. {a.how}") for a, saved_s in changes)
        )


def _print_changes(plan: Plan) -> None:
    rows, so_far = [], 0.0
    for n, change in enumerate(plan.changes, 1):
        so_far += change.forecast_saved_s
        saved = (
            ("makes it fit", "", "")
            if change.makes_fit
            else (duration(change.forecast_saved_s), at_least(change), duration(so_far))
        )
        effort = "code change" if plan.in_code and change.effort == "config key" else change.effort
        rows.append([str(n), change.title, *saved, effort, change.risk])
    columns = [
        words("", least=2),
        words("change"),
        Column("saves"),
        Column("in 9 of 10 cases", 1),
        Column("so far", 4),
        words("effort", 3),
        words("risk", 2),
    ]
    if is_brief():  # so that a change takes one line
        shown = [i for i, column in enumerate(columns) if column.name != "so far"]
        columns, rows = [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]
    print_table(columns, rows, title="What to change, in this order", filled_only=is_brief())
    with in_details("the settings and risks of each change"):
        print_lines(*_remarks(plan))
        keys = [() if plan.in_code or not c.settings else (settings_of(c),) for c in plan.changes]
        print_named(
            "",
            (
                (f"{n}", f"{'; '.join(filter(None, (*own, c.risk_reason)))}.")
                for n, (own, c) in enumerate(zip(keys, plan.changes, strict=True), 1)
            ),
        )


def at_least(change: Change) -> str:
    """What a change saves in 9 of 10 cases. That may be nothing of a change that the recommended whole needs all the same."""
    least_s = change.saved_at_least_s
    if least_s is None:
        return ""
    return f"at least {duration(least_s)}" if least_s >= 0 else "maybe nothing"


def _remarks(plan: Plan) -> list[str]:
    """From where savings count."""
    remarks = []
    if plan.changes[0].makes_fit:
        first = f"With change 1 the job takes {duration(plan.left_s[0])}; savings count from there."
        remarks.append(f"As it is, it does not fit in memory. {first}")
    return remarks


def settings_of(change: Change) -> str:
    values = {
        key: str(v).lower() if isinstance(v, bool) else v for key, v in change.settings.items()
    }
    return ", ".join(f"{key}={value}" for key, value in values.items())


def tokens_per_second(outlook: Projection, workload: Workload) -> str:
    """Of a model of token sequences; empty for others."""
    if not workload.sequence_length:
        return ""
    return rate_in_words(
        1e3 * outlook.choice.execution.global_batch / outlook.step_ms, workload.sequence_length
    )


def recommended_in_brief(best: Projection, workload: Workload) -> str:
    rate = tokens_per_second(best, workload)
    return (
        f"{config_line(best.choice)}: {number(best.step_ms)} ms a step{f', {rate}' if rate else ''}"
    )


def _print_choices(plan: Plan, best: Projection, workload: Workload) -> None:
    lines = []
    for name, outlook in (("Now", plan.now), ("Recommended", best)):
        if outlook is not None and not (
            name == "Recommended" and plan.now is not None and best.choice == plan.now.choice
        ):
            figures = [
                job_range(outlook),
                f"{number(outlook.step_ms)} ms a step",
                tokens_per_second(outlook, workload),
                f"{number(outlook.needed_gib)} GiB a device",
                usd(outlook.cost_usd, ""),
                plural(outlook.changes, "change") if outlook.changes else "",
            ]
            only_if = (
                ""
                if plan.start_fits or name != "Now"
                else " (if it fitted in memory, which it does not)"
            )
            lines += [
                (name, ", ".join(filter(None, figures)) + only_if),
                ("", config_line(outlook.choice)),
            ]
    print_named("", lines)


def _print_fleets(plan: Plan) -> None:
    if len(plan.pareto) < 2:
        return
    first, priced = plan.pareto[0], plan.pareto[0].cost_usd is not None
    efficiencies = [
        first.job_s * first.num_devices / (p.job_s * p.num_devices) for p in plan.pareto
    ]
    rows = [
        [
            str(p.num_devices),
            duration(p.job_s),
            *([usd(p.cost_usd or 0.0)] if priced else []),
            f"{efficiency:.0%}",
        ]
        for p, efficiency in zip(plan.pareto, efficiencies, strict=True)
    ]
    columns = ["GPUs", "job", *(["cost"] if priced else []), "efficiency"]
    print_table(columns, rows, left=0, title="Fastest option for each number of GPUs", spaced=False)
    print_lines(*[WHY_ABOVE_ONE] * (max(efficiencies) >= ABOVE_ONE))


def _print_sensitivity(plan: Plan) -> None:
    lines, holds = [], []
    for s in plan.sensitivity:
        between = f"{s.low:.2f} to {s.high:.2f} times"
        then = (
            f"{s.flips_to}; the recommendation would take {100 * s.regret:.2g} % longer than that"
        )
        if not s.still_fits:
            then = (
                "the recommendation would no longer fit in memory, and the best would have"
                f" {s.flips_to}"
            )
        if s.flips_to:
            lines.append((s.number, f"{between} as assumed ({s.basis}): {then}"))
        else:
            holds.append(f"{s.number} ({between})")
    if holds:
        lines.append(("nothing else" if lines else "nothing", f"tried: {', '.join(holds)}"))
    print_named("What could change this recommendation", lines)


def plan_page(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    data: dict[str, Any],
    before: Forecast | None,
    after: Forecast | None,
    evidence: Sequence[Nearness] = (),
    layouts: Sequence[Layout] = (),
) -> str:
    """The page as text. `before` and `after`: forecasts of how it trains now and of the plan's end, `layouts` the ways to divide
    its global batch. `data`: `plan --json`."""
    choices = [("now", plan.now), ("recommended", plan.best), ("fastest by forecast", plan.fastest)]
    choices += [(f"fastest with {p.num_devices}", p) for p in plan.pareto if len(plan.pareto) > 1]
    return page(
        "plan.html",
        f"{workload.model} on {devices(cluster.num_devices, cluster.device.name)}: what to change",
        _sentences(plan),
        plan_pictures(plan, before, after, layouts),
        data,
        plan.best is not None,
        plan=plan,
        settings=settings_of,
        config=config_line,
        choices=[(name, outlook) for name, outlook in choices if outlook is not None],
        evidence=evidence_rows(evidence),
        maybes=maybes(plan) if plan.best is not None else [],
        at_least=at_least,
    )


def plan_pictures(
    plan: Plan, before: Forecast | None, after: Forecast | None, layouts: Sequence[Layout] = ()
) -> list[Picture | None]:
    if plan.target is None:
        return []
    both = [
        (name, f)
        for name, f in (("as it is", before), ("with the changes", after))
        if f is not None
    ]
    ladder = plan_ladder(plan) if plan.changes else None
    return [ladder, layout_map(plan, layouts), *step_and_memory(both), fleet_chart(plan.pareto)]


def _sentences(plan: Plan) -> list[str]:
    target = plan.target
    if target is None:
        return [f"No: {plan.reason}", *([f"Nearest: {plan.nearest}"] if plan.nearest else [])]
    sentences = [verdict(plan, target), *_why(plan)]
    if target.cost_usd is not None and plan.changes:
        was = (
            ""
            if plan.now is None or plan.now.cost_usd is None
            else f" instead of {usd(plan.now.cost_usd)}"
        )
        sentences.append(f"It costs {usd(target.cost_usd)}{was}.")
    return [*sentences, COMPARED.format(plan=plan)]


def plan_ladder(plan: Plan) -> BarChart:
    """The job after each change: what is left of it, and what the change takes away."""
    left = plan.left_s
    bars = [_job_bar("as it is", duration(left[0]), left[0])] if plan.start_fits else []
    for i, (change, before, after) in enumerate(zip(plan.changes, left, left[1:], strict=False), 1):
        difference = f"{'-' if before >= after else '+'}{duration(abs(before - after))}"
        end = f"{duration(after)} ({'makes it fit' if change.makes_fit else difference})"
        bars.append(_job_bar(f"{i}. {change.title}", end, after, before - after))
    many, job = plural(len(plan.changes), "change"), duration(left[-1])
    share = left[-1] / left[0] - 1
    finding = (
        f"{many} {'brings' if len(plan.changes) == 1 else 'bring'} the job from {duration(left[0])}"
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


def fleet_chart(points: Sequence[Projection]) -> Chart | None:
    """The fastest choice with each number of GPUs: hours against GPUs, beside what perfect scaling would give."""
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


WORTH_NAMING = 0.01
SHARDING = (
    "not sharded",
    "ZeRO-1: optimizer states",
    "ZeRO-2: and gradients",
    "ZeRO-3: and parameters",
)


def layout_map(plan: Plan, layouts: Sequence[Layout]) -> HeatMap | None:
    """Step time over micro-batch and accumulation, by stage of ZeRO. None where there is nothing to choose."""
    able = [at for at in layouts if at.fits]
    if len(layouts) < 2 or not able:
        return None
    cells = {(at.execution.zero_stage, at.execution.micro_batch): at for at in layouts}
    sizes = sorted({(at.execution.micro_batch, at.execution.accumulation) for at in layouts})
    stages = sorted({at.execution.zero_stage for at in layouts})
    fastest = min(able, key=lambda at: at.step_ms or 0.0)
    shown = next((at for at in able if at.execution == plan.end), fastest)
    e, faster = shown.execution, 1 - (fastest.step_ms or 0.0) / (shown.step_ms or 1.0)
    other = "no other takes as much as 1 % less"
    if faster >= WORTH_NAMING:
        other = (
            f"the fastest, {_layout_in_words(fastest.execution)}, takes {percent(faster)} less by"
            " forecast"
        )
    return HeatMap(
        title="Micro-batch, accumulation and sharding",
        finding=(
            f"{len(able)} of {len(layouts)} ways to divide a global batch of {e.global_batch:,} fit"
            f" in memory. {sentence(_layout_in_words(e))} takes {number(shown.step_ms)} ms a step;"
            f" {other}."
        ),
        across="micro-batch x accumulation steps on each data-parallel rank",
        down="sharding",
        columns=tuple(f"{size} x {accumulation}" for size, accumulation in sizes),
        rows=tuple(
            (
                SHARDING[stage],
                tuple(
                    _layout_cell(cells.get((stage, size)), plan.start, plan.end)
                    for size, _ in sizes
                ),
            )
            for stage in stages
        ),
        unit="ms a step, without waiting for data",
        note=(
            f"Forecasts, not measurements, all with {e.precision} on {plural(e.world_size, 'GPU')}."
        ),
    )


def _layout_in_words(e: Execution) -> str:
    sharded = f"with ZeRO-{e.zero_stage}" if e.zero_stage else "without sharding"
    return f"micro-batch {e.micro_batch} x {e.accumulation} {sharded}"


def _layout_cell(at: Layout | None, now: Execution, chosen: Execution) -> Cell | None:
    if at is None:
        return None
    mark = "recommended" if at.execution == chosen else "now" if at.execution == now else ""
    if at.fits:
        return Cell(value=at.step_ms, said=number(at.step_ms), mark=mark)
    return Cell(
        value=None, said="?" if at.needed_gib is None else f"{number(at.needed_gib)} GiB", mark=mark
    )
