"""Faults planted on one of several nodes, and what `srun trainpace watch` and `srun trainpace diagnose` make of each.

Needs Slurm and network namespaces (slurm_cluster.py, netns.py).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from netns import INTERFACE
from slurm_cluster import Cluster
from truth import WARM_UP_STEPS, read_truth

from trainpace.core.records import Record, from_json
from trainpace.diagnose import Diagnosis
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
            return _in_ring_ms(made.nodes, SLOW_MBIT_PER_S) - _in_ring_ms(made.nodes, MBIT_PER_S)
        waited = [read_truth(Path(f"{made.times}.{rank}")).planted_ms for rank in range(made.nodes)]
        mine = waited.pop(self.rank)
        return mine - statistics.fmean(waited)


def _in_ring_ms(nodes: int, mbit_per_s: float) -> float:
    return 8e-3 * GRADIENT_BYTES * 2 * (nodes - 1) / nodes / mbit_per_s


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
    """What `diagnose` said, as its JSON reads, beside the recording that it was made from. `planted_ms`: of a step without
    intervention."""

    made: Made
    diagnosis: Diagnosis
    planted_ms: float

    @property
    def exchange_ms(self) -> float:
        """What the gradients take to go around the ring with a slow link."""
        return _in_ring_ms(self.made.nodes, SLOW_MBIT_PER_S)


def recorded(fault: Fault | None, cluster: Cluster, folder: Path, steps: int = 80) -> Made:
    """The script on all nodes of the cluster under `watch`, with one fault or none. RuntimeError where it fails."""
    nodes, times = len(cluster.names), folder.with_name(f"{folder.name}-times")
    done = on_all_nodes("watch", fault, cluster, folder, steps, {"STEP_TIMES": str(times)})
    if " losses, first" not in done.stderr + done.stdout:  # gloo may abort on leaving
        raise RuntimeError(_failed(done))
    return Made(recording=read_recording(folder), nodes=nodes, times=times)


def diagnosed(
    fault: Fault | None, cluster: Cluster, folder: Path, before: Sequence[str] = ()
) -> Diagnosed:
    """The same under `diagnose`, which ends it; `before`: what starts it on each node. RuntimeError where it fails."""
    times = folder.with_name(f"{folder.name}-times")
    done = on_all_nodes(
        "diagnose", fault, cluster, folder, ENDLESS, {"EACH_STEP": str(times)}, before
    )
    if done.returncode:
        raise RuntimeError(_failed(done))
    return _read(done.stdout, fault, folder, len(cluster.names), times)


def diagnosed_by_torchrun(
    fault: Fault | None, cluster: Cluster, folder: Path, more: Sequence[str] = ()
) -> Diagnosed:
    """The same on the first two hosts, past Slurm: torchrun is started on each of them by `diagnose`, with `more` options. Hosts
    are called place1 and place2. RuntimeError where one fails, or where both print a diagnosis."""
    times, hosts = (
        folder.with_name(f"{folder.name}-times"),
        [cluster.host(name) for name in cluster.names[:2]],
    )
    trainpace = (
        sys.executable,
        "-m",
        "trainpace",
        "diagnose",
        "--json",
        *more,
        "--output",
        str(folder),
        "--",
    )
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-port=29547",
    )
    started = []
    for number, host in enumerate(hosts):
        inside = (
            "unshare",
            "--uts",
            "bash",
            "-c",
            f'hostname place{number + 1} && exec "$@"',
            "host",
        )
        node = (f"--node-rank={number}", f"--master-addr={hosts[0].address}")
        started.append(
            subprocess.Popen(
                (*host.prefix, *inside, *trainpace, *torchrun, *node, *_script(fault, ENDLESS)),
                env={**around(cluster), "EACH_STEP": str(times)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    if (
        any(process.returncode for process in started)
        or said[1][0]
        or "node 0 prints the report for all nodes" not in said[1][1]
    ):
        raise RuntimeError(
            f"torchrun ended with {[process.returncode for process in started]}:\n{said}"
        )
    return _read(said[0][0], fault, folder, len(hosts), times)


def _read(answer: str, fault: Fault | None, folder: Path, nodes: int, times: Path) -> Diagnosed:
    found = json.loads(answer)  # of the first task alone
    del found["folder"]
    made = Made(recording=read_recording(folder), nodes=nodes, times=times)
    planted = 0.0
    if fault is not None:
        planted = (
            fault.planted_ms(made)
            if fault.is_link
            else _planted_in_plain_steps(fault, made, folder)
        )
    return Diagnosed(
        made=made, diagnosis=from_json(json.dumps(found), Diagnosis), planted_ms=planted
    )


def _planted_in_plain_steps(fault: Fault, made: Made, folder: Path) -> float:
    """What the faulty rank's script really waited beyond the other ranks, in the steps without intervention."""
    means = []
    for process in read_processes(folder):
        # `diagnose` times the optimizer alone as well; in every step of the script something waits
        each = [
            ms
            for line in Path(f"{made.times}.{process.rank}").read_text().split()
            if (ms := float(line))
        ]
        plain = [r.number for r in records_of(process.path) if isinstance(r, Step) and r.trial == 0]
        means.append(statistics.fmean(each[n] for n in plain if WARM_UP_STEPS <= n < len(each)))
    mine = means.pop(fault.rank)
    return mine - statistics.fmean(means)


def on_all_nodes(
    verb: str,
    fault: Fault | None,
    cluster: Cluster,
    folder: Path,
    steps: int,
    more: Mapping[str, str],
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`srun trainpace VERB --json` before the script, a task a node."""
    nodes = len(cluster.names)
    trainpace = (sys.executable, "-m", "trainpace", verb, "--json", "--output", str(folder), "--")
    if fault is not None and fault.is_link:
        cluster.limit(cluster.names[fault.rank], SLOW_MBIT_PER_S)
    try:
        return subprocess.run(
            (
                "srun",
                f"--nodes={nodes}",
                f"--ntasks={nodes}",
                *before,
                *trainpace,
                sys.executable,
                *_script(fault, steps),
            ),
            env={**around(cluster), **more},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        if fault is not None and fault.is_link:
            cluster.limit(cluster.names[fault.rank], MBIT_PER_S)


def _script(fault: Fault | None, steps: int) -> tuple[str, ...]:
    planted = ("--rank", str(fault.rank), *fault.args) if fault else ()
    return (str(SCRIPT), "--steps", str(steps), *planted)


def around(cluster: Cluster) -> dict[str, str]:
    """The environment in which ranks of this cluster meet."""
    return {
        **os.environ,
        "MASTER_ADDR": cluster.names[0],
        "MASTER_PORT": "29541",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def _failed(done: subprocess.CompletedProcess[str]) -> str:
    return f"srun ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def named(found_in: Recording | Diagnosis) -> Named:
    """The one that costs most of what the recording names."""
    together = found_in.together
    assert together is not None
    found = [Named(cause=s.cause, node=s.node, ms=s.cause_ms) for s in together.stragglers]
    found += [Named(cause="link", node=s.sender, ms=s.ms) for s in together.slow_links]
    return max(found, key=lambda n: n.ms, default=Named(cause="none", node="", ms=0.0))
