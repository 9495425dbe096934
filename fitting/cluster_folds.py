"""Forecasts of runs on many GPUs with their model, or their whole collection, left out of the fit
of the kernel constants.

Runs under tensor, pipeline or context parallelism, and those on several nodes, are never fitted on
(`runs.is_usable`); their model's other runs are left out all the same. What a collective costs is
fitted on nccl-tests alone (fitting/links.py), on none of these runs; the few shares of overlap in
`trainpace.forecast` are documented where they stand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from fitting.cards import start_of_steps
from fitting.kernels import read_kernels
from fitting.problem import FIXED_BY_KERNELS, Problem
from fitting.runs import Pair, RunTable, read_pairs, usable
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import from_json, to_jsonable
from trainpace.forecast import family_of, forecast_case, stated_peak_gib
from trainpace.forecast.constants import KernelConstants, measured_cards
from trainpace.forecast.target import FittedKernels

COLLECTIONS = ("mosaic_llm_foundry", "torchtitan", "litgpt_flashattn_misc", "lambda_aggregated")
NOTHING = "none of it is fitted on"
NEVER_FITTED = ("megatron_papers_nemo", "bigscience_bloom", "llm_runs_and_misc")
"""Collections of which no run is fitted on."""


THINNED = {"timm_inference", "timm_train_rtx3090", "profet_aws", "ryujaehun_pytorch_gpu_benchmark"}
"""Large collections of one card each:

one run in four decides the same constants in a quarter of the time.
"""


class HeldOutRun(NamedTuple):
    """The forecast of one run; None where it cannot be forecast, with the reason. Memory is of the kind that the run states."""

    run: int
    fold: str
    forecast_ms: float | None
    low_ms: float | None
    high_ms: float | None
    memory_gib: float | None
    states_gib: float | None
    activations_gib: float | None
    exposed_ms: dict[str, float]
    reason: str


def is_wanted(pair: Pair) -> bool:
    """Runs that the benchmark is about:

    those on several GPUs, and the single ones that scaling is measured against.
    """
    case = pair[0]
    if case.run.file == "lambda_aggregated":
        return family_of(case.spec) == "resnet"
    return case.run.file in (*COLLECTIONS, *NEVER_FITTED) or (
        case.run.file.startswith("neusight") and case.execution.world_size > 1
    )


def fold_of(pair: Pair, kind: str) -> str:
    """The model, or the collection, that is left out of the fit with a run."""
    case = pair[0]
    return case.spec.rpartition("/")[2] if kind == "model" else case.run.file


def folds_of(pairs: list[Pair], kind: str) -> list[str]:
    """The folds of the runs that are wanted; "" is for runs of which nothing is ever fitted on."""
    known = {fold_of(pair, kind) for pair in _fitted(pairs)}
    return ["", *sorted(known & {fold_of(pair, kind) for pair in pairs if is_wanted(pair)})]


def held_out_constants(
    data: Path, traces: Path, kinds: Sequence[str], workers: int = 2
) -> dict[str, dict[str, Any]]:
    """{"model" or "collection": {fold: constants fitted without it, as JSON's values}}."""
    pairs = read_pairs(data, traces, timed=False)
    jobs = [
        (kind, fold, str(data), str(traces)) for kind in kinds for fold in folds_of(pairs, kind)
    ]
    jobs = [job for job in jobs if job[1]] + [
        ("", "", str(data), str(traces))
    ]  # one fit without nothing is enough
    fitted: dict[tuple[str, str], Any] = {}
    with ProcessPoolExecutor(workers) as pool:
        for (kind, fold, *_), constants in zip(jobs, pool.map(_fit, jobs), strict=True):
            fitted[kind, fold] = constants
            print(f"fitted without {kind} {fold}" if fold else "fitted on all", flush=True)
    return {
        kind: {fold: fitted[kind if fold else "", fold] for fold in folds_of(pairs, kind)}
        for kind in kinds
    }


def _fitted(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in usable(pairs) if pair[0].measured_ms is not None]


def _fit(job: tuple[str, str, str, str]) -> dict[str, Any]:
    kind, left_out, data, traces = job
    rest = [
        pair
        for pair in _fitted(read_pairs(Path(data), Path(traces)))
        if (not left_out or fold_of(pair, kind) != left_out)
        and (pair[0].run.file not in THINNED or pair[0].run.index % 4 == 0)
    ]
    cards, kernels = measured_cards(), read_kernels(Path(data))
    start = start_of_steps(cards)
    problem = Problem(
        RunTable(rest, cards), kernels.select(kernels.family == ""), start, FIXED_BY_KERNELS
    )
    return to_jsonable(problem.solve())


def forecasts(pairs: list[Pair], kind: str, constants: dict[str, Any]) -> list[HeldOutRun]:
    """Every wanted run, forecast with the constants of its fold."""
    records = {
        fold: from_json(json.dumps(values), KernelConstants) for fold, values in constants.items()
    }
    found = []
    for pair in pairs:
        if is_wanted(pair):
            fold = fold_of(pair, kind) if fold_of(pair, kind) in records else ""
            found.append(_forecast(pair, fold or NOTHING, records[fold]))
    return found


def _forecast(pair: Pair, fold: str, constants: KernelConstants) -> HeldOutRun:
    case, workload = pair
    try:
        result = forecast_case(case, workload, FittedKernels(constants))
    except (TrainpaceError, AssertionError) as error:
        return HeldOutRun(case.run.index, fold, None, None, None, None, None, None, {}, str(error))
    interval, memory = result.step_time_interval_ms, result.memory
    return HeldOutRun(
        case.run.index,
        fold,
        result.step.total_ms if result.step else None,
        interval.low if interval else None,
        interval.high if interval else None,
        stated_peak_gib(case, memory) if memory else None,
        memory.parameters_gib + memory.gradients_gib + memory.optimizer_states_gib
        if memory
        else None,
        memory.activations_gib if memory else None,
        dict(result.exposed_ms),
        result.reason,
    )
