"""`srun trainpace diagnose` on three nodes of a real Slurm, each with its own network, gives one diagnosis and never hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planted"))

import netns
import several_nodes
import slurm_cluster

WHY_NOT = slurm_cluster.missing() or netns.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=f"no nodes: {WHY_NOT}")]

NODES = 3
CLOSE = 0.35
"""Wider than what benchmarks/run_nodes.py finds on a machine that does nothing else: here other tests run beside it."""
WITHIN_S = 60.0
IMPATIENT = (
    "from trainpace.watch import tasks; tasks.MEET_S, tasks.SLACK_S, tasks.GRACE_S = 5.0, 2.0, 2.0;"
    " from trainpace.cli import main; main()"
)
IN_ANY_RUN = ("slow disk",)
FAULTS = [
    pytest.param(
        f, id=f.name.replace(" ", "-"), marks=[] if f.name in IN_ANY_RUN else pytest.mark.long
    )
    for f in several_nodes.FAULTS
]


@pytest.fixture(scope="module")
def nodes():
    with slurm_cluster.cluster(NODES, mbit_per_s=several_nodes.MBIT_PER_S) as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_diagnose_on_nodes_proves_planted_fault(nodes, tmp_path, fault):
    # One node has a different clock origin, as real machines do.
    made = several_nodes.diagnosed(fault, nodes, tmp_path / "recording", before=CLOCK_APART)
    diagnosis = made.diagnosis
    found = several_nodes.named(diagnosis)
    assert (found.cause, found.node) == (fault.expected, f"node{fault.rank + 1}"), diagnosis.why
    assert found.ms == pytest.approx(made.planted_ms, rel=CLOSE), diagnosis.why
    # Not by the verdict: waiting for the straggler and communication may take equally long.
    (share,) = (
        s
        for s in diagnosis.shares
        if s.cause == ("communication" if fault.is_link else "straggler")
    )
    assert share.proved
    assert share.ms == pytest.approx(
        made.exchange_ms if fault.is_link else made.planted_ms, rel=CLOSE
    )
    (clock,) = (c for c in diagnosis.together.clocks if c.node == "node2")
    assert clock.offset_ms == pytest.approx(1000 * APART_S, abs=clock.uncertainty_ms)
    recording = made.made.recording
    assert [(r.rank, r.host) for r in recording.ranks] == [
        (i, f"node{i + 1}") for i in range(NODES)
    ]
    assert all(r.complete for r in recording.ranks)
    assert (
        len({tuple((b.trial, b.steps) for b in r.blocks) for r in recording.ranks}) == 1
    )  # all made the same


APART_S = 3600
CLOCK_APART = (
    "bash",
    "-c",
    f'test $SLURM_PROCID != 1 || exec unshare --time --monotonic {APART_S} --fork "$@"; exec "$@"',
    "clock",
)


def srun(nodes, folder, *command, before=()):
    trainpace = (sys.executable, "-c", IMPATIENT, "diagnose", "--output", str(folder), "--")
    return subprocess.run(
        (
            "srun",
            f"--nodes={NODES}",
            f"--ntasks={NODES}",
            *before,
            *trainpace,
            sys.executable,
            *command,
        ),
        env=several_nodes.around(nodes),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def test_failure_on_one_node_ends_all_and_is_named(nodes, tmp_path):
    """Without help, the other ranks would wait for the failed one for half an hour."""
    (tmp_path / "train.py").write_text(
        "import os, runpy, sys\n"
        "if os.environ['SLURM_PROCID'] == '1': sys.exit(7)\n"
        f"sys.argv = [{str(several_nodes.SCRIPT)!r}]\n"
        f"sys.path.insert(0, {str(several_nodes.SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(several_nodes.SCRIPT)!r}, run_name='__main__')\n"
    )
    done = srun(nodes, tmp_path / "recording", str(tmp_path / "train.py"))
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.count("Task 1 of 3 (on node2) ended with exit code 7.") == 1, done.stderr


def test_folder_not_shared_between_nodes_is_rejected_before_start(nodes, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    mounts = (
        "unshare",
        "--mount",
        "bash",
        "-c",
        f'mount -t tmpfs none {own} && exec "$@"',
        "mount",
    )
    done = srun(
        nodes, own / "recording", "-c", f"open({str(tmp_path / 'ran')!r}, 'w')", before=mounts
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("tasks 1, 2 of 3") == 1, done.stderr
    assert not (tmp_path / "ran").exists()


def test_torchrun_on_two_nodes_gives_one_diagnosis(nodes, tmp_path):
    (slow,) = (f for f in several_nodes.FAULTS if f.name == "slow node")
    made = several_nodes.diagnosed_by_torchrun(
        slow, nodes, tmp_path / "recording", ("--budget", "8s")
    )
    # With other tests running, communication on two busy cores may take as long as the straggler.
    assert made.diagnosis.verdict in ("straggler", "communication"), made.diagnosis.why
    found = several_nodes.named(made.diagnosis)
    assert (found.cause, found.node) == ("compute", "place2"), made.diagnosis.why
    assert found.ms == pytest.approx(made.planted_ms, rel=CLOSE)
