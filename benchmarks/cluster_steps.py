"""Real DDP and FSDP2 steps on hosts whose links have a known speed: forecast after `calibrate` against measured.

Run as root on a machine that does nothing else: python benchmarks/cluster_steps.py [--quick]. The hosts are network
namespaces (2 or 4) with one rank each. The CPU is calibrated by two processes at the same time, as two ranks run; four ranks
on two cores are forecast to compute half as fast. The links are calibrated at 2 hosts and one speed. No forecast is fitted on
a step. Kept in benchmarks/results/cluster_steps.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

HERE = Path(__file__).parent
RESULT = HERE / "results" / "cluster_steps.md"
PLANTED = HERE / "planted"
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(PLANTED))

from cluster_links import CALIBRATED_BYTES, CALIBRATED_HOSTS, CALIBRATED_MBIT, cluster_of, measure  # noqa: E402
from netns import hosts  # noqa: E402
from on_hosts import together  # noqa: E402

from trainpace.core.execution import Execution  # noqa: E402
from trainpace.core.hardware import HostLinks  # noqa: E402
from trainpace.core.outcome import Forecast  # noqa: E402
from trainpace.forecast import CalibratedKernels, Forecaster, Target  # noqa: E402
from trainpace.forecast.timings import MachineModel  # noqa: E402
from trainpace.measure import MachineProfile, calibrate  # noqa: E402
from trainpace.measure.calibration import fit_host_links  # noqa: E402
from trainpace.measure.collectives import COLLECTIVES  # noqa: E402
from trainpace.workload import Variant, Workload, load_workload  # noqa: E402

MODELS = ("convolutional", "transformer")
SHAPES = ((2, 100.0), (2, 1000.0), (4, 100.0), (4, 1000.0))
GLOBAL_BATCH_A_RANK = 16
OPTIMIZER = "adamw"
FEWEST_STEPS, SECONDS_A_CASE = 5, 6.0
CLOSE = 0.05
"""Two executions whose measured times differ by less are in no order."""


class Way(NamedTuple):
    """How a step is executed: the engine of planted/cluster_rank.py, and what trainpace calls it."""

    name: str
    engine: str
    accumulation: int
    execution: Execution


def ways(number: int, blocks: bool) -> list[Way]:
    """Executions of the same global batch. On a CPU, FSDP2 waits for every exchange: gloo has no streams to hide them on.

    A model without blocks is one unit, whose parameters FSDP2 keeps in any case.
    """
    whole, quarter = GLOBAL_BATCH_A_RANK, GLOBAL_BATCH_A_RANK // 4
    base = Execution(micro_batch=whole, nnodes=number, optimizer=OPTIMIZER)
    sharded = replace(base, zero_stage=3, engine="unoverlapped")
    kept = replace(sharded, reshard_after_forward=False)
    small = {"micro_batch": quarter, "accumulation": 4}
    found = [
        Way("DDP", "ddp", 1, base),
        Way("DDP, 4 micro-steps", "ddp", 4, replace(base, **small)),
        Way("FSDP2, parameters kept", "fsdp_keep", 1, kept),
        Way("FSDP2, parameters kept, 4 micro-steps", "fsdp_keep", 4, replace(kept, **small)),
    ]
    return [*found, Way("FSDP2", "fsdp", 1, sharded)] if blocks else found


class Row(NamedTuple):
    """One execution of one model on one set of hosts."""

    model: str
    hosts: int
    mbit_per_s: float
    way: str
    measured_ms: float
    forecast: Forecast

    @property
    def forecast_ms(self) -> float:
        """The step's."""
        assert self.forecast.step is not None, self.forecast.reason
        return self.forecast.step.total_ms

    @property
    def error_pct(self) -> float:
        """How far the forecast is above what was measured."""
        return 100 * (self.forecast_ms / self.measured_ms - 1)


def calibrated(seconds: float, repeats: int) -> tuple[MachineProfile, HostLinks]:
    """The CPU with as many processes as cores, and the links."""
    with ThreadPoolExecutor(CALIBRATED_HOSTS) as pool:
        profiles = list(pool.map(lambda _: calibrate(seconds), range(CALIBRATED_HOSTS)))
    with hosts(CALIBRATED_HOSTS, CALIBRATED_MBIT) as joined:
        timed = measure(joined, CALIBRATED_MBIT, COLLECTIVES, CALIBRATED_BYTES, repeats)
    return profiles[0], fit_host_links(timed, CALIBRATED_MBIT / 8e3)


def forecast_of(
    workload: Workload,
    way: Way,
    number: int,
    mbit: float,
    profile: MachineProfile,
    links: HostLinks,
) -> Forecast:
    """From the calibrations alone."""
    slower = crowded(profile.kernels, number)
    target = Target(cluster_of(links, number, mbit, profile.device), CalibratedKernels(slower))
    return Forecaster(workload, target).forecast(way.execution)


def crowded(kernels: MachineModel, number: int) -> MachineModel:
    """The CPU as one of `number` ranks has it, which take turns where they are more than the cores."""
    crowd = max(1.0, number / (os.cpu_count() or 1))
    return replace(kernels, step_factors=tuple(crowd * f for f in kernels.step_factors or (1.0,)))


def cases_of(number: int, workloads: dict[str, Workload]) -> list[tuple[str, Way]]:
    """Every model in every way."""
    return [
        (n, way)
        for n, w in workloads.items()
        for way in ways(number, w.form("fp32").blocks is not None)
    ]


def run(steps: int, seconds: float, repeats: int) -> tuple[MachineProfile, HostLinks, list[Row]]:
    """Calibrate, forecast, then measure."""
    profile, links = calibrated(seconds, repeats)
    print(f"drift {profile.drift:.0%}, spread {profile.spread:.0%}; {links}", flush=True)
    rows = []
    specs = {name: f"{PLANTED / 'small_models.py'}:{name}" for name in MODELS}
    workloads = {
        name: load_workload(spec, ("fp32",), Variant(OPTIMIZER, cpu=True))
        for name, spec in specs.items()
    }
    for number, mbit in SHAPES:
        with hosts(number, mbit) as joined:
            for name, way in cases_of(number, workloads):
                foreseen = forecast_of(workloads[name], way, number, mbit, profile, links)
                expected_ms = foreseen.step.total_ms if foreseen.step is not None else 1e3
                request = {
                    "spec": specs[name],
                    "engine": way.engine,
                    "optimizer": OPTIMIZER,
                    "steps": max(
                        FEWEST_STEPS, min(steps, round(1e3 * SECONDS_A_CASE / expected_ms))
                    ),
                    "micro_batch": way.execution.micro_batch,
                    "accumulation": way.accumulation,
                }
                times = together(joined, (str(PLANTED / "cluster_rank.py"),), request)
                rows.append(Row(name, number, mbit, way.name, statistics.median(times), foreseen))
                print(line(rows[-1]), flush=True)
    return profile, links, rows


def line(r: Row) -> str:
    """A table row."""
    head = f"| {r.model} | {r.hosts} | {r.mbit_per_s:.0f} | {r.way} | {r.measured_ms:.1f} |"
    if r.forecast.step is None:
        return f"{head} {r.forecast.reason} | | |"
    return f"{head} {r.forecast_ms:.1f} | {r.forecast.step.communication_ms:.1f} | {r.error_pct:+.1f} |"


def summary(rows: list[Row]) -> list[str]:
    """Mean absolute error, and how many pairs of executions (same model, hosts, link and global batch) are in order."""
    known = [r for r in rows if r.forecast.step is not None]
    groups: dict[str, list[float]] = defaultdict(list)
    for r in known:
        for key in (
            "all",
            f"{r.hosts} hosts",
            f"{r.hosts} hosts, {r.mbit_per_s:.0f} Mbit/s",
            r.way.split(",")[0],
        ):
            groups[key].append(abs(r.error_pct))
    lines = [
        f"| {k} | {len(e)} | {statistics.mean(e):.1f} | {max(e):.1f} |" for k, e in groups.items()
    ]
    right = total = best = 0
    sets = defaultdict(list)
    for r in known:
        sets[r.model, r.hosts, r.mbit_per_s].append(r)
    for same in sets.values():
        for a, b in itertools.combinations(same, 2):
            if abs(a.measured_ms / b.measured_ms - 1) >= CLOSE:
                total += 1
                right += (a.measured_ms < b.measured_ms) == (a.forecast_ms < b.forecast_ms)
        chosen = min(same, key=lambda r: r.forecast_ms)
        best += chosen.measured_ms <= (1 + CLOSE) * min(r.measured_ms for r in same)
    return [
        *lines,
        "",
        f"Pairs in the right order: {right} of {total}; the best execution found in {best} of {len(sets)} settings.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer steps, a short calibration, result not kept"
    )
    quick = parser.parse_args().quick
    profile, links, rows = run(*((5, 15.0, 7) if quick else (15, 60.0, 21)))
    import torch

    head = [
        "# DDP and FSDP2 steps between shaped hosts (`python -m benchmarks cluster`)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo, one thread a "
        f"rank; drift {profile.drift:.0%} and spread {profile.spread:.0%} while calibrating.",
        "",
        "| what | rows | mean error, % | largest, % |",
        "|---|---|---|---|",
        *summary(rows),
        "",
    ]
    table = [
        "| model | hosts | Mbit/s | execution | measured, ms | forecast, ms | of it exchange, ms | error, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head))
    if not quick:
        RESULT.write_text("\n".join([*head, f"Links: {links}", "", *table, *map(line, rows), ""]))


if __name__ == "__main__":
    main()
