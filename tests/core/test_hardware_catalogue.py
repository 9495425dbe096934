"""Devices are found by common and driver names, and users can add their own catalogue file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import UnknownName, UnreadableInput
from trainpace.core.hardware import (
    FOLDER,
    Device,
    Figure,
    catalogue,
    find_device,
    normalised,
    parse_catalogue,
)
from trainpace.core.records import from_json, to_json

REQUIRED = """
K80; M60; P4; P40; P100 PCIe 16GB; P100 SXM2; GTX 1080 Ti; Titan X (Pascal); Titan Xp; Titan V; Titan RTX; T4
V100 PCIe 16GB; V100 PCIe 32GB; V100 SXM2 16GB; V100 SXM2 32GB; RTX 2070; RTX 2080; RTX 2080 Ti; Quadro RTX 5000
Quadro RTX 6000; Quadro RTX 8000; RTX 3060 12GB; RTX 3070; RTX 3080 10GB; RTX 3090; A2; A10; A10G; A16; A30; A40
RTX A4000; RTX A4500; RTX A5000; RTX A5500; RTX A6000; A100 40GB PCIe; A100 40GB SXM; A100 80GB PCIe; A100 80GB SXM
A800 SXM; A800 PCIe; RTX 4070; RTX 4080; RTX 4090; RTX 6000 Ada; L4; L40; L40S; H100 PCIe; H100 SXM; H100 NVL; H800
H200 SXM; H200 NVL; GH200 96GB; GH200 144GB; B200; B300; GB200; GB300; RTX 5080; RTX 5090; RTX PRO 6000 Blackwell
RTX PRO 6000 Blackwell Server; MI100; MI210; MI250; MI250X; MI300X; MI325X; MI350X; MI355X
Titan X (Maxwell); M40; RTX 2070 Max-Q; RTX 3080 Laptop; RTX 3060 Laptop; RTX 4060 Laptop; RTX 4090 Laptop
RTX 5060 Laptop; RTX 5090 Laptop; RTX 3060 Ti; RTX 3090 Ti; RTX 4060 Ti; RTX 4070 Ti Super; RTX 5060; RTX 5060 Ti
RTX 5070; RTX 5070 Ti; RTX A2000; RTX 2000 Ada; RTX 4500 Ada; RTX 5000 Ada; RTX PRO 4000; RTX PRO 5000; L20; H20
Gaudi 2; Gaudi 3; RTX 2060; RTX 3050 Laptop; RTX 4050 Laptop; RTX 5050; RTX 5050 Laptop; RTX 4080 Laptop; RTX 5080 Laptop
RTX 3070 Laptop; RTX 4070 Laptop; RTX 5070 Laptop; H800 PCIe; MI300A; Arc Pro B60
"""

# names from nvidia-smi, torch.cuda.get_device_name and price lists -> catalogue entry
PRINTED = {
    "Tesla K80": "K80",
    "Tesla T4": "T4",
    "Tesla M60": "M60",
    "Tesla P100-PCIE-16GB": "P100 PCIe",
    "Tesla P100-SXM2-16GB": "P100 SXM2",
    "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "NVIDIA TITAN X (Pascal)": "Titan X Pascal",
    "NVIDIA TITAN Xp": "Titan Xp",
    "NVIDIA TITAN V": "Titan V",
    "NVIDIA TITAN RTX": "Titan RTX",
    "NVIDIA GeForce GTX 1080 Ti": "GTX 1080 Ti",
    "GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA GeForce RTX 2080 Super with Max-Q Design": "RTX 2080 Super Max-Q",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Server",
    "NVIDIA A10G": "A10G",
    "NVIDIA GeForce GTX TITAN X": "Titan X Maxwell",
    "NVIDIA GeForce RTX 2070 with Max-Q Design": "RTX 2070 Max-Q",
    "NVIDIA GeForce RTX 3080 Laptop GPU": "RTX 3080 Laptop",
    "NVIDIA GeForce RTX 5090 Laptop GPU": "RTX 5090 Laptop",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti Super",
    "NVIDIA RTX 5000 Ada Generation": "RTX 5000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Max-Q",
    "NVIDIA H20": "H20",
    "NVIDIA A800 40GB Active": "A800 Active 40GB",
    "NVIDIA L40S": "L40S",
    "A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA_A100_80GB_PCIe": "A100 PCIe 80GB",
    "NVIDIA A800-SXM4-80GB": "A800 SXM 80GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "H100-PCIe-80GB": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
    "Intel(R) Arc(TM) Pro B60 Graphics": "Arc Pro B60",
}

# the data define which variant a bare family name means
BARE = {
    "V100": "V100 SXM2 16GB",
    "P100": "P100 SXM2",
    "A100": "A100 SXM 40GB",
    "H100": "H100 SXM",
    "H200": "H200 SXM",
    "GH200": "GH200 96GB",
    "A800": "A800 SXM 80GB",
    "Titan X": "Titan X Pascal",
}

OWN = """
[[gpu]]
name = "Lab card"
aliases = ["RTX 3090"]
vendor = "NVIDIA"
architecture = "Ampere"
fp32_tflops = 40
memory_gib = { value = 48, source = "our own measurement", kind = "measured" }
"""


def names_of(device: Device) -> tuple[str, ...]:
    return (device.name, *device.aliases)


@pytest.mark.parametrize(
    "name",
    [name.strip() for line in REQUIRED.split("\n") for name in line.split(";") if name.strip()],
)
def test_every_required_gpu_is_in_catalogue(name: str) -> None:
    device = find_device(name)
    assert device in catalogue()
    numbers = re.findall(r"\d+", device.name)  # the query contains the model number
    assert not numbers or numbers[0] in name


@pytest.mark.parametrize(("name", "entry"), [*PRINTED.items(), *BARE.items()])
def test_driver_and_short_names_find_device(name: str, entry: str) -> None:
    assert find_device(name).name == entry


def test_catalogue_equals_parsed_packaged_files() -> None:
    files = sorted(FOLDER.glob("*.toml"))
    assert catalogue() == tuple(
        device for file in files for device in parse_catalogue(file.read_text("utf-8"), file.name)
    )


def test_device_names_and_aliases_are_unique() -> None:
    owners = Counter(
        key for device in catalogue() for key in {normalised(name) for name in names_of(device)}
    )
    assert [key for key, count in owners.items() if count > 1 or not key] == []


@given(
    st.sampled_from([(d, name) for d in catalogue() for name in names_of(d)]),
    st.randoms(use_true_random=False),
)
def test_lookup_ignores_case_separators_and_vendor(
    known: tuple[Device, str], random: object
) -> None:
    device, name = known
    choice = random.choice  # type: ignore[attr-defined]
    loose = "".join(
        choice(["-", "_", " ", ""]) if c in " -_" else choice([c.upper(), c.lower()]) for c in name
    )
    assert find_device(choice(["", f"{device.vendor} "]) + loose) == device


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H1000", "H100"),
        ("RTX 9090", "RTX 3090"),
        ("A100 SXM 60GB", "A100 SXM 40GB"),
        ("L40X", "L40"),
    ],
)
def test_unknown_device_lists_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UnknownName) as caught:
        find_device(name)
    assert near in caught.value.nearest


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "GeForce",
        "RTX 3080 Max",
        "RTX 4090 Ti",
        "GTX 1660 Ti",
        "GeForce GTX TITAN Z",
        "A100 (PCIe)",
        "H100 64GB",
        "NVIDIA A100X",
        "MI300C",
        "TPU v4",
        "RTX",
        "100",
    ],
)
def test_similar_device_name_is_not_accepted(name: str) -> None:
    with pytest.raises(UnknownName):
        find_device(name)


def test_devices_survive_json_round_trip() -> None:
    for device in catalogue():
        assert from_json(to_json(device), Device) == device


def test_reading_the_catalogue_imports_no_torch() -> None:
    code = "import sys; from trainpace.core.hardware import catalogue; assert catalogue(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_user_catalogue_needs_no_sources() -> None:
    (device,) = parse_catalogue(OWN, "mine.toml")
    assert device.fp32_tflops == Figure(value=40, source="mine.toml", kind="secondary")
    assert device.memory_gib == Figure(value=48, source="our own measurement", kind="measured")
    assert device.sms is None


def test_user_device_overrides_catalogue() -> None:
    own = parse_catalogue(OWN, "mine.toml")
    assert find_device("NVIDIA GeForce RTX 3090", own).name == "Lab card"
    assert find_device("RTX 3090").name == "RTX 3090"
    with pytest.raises(UnknownName) as caught:
        find_device("Lab cart", own)
    assert caught.value.nearest[0] == "Lab card"


def test_figure_source_overrides_file_source() -> None:
    text = """
    [sources]
    sheet = { kind = "datasheet", title = "the sheet" }
    paper = { kind = "datasheet", title = "the paper" }
    [figure_sources]
    sms = "paper"
    [[gpu]]
    name = "X"
    sms = 8
    tdp_w = 200
    fp32_tflops = { value = 3, source = "paper" }
    fp16_tflops = { value = 6, kind = "derived" }
    """
    (device,) = parse_catalogue(text, "x.toml")
    found = {name: getattr(device, name) for name in ("sms", "tdp_w", "fp32_tflops", "fp16_tflops")}
    assert {name: (figure.source, figure.kind) for name, figure in found.items()} == {
        "sms": ("the paper", "datasheet"),
        "tdp_w": ("the sheet", "datasheet"),
        "fp32_tflops": ("the paper", "datasheet"),
        "fp16_tflops": ("the sheet", "derived"),
    }


SOURCES = '[sources]\nsheet = { kind = "datasheet", title = "S" }\n'
MISTAKES = {
    "bad TOML": ("[[gpu]\n", ["not valid TOML"]),
    "no entries": ("", ["no [[gpu]]"]),
    "gpu is one table": ('[gpu]\nname = "X"\n', ["no [[gpu]]"]),
    "unknown table": ('[[cpu]]\nname = "X"\n', ["unknown table [cpu]"]),
    "sources is no table": ('sources = 3\n[[gpu]]\nname = "X"\n', ["sources", "tables"]),
    "no name": ("[[gpu]]\nsms = 3\n", ["no name"]),
    "a name of punctuation": ('[[gpu]]\nname = "-"\n', ["no name"]),
    "unknown key": ('[[gpu]]\nname = "X"\nmemory_gb = 3\n', ["X", "memory_gb", "memory_gib"]),
    "text for a number": ('[[gpu]]\nname = "X"\nsms = "many"\n', ["X", "sms", "float"]),
    "truth for a number": ('[[gpu]]\nname = "X"\nsms = true\n', ["X", "sms", "float"]),
    "number for a text": ('[[gpu]]\nname = "X"\nvendor = 3\n', ["X", "vendor"]),
    "aliases is a text": ('[[gpu]]\nname = "X"\naliases = "Y"\n', ["X", "aliases"]),
    "negative": ('[[gpu]]\nname = "X"\nsms = -3\n', ["X", "sms", "-3"]),
    "not a number": ('[[gpu]]\nname = "X"\nsms = nan\n', ["X", "sms", "nan"]),
    "infinite": ('[[gpu]]\nname = "X"\nsms = inf\n', ["X", "sms", "inf"]),
    "the same name twice": (
        '[[gpu]]\nname = "X 1"\n[[gpu]]\nname = "x-1"\n',
        ["x-1", "both X 1 and x-1"],
    ),
    "an alias that is a name": (
        '[[gpu]]\nname = "X"\n[[gpu]]\nname = "Y"\naliases = ["X"]\n',
        ["'X'", "X and Y"],
    ),
    "source not described": (
        SOURCES + '[[gpu]]\nname = "X"\nsms = { value = 3, source = "p" }\n',
        ["X", "sms", "'p'"],
    ),
    "default source missing": (
        '[sources]\np = 3\n[[gpu]]\nname = "X"\nsms = 3\n',
        ["X", "sms", "'sheet'"],
    ),
    "source is a list": (
        SOURCES + '[[gpu]]\nname = "X"\nsms = { value = 3, source = [1] }\n',
        ["X", "sms", "[1]"],
    ),
    "kind of no kind": (
        '[[gpu]]\nname = "X"\nsms = { value = 3, kind = "rumour" }\n',
        ["X", "sms", "rumour"],
    ),
    "figure without value": (
        '[[gpu]]\nname = "X"\nsms = { source = "p" }\n',
        ["X", "sms", "missing required field `value`"],
    ),
    "figure with a stray key": (
        '[[gpu]]\nname = "X"\nsms = { value = 3, unit = "SM" }\n',
        ["X", "sms", "unit"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_catalogue_file_is_one_line(mistake: str) -> None:
    text, said = MISTAKES[mistake]
    with pytest.raises(UnreadableInput) as caught:
        parse_catalogue(text, "mine.toml")
    message = str(caught.value)
    assert "mine.toml" in caught.value.message
    assert "\n" not in message
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("3090", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("1080", "GTX 1080"),
        ("a6000", "RTX A6000"),
        ("7900 XTX", "RX 7900 XTX"),
        ("GTX Titan X", "Titan X Maxwell"),
        ("GTX 1060", "GTX 1060"),
        ("GeForce GTX 1660 SUPER", "GTX 1660 Super"),
        ("GP100", "Quadro GP100"),
        ("DGX Spark", "GB10"),
        ("M4 Max", "Apple M4 Max"),
    ],
)
def test_cards_are_found_by_the_names_that_people_use(name: str, card: str) -> None:
    assert find_device(name).name == card
