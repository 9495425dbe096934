"""A plan for the terminal: the changes, the choices, what was rejected, and how sensitive the choice is."""

import math
from collections.abc import Sequence

from trainpace.diagnose import Advice
from trainpace.hardware import Cluster
from trainpace.job import assumed_in_words
from trainpace.plan import Change, Outlook, Plan, Sensitivity, config_line
from trainpace.report.columns import Column, words
from trainpace.report.phrases import devices, plural
from trainpace.report.terminal import print_head, print_lines, print_named, print_next, print_table, print_verdict
from trainpace.schedule import learning_rate_for_noise_scale, samples_factor, steps_factor
from trainpace.units import format_count, format_duration, format_number, format_usd
from trainpace.workload import Workload


def print_plan(plan: Plan, workload: Workload, cluster: Cluster, noise_scale: float | None = None) -> None:
    """The table of changes first, then the rest as lines. `noise_scale`: the plan's times are then to the same loss."""
    parameters = format_count(workload.parameters)
    print_head(f"{workload.model}: {parameters} parameters, {workload.optimizer}, on {fleet_of(cluster)}")
    target = target_of(plan)
    if target is None or plan.best is None or plan.simplest is None:
        print_verdict(f"No: {plan.reason}", good=False)
        print_lines(*([f"Nearest: {plan.nearest}"] if plan.nearest else []))
        return
    print_verdict(verdict(plan, target))
    if plan.changes:
        _print_changes(plan, target)
    if noise_scale is not None:
        print_lines(*_to_the_same_loss(plan.start.global_batch, plan.best.choice.execution.global_batch, noise_scale))
    _print_choices(plan, plan.best, plan.simplest)
    print_named("Considered and rejected", ((r.title, r.why) for r in plan.rejected))
    _print_sensitivity(plan)
    print_lines(COMPARED.format(plan=plan), *([assumed_in_words(plan.assumed)] if plan.assumed else []))


COMPARED = (
    "{plan.fitting:,} of {plan.searched:,} configurations fit in memory and were compared, all with the same global batch unless"
    " stated. These are forecasts, not measurements: change one thing at a time and measure."
)


def print_plan_next(command: Sequence[str], file: str | None, task: str | None) -> None:
    """The command that carries it out; a plan has to be kept first, by `command` with one option more."""
    if file is None:
        print_next(
            [*command, "--output", "plan.json"], "saves the plan; `trainpace run plan.json` then measures every change"
        )
    else:
        print_next(
            ["trainpace", "run", file, *(["--task", task] if task else [])],
            "makes the changes one by one, and measures each",
        )


def fleet_of(cluster: Cluster) -> str:
    return devices(cluster.num_devices, cluster.device.name)


def target_of(plan: Plan) -> Outlook | None:
    """The choice to which the changes lead."""
    if plan.changes and plan.simplest is not None and plan.changes[-1].execution == plan.simplest.choice.execution:
        return plan.simplest
    return plan.best


def verdict(plan: Plan, target: Outlook) -> str:
    if not plan.changes:
        return f"Nothing to change: no other configuration is faster than {format_duration(target.job_s)}."
    many = plural(len(plan.changes), "change")
    if plan.now is None or not plan.start_fits:
        return f"As it is, it does not fit in memory. With {many} it does, and the job takes {format_duration(target.job_s)}."
    return (
        f"{format_duration(target.job_s)} instead of {format_duration(plan.now.job_s)}, {plan.now.job_s / target.job_s:.3g} times"
        f" as fast, with {many}."
    )


def print_script_changes(changes: Sequence[tuple[Advice, float]]) -> None:
    """What a recording names beside the plan, at the pace at which it was recorded."""
    if changes:
        print_named(
            "Changes to the script itself, at the recorded pace (not part of the plan's savings)",
            ((a.title, f"saves {format_duration(saved_s)}. {a.how}") for a, saved_s in changes),
        )


def _print_changes(plan: Plan, target: Outlook) -> None:
    rows, so_far = [], 0.0
    for n, change in enumerate(plan.changes, 1):
        so_far += change.forecast_saved_s
        saved = ("makes it fit", "") if change.makes_fit else map(format_duration, (change.forecast_saved_s, so_far))
        rows.append([str(n), change.title, *saved, change.effort, change.risk])
    columns = (
        words("", least=2), words("change"), Column("saves"), Column("so far", 1), words("effort", 3), words("risk", 2),
    )  # fmt: skip
    print_table(columns, rows, title="What to change, in this order")
    print_lines(*_remarks(plan, target))
    print_named(
        "", ((f"{n}", f"{settings_of(c)}{'; ' if c.settings and c.risk_reason else ''}{c.risk_reason}.")
             for n, c in enumerate(plan.changes, 1)),
    )  # fmt: skip


def _to_the_same_loss(old: int, new: int, noise_scale: float) -> list[str]:
    lines = [
        f"Times are to the same loss, at a gradient noise scale of {format_number(noise_scale)} samples: an estimate that takes"
        " every batch size at its own best learning rate and the noise scale as measured (McCandlish et al. 2018)."
    ]
    if new != old:
        rule = learning_rate_for_noise_scale(old, new, noise_scale)
        lines.append(
            f"Global batch {new:,} needs {steps_factor(noise_scale, old, new):.2f} times the steps and"
            f" {samples_factor(noise_scale, old, new):.2f} times the samples of {old:,}; learning rate x {rule.sgd_factor:.2f}"
            f" with SGD, x {rule.adam_factor:.2f} with Adam."
        )
    return lines


NOISE = 0.05
"""Share of the job's time below which a change is noise: forecasts of two executions of one model on one GPU are not told apart
more finely."""


def _remarks(plan: Plan, target: Outlook) -> list[str]:
    """From where savings count, and which of them are too small to be sure of."""
    saved = [change.forecast_saved_s for change in plan.changes]
    remarks = []
    if plan.changes[0].makes_fit:
        first = format_duration(target.job_s + math.fsum(saved))
        remarks.append(
            f"As it is, it does not fit in memory. With change 1 the job takes {first}; savings count from there."
        )
    small = [
        str(n)
        for n, change in enumerate(plan.changes, 1)
        if not change.makes_fit and change.forecast_saved_s < NOISE * (target.job_s + math.fsum(saved[n:]))
    ]
    if small:
        which = f"Change {small[0]} saves" if len(small) == 1 else f"Changes {', '.join(small)} each save"
        remarks.append(
            f"{which} less than {100 * NOISE:.0f} %, too little for a forecast to be sure of: measure before keeping."
        )
    return remarks


def settings_of(change: Change) -> str:
    return ", ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.settings.items()
    )


def _print_choices(plan: Plan, best: Outlook, simplest: Outlook) -> None:
    lines = []
    if plan.now is not None:
        lines.append(
            ("Now", _figures(plan.now) + ("" if plan.start_fits else " (if it fitted in memory, which it does not)"))
        )
        lines.append(("", config_line(plan.now.choice)))
    lines += [("Best", _figures(best)), ("", config_line(best.choice))]
    if simplest.choice == best.choice:
        lines.append(("Simplest", "the same: nothing with fewer changes comes within 2 % of the best"))
    else:
        lines += [("Simplest", _figures(simplest)), ("", config_line(simplest.choice))]
    print_named("", lines)
    if len(plan.pareto) > 1:
        _print_front(plan)


def _print_front(plan: Plan) -> None:
    first, priced = plan.pareto[0], plan.pareto[0].cost_usd is not None
    rows = [
        [str(p.num_devices), format_duration(p.job_s), *([format_usd(p.cost_usd or 0.0)] if priced else []),
         f"{first.job_s * first.num_devices / (p.job_s * p.num_devices):.0%}"]
        for p in plan.pareto
    ]  # fmt: skip
    columns = ["GPUs", "job", *(["cost"] if priced else []), "efficiency"]
    print_table(columns, rows, left=0, title="Fastest option for each number of GPUs", spaced=False)


def _figures(outlook: Outlook) -> str:
    n = outlook.changes
    parts = [
        f"{format_duration(outlook.job_s)}", f"{format_number(outlook.step_ms)} ms a step",
        f"{format_number(outlook.needed_gib)} GiB a device",
        "" if outlook.cost_usd is None else format_usd(outlook.cost_usd),
        plural(n, "change") if n else "",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _print_sensitivity(plan: Plan) -> None:
    if not plan.sensitivity:
        return
    lines = [
        (s.number, f"{s.low:.2f} to {s.high:.2f} times as assumed ({s.basis}): {_flip(s)}")
        for s in plan.sensitivity if s.flips_to
    ]  # fmt: skip
    holds = [f"{s.number} ({s.low:.2f} to {s.high:.2f} times)" for s in plan.sensitivity if not s.flips_to]
    if holds:
        lines.append(("nothing else" if lines else "nothing", f"tried: {', '.join(holds)}"))
    print_named("What could change this recommendation", lines)


def _flip(s: Sensitivity) -> str:
    if not s.still_fits:
        return f"the recommendation would no longer fit in memory, and the best would have {s.flips_to}"
    return f"{s.flips_to}; the recommendation would take {100 * s.regret:.2g} % longer than that"
