"""Every card has the figures that forecast rules read, or a documented exception.

A rule without its figure is silently skipped or uses a typical value, and the forecast of the card is wrong.
For example, a GB300 without a clock was forecast 1.9 times as fast as a GB200. ALLOWED lists the exceptions with reasons.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest

import trainpace
from trainpace.core.execution import Precision
from trainpace.core.hardware import Device, Figure, catalogue, find_device
from trainpace.forecast.constants import KernelConstants, generation_of
from trainpace.forecast.rates import Rates, sustained_rates

ROOMS = ("forecast", "plan", "offers", "job", "launch", "verbs", "validation", "ladder")
FIGURES = {field.name for field in msgspec.structs.fields(Device) if field.type == Figure | None}

# behavior of each rule if the figure is missing
RULES = {
    "fp32_tflops": "no forecast",
    "tf32_tensor_tflops": "tf32 runs as fp32",
    "fp16_tensor_tflops": "16-bit products run at the fp32 rate",
    "bf16_tensor_tflops": "no forecast in bf16",
    "fp8_tensor_tflops": "no forecast in fp8, and no plan with it",
    "memory_bandwidth_gb_per_s": "no forecast",
    "memory_gib": "no word on what fits; no offer with it",
    "fp32_lanes_per_sm": "kernels issue as many threads as on 128 lanes",
    "sms": "waves are counted on 80; wide matrix units are not lowered",
    "l2_mib": "a cache of 6 MiB",
    "process_nm": "watts are judged as for 8 nm",
    "tdp_w": "the card is never short of watts; its electricity is free",
    "boost_clock_mhz": "wide matrix units are not lowered",
    "link_gb_per_s": "devices talk over PCIe",
    "nvlink_generation": "links are the mean of the measured generations of NVLink",
    "nvlink_domain": "NVLink ends at the node",
    "pcie_generation": "generation 3",
    "pcie_lanes": "16 lanes",
}
# text fields that rules read: generation, kernels of one chip, switched links, in-switch reduction
TEXTS = ("architecture", "compute_capability", "form_factor", "vendor")


class Allowed(NamedTuple):
    cards: Callable[[Device], bool]
    reason: str


def of(*capabilities: str) -> Callable[[Device], bool]:
    return lambda device: device.compute_capability in capabilities


def is_apple(device: Device) -> bool:
    return device.vendor == "Apple"


def is_gtx_16(device: Device) -> bool:
    return device.name.startswith("GTX 16")


NO_MATRIX_UNITS = ("3.7", "5.2", "6.0", "6.1")
LINKED = ("8.0", "9.0", "10.0", "10.3", "gfx908", "gfx90a", "gfx942", "gfx950", "gaudi2", "gaudi3")
ALLOWED = {
    "fp16_tensor_tflops": [
        Allowed(of(*NO_MATRIX_UNITS), "has no matrix units"),
        Allowed(is_gtx_16, "Turing without matrix units"),
        Allowed(
            of("gaudi2", "gaudi3"),
            "Intel publishes bf16 and FP8 alone; a forecast in fp16 is refused",
        ),
    ],
    "bf16_tensor_tflops": [Allowed(of(*NO_MATRIX_UNITS, "7.0", "7.5"), "computes no bf16")],
    "tf32_tensor_tflops": [
        Allowed(
            of(*NO_MATRIX_UNITS, "7.0", "7.5", "gfx908", "gfx90a", "gfx950", "gfx1100"),
            "has no TF32",
        ),
        Allowed(
            of("gaudi2", "gaudi3"), "Intel publishes no rate; a forecast in fp32 or TF32 is refused"
        ),
    ],
    "fp8_tensor_tflops": [
        Allowed(
            of(*NO_MATRIX_UNITS, "7.0", "7.5", "8.0", "8.6", "gfx908", "gfx90a", "gfx1100", "xe2"),
            "has no FP8",
        )
    ],
    "boost_clock_mhz": [
        Allowed(
            of("gaudi2", "gaudi3"),
            "matrix engines of their own, which the cores do not feed: the rule is not theirs",
        )
    ],
    "link_gb_per_s": [
        Allowed(
            lambda device: (
                device.form_factor in ("PCIe", "mobile") and device.compute_capability not in LINKED
            ),
            "a board without a connector",
        )
    ],
    "nvlink_generation": [
        Allowed(
            lambda device: device.link_gb_per_s is None or device.vendor != "NVIDIA",
            "has no NVLink",
        )
    ],
    "nvlink_domain": [
        Allowed(
            lambda device: device.name not in ("GB200", "GB300"),
            "does not pass on NVLink beyond the node",
        )
    ],
}


ON_ITS_CPUS_CHIP = Allowed(
    lambda device: device.form_factor == "integrated", "shares a chip and its memory with the CPU"
)
APPLE = Allowed(is_apple, "Apple publishes neither; matmuls run on the cores at the fp32 rate")
for name in ("link_gb_per_s", "pcie_generation", "pcie_lanes", "l2_mib", "boost_clock_mhz"):
    ALLOWED.setdefault(name, []).append(ON_ITS_CPUS_CHIP)
for name in ("fp16", "bf16", "tf32", "fp8"):
    ALLOWED[f"{name}_tensor_tflops"].append(APPLE)
ALLOWED.setdefault("tdp_w", []).append(APPLE)


def holes(devices: Iterable[Device]) -> list[str]:
    """List the cards that lack a figure that a rule reads and have no documented exception."""
    return [
        f"{device.name} has no {name}: {without}"
        for device in devices
        for name, without in RULES.items()
        if getattr(device, name) is None
        and not any(allowed.cards(device) for allowed in ALLOWED.get(name, []))
    ]


def figures_read() -> set[str]:
    """Find the figures that computing packages read from a variable or attribute named `device`."""
    read = set()
    for room in ROOMS:
        for file in (Path(trainpace.__file__).parent / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in FIGURES:
                    owner = node.value
                    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                    read |= {node.attr} if name == "device" else set()
    return read


def test_rules_list_every_figure_they_read() -> None:
    assert figures_read() == RULES.keys()


def test_every_card_has_the_figures_that_rules_read() -> None:
    assert holes(catalogue()) == []


@pytest.mark.parametrize(
    "name", ["boost_clock_mhz", "l2_mib", "tdp_w", "sms", "process_nm", "link_gb_per_s"]
)
def test_missing_figure_is_reported(name: str) -> None:
    device = msgspec.structs.replace(find_device("GB300"), **{name: None})
    assert holes([device]) == [f"GB300 has no {name}: {RULES[name]}"]


def test_every_allowed_exception_is_still_needed() -> None:
    for name, exceptions in ALLOWED.items():
        lacking = [device for device in catalogue() if getattr(device, name) is None]
        for allowed in exceptions:
            assert any(allowed.cards(device) for device in lacking), (
                f"{name}: nothing {allowed.reason}"
            )


@pytest.mark.parametrize("name", TEXTS)
def test_every_card_has_the_text_fields_that_rules_read(name: str) -> None:
    assert [device.name for device in catalogue() if not getattr(device, name)] == []


def test_gb200_and_gb300_have_similar_sustained_rates() -> None:
    """GB300 and GB200 have the same tensor core rate, so their sustained rates are close."""
    rates = [
        sustained_rates(find_device(name), "bf16", True, True, KernelConstants())
        for name in ("GB200", "GB300")
    ]
    slow, fast = (float(rate.half) for rate in rates if isinstance(rate, Rates))
    assert 1 <= fast / slow < 1.15


def test_only_desktop_geforce_and_titan_are_consumer_cards() -> None:
    for device in catalogue():
        professional = (
            device.vendor != "NVIDIA"
            or "Quadro" in device.name
            or " Ada" in device.name
            or "RTX PRO" in device.name
        )
        geforce = (
            device.name.startswith(("GTX", "RTX", "Titan"))
            and not professional
            and not device.name.startswith("RTX A")
        )
        assert device.is_consumer == (geforce and device.form_factor != "mobile"), device.name


@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_card_has_rate_or_reason_for_each_precision(precision: Precision) -> None:
    for device in catalogue():
        rates = sustained_rates(device, precision, True, True, KernelConstants())
        if isinstance(rates, str):
            assert rates.startswith(f"{device.name} has no ")
            assert rates.endswith(".")
        else:
            assert float(rates.half) > 0


@pytest.mark.parametrize(
    ("precision", "named"),
    [("fp32", "fp32"), ("tf32", "tf32"), ("fp16", "fp16"), ("amp_fp16", "fp16")],
)
def test_gaudi_rejects_precisions_without_matrix_rate(precision: Precision, named: str) -> None:
    in_16_bits = named == "fp16"
    refused = sustained_rates(
        find_device("Gaudi 3"), precision, not in_16_bits, in_16_bits, KernelConstants()
    )
    assert isinstance(refused, str)
    assert named in refused


@pytest.mark.parametrize("precision", ["bf16", "amp_bf16", "fp8"])
def test_gaudi_has_rates_for_matrix_engine_formats(precision: Precision) -> None:
    rates = sustained_rates(find_device("Gaudi 3"), precision, True, True, KernelConstants())
    assert isinstance(rates, Rates)
    assert rates.half > 100e12 > rates.plain


def test_every_card_has_a_generation() -> None:
    generations = {device.name: generation_of(device) for device in catalogue()}
    assert generations["RTX 4090"] == generations["L4"] == "8.9"
    assert generations["B200"] == generations["GB300"] == "10"
    assert generations["MI300X"] == generations["MI325X"] == "gfx942"
    assert "" not in generations.values()
