"""Part of `python -m benchmarks cluster`: forecasts of measured runs on many GPUs, constants refitted without their model or collection.

Prints the table of the issue's first five rows as Markdown into benchmarks/results/cluster_accuracy.md: errors of step times,
executions ranked right, scaling efficiency, and peak memory by execution.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from fitting.cluster_folds import NOTHING, HeldOutRun, forecasts, held_out_constants
from fitting.prepare import CONFIGURATIONS
from fitting.runs import Pair, read_pairs

from trainpace.forecast import Case

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cluster_accuracy.md"
CLEARLY = 0.01
"""Executions whose measured throughputs differ by less are not ranked: sources round."""
FILLED = "card filled by cuDNN's trials"
Rows = Sequence[tuple[Case, HeldOutRun]]


def main() -> None:
    """Run the folds, or read those of an earlier run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        help="folder that `trainpace validate --traces` filled",
    )
    parser.add_argument(
        "--constants",
        type=Path,
        default=ROOT / "out/cluster_constants.json",
        help="kept between runs",
    )
    parser.add_argument("--again", action="store_true", help="refit even if --constants is there")
    parser.add_argument(
        "--kinds", nargs="+", default=["model", "collection"], choices=["model", "collection"]
    )
    options = parser.parse_args()
    if options.again or not options.constants.is_file():
        options.constants.parent.mkdir(exist_ok=True)
        options.constants.write_text(
            json.dumps(held_out_constants(options.data, options.traces, options.kinds))
        )
    every = read_pairs(options.data, options.traces, timed=False)
    pairs = {pair[0].run.index: pair for pair in every}
    found = {
        kind: forecasts(every, kind, folds)
        for kind, folds in json.loads(options.constants.read_text()).items()
    }
    text = report(pairs, found)
    RESULT.write_text(text)
    print(text)


def report(pairs: dict[int, Pair], found: dict[str, list[HeldOutRun]]) -> str:
    """The tables as Markdown, with date and machine."""
    main = "model" if "model" in found else "collection"
    lines = [
        "# Forecasts of many GPUs, on held-out runs",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. Errors are |forecast - measured| / measured in",
        "per cent. Kernel constants are fitted anew without the run's model, or without its collection; Megatron's, NeMo's and",
        "bigscience's runs are never fitted on. What collectives cost is fitted on nccl-tests alone."
        f" {len(pairs)} measured runs had traces.",
        "",
        "| runs | left out | n | mean | median | 95th | bias | in 90 % interval | to reach |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in found:
        rows = [(pairs[row.run][0], row) for row in found[kind]]
        for name, goal, belongs in GROUPS:
            chosen = [(c, r) for c, r in rows if belongs(c) and c.measured_ms and r.forecast_ms]
            if chosen and (kind == main or all(r.fold != NOTHING for _, r in chosen)):
                lines.append(_errors(name, kind, chosen, goal))
    rows = [(pairs[row.run][0], row) for row in found[main]]
    lines += [
        "",
        *_unsupported(rows),
        "",
        f"## Executions ranked right, {main} left out",
        "",
        *ranking(rows),
    ]
    lines += [
        "",
        f"## Scaling efficiency of ResNet-50 (lambda_aggregated), {main} left out",
        "",
        *scaling(rows),
    ]
    lines += ["", "## Peak memory by execution", "", *memory(rows)]
    lines += ["", f"## Every run of LLMs, {main} left out", "", *every(rows)]
    return "\n".join(lines) + "\n"


def _is_nemo(case: Case) -> bool:
    return "NeMo" in case.run.framework


GROUPS: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    (
        "Megatron/Selene-type, all",
        "7",
        lambda c: c.run.file in ("megatron_papers_nemo", "bigscience_bloom"),
    ),
    (
        "megatron_papers_nemo, Megatron-LM",
        "7",
        lambda c: c.run.file == "megatron_papers_nemo" and not _is_nemo(c),
    ),
    (
        "megatron_papers_nemo, Calculon's rows (3.65 there)",
        "7",
        lambda c: "calculon" in c.run.notes and bool(c.measured_ms),
    ),
    (
        "megatron_papers_nemo, NeMo in FP8",
        "7",
        lambda c: c.run.file == "megatron_papers_nemo" and _is_nemo(c),
    ),
    ("bigscience_bloom, A100", "7", lambda c: c.run.file == "bigscience_bloom"),
    ("mosaic_llm_foundry", "10", lambda c: c.run.file == "mosaic_llm_foundry"),
    ("torchtitan", "10", lambda c: c.run.file == "torchtitan"),
    ("litgpt_flashattn_misc", "10", lambda c: c.run.file == "litgpt_flashattn_misc"),
    (
        "lambda_aggregated, ResNet-50, 2 to 8 GPUs",
        "-",
        lambda c: c.run.file == "lambda_aggregated" and 2 <= c.execution.world_size <= 8,
    ),
    ("neusight, 4 GPUs", "6", lambda c: c.run.file.startswith("neusight")),
)


def _errors(name: str, kind: str, rows: Rows, goal: str) -> str:
    measured = np.array([case.measured_ms for case, _ in rows], dtype=float)
    ms, low, high = (
        np.array([getattr(row, f) for _, row in rows]) for f in ("forecast_ms", "low_ms", "high_ms")
    )
    error = 100 * (ms / measured - 1)
    size = np.abs(error)
    inside = 100 * ((low <= measured) & (measured <= high)).mean()
    numbers = (size.mean(), np.median(size), np.quantile(size, 0.95), np.median(error), inside)
    return (
        f"| {name} | {kind} | {len(rows)} | "
        + " | ".join(f"{x:.1f}" for x in numbers)
        + f" | {goal} |"
    )


def _unsupported(rows: Rows) -> Iterable[str]:
    reasons: dict[tuple[str, str], int] = {}
    for case, row in rows:
        if row.forecast_ms is None:
            key = case.run.file, row.reason
            reasons[key] = reasons.get(key, 0) + 1
    yield (
        "Not forecast:"
        if reasons
        else "Every run was forecast; neusight's 4-GPU runs are not among the visible ones."
    )
    for (file, reason), count in sorted(reasons.items()):
        yield f"- {file}: {count} runs: {reason}"


def ranking(rows: Rows) -> Iterable[str]:
    """Pairs of runs of one model on as many of the same GPUs: does the forecast say which has more tokens a second?"""
    yield "| runs | pairs | ranked right, per cent | to reach |"
    yield "|---|--:|--:|--:|"
    for file in ("mosaic_llm_foundry", "torchtitan", "bigscience_bloom"):
        alike: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        for case, row in rows:
            if case.run.file == file and case.measured_ms and row.forecast_ms:
                tokens = case.execution.global_batch * (case.variant.sequence_length or 1)
                key = (
                    case.spec if file != "bigscience_bloom" else "",
                    case.cluster.device.name,
                    case.execution.world_size,
                )
                alike.setdefault(key, []).append(
                    (tokens / case.measured_ms, tokens / row.forecast_ms)
                )
        right = [
            (a[0] - b[0]) * (a[1] - b[1]) > 0
            for same in alike.values()
            for a, b in itertools.combinations(same, 2)
            if abs(a[0] / b[0] - 1) > CLEARLY and abs(b[0] / a[0] - 1) > CLEARLY
        ]
        if right:
            goal = "90" if file != "bigscience_bloom" else "-"
            yield f"| {file} | {len(right)} | {100 * float(np.mean(right)):.1f} | {goal} |"


def scaling(rows: Rows) -> Iterable[str]:
    """Throughput on n GPUs over n times that of one, with the same batch a GPU and software."""

    def key(case: Case) -> tuple[object, ...]:
        e = case.execution
        return case.cluster.device.name, e.precision, e.micro_batch, case.run.framework_version

    chosen = [
        (c, r)
        for c, r in rows
        if c.run.file == "lambda_aggregated" and c.measured_ms and r.forecast_ms
    ]
    alone = {
        key(c): (c.measured_ms or 0, r.forecast_ms or 0)
        for c, r in chosen
        if c.execution.world_size == 1
    }
    points: dict[int, list[float]] = {}
    for case, row in chosen:
        n = case.execution.world_size
        if 2 <= n <= 8 and key(case) in alone and row.forecast_ms:
            one = alone[key(case)]
            points.setdefault(n, []).append(
                100 * (one[1] / row.forecast_ms - one[0] / (case.measured_ms or 1))
            )
    yield "| GPUs | n | mean points off | worst | bias | to reach |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for name, values in [
        *((str(n), points[n]) for n in sorted(points)),
        ("all", list(itertools.chain(*points.values()))),
    ]:
        size = np.abs(values)
        yield f"| {name} | {len(values)} | {size.mean():.1f} | {size.max():.1f} | {np.median(values):+.1f} | 5 |"


def memory(rows: Rows) -> Iterable[str]:
    """Peaks that runs state, and the parts that Korthikanti et al. 2022 draw in figure 1, as Calculon's authors read them.

    The figure's states are 18 bytes times the parameters of a stage's blocks, to the last digit: without the vocabulary's, which
    the fullest stage holds besides. Where cuDNN tries convolutions the card fills up (`validation.stated_peak_gib`), which is
    what is forecast of it, and says nothing of the model.
    """
    yield "| collection | execution | n | mean | bias | to reach |"
    yield "|---|---|--:|--:|--:|--:|"
    errors: dict[tuple[str, str], list[float]] = {}
    for case, row in rows:
        parts = re.search(
            r"parameters\+optimizer ([\d.]+) GB, activations ([\d.]+) GB", case.run.notes
        )
        if case.run.peak_mem_gib and row.memory_gib is not None:
            peak = f"{case.peak}, {FILLED}" if case.run.cudnn_benchmark == "yes" else case.peak
            key = f"{case.run.file}, {peak}", _execution_text(case)
            errors.setdefault(key, []).append(100 * (row.memory_gib / case.run.peak_mem_gib - 1))
        elif parts and row.states_gib is not None and row.activations_gib is not None:
            for name, gib, stated in (
                ("states", row.states_gib, parts[1]),
                ("activations", row.activations_gib, parts[2]),
            ):
                key = f"{case.run.file}, {name} of figure 1", _execution_text(case)
                errors.setdefault(key, []).append(100 * (gib / float(stated) - 1))
    for (collection, execution), values in sorted(errors.items()):
        yield f"| {collection} | {execution} | {len(values)} | {np.abs(values).mean():.1f} | {np.median(values):+.1f} | 5 |"
    for name, chosen in (
        ("all", list(errors.values())),
        (
            f"all but {FILLED}",
            [values for (collection, _), values in errors.items() if FILLED not in collection],
        ),
    ):
        every = list(itertools.chain(*chosen))
        if every:
            yield f"| {name} | | {len(every)} | {np.abs(every).mean():.1f} | {np.median(every):+.1f} | 5 |"


def _execution_text(case: Case) -> str:
    e = case.execution
    sizes = [
        f"{name} {size}" for name, size in (("tp", e.tp), ("pp", e.pp), ("cp", e.cp)) if size > 1
    ]
    extra = [f"ZeRO {e.zero_stage}"] * bool(e.zero_stage) + [
        f"recompute {e.activation_checkpointing}"
    ]
    return ", ".join(sizes + extra)


def every(rows: Rows) -> Iterable[str]:
    """One line a run."""
    yield "| collection | model | GPUs | tokens | execution | micro x acc | measured ms | forecast ms | error |"
    yield "|---|---|---|--:|---|--:|--:|--:|--:|"
    for case, row in sorted(rows, key=lambda pair: pair[1].run):
        if case.run.file == "lambda_aggregated" or not case.measured_ms or not row.forecast_ms:
            continue
        e = case.execution
        sized = (
            f"/{CONFIGURATIONS}/" in case.run.model_spec
        )  # a model that its run names by its sizes
        model = case.run.model if sized else case.run.model_spec.rpartition("/")[2]
        extra = f", {e.precision}" * (e.precision != "bf16") + ", compiled" * e.compile
        yield (
            f"| {case.run.file} | {model} | {e.world_size} x {case.cluster.device.name} | {case.variant.sequence_length}"
            f" | {_execution_text(case)}{extra} | {e.micro_batch} x {e.accumulation} | {case.measured_ms:.0f}"
            f" | {row.forecast_ms:.0f} | {100 * (row.forecast_ms / case.measured_ms - 1):+.1f} % |"
        )


if __name__ == "__main__":
    main()
