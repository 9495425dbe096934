"""`python -m fitting fit`:

fit the kernel constants on ../shared/data and write them beside the package's code, residuals
beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from fitting.cards import start_of_steps
from fitting.kernel_rows import KernelRows
from fitting.kernels import read_kernels
from fitting.problem import FIXED_BY_KERNELS, Problem, bounds
from fitting.runs import RunTable, read_pairs, usable
from trainpace.core.records import to_jsonable
from trainpace.forecast.constants import KernelConstants, measured_cards

CONSTANTS = Path(__file__).parents[1] / "src/trainpace/forecast/constants.json"
RESIDUALS = Path(__file__).parent / "residuals.md"


def main() -> None:
    """Fit on everything that is usable; validation on held-out folds is `python -m benchmarks accuracy`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        help="folder that `trainpace validate --traces` filled",
    )
    options = parser.parse_args()
    pairs = usable(read_pairs(options.data, options.traces))
    if not pairs:
        sys.exit(
            f"no traced runs in {options.traces}; to trace them:"
            f" trainpace validate {options.data}/measured_runs.parquet --traces {options.traces}"
        )
    cards = measured_cards()
    runs, kernels = RunTable(pairs, cards), read_kernels(options.data)
    kernels = kernels.select(kernels.family == "")
    print(
        f"fitting on {len(pairs)} runs ({len(runs.run)} rows) and {len(kernels.measured_ms)} kernels"
    )
    c = rounded(Problem(runs, kernels, start_of_steps(cards), FIXED_BY_KERNELS).solve())
    CONSTANTS.write_text(json.dumps(to_jsonable(c), indent=1) + "\n")
    RESIDUALS.write_text(residuals(runs, kernels, c))
    print(RESIDUALS.read_text())


def rounded(c: KernelConstants) -> KernelConstants:
    """Three digits: more would claim what a refit does not reproduce."""
    return KernelConstants(
        **{name: float(f"{getattr(c, name):.3g}") for name in KernelConstants.__struct_fields__}
    )


def residuals(runs: RunTable, kernels: KernelRows, c: KernelConstants) -> str:
    """Errors on what was fitted, in per cent, and which constants lie at a bound."""
    step_ms = runs.step_ms(runs.by_phase(1e3 * runs.device_s(c)), c)
    lines = [
        "# Residuals of the fit",
        "",
        "On the runs and kernels that were fitted, so lower than on others.",
        "",
    ]
    lines += ["| runs | n | mean % | median % | bias % |", "|---|--:|--:|--:|--:|"]
    for file in sorted(set(runs.file)):
        error = 100 * (step_ms / runs.measured_ms - 1)[runs.file == file]
        lines.append(_line(file, error))
    lines += ["", "| kernels | n | mean % | median % | bias % |", "|---|--:|--:|--:|--:|"]
    kernel_ms = 1e3 * kernels.by_kernel(kernels.device_s(c)) + kernels.floor_ms
    for device in sorted(set(kernels.device)):
        for name in sorted(set(kernels.operator)):
            rows = (kernels.device == device) & (kernels.operator == name)
            if rows.any():
                lines.append(
                    _line(f"{device} {name}", 100 * (kernel_ms / kernels.measured_ms - 1)[rows])
                )
    edges = [
        name
        for name in KernelConstants.__struct_fields__
        if min(abs(np.log(getattr(c, name) / end)) for end in bounds(name)) < 0.02
    ]
    lines += ["", f"At a bound, so not decided by the data alone: {', '.join(edges)}.", ""]
    return "\n".join(lines)


def _line(name: str, error: np.ndarray) -> str:
    size = np.abs(error)
    return f"| {name} | {len(error)} | {size.mean():.1f} | {np.median(size):.1f} | {np.median(error):+.1f} |"


if __name__ == "__main__":
    main()
