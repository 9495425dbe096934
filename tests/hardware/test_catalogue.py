"""Physical plausibility of every figure, and names as people write them."""

import pytest

from trainpace.errors import UnknownName, UnreadableInput
from trainpace.hardware import Figure, catalogue, find_device, parse_catalogue

DEVICES = catalogue()
every = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)

REQUIRED = """K80;M60;P4;P40;P100 PCIe;P100 SXM2;GTX 1080 Ti;Titan X;Titan Xp;Titan V;Titan RTX;T4;V100 PCIe 16GB;V100 PCIe 32GB
V100 SXM2 16GB;V100 SXM2 32GB;RTX 2070;RTX 2080;RTX 2080 Ti;Quadro RTX 5000;Quadro RTX 6000;Quadro RTX 8000;RTX 3060;RTX 3070
RTX 3080;RTX 3090;A2;A10;A10G;A16;A30;A40;A4000;A4500;A5000;A5500;A6000;A100 PCIe 40GB;A100 SXM 40GB;A100 PCIe 80GB
A100 SXM 80GB;A800;RTX 4070;RTX 4080;RTX 4090;RTX 6000 Ada;L4;L40;L40S;H100 PCIe;H100 SXM;H100 NVL;H800;H200 SXM;H200 NVL;GH200
B200;B300;GB200;RTX 5080;RTX 5090;RTX PRO 6000;MI100;MI210;MI250;MI300X;MI325X;MI355X""".replace("\n", ";").split(";")


def value(device, name):
    figure = getattr(device, name)
    return None if figure is None else figure.value


@pytest.mark.parametrize("name", REQUIRED)
def test_required_devices_are_there(name):
    assert find_device(name).fp32_tflops is not None


@every
def test_fp32_peak_is_units_x_lanes_x_clock_x_2(device):
    clock = value(device, "boost_clock_mhz")
    assert clock is not None
    computed = value(device, "sms") * value(device, "fp32_lanes_per_sm") * 2 * clock * 1e-6
    assert value(device, "fp32_tflops") == pytest.approx(computed, rel=0.03)


@every
def test_bandwidth_is_bus_x_rate(device):
    computed = value(device, "memory_bus_bits") / 8 * value(device, "memory_rate_gbit_per_s_per_pin")
    assert value(device, "memory_bandwidth_gb_per_s") == pytest.approx(computed, rel=0.02)


@every
def test_ridge_points_are_plausible(device):
    """FLOP per byte at which compute and memory balance: 5 to 130 in fp32, 30 to 450 on matrix units."""
    bandwidth = value(device, "memory_bandwidth_gb_per_s") * 1e-3
    assert 5 < value(device, "fp32_tflops") / bandwidth < 130
    if device.fp16_tensor_tflops is not None:
        assert 30 < value(device, "fp16_tensor_tflops") / bandwidth < 450


@every
def test_matrix_rates_relate_as_the_architecture_says(device):
    fp16 = value(device, "fp16_tensor_tflops")
    if device.bf16_tensor_tflops is not None:
        ratio = value(device, "bf16_tensor_tflops") / fp16
        assert ratio == (0.5 if device.name == "MI100" else 1.0)  # CDNA 1 runs bf16 at half rate
    if device.tf32_tensor_tflops is not None:
        assert value(device, "tf32_tensor_tflops") == pytest.approx(fp16 / 2, rel=0.02)
    if device.fp8_tensor_tflops is not None:
        assert value(device, "fp8_tensor_tflops") == pytest.approx(2 * fp16, rel=0.02)
    if device.fp4_tensor_tflops is not None:
        assert 1.9 < value(device, "fp4_tensor_tflops") / value(device, "fp8_tensor_tflops") < 3.1


@every
def test_formats_exist_only_where_the_architecture_has_them(device):
    old = {"Kepler", "Maxwell", "Pascal"}
    assert (device.fp16_tensor_tflops is None) == (device.architecture in old)
    no_bf16 = old | {"Volta", "Turing"}
    assert (device.bf16_tensor_tflops is None) == (device.architecture in no_bf16)
    with_fp8 = device.architecture in {"Ada", "Hopper", "Blackwell"} or device.name.startswith("MI3")
    assert (device.fp8_tensor_tflops is not None) == with_fp8
    assert (device.fp4_tensor_tflops is not None) == (device.architecture == "Blackwell" or device.name == "MI355X")


@every
def test_sizes_and_power_are_plausible(device):
    assert 30 <= value(device, "tdp_w") <= 1500
    assert 4 <= value(device, "memory_gib") <= 300
    assert 1 <= value(device, "l2_mib") <= 256
    assert value(device, "pcie_generation") in (3, 4, 5, 6)
    # no chip computes more than 3 fp32 TFLOP/s or less than 10 GFLOP/s per watt
    assert 0.01 < value(device, "fp32_tflops") / value(device, "tdp_w") < 0.5


@every
def test_every_figure_has_a_source(device):
    figures = [getattr(device, f) for f in device.__struct_fields__]
    figures = [f for f in figures if isinstance(f, Figure)]
    assert len(figures) >= 15
    assert all(len(f.source) > 8 for f in figures)


@pytest.mark.parametrize(
    ("written", "name"),
    [("Tesla T4", "T4"), ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"), ("NVIDIA GeForce RTX 3090", "RTX 3090"),
     ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"), ("Tesla K80", "K80"),
     ("geforce_rtx_2080_ti", "RTX 2080 Ti"), ("h100-pcie", "H100 PCIe"), ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
     ("AMD Instinct MI300X", "MI300X"), ("RTX4090", "RTX 4090"), ("NVIDIA H200", "H200 SXM")],
)  # fmt: skip
def test_names_as_tools_write_them(written, name):
    assert find_device(written).name == name


@pytest.mark.parametrize("name", ["H1000", "RTX 9090", "", "A100 60GB", "TPU v4", "nvidia"])
def test_an_unknown_device_is_an_error_with_the_nearest_names(name):
    with pytest.raises(UnknownName) as caught:
        find_device(name)
    assert "--hardware" in str(caught.value)


def test_nearest_is_near():
    with pytest.raises(UnknownName) as caught:
        find_device("RTX 4091")
    assert "RTX 4090" in caught.value.nearest


OWN = '[[gpu]]\nname = "My card"\nvendor = "me"\nfp32_tflops = 10\nmemory_bandwidth_gb_per_s = 500\n'


def test_a_users_own_file():
    (device,) = parse_catalogue(OWN, "mine.toml")
    assert device.fp32_tflops == Figure(value=10.0, source="mine.toml", kind="secondary")
    assert find_device("my-card", [device]) is device


def test_a_users_own_file_comes_first():
    (device,) = parse_catalogue(OWN.replace("My card", "A100"), "mine.toml")
    assert find_device("A100", [device]) is device


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no [[gpu]]"), ("[[gpu]", "TOML"), ("[gpus]", "unknown table"), ("gpu = 3", "no [[gpu]]"),
        (OWN.replace("fp32_tflops", "fp32_tflop"), "Nearest: fp32_tflops"), (OWN.replace("10", "-10"), "above 0"),
        (OWN.replace("10", '"ten"'), "a number"), (OWN.replace("10", "true"), "a number"), (OWN.replace("10", "nan"), "above 0"),
        ('[[gpu]]\nvendor = "x"\n', "no name"), (OWN + OWN.replace("My card", "Other").replace("Other", "Two") + 'aliases = ["My card"]', "names both"),
        (OWN.replace('"me"', "3"), "vendor"), ("[sources]\nsheet = 3\n" + OWN, "does not describe"),
    ],
)  # fmt: skip
def test_mistakes_in_a_users_own_file(text, word):
    with pytest.raises(UnreadableInput) as caught:
        parse_catalogue(text, "mine.toml")
    assert word in str(caught.value)
    assert "mine.toml" in str(caught.value)
