"""How well forecasts of two executions of one model are told apart: pairs of packaged measurements
of one model on one card.

python -m fitting.differences      prints what `trainpace.plan.settings` holds, and how many pairs
each figure is from
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from trainpace.core.execution import Execution
from trainpace.forecast import PublicRun, packaged_traces, public_runs
from trainpace.plan.settings import SETTINGS

BESIDE = {"micro-batch", "accumulation", "GPUs"}
"""What may differ too: forecasts of it are told apart more finely than of any other knob."""
ALSO = {"precision": {"memory format"}}
"""NVIDIA's tables of fp32 beside AMP change both."""


FEWEST = 10


class Difference(NamedTuple):
    """A pair's knobs, and the error of the forecast ratio of its times a sample, as a logarithm."""

    knobs: frozenset[str]
    log_error: float


def differences() -> Iterator[Difference]:
    """All pairs of packaged runs of one model on one kind of card, of one source and software."""
    conditions = packaged_traces().conditions
    alike: dict[tuple[object, ...], list[PublicRun]] = {}
    for run in public_runs():
        if run.forecast_ms and run.global_batch and run.id in conditions:
            key = (
                run.collection,
                run.software,
                run.device,
                run.model,
                run.mode,
                run.sequence_length,
                run.image_size,
                run.optimizer,
            )
            alike.setdefault(key, []).append(run)
    for runs in alike.values():
        for a, b in itertools.combinations(runs, 2):
            knobs = _knobs(conditions[a.id].execution, conditions[b.id].execution)
            if knobs:
                measured, forecast = (
                    (_a_sample(a, name) / _a_sample(b, name))
                    for name in ("step_time_ms", "forecast_ms")
                )
                yield Difference(knobs, math.log(measured / forecast))


def _a_sample(run: PublicRun, name: str) -> float:
    return float(getattr(run, name)) / run.global_batch


def _knobs(a: Execution, b: Execution) -> frozenset[str]:
    names = {
        knob.name
        for knob in SETTINGS
        if any(getattr(a, field) != getattr(b, field) for field in knob.fields)
    }
    return frozenset(names | ({"accumulation"} if a.accumulation != b.accumulation else set()))


def resolutions(share: float = 0.8) -> dict[str, tuple[float, int]]:
    """For every knob the quantile of the absolute errors of pairs that differ in it, and how many
    pairs there are.
    """
    found: dict[str, list[float]] = {knob.name: [] for knob in SETTINGS}
    for pair in differences():
        for name, errors in found.items():
            others = pair.knobs - {name}
            if name in pair.knobs and (
                not others or (name not in BESIDE and others <= BESIDE | ALSO.get(name, set()))
            ):
                errors.append(abs(pair.log_error))
    return {
        name: (float(np.quantile(errors, share)), len(errors))
        for name, errors in found.items()
        if errors
    }


def several(share: float = 0.8) -> Iterator[tuple[str, float, float, int]]:
    """Pairs that differ in several knobs, at least ten of a kind: (the knobs, the quantile of their
    absolute errors, the largest of the knobs' own, how many).
    """
    alone = resolutions(share)
    found: dict[frozenset[str], list[float]] = {}
    for pair in differences():
        if len(pair.knobs & alone.keys()) > 1:
            found.setdefault(frozenset(pair.knobs & alone.keys()), []).append(abs(pair.log_error))
    for knobs, errors in sorted(found.items(), key=lambda item: -len(item[1])):
        if len(errors) >= FEWEST:
            largest = max(alone[name][0] for name in knobs)
            yield ", ".join(sorted(knobs)), float(np.quantile(errors, share)), largest, len(errors)


def main() -> None:
    for name, (resolution, pairs) in resolutions().items():
        print(f"{name:18} {resolution:.3f}  {pairs:,} pairs")
    for names, error, largest, pairs in several():
        print(
            f"{names}: {error:.3f}, {error / largest:.2f} times the largest of them alone, {pairs:,} pairs"
        )


if __name__ == "__main__":
    main()
