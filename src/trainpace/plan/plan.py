"""`plan_changes`: search, choose, order, and name what was left out."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, get_args

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.units import format_number
from trainpace.job import assumptions
from trainpace.plan.alternatives import rejected, sensitivity, worth_measuring
from trainpace.plan.changes import NO_WAIT, Change, Choice, DataPath, Effort, Outlook, Plan, Risk
from trainpace.plan.evaluate import Judge, Setting, forecast_of, part_of
from trainpace.plan.knobs import Knob, config_line, differing, effort_of, risk_of, turned
from trainpace.plan.reasons import because, cautions
from trainpace.plan.resolution import told_apart
from trainpace.plan.search import Freedom, SearchResult, executions_on, is_legal, search
from trainpace.plan.snippets import snippet

LARGER_FLEETS = (2, 4, 8, 16)
SHARED_NETWORK = 0.5
"""Share of its ports' rate that a network gives where switches are shared, under which a recommendation must still be right."""
_SIZES = ("nnodes", "nproc_per_node", "micro_batch", "accumulation")
_RISKS = get_args(Risk)
_EFFORTS = get_args(Effort)


def plan_changes(
    setting: Setting,
    start: Execution,
    data: tuple[DataPath, ...] = (NO_WAIT,),
    freedom: Freedom | None = None,
    to: Literal["best", "fastest"] = "best",
) -> Plan:
    """Search the executions of a workload on a cluster, and order the changes that lead from `start` to the best: the simplest of
    those that forecasts cannot tell from the fastest.

    `data`: the present data path first, then those that could be had. Where nothing fits, the plan has no best, `reason` says
    what binds and `nearest` the nearest that would do. Raises TrainpaceError where the start itself is impossible.
    """
    freedom, setting = freedom or Freedom(), setting.with_forecaster()
    present = forecast_of(setting, start)
    if present.step is None:
        raise TrainpaceError(
            f"how it trains now cannot be forecast on this fleet: {present.reason}"
        )
    paths = data if freedom.may("data") else data[:1]
    now = Choice(execution=start, data=paths[0])
    grid, cut = freedom.within(executions_on(setting.cluster, setting.workload, start, freedom))
    result = search(setting, start, grid, paths)
    judge = Judge(setting, start)
    searched = len(result.grid) * len(paths)
    fastest, best = result.best(), result.recommended(_elsewhere(setting, result))
    if fastest is None or best is None:
        return Plan(
            start=start,
            changes=(),
            searched=searched,
            start_fits=False,
            reason=_what_binds(result),
            nearest=_nearest(setting, start, freedom, result),
        )

    def outlook(choice: Choice) -> Outlook:
        return judge.outlook(choice, len(differing(now, choice)))

    target, chosen = result.choice(best if to == "best" else fastest), outlook(result.choice(best))
    return Plan(
        start=start,
        changes=ladder(judge, now, target),
        now=outlook(now) if math.isfinite(judge.step_ms(now)) else None,
        best=chosen,
        fastest=outlook(result.choice(fastest)),
        because=because(setting, judge, result, best),
        cautions=cautions(chosen, result.room_gib, setting.workload),
        pareto=tuple(
            outlook(result.choice(best if index == fastest else index)) for index in result.pareto()
        ),
        maybe=worth_measuring(result, judge, best),
        rejected=rejected(setting, result, judge, best, freedom, cut),
        sensitivity=sensitivity(setting, result, judge, best),
        searched=searched,
        fitting=result.fitting,
        start_fits=judge.fits(now),
        job=setting.schedule,
        conditions=setting.conditions,
        assumed=assumptions(setting.conditions, start.compile or target.execution.compile),
    )


def _elsewhere(setting: Setting, result: SearchResult) -> list[SearchResult]:
    """The same search where the network between nodes gives what shared switches often do: a recommendation has to hold there."""
    network = setting.cluster.network_gb_per_s_per_device
    if setting.cluster.nodes == 1 or network is None or result.best() is None:
        return []
    slower = replace(setting.cluster, network_gb_per_s_per_device=network * SHARED_NETWORK)
    return [search(setting._replace(cluster=slower), result.start, result.grid, result.data)]


def _what_binds(result: SearchResult) -> str:
    needed = result.evaluation.timed_gib
    row = int(np.argmin(needed))
    if not math.isfinite(needed[row]):
        return result.evaluation.why_not(np.arange(len(result.grid))) or "nothing can be forecast."
    if needed[row] <= result.room_gib:
        return "the job has no step: its samples do not fill one under any of these executions."
    return (
        f"memory binds: the leanest of {len(result.grid):,} executions needs"
        f" {format_number(needed[row])} GiB a device, and {format_number(result.room_gib)} can be"
        f" used, {format_number(needed[row] - result.room_gib)} too few"
        f" ({config_line(result.choice((row, 0)))})."
    )


def _nearest(setting: Setting, start: Execution, freedom: Freedom, result: SearchResult) -> str:
    """The next larger fleet that would do, else the memory that one device would need."""
    least = float(result.evaluation.timed_gib.min(initial=np.inf))
    if not least > result.room_gib or not math.isfinite(least):
        return ""
    cluster = setting.cluster
    for factor in LARGER_FLEETS:
        more = cluster.devices_per_node * factor
        if cluster.nodes > 1:
            larger = replace(cluster, nodes=cluster.nodes * factor)
        elif more <= 8:
            larger = replace(
                part_of(cluster, start.nnodes, start.nproc_per_node), devices_per_node=more
            )
        else:
            break
        wider = replace(
            start,
            nnodes=larger.nodes,
            nproc_per_node=larger.devices_per_node,
            tp=1,
            pp=1,
            cp=1,
            micro_batch=1,
            accumulation=1,
            virtual_stages=1,
        )
        limits = tuple(limit for limit in freedom.limits if limit.field not in _SIZES)
        only = replace(
            freedom, keep=tuple({*freedom.keep, "GPUs"}), allow_global_batch=False, limits=limits
        )
        try:
            grid, _ = only.within(
                executions_on(larger, setting.workload, wider, only, start.global_batch)
            )
        except TrainpaceError:
            continue
        there = search(setting._replace(cluster=larger), wider, grid, (NO_WAIT,))
        index = there.best()
        if index is not None:
            return (
                f"on {larger.num_devices} of these devices it would fit:"
                f" {config_line(there.choice(index))}."
            )
    device = (
        least
        / result.room_gib
        * (cluster.device.memory_gib.value if cluster.device.memory_gib else 0.0)
    )
    return (
        f"a device with {format_number(device)} GiB would do; smaller samples or a smaller model"
        " would too."
    )


# ---- the order of changes


def ladder(judge: Judge, start: Choice, target: Choice) -> tuple[Change, ...]:
    """Rungs from start to target, each an execution that runs: greedy, what saves most comes first. Their savings add up.

    Knobs are turned one at a time where that gives something that fits and is no slower; where none does (recomputation
    makes room for a batch), two or more are turned together. One that saves less than `NOISE` by itself goes with the next,
    for which it may make room, or the last with the one before. Where the start itself does not fit, the first rung makes it
    fit, and what it saves cannot be said.
    """
    rungs: list[tuple[tuple[Knob, ...], Choice, Choice, bool]] = []
    current, fits = start, judge.fits(start)
    knobs: tuple[Knob, ...] = ()
    begun, fitted = current, fits
    while left := differing(current, target):
        more, after = _next(
            judge, current, target, left, math.inf if not fits else judge.job_s(current)
        )
        knobs, current, fits = (*knobs, *more), after, True
        small = fitted and judge.job_s(begun) - judge.job_s(after) < judge.setting.noise_s(
            judge.job_s(after)
        )
        if small and differing(after, target):
            continue
        if small and rungs:
            before, begun, _, fitted = rungs.pop()
            knobs = (*before, *knobs)
        rungs.append((knobs, begun, after, fitted))
        begun, knobs, fitted = after, (), True
    return tuple(_change(judge, *rung) for rung in rungs)


def _next(
    judge: Judge, current: Choice, target: Choice, left: Sequence[Knob], now_s: float
) -> tuple[tuple[Knob, ...], Choice]:
    """The fewest knobs that give something no slower that fits, among those the fastest."""
    for count in range(1, len(left)):
        options: list[tuple[float, int, tuple[Knob, ...], Choice]] = []
        for i, knobs in enumerate(combinations(left, count)):
            after = turned(current, target, knobs)
            if after is not None and is_legal(after.execution, judge.start) and judge.fits(after):
                options.append((judge.job_s(after), i, knobs, after))
        if options and min(options)[0] <= now_s:
            _, _, knobs, after = min(options)
            return knobs, after
    return tuple(left), target


def _change(
    judge: Judge, knobs: Sequence[Knob], before: Choice, after: Choice, fitted: bool
) -> Change:
    risks = [risk_of(knob, before, after, judge.setting.workload) for knob in knobs]
    worst = max((risk for risk, _ in risks), key=_RISKS.index)
    reasons = dict.fromkeys(reason for risk, reason in risks if risk == worst)
    settings: dict[str, int | str | bool] = {}
    for knob in knobs:
        settings |= knob.settings(after)
    if before.execution.accumulation != after.execution.accumulation:
        settings |= {"gradient_accumulation_steps": after.execution.accumulation}
    before_s, after_s = judge.job_s(before), judge.job_s(after)
    # the job after it may be longer by what forecasts of the two are told apart by
    at_least_s = before_s - after_s * math.exp(told_apart(knob.name for knob in knobs))
    return Change(
        title=", ".join(knob.title(before, after) for knob in knobs),
        execution=after.execution,
        data=after.data,
        forecast_saved_s=before_s - after_s if fitted else 0.0,
        makes_fit=not fitted,
        saved_at_least_s=at_least_s if fitted else None,
        effort=max((effort_of(knob, after) for knob in knobs), key=_EFFORTS.index),
        risk=worst,
        risk_reason="; ".join(reasons),
        settings=settings,
        code=snippet(knobs, before, after, judge.setting.workload),
    )
