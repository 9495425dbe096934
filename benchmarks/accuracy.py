"""`make bench-accuracy`: forecasts of measured runs with their card, or their family of models, left out of the fit.

Refits the constants for every fold (about an hour and a half on two cores, estimated from four of them; interrupted, the same
command goes on: remove out/held_out.folds after a change of the kernels' form), then forecasts what was left out, and prints
a table by collection beside what other tools claim. Writes benchmarks/results/accuracy.md and, for `make fit`, the
quantiles of the intervals.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from fitting.folds import HeldOut, held_out
from fitting.intervals import Error, fit_spreads
from fitting.runs import Pair, is_same_model, read_pairs

from trainpace.forecast.intervals import COVERAGE, Spread, Spreads, deviation, with_host_spread
from trainpace.records import to_jsonable, write_whole
from trainpace.validation import Case

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/accuracy.md"
INTERVALS = ROOT / "src/trainpace/forecast/intervals.json"
GOALS = {
    ("neusight_labels, NVIDIA, forward_backward", "device"): ("NeuSight 7.3, roofline 32", "5"),
    ("neusight_labels, NVIDIA, inference", "device"): ("NeuSight 9.7", "7"),
    ("timm_inference", "family"): ("-", "-"),
    ("timm_train_rtx3090", "family"): ("roofline 27", "8"),
    ("timm_train_rtx3090", "device"): ("-", "12"),
    ("lambda_aggregated, 1 GPU", "device"): ("Habitat 5 to 1760", "12"),
    ("profet_aws", "device"): ("-", "12"),
    ("ryujaehun_pytorch_gpu_benchmark, 1 GPU", "device"): ("-", "12"),
}


def main() -> None:
    """Run the folds, or read those of an earlier run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, default=ROOT / "out/held_out.json", help="kept between runs")
    parser.add_argument("--again", action="store_true", help="refit, but for folds that an interrupted run kept")
    parser.add_argument("--write-intervals", action="store_true")
    options = parser.parse_args()
    if options.again or not options.held_out.is_file():
        kept = options.held_out.with_suffix(".folds")
        write_whole(options.held_out, json.dumps(held_out(options.data, options.traces, kept)))
        shutil.rmtree(kept)
    found = {kind: [HeldOut(*row) for row in rows] for kind, rows in json.loads(options.held_out.read_text()).items()}
    pairs = {case.run.index: (case, workload) for case, workload in read_pairs(options.data, options.traces)}
    if options.write_intervals:
        write_intervals(pairs, found)
    text = report(pairs, found)
    RESULT.write_text(text)
    print(text)


def group_of(pair: Pair) -> Iterable[str]:
    """The lines of the table that a run counts in."""
    run, device = pair[0].run, pair[0].cluster.device
    if run.file == "neusight_labels":
        return [f"{run.file}, {'NVIDIA' if device.vendor == 'NVIDIA' else 'AMD'}, {run.mode}"]
    if run.file in ("lambda_aggregated", "ryujaehun_pytorch_gpu_benchmark"):
        return [f"{run.file}, {'1 GPU' if (run.num_gpus or 1) == 1 else 'several GPUs'}"]
    return [run.file]


def report(pairs: dict[int, Pair], found: dict[str, list[HeldOut]]) -> str:
    """The table as Markdown, with date and machine."""
    lines = [
        "# Accuracy on held-out runs",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores.",
    ]
    lines += [
        "Errors are |forecast - measured| / measured in per cent. Constants are fitted anew without the card (and its"
    ]
    lines += [
        "relatives: fitting/folds.py) or without the model's family; intervals come from the errors of the other folds.",
        "",
    ]
    lines += [
        "| runs | left out | n | mean | median | 95th | bias | in 90 % interval | half width | peers, mean | to reach |"
    ]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for kind in ("device", "family"):
        groups: dict[str, list[HeldOut]] = {}
        intervals = honest_intervals(pairs, found[kind])
        for row in found[kind]:
            for name in group_of(pairs[row.run]):
                groups.setdefault(name, []).append(row)
        for name in sorted(groups):
            lines.append(_line(name, kind, groups[name], pairs, intervals))
    lines += [
        "",
        "With one measurement of the same model on another card (transfer):",
        "",
        *transfer(pairs, found["device"]),
        "",
    ]
    lines += ["## Worst ten of each collection, card left out", ""]
    lines += worst(pairs, found["device"])
    return "\n".join(lines) + "\n"


def _line(name: str, kind: str, rows: Sequence[HeldOut], pairs: dict[int, Pair], intervals: dict[str, Spreads]) -> str:
    measured = np.array([pairs[row.run][0].measured_ms for row in rows], dtype=float)
    ms = np.array([row.forecast_ms for row in rows])
    ends = np.array([_ends(intervals[row.fold], row) for row in rows])
    low, high = ms * ends[:, 0], ms * ends[:, 1]
    error = 100 * (ms / measured - 1)
    size = np.abs(error)
    inside = 100 * ((low <= measured) & (measured <= high)).mean()
    peers, goal = GOALS.get((name, kind), ("-", "-"))
    numbers = (
        size.mean(),
        np.median(size),
        np.quantile(size, 0.95),
        np.median(error),
        inside,
        np.median(50 * (high - low) / ms),
    )
    return f"| {name} | {kind} | {len(rows)} | " + " | ".join(f"{x:.1f}" for x in numbers) + f" | {peers} | {goal} |"


def honest_intervals(pairs: dict[int, Pair], rows: Sequence[HeldOut]) -> dict[str, Spreads]:
    """{fold: spreads}, from the errors of all other folds: an interval must not know the errors that it is judged by."""
    errors = [(row.fold, error) for row, error in _errors(pairs, rows)]
    return {
        fold: fit_spreads([error for other, error in errors if other != fold], ())
        for fold in sorted({row.fold for row in rows})
    }


def _ends(spreads: Spreads, row: HeldOut) -> tuple[float, float]:
    sd = deviation(spreads, row.shares, row.seen)
    spread = with_host_spread(
        Spread(math.exp(spreads.low * sd), math.exp(spreads.high * sd), COVERAGE, ""), row.host_sd
    )
    return spread.low, spread.high


def _errors(pairs: dict[int, Pair], rows: Sequence[HeldOut]) -> list[tuple[HeldOut, Error]]:
    known = [row for row in rows if teaches(pairs[row.run][0])]
    return [
        (row, Error(_log_error(row, pairs), row.shares, row.seen, pairs[row.run][0].run.file, row.host_sd))
        for row in known
    ]


def teaches(case: Case) -> bool:
    """Do the errors of this run say how far forecasts of torch are off?"""
    return is_same_model(case) and case.software.framework != "tensorflow"


def _log_error(row: HeldOut, pairs: dict[int, Pair]) -> float:
    return math.log((pairs[row.run][0].measured_ms or 1) / row.forecast_ms)


def transfer(pairs: dict[int, Pair], rows: Sequence[HeldOut]) -> list[str]:
    """Scale each run's forecast by measured / forecast of the same run on another card; the median over the other cards."""
    alike: dict[tuple[object, ...], list[HeldOut]] = {}
    for row in rows:
        case = pairs[row.run][0]
        if case.execution.world_size == 1 and is_same_model(case):
            e = case.execution
            key = (case.run.file, case.spec, case.variant, e.precision, e.channels_last, e.compile)
            alike.setdefault(key, []).append(row)
    errors: dict[str, list[float]] = {}
    for (file, *_), same in alike.items():
        for row in same:
            case = pairs[row.run][0]
            others = [o for o in same if pairs[o.run][0].cluster.device.name != case.cluster.device.name]
            if not others:
                continue
            nearest = min(
                others, key=lambda o: abs(math.log(pairs[o.run][0].execution.micro_batch / case.execution.micro_batch))
            )
            ratio = (pairs[nearest.run][0].measured_ms or 1) / nearest.forecast_ms
            errors.setdefault(str(file), []).append(100 * abs(row.forecast_ms * ratio / (case.measured_ms or 1) - 1))
    return [
        f"- {file}: mean {np.mean(e):.1f} %, median {np.median(e):.1f} % over {len(e)} runs"
        for file, e in sorted(errors.items())
    ]


def worst(pairs: dict[int, Pair], rows: Sequence[HeldOut]) -> list[str]:
    """The worst rows of every collection."""
    lines = [
        "| collection | model | card | precision | batch | measured ms | forecast ms | error |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    files = sorted({pairs[row.run][0].run.file for row in rows})
    for file in files:
        mine = [row for row in rows if pairs[row.run][0].run.file == file]
        mine.sort(key=lambda row: -abs(math.log(row.forecast_ms / (pairs[row.run][0].measured_ms or 1))))
        for row in mine[:10]:
            case = pairs[row.run][0]
            gpu = (
                case.cluster.device.name
                if case.execution.world_size == 1
                else f"{case.execution.world_size} x {case.cluster.device.name}"
            )
            model = case.run.model_spec.rpartition("/")[2]
            error = 100 * (row.forecast_ms / (case.measured_ms or 1) - 1)
            lines.append(
                f"| {file} | {model} | {gpu} | {case.execution.precision} | {case.execution.micro_batch}"
                f" | {case.measured_ms:.0f} | {row.forecast_ms:.0f} | {error:+.0f} % |"
            )
    return lines


def write_intervals(pairs: dict[int, Pair], found: dict[str, list[HeldOut]]) -> None:
    """Deviations and quantiles from the errors of both kinds of folds."""
    errors = [error for kind in ("device", "family") for _, error in _errors(pairs, found[kind])]
    devices = tuple(sorted({case.cluster.device.name for case, _ in pairs.values()}))
    INTERVALS.write_text(json.dumps(to_jsonable(fit_spreads(errors, devices)), indent=1) + "\n")


if __name__ == "__main__":
    main()
