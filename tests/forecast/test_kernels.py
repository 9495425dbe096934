"""Kernel models: bounded by what the device can do, and never less time for more work."""

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
def test_a_larger_product_never_takes_less_time(batch, m, n, k, which, more):
    shape = [batch, m, n, k]
    larger = shape.copy()
    larger[which] += more
    assert product(*larger) >= product(*shape) * (1 - 1e-9)


@given(st.integers(1, 64), sizes, sizes, sizes)
def test_a_product_is_never_faster_than_the_rate(batch, m, n, k):
    assert product(batch, m, n, k) >= 2.0 * batch * m * n * k / (14e12 * 0.9)


def test_a_small_product_takes_a_whole_wave():
    assert product(1, 1, 1, 16) > 100 * 2 * 16 / (14e12 * 0.9)


FREE = TileModel(*(np.array(x) for x in (1.0, 0.0, 0.0, 1.0)))
"""Tiles as a textbook has them: nothing is lost but in a last wave that is not full."""


def took(m, n, k, sms, model=FREE, **tiles):
    """(time in units of what the whole device would take for the arithmetic alone, waves)."""
    shape = (np.array(float(x)) for x in (1, m, n, k))
    seconds, waves = tiled(*shape, np.array(1e12), np.array(float(sms)), model, **tiles)
    return float(seconds) * 1e12 / (2.0 * m * n * k), float(waves)


def test_a_product_of_whole_waves_loses_nothing():
    assert took(256, 128, 16, 1) == pytest.approx((1, 1))
    # on 4 multiprocessors 5 tiles of 256 x 128 are 2 waves and 10 of 128 x 128 are 3, but 20 of 128 x 64 are 5 whole ones
    assert took(1280, 128, 16, 4) == pytest.approx((1, 5))
    assert took(128, 1280, 16, 4) == pytest.approx((1, 5))


@pytest.mark.parametrize(("share", "paid"), [(1.0, 2.0), (0.5, 1.625), (0.0, 1.25)])
def test_empty_part_of_last_wave_is_paid_in_part(share, paid):
    model = FREE._replace(quantisation=np.array(share))
    assert took(1280, 128, 16, 4, model, tiles=((256, 128),)) == pytest.approx((paid / 1.25, 1.25))


def test_a_tile_that_is_partly_outside_costs_a_whole_one():
    whole = took(256, 256, 16, 1, tiles=((128, 128),))
    assert whole == pytest.approx((1, 4))
    time, waves = took(129, 129, 16, 1, tiles=((128, 128),))
    assert (time * 129**2, waves) == pytest.approx((256**2, 4))


def test_the_reduction_is_padded_to_units_and_has_a_start_and_an_end():
    assert [took(128, 128, k, 1)[0] * k for k in (1, 16, 17, 32, 33)] == pytest.approx(
        [16, 16, 32, 32, 48]
    )
    model = FREE._replace(prologue=np.array(24.0))
    assert took(128, 128, 48, 1, model, tiles=((128, 128),))[0] == pytest.approx(1.5)


def test_a_tile_at_its_half_intensity_reaches_half_of_the_rate():
    intensity = 256 * 128 / (256 + 128)
    model = FREE._replace(half_intensity=np.array(intensity), efficiency=np.array(0.8))
    assert took(2560, 1280, 64, 1, model)[0] == pytest.approx(2 / 0.8)


def test_few_blocks_split_a_long_reduction_over_the_device():
    # one tile of 128 x 128 in 10 parts of 128, for 10 multiprocessors
    assert took(128, 128, 1280, 10, tiles=((128, 128),)) == pytest.approx((1, 1))
    # parts are no shorter than 128: of 640, five multiprocessors of ten have work
    assert took(128, 128, 640, 10, tiles=((128, 128),)) == pytest.approx((2, 0.5))
    assert took(128, 128, 64, 10, tiles=((128, 128),)) == pytest.approx((10, 0.1))
    # and no more than 32: a hundred multiprocessors take as long as 32 would
    assert took(64, 32, 128_000, 100, tiles=((64, 32),)) == pytest.approx((100 / 32, 0.32))
    # blocks that fill more than half of the device are not split
    assert took(128, 768, 12_800, 10, tiles=((128, 128),)) == pytest.approx((10 / 6, 0.6))


def test_tile_constants_by_unit_and_family():
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
def test_a_sweep_gives_the_numbers_of_single_forecasts(models, name, precision):
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
def test_products_of_unaligned_heads_leave_the_matrix_units_of_an_a100(precision):
    """What bigscience's runs with heads of 150 or 108 numbers take longer are 9.5 to 9.7 TFLOP/s in these products."""
    for size in (150, 108):
        rate = 2 * 64 * 2048 * size * 2048 / scores_s(precision, size)
        assert 8e12 < rate < 12e12
        assert scores_s(precision, size) > 4 * scores_s(precision, 152)
        assert scores_s(precision, size, batched=False) < 0.3 * scores_s(precision, size)
        assert scores_s(precision, size, "H100 SXM") < 0.2 * scores_s(precision, size)


def test_unsupported_device_is_nan_in_a_sweep():
    old, new = (
        Forecaster(workload(), Target(Cluster(device=find_device(name)))).at(
            Grid.vary(Execution(precision="bf16"), micro_batch=[1, 2])
        )
        for name in ("T4", "A100")
    )
    assert np.isnan(old.step_ms).all()
    assert "bf16" in old.reason(0)
    assert (new.step_ms > 0).all()


def test_channels_last_helps_matrix_units_only(models):
    def step(precision, channels_last):
        run = Execution(micro_batch=64, precision=precision, channels_last=channels_last)
        return forecast(models["resnet18"], run, Cluster(device=find_device("A100"))).step.total_ms

    assert step("amp_fp16", True) < step("amp_fp16", False)


def test_compile_saves_traffic_and_launches(models):
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
    )  # Intel prints no fp16 rate of it
    rates = sustained_rates(found, precision, True, True, fitted_constants())
    boost = 1.25  # GeForce and Titan clock above their sheet
    assert (
        0.2 * found.fp32_tflops.value * 1e12 < rates.plain <= found.fp32_tflops.value * 1e12 * boost
    )
    if found.fp16_tensor_tflops is not None:
        assert rates.half <= found.fp16_tensor_tflops.value * 1e12 * boost


def test_a_starved_card_sustains_less():
    t4 = find_device("T4")
    fed = replace(t4, tdp_w=replace(t4.tdp_w, value=4 * t4.tdp_w.value))
    starved, whole = (
        sustained_rates(d, "fp32", True, False, fitted_constants()) for d in (t4, fed)
    )
    assert starved.plain < whole.plain


@given(st.integers(1, 256), st.integers(1, 256))
def test_more_samples_never_take_less_time_in_any_operator(a, b):
    table = KernelTable(workload().forms["fp32"].operators)
    constants = fitted_constants()
    rates = sustained_rates(find_device("V100"), "fp32", True, False, constants)
    small, large = (
        table.times(np.array(float(n)), rates, constants).device_s for n in sorted((a, b))
    )
    assert (small <= large * (1 + 1e-9)).all()


def seconds_of(function, kind, read, written, elements_in=0, elements_out=0):
    """Device time of one call on an H100, without its start."""
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
def test_an_update_moves_every_array_once(function, lists, arrays):
    numbers = 4e8
    traced = seconds_of(f"_foreach_{function}", "optimizer", lists * numbers, lists * numbers / 4)
    whole = seconds_of("_foreach_anything", "optimizer", arrays * numbers, 0.0)
    assert traced == pytest.approx(whole)


def test_a_sum_into_few_results_takes_longer_than_reading():
    def sums(rows):
        return seconds_of("sum", "reduction", 4.0 * 2**24, 4.0, 2**24, 2**24 // rows)

    assert [sums(4) < sums(64) < sums(4096), sums(2**18), sums(2**20)] == [
        True,
        sums(2**24),
        sums(2**24),
    ]
    # the lent H100 sums [16384, 2048] in bf16 along the first axis in 46 microseconds, and reads as much in 22
    assert 34e-6 < seconds_of("sum", "reduction", 2.0 * 2**25, 4096.0, 2**25, 2048) < 58e-6
