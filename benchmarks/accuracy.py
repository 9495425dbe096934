"""`python -m benchmarks accuracy`: forecasts of measured runs with their card, or their family of models, left out of the fit.

Refits the constants for every fold (half an hour to an hour on two cores; interrupted, the same command goes on: remove
out/held_out.folds after a change of the kernels' form), then forecasts what was left out, and prints tables by
collection beside what other tools claim, by card and kind of model, and by software. Writes benchmarks/results/accuracy.md, the
chart docs/pictures/accuracy.png and, for `python -m fitting fit`, the quantiles of the intervals.

`--held-out out/held_out.folds` reports the folds that an interrupted run has kept, and says which are missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from accuracy_chart import draw
from accuracy_measured import observed_by_collection, second_device, with_measurements
from accuracy_pairs import order_of_executions
from accuracy_tables import LEFT_OUT, SIZES, Judged, by_card, by_collection, by_software, worst
from fitting.folds import DEVICE_FOLDS, FAMILY_FOLDS, HeldOut, held_out
from fitting.intervals import Error, fit_spreads
from fitting.relatedness import fit_relatedness
from fitting.runs import Pair, is_same_model, read_pairs
from msgspec.structs import replace

from trainpace.core.records import to_jsonable, write_whole
from trainpace.forecast import Case
from trainpace.forecast.uncertainty import (
    COVERAGE,
    Observed,
    Spread,
    Spreads,
    deviation,
    fitted_spreads,
    widened,
)

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/accuracy.md"
INTERVALS = ROOT / "src/trainpace/forecast/intervals.json"
PICTURE = ROOT / "docs/pictures/accuracy.png"
CARRIED_OVER = (
    "PROFET's published sweeps (TensorFlow; five batch sizes at five image sizes of eight networks, on a K80 and a T4), each",
    "model in turn on either card, its measured sizes on the second drawn at random. The whole collection was left out: of",
    "the constants, the intervals, and what errors have in common.",
)
FOLDS = {"device": tuple(DEVICE_FOLDS), "family": tuple(str(fold) for fold in range(FAMILY_FOLDS))}


def main() -> None:
    """Run the folds, or read those of an earlier run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument(
        "--held-out",
        type=Path,
        default=ROOT / "out/held_out.json",
        help="kept between runs; or a folder of kept folds",
    )
    parser.add_argument(
        "--again", action="store_true", help="refit, but for folds that an interrupted run kept"
    )
    parser.add_argument("--write-intervals", action="store_true")
    options = parser.parse_args()
    if options.held_out.is_dir():
        if options.again or options.write_intervals:
            parser.error(
                "a folder of folds can be reported only: give --held-out a file, or leave it out."
            )
        found = read_folds(options.held_out)
        if not any(found.values()):
            parser.error(
                f"{options.held_out} holds no fold: their files are named device-FOLD.json and family-FOLD.json."
            )
    else:
        if options.again or not options.held_out.is_file():
            kept = options.held_out.with_suffix(".folds")
            write_whole(options.held_out, json.dumps(held_out(options.data, options.traces, kept)))
            shutil.rmtree(kept)
        kinds = json.loads(options.held_out.read_text())
        found = {kind: [HeldOut(*row) for row in rows] for kind, rows in kinds.items()}
    pairs = {
        case.run.index: (case, workload)
        for case, workload in read_pairs(options.data, options.traces)
    }
    if unknown := {row.run for rows in found.values() for row in rows} - pairs.keys():
        parser.error(
            f"{len(unknown)} runs of {options.held_out} are not in --data and --traces: it was made of others."
        )
    apart = found.pop("collection", [])
    if options.write_intervals:
        write_intervals(pairs, found)
    judged = {kind: judge(pairs, found[kind]) for kind in LEFT_OUT}
    text = report(
        pairs, found, judged, second_device(pairs, apart, fitted_spreads()) if apart else ()
    )
    RESULT.write_text(text)
    print(text)
    charted = "device" if judged["device"] else "family"
    draw([row for row in judged[charted] if is_same_model(row.case)], PICTURE, charted)


def read_folds(folder: Path) -> dict[str, list[HeldOut]]:
    """The folds that `fitting.folds.held_out` has left in a folder, as it would give them back."""
    files = {
        kind: [folder / f"{kind}-{fold}.json" for fold in folds] for kind, folds in FOLDS.items()
    }
    return {
        kind: [
            HeldOut(*row)
            for file in those
            if file.is_file()
            for row in json.loads(file.read_text())
        ]
        for kind, those in files.items()
    }


def judge(pairs: Mapping[int, Pair], rows: Sequence[HeldOut]) -> list[Judged]:
    """Each forecast beside its measured run, with its interval."""
    intervals = honest_intervals(pairs, rows)
    judged = []
    for row in rows:
        low, high = _ends(intervals.get(row.fold), row)
        judged.append(
            Judged(
                pairs[row.run][0], row.forecast_ms, row.forecast_ms * low, row.forecast_ms * high
            )
        )
    return judged


def report(
    pairs: Mapping[int, Pair],
    found: Mapping[str, list[HeldOut]],
    judged: Mapping[str, list[Judged]],
    carried_over: Sequence[str],
) -> str:
    """The tables as Markdown, with date and machine."""
    same = {kind: [row for row in judged[kind] if is_same_model(row.case)] for kind in LEFT_OUT}
    others = {
        id(row.case) for rows in judged.values() for row in rows if not is_same_model(row.case)
    }
    lines = [
        "# Accuracy on held-out runs",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. {folds_in_words(found)}",
        "Errors are |forecast - measured| / measured in per cent; bias is their median with its sign. Constants are fitted anew",
        "without the card (and its relatives: fitting/folds.py) or without the model's family; intervals come from the errors of",
        "the other folds. Of the timm_inference runs, every sixth is forecast.",
        "",
        *by_collection(judged),
        "",
        *_missing(pairs, judged),
        "",
        "## By card and kind of model",
        "",
        "Inside: per cent of the measured times in their 90 % interval. Training counts forward and backward passes without an",
        f"optimizer too. Without {len(others)} runs of models that are not what their names build today (`is_same_model`).",
    ]
    for size in SIZES:
        lines += ["", f"### {size}", "", *by_card(same, size)]
    lines += ["", "## By software and precision", "", *by_software(same)]
    lines += ["", "## Which of two executions is faster", ""]
    lines += [
        "Pairs of one model on as many of the same cards, whose measured times differ by more than 5 %: ordered right are"
    ]
    lines += [
        "; ".join(f"with the {words} {_order(same[kind])}" for kind, words in LEFT_OUT.items())
        + "."
    ]
    lines += [
        "",
        "## With measurements of one's own",
        "",
        "Runs on one GPU, at most 60 of a collection.",
        "",
    ]
    taught = {
        kind: [row for row in rows if teaches(pairs[row.run][0])] for kind, rows in found.items()
    }
    lines += with_measurements(
        pairs, taught, {kind: honest_intervals(pairs, rows) for kind, rows in taught.items()}
    )
    if carried_over:
        lines += [
            "",
            "## A second card from the first one's sweep",
            "",
            *CARRIED_OVER,
            "",
            *carried_over,
        ]
    lines += ["", "## Worst ten of each collection, card left out", "", *worst(judged["device"])]
    return "\n".join(lines) + "\n"


def folds_in_words(found: Mapping[str, Sequence[HeldOut]]) -> str:
    """Which folds there are, and which are missing."""
    words = []
    for kind, folds in FOLDS.items():
        held = {row.fold for row in found[kind]}
        missing = [fold for fold in folds if fold not in held]
        there = (
            f"all {len(folds)}"
            if not missing
            else f"{len(held)} of {len(folds)} (missing: {'; '.join(missing)})"
        )
        words.append(f"{LEFT_OUT[kind]}: {there}")
    return f"Folds with the {', with the '.join(words)}."


def _missing(pairs: Mapping[int, Pair], judged: Mapping[str, Sequence[Judged]]) -> list[str]:
    """A line for each kind of fold without a run of some collection."""
    files = {case.run.file for case, _ in pairs.values()}
    missing = {kind: files - {row.case.run.file for row in rows} for kind, rows in judged.items()}
    return [
        f"No forecast with the {LEFT_OUT[kind]}: {', '.join(sorted(of))}."
        for kind, of in missing.items()
        if of
    ]


def _order(rows: Sequence[Judged]) -> str:
    by_step, by_sample = (order_of_executions(rows, a_sample).words for a_sample in (False, True))
    return f"{by_step} by the time of a step, {by_sample} by samples a second"


def honest_intervals(pairs: Mapping[int, Pair], rows: Sequence[HeldOut]) -> dict[str, Spreads]:
    """{fold: spreads}, from the errors of all other folds: an interval must not know the errors that it is judged by. The only
    fold that there is has none."""
    errors = [(row.fold, error) for row, error in _errors(pairs, rows)]
    folds = sorted({row.fold for row in rows})
    others = {fold: [error for other, error in errors if other != fold] for fold in folds}
    law = fitted_spreads().relatedness
    return {
        fold: fit_spreads(of_others, (), law) for fold, of_others in others.items() if of_others
    }


def _ends(spreads: Spreads | None, row: HeldOut) -> tuple[float, float]:
    if spreads is None:
        return math.nan, math.nan
    sd = deviation(spreads, row.shares, row.seen)
    spread = widened(
        Spread(math.exp(spreads.low * sd), math.exp(spreads.high * sd), COVERAGE, ""),
        row.outside_sd,
    )
    return spread.low, spread.high


def _errors(pairs: Mapping[int, Pair], rows: Sequence[HeldOut]) -> list[tuple[HeldOut, Error]]:
    known = [row for row in rows if teaches(pairs[row.run][0])]
    return [
        (
            row,
            Error(
                _log_error(row, pairs),
                row.shares,
                row.seen,
                pairs[row.run][0].run.file,
                row.outside_sd,
            ),
        )
        for row in known
    ]


def teaches(case: Case) -> bool:
    """Do the errors of this run say how far forecasts of torch are off?"""
    return is_same_model(case) and case.software.framework != "tensorflow"


def _log_error(row: HeldOut, pairs: Mapping[int, Pair]) -> float:
    return math.log((pairs[row.run][0].measured_ms or 1) / row.forecast_ms)


def write_intervals(pairs: dict[int, Pair], found: dict[str, list[HeldOut]]) -> None:
    """Deviations and quantiles from the errors of both kinds of folds."""
    errors = [error for kind in ("device", "family") for _, error in _errors(pairs, found[kind])]
    devices = tuple(sorted({case.cluster.device.name for case, _ in pairs.values()}))
    spreads = fit_spreads(errors, devices, fitted_spreads().relatedness)
    collections: dict[str, list[Observed]] = {}
    for kind, rows in found.items():
        taught = [row for row in rows if teaches(pairs[row.run][0])]
        of_kind = observed_by_collection(pairs, taught, {row.fold: spreads for row in taught})
        collections |= {f"{kind}, {name}": runs for name, runs in of_kind.items()}
    fitted = replace(spreads, relatedness=fit_relatedness(collections))
    INTERVALS.write_text(json.dumps(to_jsonable(fitted), indent=1) + "\n")


if __name__ == "__main__":
    main()
