"""The ladder of examples/ladder by the real command, and how well every rung was forecast.

Run on a machine that does nothing else: PYTHONPATH=.engines python benchmarks/run_ladder.py [--repeats 3]. Each repeat is a whole
ladder in a folder of its own, with its own calibration. Kept in benchmarks/results/run_ladder.md.
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

HERE = Path(__file__).parent
LADDER = HERE.parent / "examples" / "ladder" / "ladder.toml"
RESULT = HERE / "results" / "run_ladder.md"
TO_REACH = 15.0


def climb(number: int, seconds: str) -> tuple[dict[str, Any], str]:
    """One whole ladder: its JSON and its table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        # the user's own profile and journal are left alone, and a library's threads are the ladder's own
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
            "XDG_DATA_HOME": folder
        }
        options = [
            "--out",
            folder,
            "--seconds",
            seconds,
            "--markdown",
            f"{folder}/table.md",
            "--no-journal",
            "--json",
        ]
        command = [sys.executable, "-m", "trainpace", "run", str(LADDER), *options]
        print(f"ladder {number + 1}", file=sys.stderr, flush=True)
        done = subprocess.run(
            command, cwd=HERE.parent, env=env, text=True, stdout=subprocess.PIPE, check=True
        )
        return json.loads(done.stdout), Path(folder, "table.md").read_text()


def forecasts(answers: list[dict[str, Any]]) -> list[tuple[str, float, float, bool]]:
    """(rung, forecast ms, measured ms, held?) of every alternative that was forecast and measured."""
    found = []
    for answer in answers:
        for rung in (answer["baseline"], *answer["rungs"]):
            for tried in rung["tried"]:
                foreseen, measured = tried["foreseen"], tried["measured"]
                if measured is None or foreseen["step_ms"] is None:
                    continue
                ms = statistics.median(measured["trials_ms"])
                interval = foreseen["interval_ms"]
                found.append(
                    (
                        rung["title"],
                        foreseen["step_ms"],
                        ms,
                        interval["low"] <= ms <= interval["high"],
                    )
                )
    return found


def total(answer: dict[str, Any]) -> float:
    """The speed-up from the first setup to the last, measured in turn where several rungs were kept."""
    ends = answer["end_to_end"]
    return float(
        ends["gain"]["ratio"]
        if ends
        else [row["total"] for row in answer["rows"] if row["kept"]][-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", default="8s", help="of training in a trial")
    options = parser.parse_args()
    climbs = [climb(i, options.seconds) for i in range(options.repeats)]
    answers = [answer for answer, _ in climbs]
    totals = [total(answer) for answer in answers]
    held = forecasts(answers)
    errors = sorted(abs(forecast / measured - 1) for _, forecast, measured, _ in held)
    lines = [
        "# The ladder (`python -m benchmarks run`)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f} (15 min)."
        f" {options.repeats} times `trainpace run examples/ladder/ladder.toml`.",
        "",
        f"Total speed-up: {', '.join(f'{t:.1f}x' for t in totals)} (to reach: {TO_REACH:.0f}x). Forecasts whose interval held"
        f" what was then measured: {sum(h for *_, h in held)} of {len(held)}; error {statistics.median(errors):.0%} median,"
        f" {errors[-1]:.0%} at most.",
        "",
        "The first of them:",
        "",
        climbs[0][1].rstrip(),
        "",
        "## Every forecast",
        "",
        "| rung | forecast ms | measured ms | error | in its interval |",
        "|---|---|---|---|---|",
        *(
            f"| {title} | {f:.1f} | {m:.1f} | {f / m - 1:+.0%} | {'yes' if ok else 'no'} |"
            for title, f, m, ok in held
        ),
        "",
    ]
    RESULT.write_text("\n".join(lines).replace(f"{Path(__file__).resolve().parents[1]}/", ""))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
