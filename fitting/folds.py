"""Forecasts of runs that their constants were not fitted on:

GPUs left out, families of models left out.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from fitting.cards import all_kernels, fit_cards, start_constants, start_of_steps
from fitting.kernels import DEVICES, read_kernels
from fitting.problem import FIXED_BY_KERNELS, Problem
from fitting.products import CARDS, FORMATS, fit_width, read_products, sample
from fitting.runs import Pair, RunTable, read_pairs, usable
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import write_whole
from trainpace.forecast import case_table, family_of
from trainpace.forecast.constants import CardConstants, KernelConstants, measured_cards
from trainpace.forecast.matmul import MatmulModel, Width, WidthModel, fitted_matmuls
from trainpace.forecast.target import FittedKernels

FAMILY_FOLDS = 5
SECOND_DEVICE = "profet_aws"
"""The collection of whole sweeps of the same models on two cards:

5 batch sizes x 5 image sizes of 8 networks on K80 and T4.
"""
THINNING = 6
"""Of the thousands of forward passes, this part is fitted and forecast:

a fold has to end in minutes.
"""
ITERATIONS = 16
DEVICE_FOLDS = {
    "RTX 3090": r"RTX 3090",
    "Volta": r"V100|Titan V",
    "Turing": r"T4|RTX 2080|Titan RTX",
    "A100": r"A100",
    "Ampere workstation": r"A10$|A10G|A40|RTX A",
    "Hopper, Blackwell": r"H100|H200|GH200|G?B[23]00",
    "Pascal": r"P100|P4$|GTX 1080|Titan X",
    "Kepler": r"K80",
    "Ada, CDNA": r"RTX 40[5-9]0|RTX 6000 Ada|L4|MI[123]",
}
"""Cards are left out with their relatives: a new card usually is one of a new family."""


class HeldOut(NamedTuple):
    """One forecast of a run in its fold:

    what its step is made of, and whether runs of its card were in the fit.
    """

    run: int
    fold: str
    forecast_ms: float
    shares: tuple[float, ...]
    seen: bool
    outside_sd: float


def device_fold(name: str) -> str:
    """The fold of a card."""
    return next(fold for fold, pattern in DEVICE_FOLDS.items() if re.match(pattern, name))


def family_fold(spec: str) -> int:
    """The fold of a model's family, by a checksum of its name."""
    return zlib.crc32(family_of(spec).encode()) % FAMILY_FOLDS


def held_out(data: Path, traces: Path, kept: Path, workers: int = 2) -> dict[str, list[HeldOut]]:
    """{"device": ..., "family": ...}: every run's forecast with its card, or its model's family,
    left out of the fit; and {"collection": ...}: those of SECOND_DEVICE, all of it left out.

    Each fold is written to the folder `kept` when it is done, and read from there the next time: a
    fold takes many minutes.
    """
    kept.mkdir(parents=True, exist_ok=True)
    jobs = [("device", fold, data, traces, kept) for fold in DEVICE_FOLDS]
    jobs += [("family", str(fold), data, traces, kept) for fold in range(FAMILY_FOLDS)]
    jobs += [("collection", SECOND_DEVICE, data, traces, kept)]
    found: dict[str, list[HeldOut]] = {"device": [], "family": [], "collection": []}
    with ProcessPoolExecutor(workers) as pool:
        for (kind, fold, *_), results in zip(jobs, pool.map(_fold, jobs), strict=True):
            found[kind] += results
            print(f"{kind} fold {fold}: {len(results)} runs", flush=True)
    return found


def _fold(job: tuple[str, str, Path, Path, Path]) -> list[HeldOut]:
    kind, fold, data, traces, kept = job
    file = kept / f"{kind}-{fold}.json"
    if not file.is_file():
        write_whole(file, json.dumps(_fitted_without(kind, fold, data, traces, kept)))
    return [HeldOut(*row) for row in json.loads(file.read_text())]


def _fitted_without(kind: str, fold: str, data: Path, traces: Path, kept: Path) -> list[HeldOut]:
    pairs = read_pairs(data, traces)

    def is_out(pair: Pair) -> bool:
        if kind == "device":
            return device_fold(pair[0].cluster.device.name) == fold
        if kind == "collection":
            return pair[0].run.file == fold
        return str(family_fold(pair[0].spec)) == fold

    pairs = [
        pair
        for pair in pairs
        if pair[0].run.file != "timm_inference" or pair[0].run.index % THINNING == 0
    ]
    fitted = [pair for pair in usable(pairs) if not is_out(pair)]
    without = frozenset(
        name for name in DEVICES.values() if kind == "device" and device_fold(name) == fold
    )
    cards = _cards_without(fold, data, kept) if kind == "device" else measured_cards()
    products = products_without(fold, data) if kind == "device" else None
    kernels, start = read_kernels(data, without=without), start_of_steps(cards)
    table = RunTable(fitted, cards, products=products)
    constants = Problem(table, kernels.select(kernels.family == ""), start, FIXED_BY_KERNELS).solve(
        ITERATIONS
    )
    seen = {case.cluster.device.name for case, _ in fitted}
    return list(
        _forecasts([pair for pair in pairs if is_out(pair)], fold, seen, constants, products, cards)
    )


def _cards_without(fold: str, data: Path, kept: Path) -> CardConstants:
    """What kernels tell where those of the fold's cards were not measured."""
    kernels = all_kernels(data, kept / "kernels.pickle")
    fold_of = {name: _fold_or_none(name) for name in set(kernels.device.tolist())}
    return fit_cards(
        kernels.select(np.array([fold_of[name] != fold for name in kernels.device])),
        start_constants(),
    )


def _fold_or_none(name: str) -> str | None:
    return next((fold for fold, pattern in DEVICE_FOLDS.items() if re.match(pattern, name)), None)


def products_without(fold: str, data: Path) -> MatmulModel | None:
    """The model of products fitted without the cards of a fold; None where it has none of them."""
    if not any(device_fold(card) == fold for card in CARDS.values()):
        return None
    widths: dict[Width, WidthModel] = {}
    for width in FORMATS:
        products = sample(read_products(data, width))
        rest = products.at(np.array([device_fold(card) != fold for card in products.card]))
        # without Hopper and Blackwell hardly any card has an 8-bit rate
        widths[width] = fit_width(rest, width) if len(rest.m) else fitted_matmuls().widths[width]
    return replace(fitted_matmuls(), widths=widths)


def _forecasts(
    pairs: Sequence[Pair],
    fold: str,
    seen: set[str],
    constants: KernelConstants,
    products: MatmulModel | None,
    cards: CardConstants,
) -> Iterator[HeldOut]:
    for case, workload in pairs:
        try:
            table = case_table(
                case, workload, FittedKernels(constants, matmuls=products, cards=cards)
            )
            if not table.timed[0]:
                continue
            shares, outside_sd = (
                tuple(round(float(x), 4) for x in table.shares()[0]),
                round(float(table.outside_sds[0]), 4),
            )
        except TrainpaceError:  # sizes that only the model tells to be impossible
            continue
        yield HeldOut(
            case.run.index,
            fold,
            float(table.step_ms[0]),
            shares,
            case.cluster.device.name in seen,
            outside_sd,
        )
