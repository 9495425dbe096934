"""The ladder's task on a real Slurm: DDP, FSDP2, ZeRO 1, 2, 3 on 2 and 4 nodes, forecast and measured; then a node is killed.

Run as root on a machine that does nothing else: PYTHONPATH=.engines python benchmarks/run_slurm.py [--quick]. The nodes are
network namespaces whose links have a known speed (planted/slurm_cluster.py), with one rank of one thread each; the photographs
come from shards that are made once. Beside them a transformer whose gradients load the link. Forecasts are those of `trainpace
run`, from a CPU calibrated by two processes at a time and links calibrated at 2 hosts and another speed (cluster_steps.py); none
is fitted on a step. Kept in benchmarks/results/run_slurm.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

HERE = Path(__file__).parent
RESULT = HERE / "results" / "run_slurm.md"
sys.path[:0] = [str(HERE), str(HERE / "planted")]

import slurm_cluster  # noqa: E402
from cluster_links import CALIBRATED_MBIT, cluster_of  # noqa: E402
from cluster_steps import CLOSE, calibrated, crowded  # noqa: E402
from netns import INTERFACE  # noqa: E402
from slurm_cluster import Cluster, cluster  # noqa: E402

from trainpace.core.execution import Execution, ZeroStage  # noqa: E402
from trainpace.core.hardware import HostLinks  # noqa: E402
from trainpace.measure import MachineProfile  # noqa: E402
from trainpace.run.climbing import make_shards  # noqa: E402
from trainpace.run.job import Ended  # noqa: E402
from trainpace.run.ladder import Setup  # noqa: E402
from trainpace.run.slurm import Slurm, SlurmOptions  # noqa: E402
from trainpace.run.step_forecasts import LadderForecasts, StepForecast  # noqa: E402
from trainpace.run.trial import EngineName, LoaderSettings, TrialResult, job_of, outcome, run_trial  # noqa: E402

NODES = (2, 4)
MBIT_PER_S = 500.0
MICRO_BATCH = 16
TIMEOUT_S = 300.0
PHOTOGRAPHS = HERE.parent / "examples" / "ladder" / "task.py"
SPECS = {
    "photographs": f"{PHOTOGRAPHS}:task",
    "transformer": f"{HERE / 'planted' / 'small_models.py'}:transformer",
}
ENGINES: tuple[tuple[str, EngineName, ZeroStage], ...] = (
    ("DDP", "ddp", 0),
    ("FSDP2", "fsdp2", 3),
    ("ZeRO 1", "deepspeed", 1),
    ("ZeRO 2", "deepspeed", 2),
    ("ZeRO 3", "deepspeed", 3),
)
KILLED_TRAINS_S = 20.0
QUIET = 1.5
BUSY = "**taken on a busy machine: load {:.1f}**"
LAUNCHER = Slurm(
    options=SlurmOptions(setup=(f"export GLOO_SOCKET_IFNAME={INTERFACE}",)), poll_s=0.2
)


class Row(NamedTuple):
    """One engine on so many nodes, and its trials."""

    task: str
    nodes: int
    engine: str
    foreseen: StepForecast
    trials: list[TrialResult]

    @property
    def measured_ms(self) -> float:
        """The middle of the trials."""
        return statistics.median(t.step_time_ms for t in self.trials)


class Requeued(NamedTuple):
    """A trial whose node was killed, beside the same trial undisturbed. Seconds count from the first start."""

    killed: str
    first_nodes: str
    second_nodes: str
    killed_s: float
    again_s: float
    done_s: float
    ended: Ended
    result: TrialResult
    undisturbed: TrialResult


def say(words: str) -> None:
    print(words, flush=True)


def setup_of(task: str, nodes: int, engine: EngineName, stage: ZeroStage, shards: str) -> Setup:
    execution = Execution(
        micro_batch=MICRO_BATCH, nnodes=nodes, optimizer="adamw", zero_stage=stage
    )
    loader = LoaderSettings(shards=shards if task == "photographs" else None)
    return Setup(task=SPECS[task], execution=execution, engine=engine, loader=loader, threads=1)


def forecasts_of(
    folder: Path, nodes: int, profile: MachineProfile, links: HostLinks
) -> LadderForecasts:
    """What `trainpace run` would know of such nodes, had it been calibrated on them; more nodes than cores take turns."""
    folder.mkdir(parents=True)
    busy = cluster_of(links, nodes, MBIT_PER_S).host_links
    assert busy is not None
    between = replace(busy, gb_per_s=MBIT_PER_S / 8e3)
    profile = replace(profile, kernels=crowded(profile.kernels, nodes))
    return LadderForecasts(
        folder, "cpu", lambda: profile, say, TIMEOUT_S, between_nodes=lambda: between
    )


def rows_of(
    forecasts: LadderForecasts, nodes: int, shards: str, folder: Path, seconds: float, repeats: int
) -> list[Row]:
    """All forecasts, then all trials, in turn `repeats` times."""
    rows, setups = [], []
    for task, (name, engine, stage) in itertools.product(SPECS, ENGINES):
        setups.append(setup_of(task, nodes, engine, stage, shards))
        rows.append(Row(task, nodes, name, forecasts.forecast(setups[-1:], [])[0], []))
    for turn, (row, setup) in itertools.product(range(repeats), zip(rows, setups, strict=True)):
        trial = setup.trial(seconds=seconds)
        name = f"{row.task}-{nodes}-{row.engine.replace(' ', '')}-{turn}"
        found = run_trial(trial, LAUNCHER, folder / name, TIMEOUT_S)
        if not isinstance(found, TrialResult):
            raise RuntimeError(f"{name}: {found.reason}\n{Path(found.log).read_text()[-3000:]}")
        row.trials.append(found)
        say(line(row))
    return rows


def kill_a_node(made: Cluster, folder: Path, median_ms: float) -> Requeued:
    """The transformer under DDP on 2 of 4 nodes, of which one is gone half-way through the training."""
    trial = setup_of("transformer", 2, "ddp", 0, "").trial(
        steps=round(1e3 * KILLED_TRAINS_S / median_ms)
    )
    undisturbed = run_trial(trial, LAUNCHER, folder / "undisturbed", TIMEOUT_S)
    assert isinstance(undisturbed, TrialResult), undisturbed.reason
    starts: list[tuple[float, str]] = []
    killed: list[tuple[float, str]] = []

    def kill() -> None:
        time.sleep(undisturbed.start_up_s + KILLED_TRAINS_S / 2)
        lost = starts[0][1].split()[-1]
        made.cut_node(lost)
        killed.append((time.monotonic(), lost))
        made.report_down(lost)

    def on_line(line: str) -> None:
        say(f"  {line}")
        if line.startswith("slurm: job") and ", runs" in line:
            starts.append((time.monotonic(), nodes_in_use()))
            if len(starts) == 1:
                threading.Thread(target=kill).start()

    job = job_of(trial, folder / "killed", TIMEOUT_S)
    ended = LAUNCHER.run(job, on_line)
    done = time.monotonic()
    found = outcome(job, ended)
    assert isinstance(found, TrialResult), found.reason
    assert len(starts) == 2, starts
    (first, before), (second, after) = starts
    at, lost = killed[0]
    return Requeued(
        lost, before, after, at - first, second - first, done - first, ended, found, undisturbed
    )


def nodes_in_use() -> str:
    """Names of the nodes of the only job."""
    asked = subprocess.run(
        ("squeue", "-h", "-o", "%N"), capture_output=True, text=True, check=True
    ).stdout.strip()
    return slurm_cluster.control("show", "hostnames", asked).replace("\n", " ").strip()


def line(row: Row) -> str:
    """A table row."""
    f = row.foreseen
    low, high = (
        min(t.interval_ms.low for t in row.trials),
        max(t.interval_ms.high for t in row.trials),
    )
    measured = f"{row.measured_ms:.1f} ({low:.1f} to {high:.1f})"
    head = f"| {row.task} | {row.nodes} | {row.engine} |"
    if f.step_ms is None or f.interval_ms is None:
        return f"{head} {f.reason} | {measured} | | |"
    held = "yes" if f.holds(row.measured_ms) else "no"
    forecast = f"{f.step_ms:.1f} ({f.interval_ms.low:.1f} to {f.interval_ms.high:.1f})"
    return f"{head} {forecast} | {measured} | {f.step_ms / row.measured_ms - 1:+.0%} | {held} |"


def summary(rows: list[Row]) -> str:
    """Errors, intervals, and the order of engines in each setting."""
    known = [(r, r.foreseen.step_ms) for r in rows if r.foreseen.step_ms is not None]
    errors = [abs(ms / r.measured_ms - 1) for r, ms in known]
    sets: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for r, ms in known:
        sets[r.task, r.nodes].append((r.measured_ms, ms))
    pairs = [
        (a, b)
        for s in sets.values()
        for a, b in itertools.combinations(s, 2)
        if abs(a[0] / b[0] - 1) >= CLOSE
    ]
    right = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    alike = sum(a[1] == b[1] for a, b in pairs)
    best = sum(
        min(s, key=lambda x: x[1])[0] <= (1 + CLOSE) * min(m for m, _ in s) for s in sets.values()
    )
    held = sum(r.foreseen.holds(r.measured_ms) is True for r, _ in known)
    return (
        f"Forecast of {len(known)} of {len(rows)}: error {statistics.mean(errors):.0%} at the mean, {max(errors):.0%} at most;"
        f" the interval held {held}. Pairs of engines at least {CLOSE:.0%} apart in the right order: {right} of {len(pairs)}"
        f" ({alike} are forecast alike); the fastest engine (or one within {CLOSE:.0%} of it) named in {best} of {len(sets)}"
        " settings."
    )


def story(r: Requeued) -> list[str]:
    """What happened when a node was killed."""
    apart = max(
        abs(a - b) / abs(b) for a, b in zip(r.result.losses, r.undisturbed.losses, strict=True)
    )
    whole = "the same" if apart == 0 else f"at most {apart:.1e} (relative) apart"
    return [
        f"The transformer under DDP on {r.first_nodes}, {len(r.undisturbed.step_ms)} steps; undisturbed"
        f" {r.undisturbed.step_time_ms:.1f} ms a step. {r.killed_s:.1f} s after its start {r.killed} was killed with all that ran"
        " on it, and Slurm told (it would find out by itself after SlurmdTimeout, five minutes by default).",
        "",
        f"Requeued, the job ran again on {r.second_nodes} {r.again_s - r.killed_s:.1f} s later and was {r.ended.state} at"
        f" {r.done_s:.1f} s, attempts: {r.ended.attempts}. Its result: {len(r.result.step_ms)} steps at"
        f" {r.result.step_time_ms:.1f} ms; the {len(r.result.losses)} losses are {whole} as undisturbed."
        f" Lost were the {r.killed_s:.1f} s of the first attempt: a trial begins anew, it has no checkpoint.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short trial each, a short calibration, result not kept",
    )
    parser.add_argument("--repeats", type=int, default=3, help="trials of each engine")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in a trial")
    options = parser.parse_args()
    quick = options.quick
    if why := slurm_cluster.missing():
        raise SystemExit(f"no Slurm here: {why}")
    os.environ["OMP_NUM_THREADS"] = "1"
    seconds, repeats = (2.0, 1) if quick else (options.seconds, options.repeats)
    load = os.getloadavg()[1]
    profile, links = calibrated(*((15.0, 7) if quick else (60.0, 21)))
    say(f"drift {profile.drift:.0%}, spread {profile.spread:.0%}; {links}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = make_shards(f"{PHOTOGRAPHS}:photographs", folder, os.cpu_count() or 1, say)
        for nodes in NODES:
            with cluster(nodes, cpus=1, mbit_per_s=MBIT_PER_S) as made:
                forecasts = forecasts_of(folder / f"sights-{nodes}", nodes, profile, links)
                rows += rows_of(forecasts, nodes, shards, folder, seconds, repeats)
                if nodes == NODES[-1]:
                    its = next(
                        r for r in rows if (r.task, r.nodes, r.engine) == ("transformer", 2, "DDP")
                    )
                    requeued = kill_a_node(made, folder, its.measured_ms)
    lines = report(rows, requeued, profile, load)
    say("\n".join(lines))
    if not quick:
        RESULT.write_text("\n".join(lines))


def report(rows: list[Row], requeued: Requeued, profile: MachineProfile, load: float) -> list[str]:
    versions: dict[str, Any] = requeued.result.environment
    return [
        "# The ladder's task on a real Slurm (`python -m benchmarks run`, as root)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {versions.get('torch', '')}, gloo;"
        f" {BUSY.format(load) if load > QUIET else f'load {load:.1f}'} (5 min, before it began); drift {profile.drift:.0%} and"
        f" spread {profile.spread:.0%} while calibrating. Links of {MBIT_PER_S:.0f} Mbit/s, calibrated at {CALIBRATED_MBIT:.0f}."
        f" One rank of one thread a node, micro-batch {MICRO_BATCH}; 4 nodes share {os.cpu_count()} cores. Measured: the median"
        f" of {len(rows[0].trials)} trial(s), and the ends of the 90 % intervals of their medians.",
        "",
        summary(rows),
        "",
        "| task | nodes | engine | forecast ms (90 %) | measured ms | error | in its interval |",
        "|---|---|---|---|---|---|---|",
        *map(line, rows),
        "",
        "## A node killed half-way",
        "",
        *story(requeued),
        "",
    ]


if __name__ == "__main__":
    main()
