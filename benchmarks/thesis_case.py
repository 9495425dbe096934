"""The thesis' case: an expensive preprocessing of photographs before a small network, diagnosed, mended, and measured again.

Run on a machine that does nothing else: python benchmarks/thesis_case.py. Runs the real commands on examples/face_crops.py and
keeps the table in benchmarks/results/thesis_case.md. About five minutes on two cores.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "examples" / "face_crops.py"
RESULT = HERE / "results" / "thesis_case.md"


def run(*arguments: object, cwd: str) -> str:
    """A command's standard output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": cwd}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout


def rung(
    name: str, arguments: list[str], epochs: int, cwd: str
) -> tuple[str, float, float, dict[str, Any]]:
    """(name, seconds an epoch, last loss, diagnosis) of the script under these arguments; epochs by its own clock."""
    output = run(SCRIPT, *arguments, "--epochs", epochs, cwd=cwd)
    seconds = [float(s) for s in re.findall(r", ([\d.]+) s$", output, re.MULTILINE)]
    loss = float(re.findall(r"loss ([\d.]+)", output)[-1])
    text = run(
        "-m",
        "trainpace",
        "diagnose",
        "--json",
        "--rounds",
        "3",
        "--block",
        "6",
        "--",
        sys.executable,
        SCRIPT,
        *arguments,
        "--epochs",
        "99",
        cwd=cwd,
    )
    return name, statistics.median(seconds[1:] or seconds), loss, json.loads(text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(SCRIPT, "--make", "photos", cwd=folder)
        (Path(folder) / "faces.py").write_text(
            f"import sys\n\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nfrom face_crops import Faces\n\n\n"
            "def faces():\n    return Faces('photos')\n"
        )
        rungs = [
            rung("as it is: everything online, no workers", ["--photos", "photos"], 3, folder),
            rung("two loader workers", ["--photos", "photos", "--workers", "2"], 3, folder),
        ]
        start = time.monotonic()
        said = run("-m", "trainpace", "precompute", "faces.py:faces", "--out", "shards", cwd=folder)
        once = time.monotonic() - start
        rungs.append(
            rung(
                "precomputed shards, flips and brightness online",
                ["--shards", "shards"],
                12,
                folder,
            )
        )
        size = (
            sum(f.stat().st_size for f in (Path(folder) / "shards").rglob("*") if f.is_file()) / 1e6
        )
    base = rungs[0][1]
    lines = [
        "# The thesis' case (`python -m benchmarks datapath`)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores. 480 photographs, batch 16, one thread.",
        "",
        "| | s an epoch | of the time | speed-up | step ms | waiting for data | verdict | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seconds, loss, d in rungs:
        data = next(s for s in d["shares"] if s["cause"] == "data")
        lines.append(
            f"| {name} | {seconds:.2f} | {seconds / base:.1%} | {base / seconds:.1f}x | {d['step_ms']:.1f} | {data['share']:.0%} "
            f"| {d['verdict']} | {loss:.3f} |"
        )
    saved = base - rungs[-1][1]
    foretold = next(a for a in rungs[0][3]["advice"] if a["title"].startswith("prepare samples"))
    lines += [
        "",
        f"Precomputing took {once:.1f} s once ({size:.1f} MB), which the first {once / saved:.1f} epochs pay back. "
        "The first diagnosis foretold "
        f"{foretold['saves_ms']:.0f} ms a step; measured {rungs[0][3]['step_ms'] - rungs[-1][3]['step_ms']:.0f}.",
        f"`precompute` said: {said.strip().splitlines()[0]}",
        "",
    ]
    RESULT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
