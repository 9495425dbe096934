"""Measured training steps with expert parallelism against their forecasts, no constant of which was fitted on any of them.

python -m benchmarks.experts --data ../shared/data        prints the table of benchmarks/results/experts.md
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fitting.prepare import prepared

from trainpace.core.stats import Z_95
from trainpace.forecast import MeasuredRun, Row, evaluate, read_runs
from trainpace.forecast.uncertainty import COVERAGE, EXPERTS_SD

FILES = ("measured_runs.parquet", "runs2.parquet")


def expert_runs(data: Path) -> list[MeasuredRun]:
    """The timed runs that divide their experts."""
    runs = [run for name in FILES for run in read_runs(data / name)]
    return [
        run
        for run in runs
        if re.search(r"\bep=(?!1\b)\d", run.parallelism) and run.mode in ("", "train")
    ]


def table(runs: Sequence[MeasuredRun], rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: errors by model, then every run."""
    pairs = [(run, row) for run, row in zip(runs, rows, strict=True) if row.error_pct is not None]
    yield "| model | n | mean error | median | bias |"
    yield "|---|--:|--:|--:|--:|"
    for key in (family_of, release_of, lambda run: "all"):
        groups: dict[str, list[float]] = defaultdict(list)
        for run, row in pairs:
            groups[key(run)].append(row.error_pct or 0.0)
        for name, errors in sorted(groups.items()):
            sizes = [abs(error) for error in errors]
            figures = statistics.fmean(sizes), statistics.median(sizes), statistics.fmean(errors)
            yield (
                f"| {name} | {len(errors)} | "
                + " | ".join(f"{figure:.1f} %" for figure in figures)
                + " |"
            )
    yield ""
    yield from spread(pairs)
    yield ""
    yield "| model | GPUs | parallelism | precision | measured, ms | forecast, ms | error |"
    yield "|---|---|---|---|--:|--:|--:|"
    for run, row in pairs:
        yield (
            f"| {run.model} | {row.num_gpus} x {row.gpu} | {run.parallelism} | {row.precision} | {row.measured_ms:,.0f}"
            f" | {row.forecast_ms:,.0f} | {row.error_pct:+.1f} % |"
        )
    yield ""
    reasons = [row.unsupported or "no time was measured" for row in rows if row.error_pct is None]
    for reason in sorted(set(reasons)):
        yield f"- {reasons.count(reason)} runs without a forecast: {reason}"


def family_of(run: MeasuredRun) -> str:
    return run.model.partition(" (")[0]


def maker_of(run: MeasuredRun) -> str:
    """What is left out together: all models of a maker."""
    found = re.match("DeepSeek|[A-Za-z]+", run.model)
    return found[0] if found else run.model


def release_of(run: MeasuredRun) -> str:
    """The container that a vendor's table is of."""
    found = re.search(r"\d\d\.\d\d", run.framework_version) or re.search(r"\d\d\.\d\d", run.model)
    return f"container {found[0]}" if found else "others"


def spread(pairs: Sequence[tuple[MeasuredRun, Row]]) -> Iterator[str]:
    """What a forecast of experts' layers may be off beyond the spread of its parts, fitted without each family of models."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run, row in pairs:
        assert row.measured_ms
        assert row.forecast_ms
        assert row.low_ms
        of_parts = math.log(row.forecast_ms / row.low_ms) ** 2 - (Z_95 * EXPERTS_SD) ** 2
        beyond = math.log(row.measured_ms / row.forecast_ms) ** 2 - of_parts
        errors[maker_of(run)].append((math.sqrt(max(beyond, 0.0)) / Z_95, beyond))
    every = [sd for of_family in errors.values() for sd, _ in of_family]
    held = 0
    for family, of_family in errors.items():
        others = sorted(sd for name, found in errors.items() if name != family for sd, _ in found)
        sd = others[math.ceil(COVERAGE * len(others)) - 1]
        held += sum(beyond <= (Z_95 * sd) ** 2 for _, beyond in of_family)
    least = sorted(every)[math.ceil(COVERAGE * len(every)) - 1]
    inside = sum(bool(row.in_interval) for _, row in pairs)
    yield (
        f"{inside} of {len(pairs)} runs lie in the 90 % intervals of the installed version (`EXPERTS_SD` {EXPERTS_SD})."
        f" A deviation fitted on the other makers' models holds {held}; {least:.2f} holds 90 % of all."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("out/experts"))
    options = parser.parse_args()
    runs = [
        prepared(run, options.data, options.work / "configurations")
        for run in expert_runs(options.data)
    ]
    rows = evaluate(runs, options.data, options.work / "traces", print, workers=1)
    print("\n".join(table(runs, rows)))


if __name__ == "__main__":
    main()
