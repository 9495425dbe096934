"""One recording names a fault on one of three Slurm nodes with separate networks."""

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
"""Relative tolerance. It is wide because other tests run on the same machine."""


@pytest.fixture(scope="module")
def nodes():
    with slurm_cluster.cluster(NODES, mbit_per_s=several_nodes.MBIT_PER_S) as made:
        yield made


IN_ANY_RUN = ("slow disk", "slow link")
"""Faults tried in every run. tests/watch/test_stragglers.py covers the arithmetic of the others."""
FAULTS = [
    pytest.param(
        f, id=f.name.replace(" ", "-"), marks=[] if f.name in IN_ANY_RUN else pytest.mark.long
    )
    for f in several_nodes.FAULTS
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named_with_its_node(nodes, tmp_path, fault):
    made = several_nodes.recorded(fault, nodes, tmp_path / "recording")
    recording = made.recording
    assert [(r.rank, r.host) for r in recording.ranks] == [
        (i, f"node{i + 1}") for i in range(NODES)
    ]
    found = several_nodes.named(recording)
    assert (found.cause, found.node) == (fault.expected, f"node{fault.rank + 1}"), (
        recording.together
    )
    assert found.ms == pytest.approx(fault.planted_ms(made), rel=CLOSE), recording.together
    for clock in recording.together.clocks:  # all nodes share one real clock
        assert abs(clock.offset_ms) <= clock.uncertainty_ms
    words = subprocess.run(
        (sys.executable, "-m", "trainpace", "watch", "--from", str(tmp_path / "recording")),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"node{fault.rank + 1}" in words
    assert words.count("\n") <= 24
