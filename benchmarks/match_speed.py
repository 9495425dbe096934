"""How long `trainpace match` takes as a whole process: ResNet-50, 90 epochs of ImageNet, over all offers.

Interleaved with what it cannot do without (Python with numpy, and torch where the model is traced). Medians; processor time
beside wall-clock time, because a machine that does other work stretches the second and hardly the first.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROUNDS = 9
RESULT = Path(__file__).parent / "results" / "match_speed.md"
JOB = ["--samples", "1281167", "--epochs", "90"]
GOALS = {
    "cold, from the model's name": "2 s",
    "from a saved workload": "0.5 s",
    "... with spot prices, by hours": "0.5 s",
}


def main() -> None:
    """Time, print, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder, "resnet50.json"))
        match = [sys.executable, "-m", "trainpace", "match"]
        once = [*match, "resnet50", *JOB, "--save-workload", saved, "--json"]
        ways = len(json.loads(subprocess.run(once, capture_output=True, check=True).stdout)["rows"])
        commands = {
            "python -c 'import numpy, click, msgspec'": [
                sys.executable,
                "-c",
                "import numpy, click, msgspec",
            ],
            "python -c 'import torch'": [sys.executable, "-c", "import torch"],
            "from a saved workload": [*match, saved, *JOB],
            "... with spot prices, by hours": [*match, saved, *JOB, "--spot", "--by", "hours"],
            "cold, from the model's name": [*match, "resnet50", *JOB],
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(timed(command))
    lines = [
        "# How long match takes",
        "",
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; {ROUNDS} rounds; ResNet-50, 90 epochs of ImageNet, {ways} ways on all offers",
        "",
        "| whole process | median s | least s | processor s | to reach |",
        "|---|---|---|---|---|",
    ]
    for name, found in times.items():
        wall, cpu = zip(*found, strict=True)
        goal = GOALS.get(name, "")
        lines.append(
            f"| {name} | {statistics.median(wall):.2f} | {min(wall):.2f} | {statistics.median(cpu):.2f} | {goal} |"
        )
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of a process and its children."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, command
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
