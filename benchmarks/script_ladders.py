"""Three unchanged scripts, each from its own defaults to the best that this machine gives, by one command each.

Run on a machine that does nothing else: python benchmarks/script_ladders.py [characters photographs docstrings]. Each part prints
its table and keeps it in benchmarks/results/script_ladders.md. On two cores all three take about half an hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run_ladder import forecasts, total

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "script_ladders.md"
TO_REACH = {"characters": 4.0, "photographs": 8.0, "docstrings": 3.0}
HEAD = "# Ladders of three unchanged scripts (`python -m benchmarks scripts`)\n"


def climb(name: str) -> list[str]:
    """The lines of one ladder's part."""
    with tempfile.TemporaryDirectory() as folder:
        # launchers such as torchrun are those of this environment
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
            "XDG_DATA_HOME": folder,
            "PATH": path,
        }
        ladder = f"examples/{name}/ladder.toml"
        options = [
            "--out",
            f"{folder}/out",
            "--markdown",
            f"{folder}/table.md",
            "--no-journal",
            "--json",
        ]
        command = [sys.executable, "-m", "trainpace", "run", ladder, *options]
        done = subprocess.run(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
        )
        answer, table = json.loads(done.stdout), Path(folder, "table.md").read_text()
    return [*summary(name, answer), "", table.rstrip().replace(f"{ROOT}/", ""), ""]


def summary(name: str, answer: dict[str, Any]) -> list[str]:
    held = forecasts([answer])
    told = f"{sum(ok for *_, ok in held)} of {len(held)}"
    errors = [abs(forecast / measured - 1) for _, forecast, measured, _ in held]
    error = (
        f", error {statistics.median(errors):.0%} median, {max(errors):.0%} at most"
        if errors
        else ""
    )
    return [
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f} (15 min).",
        "",
        f"Total speed-up: {total(answer):.1f}x (to reach: {TO_REACH[name]:.0f}x). Forecasts whose interval held what was then"
        f" measured: {told}{error}.",
    ]


def keep(name: str, lines: list[str]) -> None:
    """Put a part's lines in place of the older ones."""
    old = RESULT.read_text() if RESULT.exists() else HEAD
    first, *parts = old.split("\n## ")
    parts = [part for part in parts if not part.startswith(f"{name}\n")]
    parts.append("\n".join([name, "", *lines]))
    RESULT.write_text("\n## ".join([first.rstrip("\n") + "\n", *sorted(parts)]).rstrip("\n") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=" ".join(TO_REACH))
    for name in parser.parse_args().names or TO_REACH:
        lines = climb(name)
        print("\n".join(lines), flush=True)
        keep(name, lines)


if __name__ == "__main__":
    main()
