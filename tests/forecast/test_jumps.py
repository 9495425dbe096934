"""Jumps in the step time over the batch size are found with their size and cause."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import (
    FittedKernels,
    Forecaster,
    Grid,
    Target,
    explanations,
    fitted_constants,
    matmul,
)
from trainpace.forecast.explanations import find_jumps, next_good
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.target import kernel_key
from trainpace.workload import PLAIN, form_of, load_workload
from trainpace.workload.trace import trace

BATCHES = list(range(1, 71))


@given(st.floats(0.1, 10), st.floats(0, 100))
def test_linear_steps_have_no_jumps(slope, start):
    assert find_jumps(BATCHES, start + slope * np.array(BATCHES)) == []


@given(st.integers(12, 58), st.floats(0.2, 1.0))
def test_jump_is_found_with_its_size(at, share):
    line = 5 + 2.0 * np.array(BATCHES, dtype=float)
    size = share * line[at]
    line[at:] += size
    ((index, excess),) = find_jumps(BATCHES, line)
    assert index == at
    assert abs(excess - size) < 1e-6


@pytest.mark.parametrize("device", ["P100", "T4", "V100"])
def test_vgg_jumps_after_multiples_of_16_but_resnet_does_not(device):
    """The authors of the Training Cost Calculator measured these jumps; docs/jumps.md explains them."""
    run, card = Execution(precision="fp32"), find_device(device)
    found = {}
    for name in ("vgg16", "resnet50"):
        found[name] = Forecaster(trace(name), Target(Cluster(device=card))).jumps(run, BATCHES)
    assert [jump.batch for jump in found["vgg16"]] == [17, 33, 49, 65]
    assert found["resnet50"] == ()
    for jump in found["vgg16"]:
        assert 0.02 * jump.before_ms < jump.excess_ms < jump.after_ms - jump.before_ms
        assert jump.mechanism == "padded batch"
        assert f"{jump.batch} images take the work of {jump.before + 16}" in jump.causes[0]
        assert "3x3 convolution" in jump.causes[0]
        assert jump.next_good == jump.before + 16


def test_three_points_have_no_jumps():
    assert find_jumps([1, 2, 3], np.array([1.0, 2.0, 30.0])) == []


def forecaster(model, gpu, precision, **kernels):
    target = Target(Cluster(device=find_device(gpu)), FittedKernels(**kernels))
    return Forecaster(load_workload(model, (form_of(precision),), PLAIN), target)


def test_jumps_vanish_without_padding_they_name(monkeypatch):
    run = Execution(precision="fp32")
    assert {jump.mechanism for jump in forecaster("vgg16", "V100", "fp32").jumps(run, BATCHES)} == {
        "padded batch"
    }
    monkeypatch.setattr(matmul, "WINOGRAD_IMAGES", 1.0)
    monkeypatch.setattr(explanations, "WINOGRAD_IMAGES", 1.0)
    assert forecaster("vgg16", "V100", "fp32").jumps(run, BATCHES) == ()


def test_jumps_shrink_without_wave_quantization():
    run, sizes = Execution(precision="tf32"), range(1, 200)
    found = forecaster("resnet50", "H100", "tf32").jumps(run, sizes)
    assert [jump.before for jump in found] == [43, 86, 172]
    for jump in found:
        assert jump.mechanism == "another wave of tiles"
        assert "on the 132 multiprocessors" in jump.causes[0]
        assert jump.next_good == 2 * jump.before or jump.next_good == 3 * jump.before // 2
    even = replace(
        fitted_constants(), conv_tile_tensor_quantisation=0.0, tile_tensor_quantisation=0.0
    )
    steps = [
        forecaster("resnet50", "H100", "tf32", **kernels)
        .at(Grid.vary(run, micro_batch=sizes))
        .step_ms
        for kernels in ({}, {"constants": even})
    ]
    with_waves, without = (
        max(explanations.excesses(list(sizes), ms)[0][jump.before - 1] for jump in found)
        for ms in steps
    )
    assert without < with_waves / 2


def test_unaligned_batch_is_named_and_next_aligned_batch_recommended():
    first = forecaster("vgg16", "H100", "amp_fp16").jumps(
        Execution(precision="amp_fp16"), range(1, 50)
    )[0]
    assert (first.before, first.mechanism, first.next_good) == (32, "batch not a multiple of 8", 40)
    assert "matmul" in first.causes[0]


@pytest.mark.parametrize(
    ("model", "gpu", "precision"), [("vgg16", "T4", "fp32"), ("resnet50", "V100", "amp_fp16")]
)
def test_next_good_batch_recovers_throughput_before_jump(model, gpu, precision):
    made, run = forecaster(model, gpu, precision), Execution(precision=precision)
    found = made.jumps(run, range(1, 120))
    assert found
    for jump in found:
        before_ms, after_ms, good_ms = made.at(
            Grid.vary(run, micro_batch=[jump.before, jump.batch, jump.next_good])
        ).step_ms
        assert (
            jump.next_good / good_ms
            >= 0.999 * jump.before / before_ms
            > 0.999 * jump.batch / after_ms
        )


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=20))
def test_next_good_is_smallest_batch_that_recovers_throughput(step_ms):
    sizes = list(range(11, 10 + len(step_ms)))
    good = next_good(10, sizes, np.array(step_ms))
    rates = [size / ms for size, ms in zip(sizes, step_ms[1:], strict=True)]
    enough = [
        size for size, rate in zip(sizes, rates, strict=True) if rate >= 0.999 * 10 / step_ms[0]
    ]
    assert good == (enough[0] if enough else None)


def test_tiling_of_single_operator_equals_its_row_in_table():
    made, run = forecaster("resnet50", "H100", "fp32"), Execution(precision="fp32")
    operators = made.workload.form("fp32").operators
    kernels, device = made.target.kernels, made.target.cluster.device
    key, at = kernel_key(run, made.target.software), np.array([32.0, 33.0])
    whole = kernels.tiling(KernelTable(operators), at, device, key)
    for j in range(0, len(operators), 7):
        alone = kernels.tiling(KernelTable(explanations.one_row(operators, j)), at, device, key)
        for one, column in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(one[:, 0], column[:, j])


def test_jumps_page_shows_forecast_jumps():
    text = (Path(__file__).parents[2] / "docs/jumps.md").read_text()
    _, *cards = [
        cell.strip()
        for cell in re.search(r"\| fp32, batch 1:70 \|(.*)\|", text)[0].split("|")[1:-1]
    ]
    assert cards == ["K80", "P100", "T4", "V100"]
    for model, name in (
        ("vgg16", "VGG-16: jumps at"),
        ("vgg19", "VGG-19 |"),
        ("resnet50", "ResNet-50, MobileNetV2 |"),
    ):
        line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        for card, cell in zip(cards, cells, strict=True):
            found = forecaster(model, card, "fp32").jumps(Execution(precision="fp32"), BATCHES)
            stated = ", ".join(
                f"{jump.batch} ({100 * jump.excess_ms / jump.before_ms:.0f})" for jump in found
            )
            assert cell == (stated or "none"), f"{model} on {card}"
