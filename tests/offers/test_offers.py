"""Offers from the snapshot, from a user's machines, and from a mocked gpuhunt."""

import datetime
import sys
import types

import pytest
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.hardware import find_device, find_host
from trainpace.core.host import usable_cores
from trainpace.offers import Offer, is_stale, read_offers, snapshot
from trainpace.offers.offer import (
    _server_hosts,
    node_networks,
    notes_on,
    offers_of,
    parse_machines,
    refreshed,
    write_offers,
)
from trainpace.verbs.match import chosen_offers, not_offered

TODAY = datetime.date(2026, 11, 21)


def test_every_offer_has_source_and_known_device():
    for offer in snapshot():
        assert find_device(offer.device).name == offer.device
        assert "@" in offer.source, offer
        assert offer.price_usd_per_hour > 0


def test_offers_are_unique_and_spot_is_cheaper():
    keys = [(o.provider, o.instance_type, o.region) for o in snapshot()]
    assert len(keys) == len(set(keys))
    assert all(
        o.spot_price_usd_per_hour < o.price_usd_per_hour
        for o in snapshot()
        if o.spot_price_usd_per_hour
    )


def test_no_offer_is_cheaper_than_its_electricity():
    for offer in snapshot():
        watts = find_device(offer.device).tdp_w.value
        assert offer.price_usd_per_hour / offer.count > watts / 1e3 * 0.04, offer


def test_node_networks_belong_to_offered_servers():
    offered = {(o.provider, o.instance_type) for o in snapshot()}
    assert set(node_networks()) <= offered
    p4d = next(o for o in snapshot() if o.instance_type == "p4d.24xlarge")
    assert p4d.network_gb_per_s == 50.0
    assert next(o for o in snapshot() if o.provider == "vast").network_gb_per_s is None


def test_server_hosts_are_known_and_belong_to_offered_servers():
    offered = [(o.provider, o.instance_type) for o in snapshot()]
    for family in _server_hosts():
        assert find_host(family["cpu"]).name == family["cpu"]
        for start in family["starts"]:
            assert any(p == family["provider"] and name.startswith(start) for p, name in offered), (
                start
            )
    hosts = {o.instance_type: o.host for o in snapshot()}
    assert hosts["p4d.24xlarge"] == "Xeon Platinum 8275CL"
    assert hosts["p5.48xlarge"] == "EPYC 7R13"
    assert hosts["p5en.48xlarge"] == "Xeon Platinum 8488C"
    assert not next(o for o in snapshot() if o.provider == "runpod").host


def test_pcie_and_sxm_variants_are_distinguished():
    devices = {o.instance_type: o.device for o in snapshot()}
    assert devices["Standard_NC24ads_A100_v4"] == "A100 PCIe 80GB"
    assert devices["Standard_ND96amsr_A100_v4"] == "A100 SXM 80GB"


def test_snapshot_survives_write_and_read():
    assert read_offers(write_offers(snapshot()), "again") == snapshot()


def test_own_machine_can_name_its_host():
    (named,) = parse_machines(
        '[[machine]]\nname = "lab"\ndevice = "A100"\nhost = "7742"\n', "mine.toml"
    )
    assert (named.host, named.host_source) == ("EPYC 7742", "mine.toml")
    with pytest.raises(TrainpaceError, match=r"mine\.toml: unknown host CPU 'fast'"):
        parse_machines('[[machine]]\nname = "lab"\ndevice = "A100"\nhost = "fast"\n', "mine.toml")


def test_prices_without_date_or_older_than_90_days_are_stale():
    offer = Offer(provider="x", instance_type="y", device="T4", count=1, price_usd_per_hour=1.0)
    assert is_stale(offer, TODAY)
    assert not is_stale(replace(offer, as_of="2026-10-01"), TODAY)
    assert is_stale(replace(offer, as_of="2026-02-26"), TODAY)


@pytest.mark.parametrize(
    "line",
    [
        "aws,x,,T4,0,,,,1,,s,",
        "aws,x,,T4,1,,,,-1,,s,",
        "aws,x,,T4,many,,,,1,,s,",
        "a,x,,T4,1,,,,1,,s,soon",
    ],
)
def test_damaged_offer_list_error_names_line(line):
    header = write_offers(()).strip()
    with pytest.raises(TrainpaceError, match="mine, line 2"):
        read_offers(f"{header}\n{line}\n", "mine")


MACHINES = """
[[machine]]
name = "lab"
device = "RTX 4090"
count = 4
nodes = 2
network_gbit_per_s = 10
purchase_usd = 12000
years = 4
electricity_usd_per_kwh = 0.30
"""


def test_bought_machine_price_is_spread_over_years():
    (lab,) = parse_machines(MACHINES, "mine.toml")
    assert lab.price_usd_per_hour == pytest.approx(12000 / (4 * 8766))
    assert (lab.provider, lab.network_gb_per_s, lab.most_nodes) == ("own", 1.25, 2)


PC = '[[machine]]\nname = "a"\ndevice = "T4"\n'


@pytest.mark.parametrize(
    "text",
    [
        "not toml [",
        "[other]",
        '[[machine]]\nname = "a"',
        f"{PC}purchase_usd = 5",
        f"{PC}purchase_usd = 5\nyears = 1\nprice_usd_per_hour = 1",
        f"{PC}count = 0",
        f"{PC}prise = 2",
        f"{PC}price = 2\nprice_usd_per_hour = 1",
        PC + PC,
    ],
)
def test_parse_machines_rejects_invalid_files(text):
    with pytest.raises(TrainpaceError):
        parse_machines(text, "mine.toml")


def test_idle_machines_have_a_note_with_their_cost():
    text = '[[machine]]\nname = "pc"\ndevice = "GTX 1080 Ti"\nprice = 0.1\nidle_watts = 60\nelectricity_usd_per_kwh = 0.3\n'
    (note,) = notes_on(parse_machines(text, "mine.toml"))
    assert "1.44 kWh and 0.43 dollars" in note
    assert "120 s (assumed" in note
    (note,) = notes_on(parse_machines(text + "boot_s = 45\n", "mine.toml"))
    assert "45 s" in note
    for wrong in ("idle_watts = 0", "boot_s = -1"):
        with pytest.raises(UnreadableInput, match=wrong.split()[0]):
            parse_machines(text.replace("idle_watts = 60\n", "") + wrong, "mine.toml")


def test_minimal_machine_file_is_read():
    text = '[[machine]]\nname = "a"\ndevice = "T4"\nprice = 2\nnodes = 2\nnetwork_gb_per_s = 0.125'
    (one,) = parse_machines(text, "mine.toml")
    assert (one.price_usd_per_hour, one.network_gb_per_s) == (2.0, 0.125)
    assert not is_stale(one, TODAY)
    assert notes_on((one,)) == []


def item(**fields):
    usual = {
        "instance_name": "p4d.24xlarge",
        "location": "us-east-1",
        "price": 21.95,
        "cpu": 96,
        "memory": 1152.0,
        "gpu_count": 8,
        "gpu_name": "A100",
        "gpu_memory": 40.0,
        "spot": False,
        "provider": "aws",
    }
    return types.SimpleNamespace(**usual | fields)


def test_gpuhunt_items_become_offers():
    items = [
        item(),
        item(spot=True, price=8.0),
        item(provider="lambdalabs", instance_name="gpu_1x", gpu_count=1, gpu_memory=80.0),
        item(instance_name="free", price=0.0),
        item(instance_name="cpu", gpu_count=0, gpu_name=None),
        item(instance_name="new", gpu_name="Z9000", gpu_memory=512.0),
        item(instance_name="odd", gpu_memory=300.0),
    ]
    offers, unknown = offers_of(items, TODAY)
    assert [(o.provider, o.device, o.spot_price_usd_per_hour, o.as_of) for o in offers] == [
        ("aws", "A100 SXM 40GB", 8.0, "2026-11-21"),
        ("lambda", "A100 SXM 80GB", None, "2026-11-21"),
    ]
    assert unknown == {"Z9000": 1, "A100": 1}


def test_refresh_without_gpuhunt_or_network_fails_with_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(TrainpaceError, match="pip install"):
        refreshed(TODAY)

    def offline():
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "gpuhunt", types.SimpleNamespace(query=offline))
    with pytest.raises(TrainpaceError, match="no route to host"):
        refreshed(TODAY)
    monkeypatch.setitem(sys.modules, "gpuhunt", types.SimpleNamespace(query=list))
    with pytest.raises(TrainpaceError, match="offline"):
        refreshed(TODAY)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("P100", {"P100 PCIe", "P100 SXM2"}),  # Google offers PCIe, Oracle offers SXM2
        ("P100 SXM2", {"P100 SXM2"}),
        ("tesla p100", {"P100 PCIe", "P100 SXM2"}),
        ("T4", {"T4"}),
        ("RTX 3090", {"RTX 3090"}),
    ],
)
def test_gpu_family_selects_all_variants(name, devices):
    offers, _ = chosen_offers(snapshot(), (), (), (name,), ())
    assert {offer.device for offer in offers} == devices


def test_gpu_that_nobody_offers_becomes_a_machine_without_a_price():
    names = ("RTX 3060", "T4", "P100", "rtx 3060")
    assert [
        (o.device, o.count, o.price_usd_per_hour, o.vcpus) for o in not_offered(names, snapshot())
    ] == [("RTX 3060", 1, 0.0, usable_cores())]
    with pytest.raises(UnknownName):
        not_offered(("RTX 30600",), snapshot())
