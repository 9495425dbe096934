"""A plan as a page: what to change in which order, what it brings, step and memory before and after, what was rejected."""

from typing import Any

from trainpace.hardware import Cluster
from trainpace.outcome import Forecast
from trainpace.plan import Outlook, Plan, config_line
from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
from trainpace.report.charts.changes import fleet_chart, plan_ladder
from trainpace.report.charts.chart import Picture
from trainpace.report.pages.render import page
from trainpace.report.plan import COMPARED, fleet_of, settings_of, target_of, verdict
from trainpace.units import format_usd
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
    choices = [("now", plan.now), ("best", plan.best), ("simplest", plan.simplest)]
    choices += [(f"fastest with {p.num_devices}", p) for p in plan.pareto if len(plan.pareto) > 1]
    return page(
        "plan.html", f"{workload.model} on {fleet_of(cluster)}: what to change", _verdict(plan, target_of(plan)),
        plan_pictures(plan, before, after), data, plan.best is not None, plan=plan, settings=settings_of, config=config_line,
        choices=[(name, outlook) for name, outlook in choices if outlook is not None],
    )  # fmt: skip


def plan_pictures(plan: Plan, before: Forecast | None, after: Forecast | None) -> list[Picture]:
    target = target_of(plan)
    if target is None:
        return []
    pictures: list[Picture | None] = [plan_ladder(plan, target) if plan.changes else None]
    both = [(name, f) for name, f in (("as it is", before), ("with the changes", after)) if f is not None]
    timed = [Timed("", name, f.step, f.step_time_interval_ms) for name, f in both if f.step is not None]
    held = [Held(name, f.memory, f.capacity_gib) for name, f in both if f.step is not None and f.memory is not None]
    pictures += [step_breakdown(timed) if timed else None, memory_at_peak(held) if held else None]
    return [picture for picture in [*pictures, fleet_chart(plan.pareto)] if picture is not None]


def _verdict(plan: Plan, target: Outlook | None) -> list[str]:
    if target is None:
        return [f"No: {plan.reason}", *([f"Nearest: {plan.nearest}"] if plan.nearest else [])]
    sentences = [verdict(plan, target)]
    if target.cost_usd is not None and plan.changes:
        was = "" if plan.now is None or plan.now.cost_usd is None else f" instead of {format_usd(plan.now.cost_usd)}"
        sentences.append(f"It costs {format_usd(target.cost_usd)}{was}.")
    return [*sentences, COMPARED.format(plan=plan)]
