"""How good is `trainpace measure`: its own cost, its intervals, its choice of batch sizes, and what survives a kill.

Run on a machine that does nothing else: python benchmarks/measure.py [overhead repeats adaptive killed calibrated]. Each part
prints its lines and keeps them in benchmarks/results/measure.md. On two cores all parts take about forty minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainpace.core.outcome import FailedProbe
from trainpace.core.stats import noise_of, repeat_interval
from trainpace.journal import Entry, Journal
from trainpace.measure import Conditions, measure, probe
from trainpace.measure.detection import detect, warnings_of
from trainpace.measure.sweep import Outcome, SweepPlan, analyse, medians_of, next_batch, next_probe

HERE = Path(__file__).parent
RESULT = HERE / "results" / "measure.md"
TASKS = HERE / "sweep_tasks.py"
SIZES = tuple(range(1, 71))
PAIRS, REPEATS, KILLS = 12, 50, 50
_BARE = """
import json, statistics, sys, time, torch
sys.path.insert(0, sys.argv[1])
import sweep_tasks
torch.manual_seed(0)
model, loss, optimizer, data = sweep_tasks.wide()
batches = [torch.utils.data.default_collate([data[i % len(data)] for i in range(16)]) for _ in range(4)]
times, end = [], time.perf_counter() + 3
while time.perf_counter() < end:
    x, y = batches[len(times) % 4]
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss(model(x), y).backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(json.dumps(1e3 * statistics.median(times[len(times) // 5:])))
"""


def overhead() -> list[str]:
    """Step time under `measure` against a loop written by hand, in turns, each in a process of its own."""
    ratios = []
    for i in range(PAIRS):
        pair = {}
        for which in ("bare", "measured") if i % 2 else ("measured", "bare"):
            if which == "bare":
                done = subprocess.run(
                    [sys.executable, "-c", _BARE, str(HERE)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                pair[which] = float(done.stdout)
            else:
                pair[which] = measure(Conditions(model=f"{TASKS}:wide", seconds=3.0), 16).median_ms
        ratios.append(pair["measured"] / pair["bare"])
    ordered = sorted(ratios)
    return [
        f"| own overhead, median of {PAIRS} interleaved pairs | {100 * (statistics.median(ratios) - 1):+.1f} % (quartiles"
        f" {100 * (ordered[PAIRS // 4] - 1):+.1f} to {100 * (ordered[3 * PAIRS // 4] - 1):+.1f}) | 1 % |"
    ]


def repeats() -> list[str]:
    """The interval that three probes of one batch size give, as `measure --batch 16` does: does it hold the next probe?"""
    conditions = Conditions(model=f"{TASKS}:smooth", seconds=1.0)
    found = [measure(conditions, 16).median_ms for _ in range(REPEATS + 3)]
    inside = 0
    for i in range(REPEATS):
        three, after = found[i : i + 3], found[i + 3]
        noise = noise_of({16: three})
        assert noise is not None
        interval = repeat_interval(three, noise)
        inside += interval.low <= after <= interval.high
    whole = noise_of({16: found})
    assert whole is not None
    return [
        f"| 90 % interval of three probes holds the next one, {REPEATS} repeats | {inside} of {REPEATS}"
        f" (the {len(found)} probes spread by {100 * whole.relative:.1f} %) | 90 % |"
    ]


def adaptive() -> list[str]:
    """1:70 in full (twice each) and adaptively, in turns within one run, on a tiled and a smooth network."""
    lines = []
    for name in ("tiled", "smooth"):
        conditions = Conditions(model=f"{TASKS}:{name}", seconds=0.6)
        full: list[Outcome] = []
        chosen: list[Outcome] = []
        full_s = chosen_s = 0.0
        plan = SweepPlan(batches=SIZES, every=True, repeats=1)
        while True:
            # two or three of the full sweep for each of the adaptive one, so that both see the same machine
            batches = [next_probe(plan, full)]
            for batch in [b for b in batches if b is not None]:
                start = time.perf_counter()
                full.append(probe(conditions, batch, "cpu"))
                full_s += time.perf_counter() - start
            again = None
            if len(chosen) * 2.5 <= len(full) or batches[0] is None:
                again = next_batch(SIZES, medians_of(chosen))
            if again is not None:
                start = time.perf_counter()
                chosen.append(probe(conditions, again, "cpu"))
                chosen_s += time.perf_counter() - start
            if batches[0] is None and again is None:
                break
        a, b = analyse(full), analyse(chosen)
        noise = max(a.curve.noise, b.curve.noise)
        deviations = [b.curve.at(p.batch) / p.step_ms - 1 for p in a.points]
        worst = max(map(abs, deviations))
        jumps = [[f"{j.before}-{j.after}" for j in curve.jumps] for curve in (a.curve, b.curve)]
        lines += [
            f"| 1:70 {name}: time of the adaptive sweep's {len(chosen)} probes | {100 * chosen_s / full_s:.0f} % of"
            f" {len(full)} | 40 % |",
            f"| 1:70 {name}: jumps, all probes / adaptive | {', '.join(jumps[0]) or 'none'} /"
            f" {', '.join(jumps[1]) or 'none'} | the same |",
            f"| 1:70 {name}: largest / median deviation of the curves | {100 * worst:.1f} % /"
            f" {100 * statistics.median(map(abs, deviations)):.1f} %, noise {100 * noise:.1f} % | 2 x noise |",
        ]
    return lines


def killed() -> list[str]:
    """kill -9 at random moments of a sweep; then out of memory and a hang; then to the end."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "journal.db"))
        command = [
            sys.executable,
            "-m",
            "trainpace",
            "measure",
            f"{TASKS}:smooth",
            "--batch",
            "1:70",
            "--every",
            "--repeats",
            "1",
            "--seconds",
            "0s",
            "--journal",
            place,
            "--no-forecast",
            "--json",
        ]
        lost = doubled = corrupt = 0
        kept = 0
        for _ in range(KILLS):
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            time.sleep(draw.uniform(0.2, 8.0))
            os.kill(process.pid, signal.SIGKILL)
            assert process.stderr is not None
            began = sum(
                line.startswith("measuring batch") for line in process.stderr.read().splitlines()
            )
            process.wait()
            if not Path(place).exists():
                continue
            with sqlite3.connect(place) as database:
                corrupt += database.execute("pragma integrity_check").fetchone()[0] != "ok"
            entries = _entries(place)
            batches = [entry.execution.micro_batch for entry in entries]
            doubled += len(batches) - len(set(batches))
            # all that began but the one in flight must be there
            lost += max(0, kept + began - 1 - len(entries))
            kept = len(entries)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        total, points = len(_entries(place)), len(json.loads(done.stdout)["analysis"]["points"])
        alive = _workers(folder)
    small = probe(Conditions(model="vgg16", seconds=0.0, memory_limit_gib=0.5), 4, "cpu")
    hang = probe(Conditions(model=f"{TASKS}:hangs", timeout_s=8.0), 4, "cpu")
    assert isinstance(small, FailedProbe)
    assert isinstance(hang, FailedProbe)
    return [
        f"| kill -9 at {KILLS} random moments: finished probes lost / doubled / corrupt journals | {lost} / {doubled} /"
        f" {corrupt} | 0 |",
        f"| the sweep taken up again to its end: runs kept, sizes in the answer, workers left over | {total}, {points},"
        f" {alive} | 70, 70, 0 |",
        f"| a memory limit of 0.5 GiB on VGG-16; a model that hangs | {small.failure}; {hang.failure} | said, no more lost |",
    ]


def _workers(folder: str) -> int:
    """Probes still running that were started in this folder."""
    alive = 0
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{number}/cmdline").read_text()
            alive += (
                "trainpace.measure.steps" in words and os.readlink(f"/proc/{number}/cwd") == folder
            )
    return alive


def _entries(place: str) -> list[Entry]:
    with Journal.open(place) as journal:
        return list(journal.every())


def calibrated() -> list[str]:
    """Ten models forecast after a calibration, then measured; and other batch sizes after one was measured."""
    from calibration import ten_models  # beside this script

    return ten_models()


PARTS: dict[str, Callable[[], list[str]]] = {
    "overhead": overhead,
    "repeats": repeats,
    "adaptive": adaptive,
    "killed": killed,
    "calibrated": calibrated,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS))
    options = parser.parse_args()
    machine = detect()
    for warning in warnings_of(machine):
        print(f"note: {warning}", flush=True)
    before = RESULT.read_text().split("\n## ") if RESULT.exists() else []
    sections = {text.split("\n")[0]: text for text in before[1:]}
    head = "# Measuring\n\nEach part with its date and machine; `python -m benchmarks measure`.\n"
    for part in options.parts:
        start = time.perf_counter()
        lines = PARTS[part]()
        cores = machine.cpu.usable_cores
        when = f"{datetime.date.today()}, {machine.cpu.name}, {cores:g} cores, Python {platform.python_version()}"
        took = f"{(time.perf_counter() - start) / 60:.0f} min"
        text = "\n".join(
            [
                part,
                "",
                f"{when}, {took}",
                "",
                "| what | reached | to reach |",
                "|---|---|---|",
                *lines,
                "",
            ]
        )
        print(f"\n## {text}", flush=True)
        sections[part] = text
        RESULT.write_text(
            "\n## ".join([head, *(sections[name] for name in PARTS if name in sections)])
        )


if __name__ == "__main__":
    main()
