"""Does the interval of a forecast that the journal corrects hold the next measurement? 60 repeats, quiet and under load.

python benchmarks/journal_repeats.py [quiet loaded]. Each condition begins with a journal of its own: five models are swept over
four batch sizes, three processes each; then every size is forecast by the journal and measured three times more. Under load two
other processes compute for up to three seconds and rest for as long, at random. A quarter of an hour on two cores; kept in
benchmarks/results/journal_repeats.md, a section a condition.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainpace.core.hardware import Cluster
from trainpace.forecast import CalibratedKernels, Forecaster, Grid, Target
from trainpace.journal import Circumstances, Journal, Knowledge, record_sweep
from trainpace.measure import Conditions, MachineProfile, SweepPlan, calibrate, measure
from trainpace.workload import Variant, load_workload

HERE = Path(__file__).parent
RESULT = HERE / "results" / "journal_repeats.md"
TASKS, PHOTOS = HERE / "sweep_tasks.py", HERE.parent / "examples" / "photo_tasks.py"
MODELS = {
    f"{TASKS}:wide": (8, 16, 32, 64),
    f"{TASKS}:smooth": (8, 16, 32, 64),
    f"{PHOTOS}:cnn": (8, 16, 32, 64),
    f"{PHOTOS}:transformer": (8, 16, 32, 64),
    f"{TASKS}:tiled": (8, 16, 32, 64),
}
SWEPT, REPEATED = 3, 3
PROBE_S = 0.5
LOAD = """
import random, time
import numpy as np
a = np.random.default_rng(0).random((300, 300))
while True:
    end = time.perf_counter() + random.uniform(0, 3)
    while time.perf_counter() < end:
        a @ a
    time.sleep(random.uniform(0, 3))
"""


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """That many others that compute now and then."""
    others = [
        subprocess.Popen([sys.executable, "-c", LOAD], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for _ in range(processes)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def repeats(
    profile: MachineProfile, folder: Path
) -> list[tuple[str, int, float, float, float, float]]:
    """(model, batch, forecast, low, high, measured) of every repeat."""
    target, rows = Target(Cluster(device=profile.device), CalibratedKernels(profile.kernels)), []
    for model, sizes in MODELS.items():
        conditions = Conditions(model=model, seconds=PROBE_S)
        workload = load_workload(model, ("fp32",), Variant(None, cpu=True))
        forecaster = Forecaster(workload, target)
        with Journal.open(str(folder / "journal.db")) as journal:
            plan = SweepPlan(batches=sizes, repeats=SWEPT, every=True)
            record_sweep(
                journal, conditions, plan, Circumstances(device=profile.device.name), forecaster
            )
            knowing = forecaster.knowing(Knowledge(journal, workload))
            execution = conditions.execution(1, workload.optimizer)
            for forecast in knowing.at(Grid.vary(execution, micro_batch=sizes)).forecasts():
                assert forecast.step is not None
                assert forecast.step_time_interval_ms is not None
                interval, batch = forecast.step_time_interval_ms, forecast.execution.micro_batch
                for _ in range(REPEATED):
                    ms = measure(conditions, batch).median_ms
                    row = (
                        workload.model.rpartition(":")[2],
                        batch,
                        forecast.step.total_ms,
                        interval.low,
                        interval.high,
                        ms,
                    )
                    print(*row, flush=True)
                    rows.append(row)
    return rows


def section(name: str, rows: list[tuple[str, int, float, float, float, float]]) -> str:
    inside = sum(low <= ms <= high for *_, low, high, ms in rows)
    errors = sorted(abs(forecast / ms - 1) for _, _, forecast, _, _, ms in rows)
    widths = sorted(math.sqrt(high / low) - 1 for *_, low, high, _ in rows)
    error_pct, width_pct = (100 * values[len(values) // 2] for values in (errors, widths))
    lines = [
        f"## {name}",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. {inside} of {len(rows)} repeats"
        f" ({100 * inside / len(rows):.0f} %) inside the 90 % interval; median error {error_pct:.1f} %, median half"
        f" width {width_pct:.0f} %.",
        "",
        "| model | batch | forecast ms (90 %) | measured ms |",
        "|---|--:|---|---|",
    ]
    for i in range(0, len(rows), REPEATED):
        model, batch, forecast, low, high, _ = rows[i]
        measured = ", ".join(
            f"{ms:.4g}{'' if low <= ms <= high else ' (outside)'}"
            for *_, ms in rows[i : i + REPEATED]
        )
        lines.append(
            f"| {model} | {batch} | {forecast:.4g} ({low:.4g} to {high:.4g}) | {measured} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Each condition, and its section of the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["quiet", "loaded"])
    options = parser.parse_args()
    kept = RESULT.read_text().split("## ")[1:] if RESULT.is_file() else []
    sections = {text.split()[0]: f"## {text}" for text in kept}
    profile = calibrate(20.0)
    for name in [options.only] if options.only else ["quiet", "loaded"]:
        with tempfile.TemporaryDirectory() as folder, load(2 if name == "loaded" else 0):
            sections[name] = section(name, repeats(profile, Path(folder)))
        text = "# The next measurement beside the journal's forecast (`python -m benchmarks measure`)\n\n"
        RESULT.write_text(
            text
            + "\n".join(sections[key].rstrip() + "\n" for key in sorted(sections, reverse=True))
        )
        print(sections[name].partition("| model")[0])


if __name__ == "__main__":
    main()
