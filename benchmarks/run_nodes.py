"""Faults planted on one of four nodes of a real Slurm, and what `srun trainpace watch` and `srun trainpace diagnose` say of each.

Run as root: python benchmarks/run_nodes.py [--quick] [--part watch|diagnose]; of one part the other's results are kept.
Every node is a network namespace with a link of a known speed and one
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

HERE = Path(__file__).parent
RESULT = HERE / "results" / "run_nodes.md"
sys.path[:0] = [str(HERE), str(HERE / "planted")]

import netns  # noqa: E402
import several_nodes  # noqa: E402
import slurm_cluster  # noqa: E402
from several_nodes import FAULTS, Diagnosed, Fault, Made, Named  # noqa: E402

from trainpace.diagnose import Share  # noqa: E402
from trainpace.watch import BEHIND  # noqa: E402

NODES = 4
RANKS = {"watch": (1, 3, 2, 1), "diagnose": (1, 3)}
"""Of the fault, one a repeat."""
CLOSE = 0.2
TRIED = {"data": "cached_batch"}
"""The intervention that takes the cause away, where it is not the exchange that is left out."""


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
        return (self.found.cause, self.found.node) == (
            self.fault.expected,
            f"node{self.fault.rank + 1}",
        )

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
        name, right = (
            self.fault.name if self.fault else "none",
            "yes" if self.is_right else "**no**",
        )
        return f"| {name} | {where} | {told} | {right} | {planted} | {clock} |"


def row_of(fault: Fault | None, made: Made) -> Row:
    recording = made.recording
    assert recording.together is not None
    worst = max(
        recording.together.clocks, key=lambda c: abs(c.offset_ms)
    )  # in truth all nodes have one clock
    planted = fault.planted_ms(made) if fault else 0.0
    return Row(
        fault, several_nodes.named(recording), planted, abs(worst.offset_ms), worst.uncertainty_ms
    )


class Diagnosis(NamedTuple):
    """Of one run of `diagnose`; by torchrun on two nodes where there is no Slurm."""

    fault: Fault | None
    made: Diagnosed
    without_slurm: bool = False

    @property
    def found(self) -> Named:
        return several_nodes.named(self.made.diagnosis)

    @property
    def verdict(self) -> str:
        return self.made.diagnosis.verdict

    @property
    def share(self) -> Share:
        """Of what the fault costs: waiting for the slowest rank, or the exchange."""
        cause = (
            "straggler" if self.fault is not None and not self.fault.is_link else "communication"
        )
        return next(s for s in self.made.diagnosis.shares if s.cause == cause)

    @property
    def is_right(self) -> bool:
        if self.fault is None:
            return self.found.cause == "none" and self.verdict != "straggler"
        node = f"{'place' if self.without_slurm else 'node'}{self.fault.rank + 1}"
        return (self.found.cause, self.found.node) == (
            self.fault.expected,
            node,
        ) and self.share.proved

    @property
    def error(self) -> float:
        return self.found.ms / self.made.planted_ms - 1 if self.made.planted_ms else 0.0

    @property
    def proved(self) -> str:
        """What interventions say: the share, and what leaving the cause out saved."""
        share = self.share
        trial = TRIED.get(self.fault.expected if self.fault else "", "no_sync")
        saved = next((p for p in self.made.diagnosis.proofs if p.trial == trial), None)
        left_out = {"cached_batch": "cached batch", "no_sync": "no exchange"}[trial]
        tried = (
            "-"
            if saved is None
            else f"{left_out}: {saved.saved_ms:.1f} ({saved.low_ms:.1f} to {saved.high_ms:.1f})"
        )
        return f"{share.ms:.1f}{', proved' if share.proved else ''} | {tried}"

    def line(self) -> str:
        on = f"node{self.fault.rank + 1}" if self.fault else "-"
        told = f"{self.found.cause}, {self.found.node}" if self.found.node else "none"
        planted, error = (
            (f"{self.made.planted_ms:.1f}", f"{self.error:+.0%}") if self.fault else ("-", "-")
        )
        name = f"{self.fault.name if self.fault else 'none'}{', torchrun' if self.without_slurm else ''}"
        right = "yes" if self.is_right else "**no**"
        figures = f"{planted} | {self.found.ms:.1f} | {error} | {self.proved}"
        return f"| {name} | {on} | {self.verdict} | {told} | {right} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat, and nothing is kept")
    parser.add_argument("--part", choices=RANKS, help="of both parts only this one")
    args = parser.parse_args()
    if why := slurm_cluster.missing() or netns.missing():
        raise SystemExit(f"no nodes: {why}")
    load, parts = os.getloadavg()[1], dict[str, list[str]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_cluster.cluster(NODES, cpus=1, mbit_per_s=several_nodes.MBIT_PER_S) as made,
    ):
        for part in (args.part,) if args.part else RANKS:
            ranks = RANKS[part][:1] if args.quick else RANKS[part]
            faults = [f for rank in ranks for f in (None, *(replace(f, rank=rank) for f in FAULTS))]
            if part == "watch":
                parts[part] = report(list(_watched(faults, made, Path(folder))), load)
            else:
                parts[part] = diagnose_report(list(_diagnosed(faults, made, Path(folder))), load)
    print("\n\n".join("\n".join(lines) for lines in parts.values()))
    if not args.quick:
        RESULT.write_text(kept(RESULT.read_text() if RESULT.exists() else "", parts))


def _watched(
    faults: Sequence[Fault | None], made: slurm_cluster.Cluster, folder: Path
) -> Iterator[Row]:
    for i, fault in enumerate(faults):
        row = row_of(fault, several_nodes.recorded(fault, made, folder / f"watch-{i}"))
        print(row.line(), flush=True)
        yield row


def _diagnosed(
    faults: Sequence[Fault | None], made: slurm_cluster.Cluster, folder: Path
) -> Iterator[Diagnosis]:
    for i, fault in enumerate(faults):
        row = Diagnosis(fault, several_nodes.diagnosed(fault, made, folder / f"diagnose-{i}"))
        print(row.line(), flush=True)
        yield row
    slow = FAULTS[0]
    row = Diagnosis(
        slow,
        several_nodes.diagnosed_by_torchrun(slow, made, folder / "torchrun"),
        without_slurm=True,
    )
    print(row.line(), flush=True)
    yield row


DIAGNOSE_TITLE = "## The same under `srun trainpace diagnose`"


def kept(before: str, parts: Mapping[str, Sequence[str]]) -> str:
    """The whole result: parts that were run in place of those that stood there before."""
    watch, _, diagnose = before.partition(DIAGNOSE_TITLE)
    whole = {
        "watch": watch.strip(),
        "diagnose": f"{DIAGNOSE_TITLE}{diagnose}".strip() if diagnose else "",
    }
    whole |= {part: "\n".join(lines).strip() for part, lines in parts.items()}
    return "\n\n".join(text for text in (whole["watch"], whole["diagnose"]) if text) + "\n"


def diagnose_report(rows: list[Diagnosis], load: float) -> list[str]:
    import torch

    faults = [r for r in rows if r.fault is not None]
    right, close = (
        sum(r.is_right for r in rows),
        sum(abs(r.error) <= CLOSE for r in faults if r.is_right),
    )
    return [
        DIAGNOSE_TITLE,
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo; load {load:.1f}"
        " (5 min, before it began). The same nodes and faults; interventions on all nodes at once, and one diagnosis by the first"
        " task. The last row is torchrun on two of the nodes, past Slurm.",
        "",
        f"Cause and node right, and proved: {right} of {len(rows)}, of which {len(rows) - len(faults)} without a fault."
        f" Milliseconds of a step within {CLOSE:.0%}: {close} of {len(faults)}. By intervention: how far a straggler's step"
        " without exchange is behind the others'; of a slow link, and of none, the whole exchange. The verdict is the largest"
        " part of a step, and so either of the two where both take 20 ms.",
        "",
        "| fault | on | verdict | named | right | planted ms | found ms | error | ms by intervention | saved, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(r.line() for r in rows),
        "",
    ]


def report(rows: list[Row], load: float) -> list[str]:
    import torch

    faults = [r for r in rows if r.fault is not None]
    right, close = (
        sum(r.is_right for r in rows),
        sum(abs(r.error) <= CLOSE for r in faults if r.is_right),
    )
    worst = max((abs(r.error) for r in faults), default=0.0)
    middle = statistics.median(abs(r.error) for r in faults)
    return [
        "# Faults on one of four nodes (`python -m benchmarks nodes`, as root)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo; load {load:.1f}"
        f" (5 min, before it began). {NODES} nodes on a real Slurm, each a network namespace with one rank and a link of"
        f" {several_nodes.MBIT_PER_S:.0f} Mbit/s, recorded by `srun trainpace watch`; gradients of"
        f" {several_nodes.GRADIENT_BYTES / 1e6:.2f} MB go around in DistributedDataParallel.",
        "",
        f"Named right: {right} of {len(rows)}, of which {len(rows) - len(faults)} without a fault. Milliseconds of a step"
        f" within {CLOSE:.0%}: {close} of {len(faults)}; off by {middle:.0%} at the median, {worst:.0%} at most. Planted:"
        " what the script says that it waited longer; of a slow link"
        f" ({several_nodes.SLOW_MBIT_PER_S:.0f} Mbit/s) what its bytes take longer at its speed."
        " The nodes share one clock, so that an offset which is found is an error.",
        "",
        "| fault | on | named | right | planted ms | found ms | error | clock off by ms |",
        "|---|---|---|---|---|---|---|---|",
        *(r.line() for r in rows),
        "",
        f"Read with it: the share of a step from which a rank is called a straggler ({BEHIND:.0%}) was 3 % until an earlier"
        " complete run, which named all 12 faults (within 11 %) and a straggler in one of three recordings without a fault."
        f" {len(rows) - len(faults)} recordings without a fault are too few for a rate of false alarms. A slow node and longer"
        " sequences are sleeps of a known length, not a slower processor.",
        "",
    ]


if __name__ == "__main__":
    main()
