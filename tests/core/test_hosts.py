"""Host CPUs are found by common, cloud and Linux names. Their ratings agree with clocks and with each other."""

import json
import statistics
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from trainpace.core.errors import UnknownName
from trainpace.core.hardware import (
    FILE,
    catalogue,
    find_device,
    find_host,
    host_catalogue,
    typical_host,
)
from trainpace.core.records import to_json

TOOL = Path(__file__).parents[2] / "tools/typical_hosts.py"
SPEC = spec_from_file_location("typical_hosts", TOOL)
tool = module_from_spec(SPEC)
SPEC.loader.exec_module(tool)
RAW = tomllib.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz", "Xeon Platinum 8275CL"),
        ("AMD EPYC 7742 64-Core Processor", "EPYC 7742"),
        ("epyc-7742", "EPYC 7742"),
        ("EPYC 7713P", "EPYC 7713"),
        ("12th Gen Intel(R) Core(TM) i9-12900K", "Core i9-12900K"),
        ("13900k", "Core i9-13900K"),
        ("AMD Ryzen Threadripper PRO 3975WX 32-Cores", "Threadripper PRO 3975WX"),
        ("5950X", "Ryzen 9 5950X"),
        ("Xeon 8480+", "Xeon Platinum 8480+"),
        ("8480C", "Xeon Platinum 8480+"),
        ("E5-2686 v4", "Xeon E5-2686 v4"),
        ("NVIDIA Grace", "Grace"),
        ("i9-7900X", "Core i9-7900X"),
        ("Ryzen 9 7900X", "Ryzen 9 7900X"),
    ],
)
def test_host_cpu_is_found_by_common_names(name, found):
    assert find_host(name).name == found


def test_every_name_and_alias_finds_its_host_cpu():
    for cpu in host_catalogue():
        for name in (
            cpu.name,
            *cpu.aliases,
            f"{cpu.vendor} {cpu.name} 32-Core Processor @ 2.10GHz",
        ):
            assert find_host(name) is cpu


def test_unknown_and_ambiguous_host_names_list_nearest():
    with pytest.raises(UnknownName) as refused:
        find_host("EPYC 7743")
    assert any("EPYC 7742" in name for name in refused.value.nearest)
    with pytest.raises(UnknownName):
        find_host("7900X")
    with pytest.raises(UnknownName):
        find_host("")


def test_host_ratings_have_sources_and_match_turbo_clock():
    for cpu in host_catalogue():
        points = cpu.single_thread
        assert points.source
        assert points.kind == ("derived" if "turbo clock" in points.source else "secondary")
        assert 1500 < points.value < 5500
        assert 2.5 < cpu.turbo_ghz <= 6.0
        assert 480 < points.value / cpu.turbo_ghz < 920


def test_ratings_of_held_out_cpus_match_their_core():
    """Derived ratings assume this. The EPYC 9334 is the exception documented in hosts.toml."""
    for core in RAW["core"].values():
        ratios = {cpu["cpu"]: cpu["points"] / cpu["turbo_ghz"] for cpu in core.get("measured", ())}
        for name, ratio in ratios.items():
            others = [other for cpu, other in ratios.items() if cpu != name]
            if others and name != "EPYC 9334":
                assert statistics.median(others) == pytest.approx(ratio, rel=0.1), name


def test_cpu_without_measured_core_is_rough():
    assert find_host("Grace").rough
    assert find_host("EPYC 9655").rough
    assert not find_host("EPYC 9654").rough


def test_packaged_typical_hosts_match_catalogue():
    packaged = FILE.with_name("typical_hosts.json").read_text("utf-8")
    assert json.loads(packaged) == json.loads(to_json(tool.typical_hosts())), (
        "python tools/typical_hosts.py"
    )


def test_every_card_has_typical_host_of_matching_kind():
    kinds = {cpu.name: cpu.kind for cpu in host_catalogue()}
    for device in catalogue():
        typical = typical_host(device)
        assert typical.points == pytest.approx(find_host(typical.name).single_thread.value, abs=1)
        assert 0.03 < typical.log_sd < 0.35
    assert {d.architecture for d in catalogue()} <= set(tool.SOLD)
    for name, kind in {
        "A100": "server",
        "T4": "server",
        "RTX 4090": "desktop",
        "RTX 2080 Max-Q": "laptop",
    }.items():
        assert kinds[typical_host(find_device(name)).name] == kind
    assert typical_host(find_device("GH200")).name == "Grace"
    assert typical_host(find_device("GB200")).name == "Grace"
