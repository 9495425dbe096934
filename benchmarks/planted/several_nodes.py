"""Faults planted on one of several nodes, and what `srun trainpace watch` and `srun trainpace diagnose` make of each.

Needs Slurm and network namespaces (slurm_cluster.py, netns.py).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from netns import INTERFACE
from slurm_cluster import Cluster
from truth import WARM_UP_STEPS, read_truth

from trainpace.diagnose import Diagnosis
from trainpace.records import Record, from_json
from trainpace.watch import Recording, Step, read_processes, read_recording, records_of

SCRIPT = Path(__file__).parent / "scripts" / "several_nodes.py"
MBIT_PER_S, SLOW_MBIT_PER_S = 800.0, 150.0
TIMEOUT_S = 240.0
ENDLESS = 5_000
"""Steps that `diagnose` does not come to the end of."""
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


class Diagnosed(Record):
    """What `diagnose` said, as its JSON reads, beside the recording that it was made from."""

    made: Made
    diagnosis: Diagnosis
    planted_ms: float


def recorded(fault: Fault | None, cluster: Cluster, folder: Path, steps: int = 80) -> Made:
    """The script on all nodes of the cluster under `watch`, with one fault or none. RuntimeError where it fails."""
    nodes, times = len(cluster.names), folder.with_name(f"{folder.name}-times")
    done = on_all_nodes("watch", fault, cluster, folder, steps, {"STEP_TIMES": str(times)})
    if " losses, first" not in done.stderr + done.stdout:  # gloo may abort on leaving
        raise RuntimeError(_failed(done))
    return Made(recording=read_recording(folder), nodes=nodes, times=times)


def diagnosed(fault: Fault | None, cluster: Cluster, folder: Path) -> Diagnosed:
    """The same under `diagnose`, which ends it. RuntimeError where it fails."""
    times = folder.with_name(f"{folder.name}-times")
    done = on_all_nodes("diagnose", fault, cluster, folder, ENDLESS, {"EACH_STEP": str(times)})
    if done.returncode:
        raise RuntimeError(_failed(done))
    found = json.loads(done.stdout)  # of the first task alone
    del found["folder"]
    made = Made(recording=read_recording(folder), nodes=len(cluster.names), times=times)
    planted = 0.0
    if fault is not None:
        planted = fault.planted_ms(made) if fault.is_link else _planted_in_plain_steps(fault, made, folder)
    return Diagnosed(made=made, diagnosis=from_json(json.dumps(found), Diagnosis), planted_ms=planted)


def _planted_in_plain_steps(fault: Fault, made: Made, folder: Path) -> float:
    """What the faulty rank's script really waited beyond the other ranks, in the steps without intervention."""
    means = []
    for process in read_processes(folder):
        # `diagnose` times the optimizer alone as well; in every step of the script something waits
        each = [ms for line in Path(f"{made.times}.{process.rank}").read_text().split() if (ms := float(line))]
        plain = [r.number for r in records_of(process.path) if isinstance(r, Step) and r.trial == 0]
        means.append(statistics.fmean(each[n] for n in plain if WARM_UP_STEPS <= n < len(each)))
    mine = means.pop(fault.rank)
    return mine - statistics.fmean(means)


def on_all_nodes(
    verb: str, fault: Fault | None, cluster: Cluster, folder: Path, steps: int, more: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`srun trainpace VERB --json` before the script, a task a node."""
    nodes = len(cluster.names)
    trainpace = (sys.executable, "-m", "trainpace", verb, "--json", "--output", str(folder), "--")
    planted = ("--rank", str(fault.rank), *fault.args) if fault else ()
    script = (sys.executable, str(SCRIPT), "--steps", str(steps), *planted)
    if fault is not None and fault.is_link:
        cluster.limit(cluster.names[fault.rank], SLOW_MBIT_PER_S)
    try:
        return subprocess.run(
            ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", *trainpace, *script),
            env={**around(cluster), **more}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        if fault is not None and fault.is_link:
            cluster.limit(cluster.names[fault.rank], MBIT_PER_S)


def around(cluster: Cluster) -> dict[str, str]:
    """The environment in which ranks of this cluster meet."""
    return {
        **os.environ, "MASTER_ADDR": cluster.names[0], "MASTER_PORT": "29541", "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _failed(done: subprocess.CompletedProcess[str]) -> str:
    return f"srun ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def named(found_in: Recording | Diagnosis) -> Named:
    """The one that costs most of what the recording names."""
    together = found_in.together
    assert together is not None
    found = [Named(cause=s.cause, node=s.node, ms=s.cause_ms) for s in together.stragglers]
    found += [Named(cause="link", node=s.sender, ms=s.ms) for s in together.slow_links]
    return max(found, key=lambda n: n.ms, default=Named(cause="none", node="", ms=0.0))
