"""Links between hosts: the fit recovers planted values, and real ranks are timed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import Cluster, Device, HostLinks
from trainpace.forecast.collectives import collective_ms
from trainpace.measure.calibration import TimedCollective, fit_host_links, non_negative
from trainpace.measure.collectives import COLLECTIVES, SIZES_BYTES

RANK = Path(__file__).parents[2] / "benchmarks" / "planted" / "collective_rank.py"
LINKS = HostLinks(
    start_us=200,
    message_us=100,
    gb_per_s=0.0375,
    link_share=1448 / 1514,
    burst_bytes=16384,
    duplex_excess=0.25,
    host_us_per_mib={"all_reduce": 500, "reduce_scatter": 1500, "send": 100},
)
CPU = Device(name="cpu", vendor="", architecture="", kind="cpu")


def hosts(number, gb_per_s=0.0375, links=LINKS):
    return Cluster(device=CPU, nodes=number, network_gb_per_s_per_device=gb_per_s, host_links=links)


def timed(number=2, gb_per_s=0.0375):
    return [
        TimedCollective(
            collective=name,
            payload_bytes=size,
            ranks=number,
            time_ms=float(collective_ms(name, size, number, 1, hosts(number, gb_per_s))),
        )
        for name in COLLECTIVES
        for size in (*SIZES_BYTES, 2**15, 2**24)
    ]


def test_fit_recovers_planted_host_link_parameters():
    found = fit_host_links(timed(), 0.0375)
    assert found.start_us == pytest.approx(LINKS.start_us, rel=0.01)
    assert found.message_us == pytest.approx(LINKS.message_us, rel=0.01)
    assert found.duplex_excess == pytest.approx(0.25, rel=0.02)
    assert found.burst_bytes == LINKS.burst_bytes
    assert found.host_us_per_mib == pytest.approx(LINKS.host_us_per_mib, rel=0.02)


def test_host_link_fit_is_robust_to_outliers():
    rows = [
        TimedCollective(
            collective=t.collective,
            payload_bytes=t.payload_bytes,
            ranks=2,
            time_ms=t.time_ms * (5 if i % 7 == 3 else 1),
        )
        for i, t in enumerate(timed())
    ]
    found = fit_host_links(rows, 0.0375)
    far = collective_ms("all_reduce", 2**22, 4, 1, hosts(4, 0.125, found))
    assert far == pytest.approx(collective_ms("all_reduce", 2**22, 4, 1, hosts(4, 0.125)), rel=0.05)


def test_unknown_bandwidth_is_fitted_from_largest_payload():
    assert fit_host_links(timed()).gb_per_s == pytest.approx(0.0375, rel=0.02)


def test_links_fitted_on_two_hosts_predict_four():
    found = fit_host_links(timed(), 0.0375)
    for name in COLLECTIVES:
        sizes = np.array(SIZES_BYTES, dtype=float)
        expected = collective_ms(name, sizes, 4, 1, hosts(4, 0.125))
        assert collective_ms(name, sizes, 4, 1, hosts(4, 0.125, found)) == pytest.approx(
            expected, rel=0.02
        )


def test_gloo_reduce_scatter_costs_as_much_as_all_reduce():
    even = HostLinks(start_us=0, message_us=0, host_us_per_mib={}, gb_per_s=0.125, link_share=0.956)
    reduce, scatter, gather = (
        collective_ms(name, 2**24, 4, 1, hosts(4, 0.125, even))
        for name in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert reduce == scatter == pytest.approx(2 * gather)
    assert reduce == pytest.approx(1e3 * 1.5 * 2**24 / (0.125e9 * 0.956))


@given(st.sampled_from(COLLECTIVES), st.integers(2, 64), st.floats(1, 1e10), st.floats(1, 10))
def test_collective_time_grows_with_bytes_and_slower_links(collective, number, payload, factor):
    ms = collective_ms(collective, payload, number, 1, hosts(number))
    assert 0 < ms <= collective_ms(collective, payload * factor, number, 1, hosts(number))
    assert ms <= collective_ms(collective, payload, number, 1, hosts(number, 0.0375 / factor))


def test_ranks_on_one_host_do_not_use_network_link():
    both = Cluster(
        device=CPU, devices_per_node=2, nodes=2, network_gb_per_s_per_device=0.001, host_links=LINKS
    )
    assert collective_ms("all_reduce", 1e7, 2, 2, both) < 0.01 * collective_ms(
        "all_reduce", 1e7, 2, 1, both
    )


def test_host_links_reject_invalid_values():
    with pytest.raises(TrainpaceError, match="bandwidth"):
        HostLinks(start_us=0, message_us=0, host_us_per_mib={}, gb_per_s=0.0, link_share=0.9)
    with pytest.raises(TrainpaceError, match="0 or more"):
        HostLinks(
            start_us=0, message_us=0, host_us_per_mib={"send": -1}, gb_per_s=1.0, link_share=0.9
        )


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_non_negative_fit_satisfies_optimality_conditions(seed, unknowns):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(20, unknowns)), rng.normal(size=20)
    x = non_negative(a, b)
    slope = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert slope.max() < 1e-6  # more of any unknown would not help
    assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-6  # nor less of one that is not 0


@pytest.mark.slow
def test_two_ranks_time_every_collective(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    request = json.dumps({"collectives": COLLECTIVES, "sizes_bytes": [2**10, 2**16], "repeats": 3})
    answer = tmp_path / "answer.json"
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(RANK), str(answer), request]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(i)}) for i in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    rows = json.loads(answer.read_text())
    assert [(r["collective"], r["payload_bytes"]) for r in rows] == [
        (c, s) for c in COLLECTIVES for s in (2**10, 2**16)
    ]
    assert all(r["time_ms"] > 0 for r in rows)
