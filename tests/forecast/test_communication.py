"""Communication: rings, networks, shards, and what hides under the backward pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.execution import Execution
from trainpace.forecast.communication import exposed_ms, link_bytes_per_s
from trainpace.hardware import Cluster, find_device

GIB = 2.0**30


def cluster(name="A100", per_node=8, nodes=1, network=None):
    return Cluster(
        device=find_device(name), devices_per_node=per_node, nodes=nodes, network_gb_per_s_per_device=network
    )


def exposed(gradient=GIB, parameters=GIB, forward=0.0, backward=0.0, on=None, **changes):
    on = on or cluster()
    run = Execution(nproc_per_node=on.devices_per_node, nnodes=on.nodes, **changes)
    return exposed_ms(run, on, gradient, parameters, forward, backward)


def test_an_all_reduce_on_an_a100_node_is_near_the_measured_one():
    # nccl-tests on 8 A100s, stas00/ml-engineering: 0.424 ms for 32 MiB; DDP sends 1 GiB in buckets of about that size
    assert exposed() == pytest.approx(32 * 0.424, rel=0.35)


@given(st.floats(1e6, 1e11), st.floats(0, 1e4))
def test_a_longer_backward_pass_hides_more_but_never_all(gradient, backward):
    bare, hidden = exposed(gradient), exposed(gradient, backward=backward)
    assert 0 < hidden <= bare
    assert exposed(2 * gradient, backward=backward) > hidden


def test_what_is_reduced_after_the_backward_pass_is_not_hidden():
    assert exposed(backward=100.0, engine="unoverlapped") == exposed(backward=0.0)


def test_links():
    assert link_bytes_per_s(cluster("H100")) > link_bytes_per_s(cluster("A100")) > link_bytes_per_s(cluster("L4"))
    assert link_bytes_per_s(cluster(nodes=4, network=5.0)) < link_bytes_per_s(cluster())
    assert "network" in link_bytes_per_s(cluster(nodes=2))


def test_full_sharding_moves_half_as_much_again():
    plain, sharded = exposed(), exposed(zero_stage=3)
    assert 1.2 * plain < sharded < 1.8 * plain


def test_data_parallel_copies_over_pcie():
    assert exposed(engine="data_parallel", on=cluster("RTX 2080 Ti", 4)) > 50 * exposed(backward=1e4)


def test_one_device_communicates_nothing():
    assert exposed(on=cluster(per_node=1)) == 0
