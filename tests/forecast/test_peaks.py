"""Peak memory as allocators and monitors report it."""

from pathlib import Path

import pytest

from trainpace.core.outcome import Memory
from trainpace.forecast import MeasuredRun, case_of, stated_peak_gib
from trainpace.forecast.memory import CONTEXT_GIB
from trainpace.forecast.validation import EAGER_CONTEXT_GIB

SMALL = Memory(
    parameters_gib=1.0,
    gradients_gib=1.0,
    optimizer_states_gib=2.0,
    activations_gib=3.0,
    reserved_gib=8.0,
    device_gib=9.0,
)


def case(**stated):
    values = {
        "index": 0,
        "model_spec": "torchvision:resnet50",
        "gpu_canonical": "V100-SXM-32GB",
        "precision": "fp32",
        "batch_per_gpu": 32.0,
        "step_time_ms": 100.0,
        "framework_version": "2.3.0",
    }
    return case_of(MeasuredRun(**values | stated), Path())


def test_peak_memory_kind_selects_allocated_or_device_memory():
    assert stated_peak_gib(case(), SMALL) == SMALL.allocated_gib
    assert stated_peak_gib(case(peak_memory_kind="device"), SMALL) == SMALL.device_gib


def test_old_torch_context_takes_more_memory():
    old, new = (
        stated_peak_gib(case(peak_memory_kind="device", framework_version=v), SMALL)
        for v in ("1.10.0", "2.3.0")
    )
    assert old - new == pytest.approx(EAGER_CONTEXT_GIB - CONTEXT_GIB)


def test_cudnn_benchmark_fills_device_memory():
    shown = stated_peak_gib(case(peak_memory_kind="device", cudnn_benchmark="yes"), SMALL)
    assert 30 < shown < 32
    large = stated_peak_gib(
        case(peak_memory_kind="device", cudnn_benchmark="yes", gpu_canonical="A100-SXM-40GB"), SMALL
    )
    assert large == pytest.approx(shown * 40 / 32)


def test_reserved_peak_kind_selects_reserved_memory():
    assert stated_peak_gib(case(peak_memory_kind="reserved"), SMALL) == SMALL.reserved_gib


def test_device_peak_is_capped_at_card_memory():
    kept = Memory(
        parameters_gib=1.0,
        gradients_gib=1.0,
        optimizer_states_gib=2.0,
        activations_gib=24.0,
        reserved_gib=33.0,
        device_gib=34.0,
    )
    assert stated_peak_gib(case(peak_memory_kind="device"), kept) <= 32
