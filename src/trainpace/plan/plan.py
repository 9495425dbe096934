"""`plan_changes`: search, choose, order, and say what was left out."""

import math
from typing import Literal

import numpy as np
from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.job import assumptions
from trainpace.plan.changes import NO_WAIT, Choice, DataPath, Outlook, Plan
from trainpace.plan.evaluate import Judge, Setting, forecast_of, part_of
from trainpace.plan.knobs import config_line, differing
from trainpace.plan.order import ladder
from trainpace.plan.rejected import rejected
from trainpace.plan.search import SearchResult, search
from trainpace.plan.sensitivity import sensitivity
from trainpace.plan.space import Freedom, space_of
from trainpace.units import format_number

LARGER_FLEETS = (2, 4, 8, 16)


def plan_changes(
    setting: Setting,
    start: Execution,
    data: tuple[DataPath, ...] = (NO_WAIT,),
    freedom: Freedom | None = None,
    to: Literal["best", "simplest"] = "best",
) -> Plan:
    """Search the executions of a workload on a cluster, and order the changes that lead from `start` to the best.

    `data`: the present data path first, then those that could be had. Where nothing fits, the plan has no best, `reason` says
    what binds and `nearest` the nearest that would do. Raises TrainpaceError where the start itself is impossible.
    """
    freedom, setting = freedom or Freedom(), setting.with_forecaster()
    present = forecast_of(setting, start)
    if present.step is None:
        raise TrainpaceError(f"how it trains now cannot be forecast on this fleet: {present.reason}")
    paths = data if freedom.may("data") else data[:1]
    now = Choice(execution=start, data=paths[0])
    result = search(setting, space_of(setting.workload, start, setting.cluster, freedom), paths)
    judge = Judge(setting, start)
    searched = len(result.space) * len(paths)
    best, simplest = result.best(), result.simplest()
    if best is None or simplest is None:
        return Plan(start=start, changes=(), searched=searched, start_fits=False, reason=_what_binds(result),
                    nearest=_nearest(setting, start, freedom, result))  # fmt: skip

    def outlook(choice: Choice) -> Outlook:
        return judge.outlook(choice, len(differing(now, choice)))

    target = result.choice(best if to == "best" else simplest)
    fits = judge.fits(now)
    return Plan(
        start=start,
        changes=ladder(judge, now, target),
        now=outlook(now) if math.isfinite(judge.step_ms(now)) else None,
        best=outlook(result.choice(best)),
        simplest=outlook(result.choice(simplest)),
        pareto=tuple(outlook(result.choice(index)) for index in result.pareto()),
        rejected=rejected(setting, result, judge, best, freedom),
        sensitivity=sensitivity(setting, result, judge, best),
        searched=searched,
        fitting=result.fitting,
        start_fits=fits,
        assumed=assumptions(setting.conditions, any(e.compile for e in (start, target.execution))),
    )


def _what_binds(result: SearchResult) -> str:
    needed = result.evaluation.needed_gib
    if np.isnan(result.evaluation.step_ms).all():
        return result.evaluation.why_not(np.arange(len(result.space))) or "nothing can be forecast."
    able = np.where(np.isnan(result.evaluation.step_ms), np.inf, needed)
    row = int(np.argmin(able))
    if able[row] <= result.room_gib:
        return "the job has no step: its samples do not fill one under any of these executions."
    over = able[row] - result.room_gib
    return (
        f"memory binds: the leanest of {len(result.space):,} executions needs {format_number(able[row])} GiB a device, and"
        f" {format_number(result.room_gib)} can be used, {format_number(over)} too few"
        f" ({config_line(result.choice((row, 0)))})."
    )


def _nearest(setting: Setting, start: Execution, freedom: Freedom, result: SearchResult) -> str:
    """The next larger fleet that would do, else the memory that one device would need."""
    able = np.where(np.isnan(result.evaluation.step_ms), np.inf, result.evaluation.needed_gib)
    least = float(able.min(initial=np.inf))
    if not least > result.room_gib or not math.isfinite(least):
        return ""
    cluster = setting.cluster
    for factor in LARGER_FLEETS:
        if cluster.nodes > 1:
            larger = replace(cluster, nodes=cluster.nodes * factor)
        elif cluster.devices_per_node * factor <= 8:
            larger = replace(
                part_of(cluster, start.nnodes, start.nproc_per_node), devices_per_node=cluster.devices_per_node * factor
            )
        else:
            break
        wider = replace(start, nnodes=larger.nodes, nproc_per_node=larger.devices_per_node, tp=1, pp=1, cp=1,
                        micro_batch=1, accumulation=1, virtual_stages=1)  # fmt: skip
        only = replace(freedom, keep=tuple({*freedom.keep, "GPUs"}), allow_global_batch=False)
        try:
            space = space_of(setting.workload, wider, larger, only, start.global_batch)
        except TrainpaceError:
            continue
        there = search(setting._replace(cluster=larger), space, (NO_WAIT,))
        index = there.best()
        if index is not None:
            return f"on {larger.num_devices} of these devices it would fit: {config_line(there.choice(index))}."
    device = least / result.room_gib * (cluster.device.memory_gib.value if cluster.device.memory_gib else 0.0)
    return f"a device with {format_number(device)} GiB would do; smaller samples or a smaller model would too."
