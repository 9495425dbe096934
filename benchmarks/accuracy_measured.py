"""How much measurements sharpen held-out forecasts: of the same model on another card, of other models on this one, of the same
run at another batch size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from accuracy_tables import LEFT_OUT, figure
from fitting.folds import HeldOut
from fitting.relatedness import fit_relatedness
from fitting.runs import Pair, is_same_model

from trainpace.core.stats import Z_95
from trainpace.forecast import Case
from trainpace.forecast.uncertainty import (
    Observed,
    Posterior,
    Relatedness,
    Run,
    Spreads,
    card_deviation,
    deviation,
)

MOST_OF_A_COLLECTION = 60
"""Runs of one collection that are forecast, so that no collection decides a line."""
Kin = Callable[[Observed, Sequence[Observed], random.Random], Sequence[Observed]]
"""The measurements that a user has: of a run and its collection, some others; empty where there are too few."""


class Sharpened(NamedTuple):
    """A run's log(measured / forecast), what measurements make of the forecast, and the deviations before and after."""

    error: float
    mean: float
    sd_before: float
    sd_after: float


def with_measurements(
    pairs: Mapping[int, Pair],
    found: Mapping[str, Sequence[HeldOut]],
    spreads: Mapping[str, Mapping[str, Spreads]],
) -> list[str]:
    """A table of errors without and with measurements; `spreads`: of each fold, by kind of fold. What runs have in common is
    fitted on one half of the collections and judged on the other, in turn."""
    lines = [
        "| measured | left out | n | mean error, % | corrected | median error, % | corrected | in interval, % | corrected"
        " | half width, % | corrected |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, words in LEFT_OUT.items():
        collections = observed_by_collection(pairs, found[kind], spreads[kind])
        halves = [dict(list(collections.items())[start::2]) for start in (0, 1)]
        if not all(halves):
            continue
        laws = [fit_relatedness(half) for half in reversed(halves)]
        for name, kin in SCENARIOS.items():
            judged = [
                one
                for half, law in zip(halves, laws, strict=True)
                for one in _sharpened(half.values(), kin, law)
            ]
            if judged:
                lines.append(_line(name, words, judged))
    return lines


def observed_by_collection(
    pairs: Mapping[int, Pair], rows: Sequence[HeldOut], spreads: Mapping[str, Spreads]
) -> dict[str, list[Observed]]:
    """The held-out runs on one GPU, as measurements beside their forecasts, by collection."""
    collections: dict[str, list[Observed]] = {}
    for row in rows:
        case = pairs[row.run][0]
        if case.execution.world_size == 1 and row.fold in spreads:
            collections.setdefault(case.run.file, []).append(
                _observed(row, case, spreads[row.fold])
            )
    return {name: collections[name] for name in sorted(collections)}


def _observed(row: HeldOut, case: Case, spreads: Spreads) -> Observed:
    assert case.measured_ms is not None
    e = case.execution
    log_sd = math.hypot(
        float(deviation(spreads, row.shares, row.seen)) * spreads.high / Z_95, row.outside_sd
    )
    variant = repr(
        (case.variant, e.precision, e.optimizer, e.channels_last, e.compile, case.software)
    )
    model = f"{case.spec}, {case.variant.mode}"
    card_sd = 0.0 if row.seen else float(card_deviation(spreads, row.shares, ""))
    run = Run(
        model,
        case.cluster.device.name,
        variant,
        e.global_batch,
        tuple(row.shares),
        log_sd,
        card_sd,
        row.forecast_ms,
    )
    return Observed(run, (math.log(case.measured_ms / row.forecast_ms),) * 4)


def _sharpened(
    collections: Iterable[Sequence[Observed]], kin: Kin, law: Relatedness
) -> list[Sharpened]:
    chance = random.Random(0)
    judged = []
    for runs in collections:
        for asked in chance.sample(runs, min(MOST_OF_A_COLLECTION, len(runs))):
            if known := kin(asked, runs, chance):
                told = Posterior(known, law)
                run = told.runs_of([asked.run])
                mean, log_sd = float(told.means(run)[0, 0]), float(told.log_sd(run)[0])
                judged.append(Sharpened(asked.log_ratios[0], mean, asked.run.log_sd, log_sd))
    return judged


def _of_another_card(
    asked: Observed, runs: Sequence[Observed], chance: random.Random
) -> Sequence[Observed]:
    a = asked.run
    kin = [
        o
        for o in runs
        if (o.run.model, o.run.variant) == (a.model, a.variant) and o.run.device != a.device
    ]
    return (
        [min(kin, key=lambda o: (abs(math.log(o.run.batch / a.batch)), chance.random()))]
        if kin
        else []
    )


def _of_another_batch(
    asked: Observed, runs: Sequence[Observed], chance: random.Random
) -> Sequence[Observed]:
    kin = [o for o in runs if o.run[:3] == asked.run[:3] and o.run.batch != asked.run.batch]
    return [chance.choice(kin)] if kin else []


def _of_other_models(n: int) -> Kin:
    def kin(asked: Observed, runs: Sequence[Observed], chance: random.Random) -> Sequence[Observed]:
        by_model: dict[str, list[Observed]] = {}
        for o in runs:
            if o.run.device == asked.run.device and o.run.model != asked.run.model:
                by_model.setdefault(o.run.model, []).append(o)
        if len(by_model) < n:
            return []
        return [chance.choice(by_model[model]) for model in chance.sample(sorted(by_model), n)]

    return kin


SCENARIOS: dict[str, Kin] = {
    "the same model on another card": _of_another_card,
    "another model on this card": _of_other_models(1),
    "3 other models on this card": _of_other_models(3),
    "10 other models on this card": _of_other_models(10),
    "the same run at another batch size": _of_another_batch,
}


SIZES_MEASURED = {0: 12, 1: 8, 3: 6, 10: 4}
"""Sizes measured on the second card, and the mean error in per cent that is asked."""
DRAWS = 8


def second_device(
    pairs: Mapping[int, Pair], rows: Sequence[HeldOut], spreads: Spreads
) -> list[str]:
    """A table: a model's times on a second card, from its sweep on the first, n sizes on the second, and with the other models'
    sweeps on both or without. Forecasts, spreads and what errors have in common are of other collections."""
    seen = [
        _observed(row, pairs[row.run][0], spreads)
        for row in rows
        if is_same_model(pairs[row.run][0])
    ]
    # one model whatever the size of its images, which `variant` tells apart
    seen = [o._replace(run=o.run._replace(model=o.run.model.partition(",")[0])) for o in seen]
    lines = [
        "| known beside the sweep on the first card | sizes measured on the second | asked, % | mean error, % | median, % |"
        " in the 90 % interval, % | half width, % | by second card, % |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for words, others in (("nothing", False), ("the other models' sweeps on both", True)):
        for n, asked in SIZES_MEASURED.items():
            judged = {
                card: _carried_over(seen, card, n, others, spreads.relatedness)
                for card in sorted({o.run.device for o in seen})
            }
            error, mean, _, sd = np.array([one for card in judged.values() for one in card]).T
            off = 100 * np.abs(np.exp(mean - error) - 1)
            by_card = [
                f"{card} {np.mean([100 * abs(math.exp(o.mean - o.error) - 1) for o in some]):.1f}"
                for card, some in judged.items()
            ]
            inside, width = (
                100 * (np.abs(error - mean) <= Z_95 * sd).mean(),
                100 * float(np.median(np.sinh(Z_95 * sd))),
            )
            figures = " | ".join(
                figure(float(value)) for value in (off.mean(), np.median(off), inside, width)
            )
            lines.append(f"| {words} | {n} | {asked} | {figures} | {', '.join(by_card)} |")
    return lines


def _carried_over(
    seen: Sequence[Observed], card: str, n: int, others: bool, law: Relatedness
) -> list[Sharpened]:
    judged = []
    for model in sorted({o.run.model for o in seen}):
        first = [o for o in seen if o.run.model == model and o.run.device != card]
        second = [o for o in seen if o.run.model == model and o.run.device == card]
        beside = [o for o in seen if o.run.model != model] if others else []
        for draw in range(DRAWS if n else 1):
            measured = set(
                random.Random(f"{model} {card} {n} {draw}").sample(range(len(second)), n)
            )
            told = Posterior([*first, *(second[i] for i in sorted(measured)), *beside], law)
            rest = [o for i, o in enumerate(second) if i not in measured]
            runs = told.runs_of([o.run for o in rest])
            means, sds = told.means(runs)[:, 0].tolist(), told.log_sd(runs).tolist()
            judged += [
                Sharpened(o.log_ratios[0], mean, o.run.log_sd, sd)
                for o, mean, sd in zip(rest, means, sds, strict=True)
            ]
    return judged


def _line(name: str, left_out: str, judged: Sequence[Sharpened]) -> str:
    error, mean, before, after = np.array(judged).T
    plain, with_them = (
        100 * np.abs(np.exp(guess - error) - 1) for guess in (np.zeros_like(mean), mean)
    )
    inside = [
        100 * (np.abs(error - at) <= Z_95 * sd).mean() for at, sd in ((0.0, before), (mean, after))
    ]
    widths = [100 * float(np.median(np.sinh(Z_95 * sd))) for sd in (before, after)]
    figures = [
        plain.mean(),
        with_them.mean(),
        np.median(plain),
        np.median(with_them),
        *inside,
        *widths,
    ]
    return f"| {name} | {left_out} | {len(judged)} | {' | '.join(figure(float(value)) for value in figures)} |"
