"""Faults planted on one of several nodes, and the recording that `srun trainpace watch` makes of each.

Needs Slurm and network namespaces (slurm_cluster.py, netns.py).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Literal

from netns import INTERFACE
from slurm_cluster import Cluster
from truth import read_truth

from trainpace.records import Record
from trainpace.watch import Recording, read_recording

SCRIPT = Path(__file__).parent / "scripts" / "several_nodes.py"
MBIT_PER_S, SLOW_MBIT_PER_S = 800.0, 150.0
TIMEOUT_S = 240.0
GRADIENT_BYTES = 4 * (1000 * 128 + 128 * 512 + 512 + 512 * 128 + 128 + 128 * 2 + 2)
"""Of the script's model."""

Found = Literal["compute", "data", "inputs", "link"]


class Fault(Record):
    """What is planted on the node of `rank`, and what it should be called."""

    name: str
    expected: Found
    args: tuple[str, ...] = ()
    is_link: bool = False
    rank: int = 1

    def planted_ms(self, made: Made) -> float:
        """Of a step: what the script says that it really waited beyond the other ranks, since a busy machine wakes it late. Of a
        link what its bytes take longer; in a ring every node sends its next one 2 (n - 1) / n of the gradients."""
        if self.is_link:
            sent = GRADIENT_BYTES * 2 * (made.nodes - 1) / made.nodes
            return 8e-3 * sent * (1 / SLOW_MBIT_PER_S - 1 / MBIT_PER_S)
        waited = [read_truth(Path(f"{made.times}.{rank}")).planted_ms for rank in range(made.nodes)]
        mine = waited.pop(self.rank)
        return mine - statistics.fmean(waited)


class Made(Record):
    """A recording of so many nodes, and where their ranks say what was planted, each behind a dot and its number."""

    recording: Recording
    nodes: int
    times: Path


FAULTS = (
    Fault(name="slow node", expected="compute", args=("--forward-ms", "20")),
    Fault(name="slow disk", expected="data", args=("--read-ms", "2.5")),
    Fault(name="longer sequences", expected="inputs", args=("--long",)),
    Fault(name="slow link", expected="link", is_link=True),
)


class Named(Record):
    """What a recording says of a fault."""

    cause: str
    node: str
    ms: float


def recorded(fault: Fault | None, cluster: Cluster, folder: Path, steps: int = 80) -> Made:
    """The script on all nodes of the cluster, with one fault or none. RuntimeError where it fails."""
    nodes, times = len(cluster.names), folder.with_name(f"{folder.name}-times")
    watch = (sys.executable, "-m", "trainpace", "watch", "--json", "--output", str(folder), "--")
    planted = ("--rank", str(fault.rank), *fault.args) if fault else ()
    script = (sys.executable, str(SCRIPT), "--steps", str(steps), *planted)
    around = {
        **os.environ, "MASTER_ADDR": cluster.names[0], "MASTER_PORT": "29541", "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1", "STEP_TIMES": str(times),
    }  # fmt: skip
    if fault is not None and fault.is_link:
        cluster.limit(cluster.names[fault.rank], SLOW_MBIT_PER_S)
    try:
        done = subprocess.run(
            ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", *watch, *script),
            env=around, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        if fault is not None and fault.is_link:
            cluster.limit(cluster.names[fault.rank], MBIT_PER_S)
    if " losses, first" not in done.stderr + done.stdout:  # gloo may abort on leaving
        raise RuntimeError(f"srun ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Made(recording=read_recording(folder), nodes=nodes, times=times)


def named(recording: Recording) -> Named:
    """The one that costs most of what the recording names."""
    assert recording.together is not None
    found = [Named(cause=s.cause, node=s.node, ms=s.cause_ms) for s in recording.together.stragglers]
    found += [Named(cause="link", node=s.sender, ms=s.ms) for s in recording.together.slow_links]
    return max(found, key=lambda n: n.ms, default=Named(cause="none", node="", ms=0.0))
