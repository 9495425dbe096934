"""Kernel times respect the device's peak rates and grow with the work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, operators, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, catalogue, find_device
from trainpace.forecast import Forecaster, Grid, Target, fitted_constants
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.matmul import TileModel, tile_model, tiled
from trainpace.forecast.rates import sustained_rates
from trainpace.workload import OTHER, Operators
from trainpace.workload.trace import trace

sizes = st.integers(1, 4096)
TILES = TileModel(*(np.array(x) for x in (0.9, 10.0, 32.0, 0.7)))
RATE, SMS = np.array(14e12), np.array(80.0)


def product(batch, m, n, k):
    return float(tiled(*(np.array(float(x)) for x in (batch, m, n, k)), RATE, SMS, TILES)[0])


@given(st.integers(1, 64), sizes, sizes, sizes, st.integers(0, 3), st.integers(1, 512))
def test_larger_matmul_never_takes_less_time(batch, m, n, k, which, more):
    shape = [batch, m, n, k]
    larger = shape.copy()
    larger[which] += more
    assert product(*larger) >= product(*shape) * (1 - 1e-9)


@given(st.integers(1, 64), sizes, sizes, sizes)
def test_matmul_never_exceeds_sustained_rate(batch, m, n, k):
    assert product(batch, m, n, k) >= 2.0 * batch * m * n * k / (14e12 * 0.9)


def test_small_matmul_takes_full_wave():
    assert product(1, 1, 1, 16) > 100 * 2 * 16 / (14e12 * 0.9)


FREE = TileModel(*(np.array(x) for x in (1.0, 0.0, 0.0, 1.0)))
"""Ideal tile model: only a partial last wave costs time."""


def took(m, n, k, sms, model=FREE, **tiles):
    """Return (time relative to the arithmetic at the peak rate, waves)."""
    shape = (np.array(float(x)) for x in (1, m, n, k))
    seconds, waves = tiled(*shape, np.array(1e12), np.array(float(sms)), model, **tiles)
    return float(seconds) * 1e12 / (2.0 * m * n * k), float(waves)


def test_matmul_of_full_waves_has_no_quantization_loss():
    assert took(256, 128, 16, 1) == pytest.approx((1, 1))
    # on 4 multiprocessors, 5 tiles of 256 x 128 take 2 waves, 10 of 128 x 128 take 3, and 20 of 128 x 64 take 5 full waves
    assert took(1280, 128, 16, 4) == pytest.approx((1, 5))
    assert took(128, 1280, 16, 4) == pytest.approx((1, 5))


@pytest.mark.parametrize(("share", "paid"), [(1.0, 2.0), (0.5, 1.625), (0.0, 1.25)])
def test_quantization_sets_cost_of_partial_last_wave(share, paid):
    model = FREE._replace(quantisation=np.array(share))
    assert took(1280, 128, 16, 4, model, tiles=((256, 128),)) == pytest.approx((paid / 1.25, 1.25))


def test_partial_tile_costs_full_tile():
    whole = took(256, 256, 16, 1, tiles=((128, 128),))
    assert whole == pytest.approx((1, 4))
    time, waves = took(129, 129, 16, 1, tiles=((128, 128),))
    assert (time * 129**2, waves) == pytest.approx((256**2, 4))


def test_reduction_is_padded_to_16_and_has_prologue():
    assert [took(128, 128, k, 1)[0] * k for k in (1, 16, 17, 32, 33)] == pytest.approx(
        [16, 16, 32, 32, 48]
    )
    model = FREE._replace(prologue=np.array(24.0))
    assert took(128, 128, 48, 1, model, tiles=((128, 128),))[0] == pytest.approx(1.5)


def test_tile_at_half_intensity_reaches_half_the_rate():
    intensity = 256 * 128 / (256 + 128)
    model = FREE._replace(half_intensity=np.array(intensity), efficiency=np.array(0.8))
    assert took(2560, 1280, 64, 1, model)[0] == pytest.approx(2 / 0.8)


def test_split_k_spreads_long_reduction_over_multiprocessors():
    # one tile of 128 x 128 in 10 parts of 128, for 10 multiprocessors
    assert took(128, 128, 1280, 10, tiles=((128, 128),)) == pytest.approx((1, 1))
    # parts have at least 128: a reduction of 640 occupies 5 of 10 multiprocessors
    assert took(128, 128, 640, 10, tiles=((128, 128),)) == pytest.approx((2, 0.5))
    assert took(128, 128, 64, 10, tiles=((128, 128),)) == pytest.approx((10, 0.1))
    # at most 32 parts: 100 multiprocessors take as long as 32
    assert took(64, 32, 128_000, 100, tiles=((64, 32),)) == pytest.approx((100 / 32, 0.32))
    # blocks that fill more than half of the device are not split
    assert took(128, 768, 12_800, 10, tiles=((128, 128),)) == pytest.approx((10 / 6, 0.6))


def test_tile_constants_depend_on_unit_and_family():
    constants = fitted_constants()
    for family in ("tile", "conv_tile"):
        model = tile_model(np.array([0.9, 0.5]), np.array([True, False]), constants, family)
        assert list(model.efficiency) == [0.9, 0.5]
        for name in ("half_intensity", "prologue", "quantisation"):
            sheet = [getattr(constants, f"{family}_{unit}_{name}") for unit in ("tensor", "plain")]
            assert list(getattr(model, name)) == sheet
    plain = tile_model(np.array(0.9), np.array(True), constants)
    assert plain.prologue == constants.tile_tensor_prologue


@pytest.fixture(scope="module")
def models():
    return {name: trace(name, ("fp32", "amp")) for name in ("resnet18", "mobilenet_v2")}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp_fp16"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_batch_sweep_equals_single_forecasts(models, name, precision):
    batches = [1, 7, 33, 70]
    run = Execution(precision=precision)
    for device in ("T4", "A100", "RTX 4090", "K80"):
        target = Target(Cluster(device=find_device(device)))
        swept = Forecaster(models[name], target).at(Grid.vary(run, micro_batch=batches)).step_ms
        for step_ms, batch in zip(swept, batches, strict=True):
            alone = Forecaster(models[name], target).forecast(replace(run, micro_batch=batch))
            assert step_ms == pytest.approx(alone.step.total_ms, rel=1e-12)


def scores_s(precision, head_size, device="A100 SXM 80GB", batched=True):
    table = operators(m=2048, n=2048, k=head_size, half=True)
    dims = table.dims.copy()
    dims[:2, 0, 0] = products = 64 if batched else 1
    rates = sustained_rates(find_device(device), precision, True, True, fitted_constants())
    times = KernelTable(replace(table, dims=dims, flops=products * table.flops)).times(
        np.array([1.0]), rates, fitted_constants()
    )
    return float(times.compute_s[0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_unaligned_head_matmuls_do_not_use_a100_tensor_cores(precision):
    """In bigscience's runs, matmuls with head sizes 150 or 108 reach 9.5 to 9.7 TFLOP/s."""
    for size in (150, 108):
        rate = 2 * 64 * 2048 * size * 2048 / scores_s(precision, size)
        assert 8e12 < rate < 12e12
        assert scores_s(precision, size) > 4 * scores_s(precision, 152)
        assert scores_s(precision, size, batched=False) < 0.3 * scores_s(precision, size)
        assert scores_s(precision, size, "H100 SXM") < 0.2 * scores_s(precision, size)


def test_unsupported_precision_gives_nan_in_batch_sweep():
    old, new = (
        Forecaster(workload(), Target(Cluster(device=find_device(name)))).at(
            Grid.vary(Execution(precision="fp8"), micro_batch=[1, 2])
        )
        for name in ("T4", "H100 SXM")
    )
    assert np.isnan(old.step_ms).all()
    assert "fp8" in old.reason(0).lower()
    assert (new.step_ms > 0).all()


def test_channels_last_is_faster_on_tensor_cores(models):
    def step(precision, channels_last):
        run = Execution(micro_batch=64, precision=precision, channels_last=channels_last)
        return forecast(models["resnet18"], run, Cluster(device=find_device("A100"))).step.total_ms

    assert step("amp_fp16", True) < step("amp_fp16", False)


def test_compile_reduces_step_time(models):
    eager, compiled = (
        forecast(
            models["resnet18"],
            Execution(micro_batch=64, compile=on),
            Cluster(device=find_device("A100")),
        ).step.total_ms
        for on in (False, True)
    )
    assert compiled < eager


@pytest.mark.parametrize("device", [d.name for d in catalogue() if d.kind == "gpu"])
def test_sustained_rates_stay_near_the_datasheet(device):
    found = find_device(device)
    precision = (
        "amp_bf16" if found.architecture == "Gaudi" else "amp_fp16"
    )  # Intel publishes no fp16 rate for Gaudi
    rates = sustained_rates(found, precision, True, True, fitted_constants())
    boost = 1.25  # GeForce and Titan run above their datasheet clock
    assert (
        0.2 * found.fp32_tflops.value * 1e12 < rates.plain <= found.fp32_tflops.value * 1e12 * boost
    )
    if found.fp16_tensor_tflops is not None:
        assert rates.half <= found.fp16_tensor_tflops.value * 1e12 * boost


def test_lower_tdp_reduces_sustained_rate():
    t4 = find_device("T4")
    fed = replace(t4, tdp_w=replace(t4.tdp_w, value=4 * t4.tdp_w.value))
    starved, whole = (
        sustained_rates(d, "fp32", True, False, fitted_constants()) for d in (t4, fed)
    )
    assert starved.plain < whole.plain


@given(st.integers(1, 256), st.integers(1, 256))
def test_larger_batch_never_takes_less_time_in_any_operator(a, b):
    table = KernelTable(workload().forms["fp32"].operators)
    constants = fitted_constants()
    rates = sustained_rates(find_device("V100"), "fp32", True, False, constants)
    small, large = (
        table.times(np.array(float(n)), rates, constants).device_s for n in sorted((a, b))
    )
    assert (small <= large * (1 + 1e-9)).all()


def seconds_of(function, kind, read, written, elements_in=0, elements_out=0):
    """Return the device time of one call on an H100 without launch time."""
    dims = np.zeros((1, 16, 2))
    dims[0, OTHER.elements_in, 0], dims[0, OTHER.elements_out, 0] = elements_in, elements_out
    table = Operators(
        kind=(kind,),
        function=(function,),
        phase=("forward",),
        module=("",),
        half=np.array([False]),
        count=np.array([1]),
        launches=np.array([1]),
        flops=np.zeros((1, 2)),
        read_bytes=np.array([[read, 0.0]]),
        written_bytes=np.array([[written, 0.0]]),
        dims=dims,
    )
    c = fitted_constants()
    rates = sustained_rates(find_device("H100 SXM"), "fp32", True, False, c)
    return (
        float(KernelTable(table).times(np.array(1.0), rates, c).device_s[0]) - 1e-6 * c.latency_us
    )


@pytest.mark.parametrize(
    ("function", "lists", "arrays"),
    [("lerp_", 2, 3), ("addcmul_", 3, 3), ("addcdiv_", 3, 4), ("mul_", 1, 2)],
)
def test_foreach_update_moves_each_array_once(function, lists, arrays):
    numbers = 4e8
    traced = seconds_of(f"_foreach_{function}", "optimizer", lists * numbers, lists * numbers / 4)
    whole = seconds_of("_foreach_anything", "optimizer", arrays * numbers, 0.0)
    assert traced == pytest.approx(whole)


def test_reduction_into_few_outputs_is_slower_than_reading():
    def sums(rows):
        return seconds_of("sum", "reduction", 4.0 * 2**24, 4.0, 2**24, 2**24 // rows)

    assert [sums(4) < sums(64) < sums(4096), sums(2**18), sums(2**20)] == [
        True,
        sums(2**24),
        sums(2**24),
    ]
    # measured on an H100: summing [16384, 2048] in bf16 along the first axis takes 46 us, reading it takes 22 us
    assert 34e-6 < seconds_of("sum", "reduction", 2.0 * 2**25, 4096.0, 2**25, 2048) < 58e-6
