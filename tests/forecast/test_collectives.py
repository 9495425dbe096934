"""Collective times follow the algorithms and match nccl-tests measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast.collectives import COLLECTIVES, CONSTANTS, collective_ms

A100 = Cluster(
    device=find_device("A100 SXM 80GB"), devices_per_node=8, nodes=8, network_gb_per_s_per_device=25
)
H200 = Cluster(
    device=find_device("H200 SXM"), devices_per_node=8, nodes=8, network_gb_per_s_per_device=50
)
PCIE = Cluster(device=find_device("T4"), devices_per_node=4, nodes=4, network_gb_per_s_per_device=1)
GB200 = Cluster(
    device=find_device("GB200"), devices_per_node=4, nodes=36, network_gb_per_s_per_device=50
)
CLUSTERS = st.sampled_from([A100, H200, PCIE, GB200])
NAMES = st.sampled_from(COLLECTIVES)
GROUPS = st.sampled_from([(2, 1), (2, 2), (4, 4), (8, 8), (8, 2), (16, 8), (64, 8), (64, 1)])
BYTES = st.floats(1, 1e11)


def bus_gb_per_s(collective, payload_bytes, ranks, cluster, per_node=8):
    ms = collective_ms(collective, payload_bytes, ranks, per_node, cluster)
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * payload_bytes / ms / 1e6


@pytest.mark.parametrize(
    ("collective", "payload_bytes", "ranks", "cluster", "measured"),
    [  # nccl-tests, collectives.csv
        ("all_reduce", 2**34, 8, H200, 482.3),
        ("all_reduce", 2**33, 4, H200, 363.3),
        ("all_reduce", 2**33, 5, H200, 414.2),
        ("all_gather", 2**34, 8, H200, 361.4),
        ("reduce_scatter", 2**34, 8, H200, 362.9),
        ("all_reduce", 2**32, 32, H200, 364.9),
    ],
)
def test_large_payloads_reach_measured_bus_bandwidth(
    collective, payload_bytes, ranks, cluster, measured
):
    assert bus_gb_per_s(collective, payload_bytes, ranks, cluster) == pytest.approx(
        measured, rel=0.06
    )


def test_largest_a100_all_reduce_matches_nccl_tests():
    assert bus_gb_per_s("all_reduce", 2**34, 8, A100) == pytest.approx(234.9, rel=0.12)


@pytest.mark.parametrize(
    ("payload_bytes", "cluster", "measured_us"),
    [
        (2**15, A100, 43.8),
        (2**22, A100, 101.5),
        (2**26, A100, 684.6),
        (2**15, H200, 40.0),
        (2**24, H200, 133.5),
    ],
)
def test_small_all_reduce_matches_measured_latency(payload_bytes, cluster, measured_us):
    assert collective_ms("all_reduce", payload_bytes, 8, 8, cluster) * 1e3 == pytest.approx(
        measured_us, rel=0.25
    )


@pytest.mark.parametrize(
    ("collective", "payload_bytes", "ranks", "measured_us"),
    [  # kernels16, aiconfigurator's GB200 in CUDA graphs
        ("all_gather", 2**22, 48, 90),
        ("all_reduce", 2**16, 64, 119),
        ("all_to_all", 2**16, 64, 638),
        ("all_to_all", 2**32, 32, 6523),
        ("reduce_scatter", 2**16, 16, 31),
    ],
)
def test_nvlink_domain_of_72_gpus_matches_measured_times(
    collective, payload_bytes, ranks, measured_us
):
    graphs = replace(CONSTANTS, eager_us=0.0)
    us = 1e3 * collective_ms(collective, payload_bytes, ranks, ranks, GB200, graphs)
    assert us == pytest.approx(measured_us, rel=0.25)


@given(NAMES, CLUSTERS, GROUPS, BYTES, st.floats(1, 100))
def test_more_bytes_never_take_less_time(collective, cluster, group, payload, factor):
    less, more = collective_ms(collective, [payload, payload * factor], *group, cluster)
    assert 0 < less <= more


@given(NAMES, CLUSTERS, GROUPS, BYTES, st.floats(0.01, 1))
def test_slower_network_never_speeds_up_a_collective(collective, cluster, group, payload, factor):
    slower = Cluster(
        device=cluster.device,
        network_gb_per_s_per_device=cluster.network_gb_per_s_per_device * factor,
        nodes=8,
    )
    assert collective_ms(collective, payload, *group, slower) >= collective_ms(
        collective, payload, *group, cluster
    )


@given(CLUSTERS, GROUPS, BYTES)
def test_all_reduce_is_no_slower_than_reduce_scatter_plus_all_gather(cluster, group, payload):
    halves = sum(
        collective_ms(c, payload, *group, cluster) for c in ("reduce_scatter", "all_gather")
    )
    assert collective_ms("all_reduce", payload, *group, cluster) <= halves * (1 + 1e-9)


@given(GROUPS.filter(lambda g: g[0] == g[1]))
def test_large_all_reduce_equals_reduce_scatter_plus_all_gather(group):
    halves = sum(collective_ms(c, 1e11, *group, A100) for c in ("reduce_scatter", "all_gather"))
    rel = (
        0.25 if group[0] == 2 else 0.01
    )  # between two ranks, all-reduce is more efficient than reduce-scatter plus all-gather
    assert collective_ms("all_reduce", 1e11, *group, A100) == pytest.approx(halves, rel=rel)


@given(NAMES, CLUSTERS, BYTES)
def test_collective_of_one_rank_or_zero_bytes_takes_no_time(collective, cluster, payload):
    assert collective_ms(collective, payload, 1, 1, cluster) == 0
    assert collective_ms(collective, 0, 8, 8, cluster) == 0


def test_collective_ms_broadcasts_array_arguments():
    ms = collective_ms("all_gather", np.array([[1e6], [1e8]]), np.array([2, 8, 16]), 8, A100)
    assert ms.shape == (2, 3)
    assert ms[1, 2] == collective_ms("all_gather", 1e8, 16, 8, A100)


def test_tree_all_reduce_is_faster_than_ring_between_two_nodes():
    slow = Cluster(
        device=A100.device, devices_per_node=8, nodes=2, network_gb_per_s_per_device=1.25
    )
    ring_share = 2 * 15 / 16
    ring_ms = 1e3 * ring_share * 1e9 / (10e9 * 0.91)
    assert collective_ms("all_reduce", 1e9, 16, 8, slow) < 0.65 * ring_ms


def test_nvlink_bridge_joins_only_two_cards():
    pair = Cluster(device=find_device("H100 PCIe"), devices_per_node=4)
    assert collective_ms("all_reduce", 1e9, 4, 4, pair) > 3 * collective_ms(
        "all_reduce", 1e9, 2, 2, pair
    )


def test_geforce_without_peer_access_communicates_through_host():
    geforce = Cluster(device=find_device("RTX 3090"), devices_per_node=4)
    workstation = Cluster(device=find_device("RTX A5000"), devices_per_node=4)
    for ranks in (2, 4):
        both = [
            collective_ms("all_reduce", 1e9, ranks, ranks, cluster)
            for cluster in (geforce, workstation)
        ]
        assert both[0] > 2 * both[1]
    told = Cluster(device=geforce.device, devices_per_node=4, pcie_peer_access=True)
    assert collective_ms("send", 1e9, 4, 4, told) < 0.5 * collective_ms("send", 1e9, 4, 4, geforce)


def test_pair_on_switchless_board_gets_part_of_nvlink_bandwidth():
    v100, gh200 = (
        Cluster(device=find_device(name), devices_per_node=4)
        for name in ("V100 SXM2 16GB", "GH200 96GB")
    )
    for board in (v100, gh200):
        assert bus_gb_per_s("send", 1e9, 2, board, per_node=2) < 0.6 * bus_gb_per_s(
            "all_gather", 4e9, 4, board, per_node=4
        )


def test_missing_network_bandwidth_is_reported():
    unlinked = Cluster(device=A100.device, devices_per_node=8, nodes=2)
    assert "network's bandwidth" in collective_ms("all_reduce", 1e6, 16, 8, unlinked)
    assert collective_ms("all_reduce", 1e6, 8, 8, unlinked) > 0
    with pytest.raises(UnknownName, match="all_gather"):
        collective_ms("allgather", 1e6, 8, 8, A100)
    with pytest.raises(TrainpaceError, match="network_latency_us"):
        Cluster(device=A100.device, network_latency_us=-1)
