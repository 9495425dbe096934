"""Figures of the packaged catalogue are consistent with physics, the architecture and each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import get_args

import pytest

from trainpace.core.hardware import Device, Figure, FigureKind, catalogue


def having(*names: str) -> Callable[[Callable[[Device], None]], Callable[[], None]]:
    """Run a test on every device that has all of these figures, and report all failures at once."""
    devices = [d for d in catalogue() if all(getattr(d, name) is not None for name in names)]

    def decorate(test: Callable[[Device], None]) -> Callable[[], None]:
        def over_devices() -> None:
            failures = []
            for device in devices:
                try:
                    test(device)
                except pytest.skip.Exception:
                    continue
                except AssertionError as error:
                    failures.append(f"{device.name}: {error}")
            assert not failures, "\n".join(failures)

        over_devices.__name__, over_devices.__doc__ = test.__name__, test.__doc__
        return over_devices

    return decorate


GEFORCE = re.compile(r"RTX [2-5]0[5-9]0\b|GB10$")
ON_CHIP = "integrated"
"""GPUs that share a chip and its memory with the CPU. They have no PCIe link of their own."""
HALF_RATE_SHEETS = {
    "A10G",
    "L40",
    "L20",
}  # data-center cards whose datasheets state half of the chip's rate
CUT = {"H20": 0.234}  # a quarter of the chip's tensor core rate, below the boost clock
LOWER_TENSOR_CLOCK = {
    "Hopper",
    "Blackwell",
}  # datasheets of data-center cards state tensor rates below the boost clock

# FLOP per SM and clock of 16-bit matmuls with fp32 accumulation at the full rate, by compute capability
TENSOR_FLOP_PER_SM_CLOCK = {
    "7.0": 1024,
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
    "gfx908": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
    "xe2": 2048,
    "12.1": 1024,
    "gfx1100": 512,
}
FP16_PER_FP32 = {
    "6.0": 2,
    "6.1": 1 / 64,
    "7.0": 2,
    "7.5": 2,
    "8.0": 4,
    "8.6": 1,
    "8.9": 1,
    "9.0": 2,
    "12.0": 1,
    "xe2": 2,
    "gfx1100": 2,
}
FP4_PER_FP8 = {"10.0": 2, "10.3": 3, "12.0": 2, "12.1": 2, "gfx950": 2}
LANES = {
    "3.7": 192,
    "5.2": 128,
    "6.0": 64,
    "6.1": 128,
    "7.0": 64,
    "7.5": 64,
    "8.0": 64,
    "8.6": 128,
    "8.9": 128,
    "9.0": 128,
    "10.0": 128,
    "10.3": 128,
    "12.0": 128,
    "gfx908": 64,
    "gfx90a": 64,
    "gfx942": 128,
    "gfx950": 128,
    "gaudi2": 64,
    "gaudi3": 64,
    "xe2": 128,
    "12.1": 128,
    "gfx1100": 128,
    "apple7": 128,
    "apple8": 128,
    "apple9": 128,
}
SHARED_KIB = {  # Intel publishes no value for Gaudi; on Arc, shared memory and L1 share one memory
    "3.7": 112,
    "5.2": 96,
    "6.0": 64,
    "6.1": 96,
    "7.0": 96,
    "7.5": 64,
    "8.0": 164,
    "8.6": 100,
    "8.9": 100,
    "9.0": 228,
    "10.0": 228,
    "10.3": 228,
    "12.0": 100,
    "gfx908": 64,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
    "12.1": 100,
    "gfx1100": 64,
}
NVLINK = {"Pascal": 1, "Volta": 2, "Turing": 2, "Ampere": 3, "Hopper": 4, "Blackwell": 5}
PCIE = {
    "Kepler": {3},
    "Maxwell": {3},
    "Pascal": {3},
    "Volta": {3},
    "Turing": {3},
    "Ampere": {4},
    "Ada": {4},
    "Hopper": {5},
    "Blackwell": {5, 6},
    "CDNA": {4, 5},
    "Gaudi": {4, 5},
    "Battlemage": {5},
    "RDNA 3": {4},
}
HAVE = {
    "fp16_tensor_tflops": TENSOR_FLOP_PER_SM_CLOCK.keys(),
    "tf32_tensor_tflops": {
        "8.0",
        "8.6",
        "8.9",
        "9.0",
        "10.0",
        "10.3",
        "12.0",
        "12.1",
        "gfx942",
        "xe2",
    },
    "bf16_tensor_tflops": TENSOR_FLOP_PER_SM_CLOCK.keys() - {"7.0", "7.5"} | {"gaudi2", "gaudi3"},
    "fp8_tensor_tflops": {
        "8.9",
        "9.0",
        "10.0",
        "10.3",
        "12.0",
        "12.1",
        "gfx942",
        "gfx950",
        "gaudi2",
        "gaudi3",
    },
    "fp4_tensor_tflops": {"10.0", "10.3", "12.0", "12.1", "gfx950"},
}
PROCESS_NM = {
    "3.7": 28,
    "5.2": 28,
    "6.0": 16,
    "6.1": 16,
    "7.0": 12,
    "7.5": 12,
    "8.0": 7,
    "8.6": 8,
    "8.9": 5,
    "9.0": 5,
    "10.0": 5,
    "10.3": 5,
    "12.0": 5,
    "gfx908": 7,
    "gfx90a": 6,
    "gfx942": 5,
    "gfx950": 3,
    "gaudi2": 7,
    "gaudi3": 5,
    "xe2": 5,
    "12.1": 3,
    "gfx1100": 5,
    "apple7": 5,
    "apple8": 5,
    "apple9": 3,
}
L2_MIB = {  # smallest and largest of the chips with this compute capability
    "3.7": (1.5, 1.5),
    "5.2": (2, 3),
    "6.0": (4, 4),
    "6.1": (1.5, 3),
    "7.0": (4.5, 6),
    "7.5": (1.5, 6),
    "8.0": (24, 40),
    "8.6": (2, 6),
    "8.9": (12, 96),
    "9.0": (50, 60),
    "10.0": (126, 126),
    "10.3": (126, 126),
    "12.0": (32, 128),
    "gfx908": (8, 8),
    "gfx90a": (8, 8),
    "gfx942": (24, 32),
    "gfx950": (32, 32),
    "gaudi2": (48, 48),
    "gaudi3": (96, 96),
    "xe2": (18, 18),
    "gfx1100": (6, 6),
}
LINK_GB_PER_S: dict[str, set[float]] = {  # both directions, all links of one device
    "6.0": {160},
    "7.0": {300},
    "7.5": {50, 100},
    "8.0": {200, 400, 600},
    "8.6": {112.5},
    "9.0": {400, 600, 900},
    "10.0": {1800},
    "10.3": {1800},
    "gfx908": {276},
    "gfx90a": {300, 400},
    "gfx942": {768, 896},
    "gfx950": {1075},
    "gaudi2": {525},
    "gaudi3": {1050},
}
RIDGE = {  # FLOP per byte at which a kernel stops being limited by memory
    "fp32_tflops": (5, 130),
    "tf32_tensor_tflops": (30, 230),
    "fp16_tensor_tflops": (55, 460),
    "bf16_tensor_tflops": (55, 460),
    "fp8_tensor_tflops": (140, 920),
    "fp4_tensor_tflops": (550, 2000),
}


def figures(device: Device) -> dict[str, Figure]:
    found = {name: getattr(device, name) for name in device.__struct_fields__}
    return {name: value for name, value in found.items() if isinstance(value, Figure)}


def value(device: Device, name: str) -> float:
    return float(getattr(device, name).value)


def is_geforce(device: Device) -> bool:
    return device.vendor == "NVIDIA" and GEFORCE.match(device.name) is not None


@having()
def test_every_figure_has_a_source(device: Device) -> None:
    assert figures(device)
    for name, figure in figures(device).items():
        assert len(figure.source) > 8, name
        assert figure.kind in get_args(FigureKind), name


@having()
def test_every_device_has_figures_for_forecasts(device: Device) -> None:
    needed = {"sms", "fp32_lanes_per_sm", "fp32_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
    if device.form_factor != ON_CHIP:
        needed |= {"tdp_w", "pcie_generation", "pcie_lanes"}
    assert needed <= figures(device).keys()
    assert device.vendor in {"NVIDIA", "AMD", "Intel", "Apple"}
    assert device.form_factor


@having()
def test_counts_are_integers_and_sizes_plausible(device: Device) -> None:
    for name in (
        "sms",
        "fp32_lanes_per_sm",
        "memory_bus_bits",
        "nvlink_generation",
        "pcie_generation",
        "pcie_lanes",
    ):
        figure = getattr(device, name)
        assert figure is None or float(figure.value).is_integer(), name
    assert 3 <= value(device, "memory_gib") <= 400
    assert 60 <= value(device, "memory_bandwidth_gb_per_s") <= 9000
    if device.form_factor != ON_CHIP:
        assert 30 <= value(device, "tdp_w") <= 1500
        assert value(device, "pcie_lanes") in {8, 16}


@having("boost_clock_mhz")
def test_fp32_is_lanes_times_boost_clock(device: Device) -> None:
    flops = (
        value(device, "sms")
        * value(device, "fp32_lanes_per_sm")
        * value(device, "boost_clock_mhz")
        * 1e6
        * 2
    )
    assert value(device, "fp32_tflops") * 1e12 == pytest.approx(flops, rel=0.03)


@having("base_clock_mhz", "boost_clock_mhz")
def test_boost_clock_is_not_below_base_clock(device: Device) -> None:
    assert value(device, "base_clock_mhz") <= value(device, "boost_clock_mhz")


@having("memory_bus_bits", "memory_rate_gbit_per_s_per_pin")
def test_memory_bandwidth_is_bus_width_times_rate(device: Device) -> None:
    bandwidth = (
        value(device, "memory_bus_bits") / 8 * value(device, "memory_rate_gbit_per_s_per_pin")
    )
    assert value(device, "memory_bandwidth_gb_per_s") == pytest.approx(bandwidth, rel=0.02)


@having()
def test_multiprocessor_figures_follow_compute_capability(device: Device) -> None:
    capability = device.compute_capability
    assert value(device, "fp32_lanes_per_sm") == LANES[capability]
    if capability in SHARED_KIB:
        assert value(device, "shared_memory_per_sm_kib") == SHARED_KIB[capability]
    else:
        assert device.shared_memory_per_sm_kib is None
    if device.form_factor != ON_CHIP:
        assert value(device, "pcie_generation") in PCIE[device.architecture]
    assert value(device, "process_nm") == PROCESS_NM[capability]
    if device.l2_mib is not None:
        low, high = L2_MIB[capability]
        assert low <= device.l2_mib.value <= high
    if device.link_gb_per_s is not None:
        assert device.link_gb_per_s.value in LINK_GB_PER_S[capability]
    if device.nvlink_generation is not None:
        assert device.nvlink_generation.value == NVLINK[device.architecture]
        assert device.link_gb_per_s is not None


@having()
def test_only_supporting_architectures_have_a_precision_rate(device: Device) -> None:
    for name, capabilities in HAVE.items():
        if device.name.startswith("GTX 16"):  # Turing without matrix units
            capabilities = set()
        assert (getattr(device, name) is not None) == (device.compute_capability in capabilities), (
            name
        )


@having()
def test_plain_fp16_rate_is_multiple_of_fp32(device: Device) -> None:
    multiple = FP16_PER_FP32.get(device.compute_capability)
    if multiple is None:
        assert device.fp16_tflops is None
    else:
        assert value(device, "fp16_tflops") == pytest.approx(
            multiple * value(device, "fp32_tflops"), rel=0.02
        )


@having("fp16_tensor_tflops")
def test_tensor_rates_scale_with_precision(device: Device) -> None:
    fp16 = value(device, "fp16_tensor_tflops")
    if device.bf16_tensor_tflops is not None:  # CDNA 1 runs bf16 at half of the fp16 rate
        assert value(device, "bf16_tensor_tflops") == (fp16 / 2 if device.name == "MI100" else fp16)
    if device.tf32_tensor_tflops is not None:
        assert value(device, "tf32_tensor_tflops") == pytest.approx(fp16 / 2, rel=0.015)
    if device.fp8_tensor_tflops is not None:
        assert value(device, "fp8_tensor_tflops") == pytest.approx(fp16 * 2, rel=0.015)
    if device.fp4_tensor_tflops is not None:
        multiple = FP4_PER_FP8[device.compute_capability] * (
            2 if is_geforce(device) else 1
        )  # GeForce does not halve FP4
        fp8 = value(device, "fp8_tensor_tflops")
        assert value(device, "fp4_tensor_tflops") == pytest.approx(multiple * fp8, rel=0.015)


@having("fp16_tensor_tflops", "boost_clock_mhz")
def test_tensor_rate_matches_units_with_fp32_accumulation(device: Device) -> None:
    rate = value(device, "fp16_tensor_tflops") * 1e12
    per_clock = value(device, "sms") * TENSOR_FLOP_PER_SM_CLOCK[device.compute_capability]
    share = rate / (per_clock * value(device, "boost_clock_mhz") * 1e6)
    if device.name in CUT:
        assert share == pytest.approx(CUT[device.name], rel=0.01)
    elif is_geforce(device) or device.name in HALF_RATE_SHEETS:
        assert share == pytest.approx(0.5, rel=0.02)
    elif device.architecture in LOWER_TENSOR_CLOCK and device.compute_capability != "12.0":
        assert 0.85 <= share <= 1.005
    elif device.name == "Titan V":  # NVIDIA's 110 TFLOP/s assume 1.34 GHz
        assert share == pytest.approx(0.92, rel=0.01)
    else:
        assert share == pytest.approx(1, rel=0.02)


@having()
def test_ridge_points_are_plausible(device: Device) -> None:
    if device.architecture == "Gaudi" or device.name in CUT:
        pytest.skip(
            "Gaudi's matrix engines are eight times as large as its vectors; a cut card is bound by its cut"
        )
    bandwidth = value(device, "memory_bandwidth_gb_per_s") * 1e9
    for name in RIDGE.keys() & figures(device).keys():
        low, high = RIDGE[name]
        assert low <= value(device, name) * 1e12 / bandwidth <= high, name


@having()
def test_memory_size_matches_device_name(device: Device) -> None:
    for said in re.findall(r"\b(\d+) ?GB?\b", " ".join([device.name, *device.aliases])):
        if int(said) not in {480, 95}:  # GH200 480GB names the CPU's memory; 95 is a rounding of 96
            assert value(device, "memory_gib") == pytest.approx(int(said), rel=0.01)


@pytest.mark.parametrize(
    ("smaller", "larger", "name"),
    [
        ("A100 SXM 40GB", "A100 SXM 80GB", "memory_bandwidth_gb_per_s"),
        ("H100 SXM", "H200 SXM", "memory_bandwidth_gb_per_s"),
        ("H100 PCIe", "H100 SXM", "fp16_tensor_tflops"),
        ("A800 SXM 80GB", "A100 SXM 80GB", "link_gb_per_s"),
        ("H800 SXM", "H100 SXM", "link_gb_per_s"),
        ("H20", "H800 SXM", "bf16_tensor_tflops"),
        ("RTX 3080 Laptop", "RTX 3080", "tdp_w"),
        ("RTX 5090 Laptop", "RTX 5090", "fp16_tensor_tflops"),
        ("V100 PCIe 16GB", "V100 SXM2 16GB", "fp32_tflops"),
        ("MI300X", "MI325X", "memory_gib"),
    ],
)
def test_larger_variants_have_larger_figures(smaller: str, larger: str, name: str) -> None:
    by_name = {device.name: device for device in catalogue()}
    assert value(by_name[smaller], name) < value(by_name[larger], name)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_figure_rejects_nonpositive_and_infinite_values(bad: float) -> None:
    with pytest.raises(ValueError, match="from 1e-6 to 1e9"):
        Figure(value=bad, source="a datasheet", kind="datasheet")
