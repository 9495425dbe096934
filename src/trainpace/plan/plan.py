"""Planning of changes to a training: search, choice, order of changes, and alternatives."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import CERTAIN
from trainpace.core.units import format_number
from trainpace.forecast import has_vocabulary_loss
from trainpace.job import NO_WAIT, DataPath, assumptions
from trainpace.plan.changes import Change, Choice, Effort, Plan, Projection, Risk
from trainpace.plan.evaluate import Evaluator, Problem, part_of, with_start
from trainpace.plan.explain import because, cautions, rejected, worth_measuring
from trainpace.plan.search import SearchResult, SearchSpace, executions_on, is_legal, search
from trainpace.plan.settings import (
    Setting,
    changed,
    code_of,
    config_line,
    differing,
    effort_of,
    resolution,
    risk_of,
)

LARGER_FACTORS = (2, 4, 8, 16)
SHARED_NETWORK = 0.5
"""Share of the ports' bandwidth that a network with shared switches delivers. A recommendation must
also hold at this bandwidth.
"""
_SIZES = ("nnodes", "nproc_per_node", "micro_batch", "accumulation")
_RISKS = get_args(Risk)
_EFFORTS = get_args(Effort)


def plan_changes(
    problem: Problem,
    start: Execution,
    data: tuple[DataPath, ...] = (NO_WAIT,),
    space: SearchSpace | None = None,
    to: Literal["best", "fastest"] = "best",
) -> Plan:
    """Search all executions, and order the changes from `start` to the best or the fastest one.

    The best choice is the simplest one that forecasts cannot distinguish from the fastest. If
    nothing fits, the plan has no best choice. Its `reason` and `nearest` then say why, and what
    would fit.

    Args:
        problem: The workload, the cluster and the job.
        start: The current execution.
        data: The current data path, followed by the available ones.
        space: What the search may change.
        to: The choice at which the changes end.

    Raises:
        TrainpaceError: The current execution cannot be forecast.
    """
    space, problem = space or SearchSpace(), problem.with_forecaster()
    problem = with_start(problem, start)
    paths = data if space.may("data") else data[:1]
    now = Choice(execution=start, data=paths[0])
    grid, limits = space.within(executions_on(problem.cluster, problem.workload, start, space))
    present = Evaluator(problem, start)
    fits, loss = present.fits(now), tuple[Change, ...]()
    if not fits:
        problem, loss = _with_lean_loss(problem, now)
    result = search(problem, start, grid, paths)
    evaluator = Evaluator(problem, start)
    searched = len(result.grid) * len(paths)
    fastest, best = result.best(), result.recommended(_elsewhere(problem, result))
    if fastest is None or best is None:
        return Plan(
            start=start,
            changes=(),
            searched=searched,
            start_fits=False,
            reason=_what_binds(result),
            nearest=_nearest(problem, start, space, result),
        )

    def projection(choice: Choice) -> Projection:
        return evaluator.projection(choice, len(differing(now, choice)) + len(loss))

    chosen = projection(result.choice(best))
    target = result.choice(best if to == "best" else fastest)
    pareto = [best if index == fastest else index for index in result.pareto()]
    return Plan(
        start=start,
        changes=_joined(loss, ordered_changes(evaluator, now, target)),
        now=present.projection(now, 0) if math.isfinite(present.step_ms(now)) else None,
        best=chosen,
        fastest=projection(result.choice(fastest)),
        because=because(problem, evaluator, result, best),
        cautions=cautions(chosen),
        pareto=tuple(projection(result.choice(index)) for index in pareto),
        maybe=worth_measuring(result, best),
        rejected=rejected(problem, result, evaluator, best, space, limits),
        searched=searched,
        fitting=result.fitting,
        start_fits=fits,
        job=problem.schedule,
        conditions=problem.conditions,
        assumed=assumptions(problem.conditions, start.compile or target.execution.compile),
    )


LEAN_LOSS = "chunked cross-entropy instead of all logits at once"
LIGER_LOSS = """\
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
loss = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden.flatten(0, 1), labels.flatten())"""


def _with_lean_loss(problem: Problem, now: Choice) -> tuple[Problem, tuple[Change, ...]]:
    """Return the problem with a loss that does not hold all logits, and the change to it.

    The loss is one setting, and the training stays the same. It therefore comes before sharding.
    The change is made only if the current execution then fits, with or without recomputation, and
    did not fit with recomputation before.
    """
    again = replace(now.execution, activation_checkpointing="full")
    recomputed = replace(now, execution=again)
    software = replace(problem.software, cross_entropy="chunked")
    lean = problem._replace(software=software, forecaster=None).with_forecaster()
    before, after = (Evaluator(p, now.execution) for p in (problem, lean))
    is_large = has_vocabulary_loss(problem.workload.form(again.precision).operators)
    chosen = problem.software.cross_entropy is not None
    if chosen or not is_large or before.fits(recomputed):
        return problem, ()
    fits = after.fits(now)
    if not fits and not after.fits(recomputed):
        return problem, ()
    change = Change(
        title=LEAN_LOSS,
        execution=now.execution,
        data=now.data,
        forecast_saved_s=0.0,
        makes_fit=fits,
        risk="low",
        risk_reason="the loss is summed in another order",
        settings={"use_liger_kernel": True},
        code=LIGER_LOSS,
    )
    return lean, (change,)


def _joined(loss: tuple[Change, ...], changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Put the change of the loss first. It joins the next change if it does not fit alone."""
    if not loss or loss[0].makes_fit or not changes:
        return (*loss, *changes)
    (one,), (first, *rest) = loss, changes
    joined = replace(
        first,
        title=f"{one.title}, {first.title}",
        settings=one.settings | first.settings,
        code="\n".join(filter(None, (one.code, first.code))),
    )
    return joined, *rest


def _elsewhere(problem: Problem, result: SearchResult) -> list[SearchResult]:
    """Repeat the search for a network with shared switches. Returns [] if no network is used."""
    network = problem.cluster.network_gb_per_s_per_device
    if problem.cluster.nodes == 1 or network is None or result.best() is None:
        return []
    slower = replace(problem.cluster, network_gb_per_s_per_device=network * SHARED_NETWORK)
    return [search(problem._replace(cluster=slower), result.start, result.grid, result.data)]


# ---- if nothing fits


def _what_binds(result: SearchResult) -> str:
    needed = result.evaluation.timed_gib
    row = int(np.argmin(needed))
    if not math.isfinite(needed[row]):
        return result.evaluation.why_not(np.arange(len(result.grid))) or "nothing can be forecast."
    if result.evaluation.fits.any():
        return "the job has no step: its samples do not fill one under any of these executions."
    return (
        f"out of memory: the leanest of {len(result.grid):,} executions needs"
        f" {format_number(needed[row])} GiB per device,"
        f" {format_number(needed[row] - result.room_gib)} more than surely fit,"
        f" {format_number(result.room_gib)}"
        f" ({config_line(result.choice((row, 0)))})."
    )


def _nearest(problem: Problem, start: Execution, space: SearchSpace, result: SearchResult) -> str:
    """Name the next larger number of GPUs that fits, or else the memory that a GPU would need."""
    least = float(result.evaluation.timed_gib.min(initial=np.inf))
    if not least > result.room_gib or not math.isfinite(least):
        return ""
    limits = tuple(limit for limit in space.limits if limit.field not in _SIZES)
    only = replace(
        space, keep=tuple({*space.keep, "GPUs"}), allow_global_batch=False, limits=limits
    )
    for factor in LARGER_FACTORS:
        larger = _larger(problem.cluster, start, factor)
        if larger is None:
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
        try:
            grid, _ = only.within(
                executions_on(larger, problem.workload, wider, only, start.global_batch)
            )
        except TrainpaceError:
            continue
        there = search(problem._replace(cluster=larger, proven_gib=0.0), wider, grid, (NO_WAIT,))
        index = there.best()
        if index is not None:
            fitting = config_line(there.choice(index))
            return f"on {larger.num_devices} of these GPUs it would fit: {fitting}."
    memory = problem.cluster.device.memory_gib
    needed = least / result.room_gib * (memory.value if memory else 0.0)
    return (
        f"a GPU with {format_number(needed)} GiB would do, or smaller samples or a smaller model."
    )


def _larger(cluster: Cluster, start: Execution, factor: int) -> Cluster | None:
    """Return a cluster with `factor` times the GPUs. None if one node cannot hold them."""
    if cluster.nodes > 1:
        return replace(cluster, nodes=cluster.nodes * factor)
    more = cluster.devices_per_node * factor
    used = part_of(cluster, start.nnodes, start.nproc_per_node)
    return replace(used, devices_per_node=more) if more <= 8 else None


# ---- the order of changes


class _Step(NamedTuple):
    settings: tuple[Setting, ...]
    before: Choice
    after: Choice
    fitted: bool


def ordered_changes(evaluator: Evaluator, start: Choice, target: Choice) -> tuple[Change, ...]:
    """Return the changes from start to target. After each change the training can run.

    The order is greedy: the largest saving comes first. Settings change one at a time if the result
    fits and is not slower. Otherwise two or more change together, such as recomputation and the
    larger batch that it makes room for.

    A change that saves less than `NOISE` is merged into the next one, and the last change into the
    previous one. If the start does not fit, the first change makes it fit and has no known saving.
    """
    steps: list[_Step] = []
    settings: tuple[Setting, ...] = ()
    before = current = start
    fitted = fits = evaluator.fits(start)
    while left := differing(current, target):
        now_s = evaluator.job_s(current) if fits else math.inf
        more, current = _next(evaluator, current, target, left, now_s)
        settings, fits = (*settings, *more), True
        after_s = evaluator.job_s(current)
        small = fitted and evaluator.job_s(before) - after_s < evaluator.problem.noise_s(after_s)
        if small and differing(current, target):
            continue
        while small and steps:
            last = steps.pop()
            settings, before, fitted = (*last.settings, *settings), last.before, last.fitted
            small = fitted and evaluator.job_s(before) - after_s <= 0
        steps.append(_Step(settings, before, current, fitted))
        before, settings, fitted = current, (), True
    return tuple(_change(evaluator, step) for step in steps)


def _next(
    evaluator: Evaluator, current: Choice, target: Choice, left: Sequence[Setting], now_s: float
) -> tuple[tuple[Setting, ...], Choice]:
    """Return the smallest set of settings with a choice that fits and is not slower.

    Among sets of the same size, the fastest one wins.
    """
    for count in range(1, len(left)):
        options: list[tuple[float, int, tuple[Setting, ...], Choice]] = []
        for i, settings in enumerate(combinations(left, count)):
            after = changed(current, target, settings)
            if after is None or not is_legal(after.execution, evaluator.start):
                continue
            if evaluator.fits(after):
                options.append((evaluator.job_s(after), i, settings, after))
        if options and min(options)[0] <= now_s:
            _, _, settings, after = min(options)
            return settings, after
    return tuple(left), target


def _change(evaluator: Evaluator, step: _Step) -> Change:
    """Convert a step between two choices to a change with its saving, risk and settings."""
    settings, before, after, fitted = step
    worst, reasons = _worst_risk(evaluator, step)
    keys: dict[str, int | str | bool] = {}
    for setting in settings:
        keys |= setting.keys(after)
    if before.execution.accumulation != after.execution.accumulation:
        keys |= {"gradient_accumulation_steps": after.execution.accumulation}
    before_s, after_s = evaluator.job_s(before), evaluator.job_s(after)
    # The job after the change may take longer than forecast, by the resolution of forecasts.
    longest_s = after_s * math.exp(resolution(setting.name for setting in settings))
    return Change(
        title=", ".join(setting.title(before, after) for setting in settings),
        execution=after.execution,
        data=after.data,
        forecast_saved_s=before_s - after_s if fitted else 0.0,
        makes_fit=not fitted,
        saved_at_least_s=before_s - longest_s if fitted else None,
        effort=max((effort_of(setting, after) for setting in settings), key=_EFFORTS.index),
        risk=worst,
        risk_reason=reasons,
        settings=keys,
        code=code_of(settings, before, after, evaluator.problem.workload),
    )


def _worst_risk(evaluator: Evaluator, step: _Step) -> tuple[Risk, str]:
    """Return the highest risk among a step's settings and its memory, with its reasons."""
    workload = evaluator.problem.workload
    risks = [risk_of(setting, step.before, step.after, workload) for setting in step.settings]
    before, after = (evaluator.fit_probability(choice) for choice in (step.before, step.after))
    if after < min(before, CERTAIN):
        risks.append(("low", f"it fits in memory with a probability of {after:.0%}"))
    worst = max((risk for risk, _ in risks), key=_RISKS.index)
    return worst, "; ".join(dict.fromkeys(reason for risk, reason in risks if risk == worst))
