"""A plan as a page: what to change in which order, what it brings, step and memory before and after, what was left out."""

from __future__ import annotations

from typing import Any

from trainpace.hardware import Cluster
from trainpace.outcome import Forecast
from trainpace.plan import Plan
from trainpace.plan.changes import Outlook
from trainpace.plan.knobs import config_line
from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
from trainpace.report.charts.changes import fleet_chart, plan_ladder
from trainpace.report.charts.chart import Picture
from trainpace.report.pages.figure import drawn, section, table
from trainpace.report.pages.frame import document
from trainpace.units import format_duration, format_number, format_usd
from trainpace.workload import Workload


def plan_page(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    data: dict[str, Any],
    before: Forecast | None,
    after: Forecast | None,
) -> str:
    """The page as text. `before` and `after`: forecasts of how it trains now and of the plan's end. `data`: `plan --json`."""
    fleet = f"{cluster.num_devices} x {cluster.device.name}" if cluster.num_devices > 1 else cluster.device.name
    title = f"{workload.model} on {fleet}: what to change"
    if plan.best is None:
        near = [f"Nearest: {plan.nearest}"] if plan.nearest else []
        return document(title, [f"No: {plan.reason}", *near], "", data, answer=False)
    target = target_of(plan)
    assert target is not None
    body = "".join(drawn(picture) for picture in plan_pictures(plan, before, after))
    body += section("What to change, in this order", _changes(plan))
    body += section("Choices", _choices(plan)) + section("What the choice hangs on", _sensitivity(plan))
    body += section("Looked at and left out", _rejected(plan))
    return document(title, _verdict(plan, target), body, data)


def plan_pictures(plan: Plan, before: Forecast | None, after: Forecast | None) -> list[Picture]:
    """The job change by change, the step and the memory before and after, the job against the number of GPUs."""
    target = target_of(plan)
    if target is None:
        return []
    found: list[Picture | None] = [plan_ladder(plan, target) if plan.changes else None]
    both = [
        (name, f)
        for name, f in (("as it is", before), ("with the changes", after))
        if f is not None and f.step is not None
    ]
    if both:
        found.append(
            step_breakdown([Timed("", name, f.step, f.step_time_interval_ms) for name, f in both if f.step is not None])
        )
        held = [Held(name, f.memory, f.capacity_gib) for name, f in both if f.memory is not None]
        found.append(memory_at_peak(held) if held else None)
    found.append(fleet_chart(plan.pareto))
    return [picture for picture in found if picture is not None]


def target_of(plan: Plan) -> Outlook | None:
    """The choice to which the changes lead."""
    if plan.changes and plan.simplest is not None and plan.changes[-1].execution == plan.simplest.choice.execution:
        return plan.simplest
    return plan.best


def _verdict(plan: Plan, target: Outlook) -> list[str]:
    if not plan.changes:
        return ["Nothing to change: no other choice is faster.", f"The job takes {format_duration(target.job_s)}."]
    n = len(plan.changes)
    changes = f"{n} change{'' if n == 1 else 's'}"
    if plan.start_fits and plan.now is not None:
        share = target.job_s / plan.now.job_s
        then, now = format_duration(target.job_s), format_duration(plan.now.job_s)
        said = f"{changes}: the job takes {then} instead of {now}, {share:.0%} of it."
    else:
        said = f"As it is, it does not fit. With {changes} it does, and the job takes {format_duration(target.job_s)}."
    lines_said = [said]
    if target.cost_usd is not None:
        was = "" if plan.now is None or plan.now.cost_usd is None else f" instead of {format_usd(plan.now.cost_usd)}"
        lines_said.append(f"It costs {format_usd(target.cost_usd)}{was}.")
    lines_said.append(
        f"{plan.fitting:,} of {plan.searched:,} choices fit and were compared. Forecasts, not measurements: change one thing at a"
        " time and measure (trainpace run does)."
    )
    return lines_said


def _changes(plan: Plan) -> str:
    rows = [
        [str(n), c.title, "makes it fit" if c.makes_fit else format_duration(c.forecast_saved_s), c.effort, c.risk,
         ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in c.settings.items()), c.risk_reason]
        for n, c in enumerate(plan.changes, 1)
    ]  # fmt: skip
    return (
        table(["", "change", "saves", "effort", "risk", "settings", "why the risk"], rows, left=2, words=range(3, 7))
        if rows
        else ""
    )


def _choices(plan: Plan) -> str:
    named = [("now", plan.now), ("best", plan.best), ("simplest", plan.simplest)]
    named += [(f"fastest with {p.num_devices}", p) for p in plan.pareto if len(plan.pareto) > 1]
    rows = [
        [name, format_duration(o.job_s), format_number(o.step_ms), format_number(o.needed_gib), str(o.num_devices),
         "" if o.cost_usd is None else format_usd(o.cost_usd), config_line(o.choice)]
        for name, o in named if o is not None
    ]  # fmt: skip
    return table(["", "job", "step ms", "GiB a device", "GPUs", "cost", "settings"], rows, words=(6,))


def _sensitivity(plan: Plan) -> str:
    rows = [
        [s.number, f"{s.low:.2f} to {s.high:.2f} times", s.basis,
         "holds" if not s.flips_to else s.flips_to if s.still_fits else f"would not fit; then {s.flips_to}"]
        for s in plan.sensitivity
    ]  # fmt: skip
    return table(["number", "may be", "because of", "the choice"], rows, left=4) if rows else ""


def _rejected(plan: Plan) -> str:
    rows = [[r.title, r.why, "" if r.lost_s is None else format_duration(r.lost_s)] for r in plan.rejected]
    return table(["what", "why", "the job takes longer by"], rows, left=2) if rows else ""
