"""Forecasts of runs on many GPUs with their model, or their whole collection, left out of the fit of the kernel constants.

Runs under tensor, pipeline or context parallelism, and those on several nodes, are never fitted on (`runs.is_usable`); their
model's other runs are left out all the same. What a collective costs is fitted on nccl-tests alone (fitting/links.py), on none
of these runs; the few shares of overlap in `trainpace.forecast` are documented where they stand.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fitting.kernels import read_kernels
from fitting.problem import Problem
from fitting.runs import Pair, RunTable, read_pairs, usable
from trainpace.errors import TrainpaceError
from trainpace.forecast.constants import KernelConstants
from trainpace.validation.evaluate import forecast_case
from trainpace.validation.summary import family_of

COLLECTIONS = ("mosaic_llm_foundry", "torchtitan", "litgpt_flashattn_misc", "lambda_aggregated")
NOTHING = "nothing, since none is fitted on,"
NEVER_FITTED = ("megatron_papers_nemo", "bigscience_bloom", "llm_runs_and_misc")
"""Collections of which no run is fitted on."""


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
    """Runs that the benchmark is about: those on several GPUs, and the single ones that scaling is measured against."""
    case = pair[0]
    if case.run.file == "lambda_aggregated":
        return family_of(case.spec) == "resnet"
    return case.run.file in (*COLLECTIONS, *NEVER_FITTED) or (
        case.run.file.startswith("neusight") and case.execution.world_size > 1
    )


def fold_of(pair: Pair, kind: str) -> str:
    """What is left out of the fit with a run: its model, or its collection."""
    case = pair[0]
    return case.spec.rpartition("/")[2] if kind == "model" else case.run.file


def held_out_runs(data: Path, traces: Path, workers: int = 2) -> dict[str, list[HeldOutRun]]:
    """{"model": ..., "collection": ...}: the forecast of every wanted run, with that much left out of the fit."""
    pairs = read_pairs(data, traces, timed=False)
    jobs = []
    for kind in ("model", "collection"):
        folds = {fold_of(pair, kind) for pair in _fitted(pairs)} & {
            fold_of(pair, kind) for pair in pairs if is_wanted(pair)
        }
        jobs += [(kind, fold, str(data), str(traces)) for fold in ("", *sorted(folds))]
    found: dict[str, list[HeldOutRun]] = {"model": [], "collection": []}
    with ProcessPoolExecutor(workers) as pool:
        for (kind, fold, *_), results in zip(jobs, pool.map(_fold, jobs), strict=True):
            found[kind] += results
            print(f"{kind} {fold or NOTHING} left out: {len(results)} runs", flush=True)
    return found


def _fitted(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in usable(pairs) if pair[0].measured_ms is not None]


def _fold(job: tuple[str, str, str, str]) -> list[HeldOutRun]:
    """One fit; the fold without a name is for runs of which nothing is ever fitted on."""
    kind, left_out, data, traces = job
    pairs = read_pairs(Path(data), Path(traces), timed=False)
    fitted = _fitted(pairs)
    known = {fold_of(pair, kind) for pair in fitted}
    rest = [pair for pair in fitted if fold_of(pair, kind) != left_out]
    constants = Problem(RunTable(rest), read_kernels(Path(data)), KernelConstants()).solve()
    wanted = [
        pair
        for pair in pairs
        if is_wanted(pair) and (fold_of(pair, kind) if fold_of(pair, kind) in known else "") == left_out
    ]
    return [_forecast(pair, left_out or NOTHING, constants) for pair in wanted]


def _forecast(pair: Pair, fold: str, constants: KernelConstants) -> HeldOutRun:
    case, workload = pair
    try:
        result = forecast_case(case, workload, constants)
    except (TrainpaceError, AssertionError) as error:
        return HeldOutRun(case.run.index, fold, None, None, None, None, None, None, {}, str(error))
    interval, memory = result.step_time_interval_ms, result.memory
    return HeldOutRun(
        case.run.index,
        fold,
        result.step.total_ms if result.step else None,
        interval.low if interval else None,
        interval.high if interval else None,
        getattr(memory, f"{case.peak}_gib") if memory else None,
        memory.parameters_gib + memory.gradients_gib + memory.optimizer_states_gib if memory else None,
        memory.activations_gib if memory else None,
        dict(result.exposed_ms),
        result.reason,
    )
