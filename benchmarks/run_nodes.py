"""Faults planted on one of four nodes of a real Slurm, and what `srun trainpace watch` says of each.

Run as root: python benchmarks/run_nodes.py [--quick]. Every node is a network namespace with a link of a known speed and one
rank; a slow node, a slow disk and longer sequences cost a known time each, a slow link what its known speed costs in a ring.
Kept in benchmarks/results/run_nodes.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

HERE = Path(__file__).parent
RESULT = HERE / "results" / "run_nodes.md"
sys.path[:0] = [str(HERE), str(HERE / "planted")]

import netns  # noqa: E402
import several_nodes  # noqa: E402
import slurm_cluster  # noqa: E402
from several_nodes import FAULTS, Fault, Made, Named  # noqa: E402

from trainpace.watch import BEHIND  # noqa: E402

NODES = 4
RANKS = (1, 3, 2, 1)
"""Of the fault, one a repeat."""
CLOSE = 0.2


class Row(NamedTuple):
    fault: Fault | None
    found: Named
    planted_ms: float
    off_ms: float
    within_ms: float

    @property
    def is_right(self) -> bool:
        if self.fault is None:
            return self.found.cause == "none"
        return (self.found.cause, self.found.node) == (self.fault.expected, f"node{self.fault.rank + 1}")

    @property
    def error(self) -> float:
        return self.found.ms / self.planted_ms - 1 if self.planted_ms else 0.0

    def line(self) -> str:
        where = f"node{self.fault.rank + 1}" if self.fault else "-"
        told = f"{self.found.cause}, {self.found.node}" if self.found.node else "none"
        planted = (
            f"{self.planted_ms:.1f} | {self.found.ms:.1f} | {self.error:+.0%}"
            if self.fault
            else f"- | {self.found.ms:.1f} | -"
        )
        clock = f"{self.off_ms:.2f} (said: within {self.within_ms:.0f})"
        name, right = self.fault.name if self.fault else "none", "yes" if self.is_right else "**no**"
        return f"| {name} | {where} | {told} | {right} | {planted} | {clock} |"


def row_of(fault: Fault | None, made: Made) -> Row:
    recording = made.recording
    assert recording.together is not None
    worst = max(recording.together.clocks, key=lambda c: abs(c.offset_ms))  # in truth all nodes have one clock
    planted = fault.planted_ms(made) if fault else 0.0
    return Row(fault, several_nodes.named(recording), planted, abs(worst.offset_ms), worst.uncertainty_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat, and nothing is kept")
    quick = parser.parse_args().quick
    if why := slurm_cluster.missing() or netns.missing():
        raise SystemExit(f"no nodes: {why}")
    load, rows = os.getloadavg()[1], list[Row]()
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_cluster.cluster(NODES, cpus=1, mbit_per_s=several_nodes.MBIT_PER_S) as made,
    ):
        for rank in RANKS[:1] if quick else RANKS:
            for fault in (None, *(replace(f, rank=rank) for f in FAULTS)):
                rows.append(row_of(fault, several_nodes.recorded(fault, made, Path(folder) / f"{len(rows)}")))
                print(rows[-1].line(), flush=True)
    lines = report(rows, load)
    print("\n".join(lines))
    if not quick:
        RESULT.write_text("\n".join(lines))


def report(rows: list[Row], load: float) -> list[str]:
    import torch

    faults = [r for r in rows if r.fault is not None]
    right, close = sum(r.is_right for r in rows), sum(abs(r.error) <= CLOSE for r in faults if r.is_right)
    worst = max((abs(r.error) for r in faults), default=0.0)
    middle = statistics.median(abs(r.error) for r in faults)
    return [
        "# Faults on one of four nodes (`make bench-nodes`, as root)", "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo; load {load:.1f}"
        f" (5 min, before it began). {NODES} nodes on a real Slurm, each a network namespace with one rank and a link of"
        f" {several_nodes.MBIT_PER_S:.0f} Mbit/s, recorded by `srun trainpace watch`; gradients of"
        f" {several_nodes.GRADIENT_BYTES / 1e6:.2f} MB go around in DistributedDataParallel.", "",
        f"Named right: {right} of {len(rows)}, of which {len(rows) - len(faults)} without a fault. Milliseconds of a step"
        f" within {CLOSE:.0%}: {close} of {len(faults)}; off by {middle:.0%} at the median, {worst:.0%} at most. Planted:"
        " what the script says that it waited longer; of a slow link"
        f" ({several_nodes.SLOW_MBIT_PER_S:.0f} Mbit/s) what its bytes take longer at its speed."
        " The nodes share one clock, so that an offset which is found is an error.", "",
        "| fault | on | named | right | planted ms | found ms | error | clock off by ms |", "|---|---|---|---|---|---|---|---|",
        *(r.line() for r in rows), "",
        f"Read with it: the share of a step from which a rank is called a straggler ({BEHIND:.0%}) was 3 % until an earlier"
        " complete run, which named all 12 faults (within 11 %) and a straggler in one of three recordings without a fault."
        f" {len(rows) - len(faults)} recordings without a fault are too few for a rate of false alarms. A slow node and longer"
        " sequences are sleeps of a known length, not a slower processor.", "",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
