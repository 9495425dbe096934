"""The order of changes: greedy, what saves most comes first, and every rung is an execution that runs."""

import math
from collections.abc import Sequence
from itertools import combinations

from trainpace.plan.changes import Change, Choice, Risk
from trainpace.plan.evaluate import Judge
from trainpace.plan.knobs import Knob, differing, effort_of, risk_of, turned
from trainpace.plan.space import is_legal

_RISKS: tuple[Risk, ...] = ("none", "low", "medium")
_EFFORTS = ("config key", "code change", "infrastructure")


def ladder(judge: Judge, start: Choice, target: Choice) -> tuple[Change, ...]:
    """Rungs from start to target. Their savings add up to the whole.

    Knobs are turned one at a time where that gives something that fits and is no slower; where none does (recomputation
    makes room for a batch), two or more are turned together. Where the start itself does not fit, the first rung makes it fit,
    and what it saves cannot be said.
    """
    rungs: list[Change] = []
    current, fits = start, judge.fits(start)
    while left := differing(current, target):
        knobs, after = _next(judge, current, target, left, math.inf if not fits else judge.job_s(current))
        rungs.append(_change(judge, knobs, current, after, fits))
        current, fits = after, True
    return tuple(rungs)


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


def _change(judge: Judge, knobs: Sequence[Knob], before: Choice, after: Choice, fitted: bool) -> Change:
    risks = [risk_of(knob, before, after, judge.setting.workload) for knob in knobs]
    worst = max((risk for risk, _ in risks), key=_RISKS.index)
    reasons = dict.fromkeys(reason for risk, reason in risks if risk == worst)
    settings: dict[str, int | str | bool] = {}
    for knob in knobs:
        settings |= knob.settings(after)
    if before.execution.accumulation != after.execution.accumulation:
        settings |= {"gradient_accumulation_steps": after.execution.accumulation}
    return Change(
        title=", ".join(knob.title(before, after) for knob in knobs), execution=after.execution, data=after.data,
        forecast_saved_s=judge.job_s(before) - judge.job_s(after) if fitted else 0.0, makes_fit=not fitted,
        effort=max((effort_of(knob, after) for knob in knobs), key=_EFFORTS.index), risk=worst, risk_reason="; ".join(reasons),
        settings=settings,
    )  # fmt: skip
