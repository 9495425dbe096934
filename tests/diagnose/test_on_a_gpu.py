"""Trainings with planted causes recorded on an H200 (benchmarks/results/diagnose_gpu.md), and handmade device records."""

import json
from pathlib import Path

import pytest

from diagnose.recordings import block, rank, recording
from trainpace.core.records import from_json
from trainpace.diagnose import diagnose
from trainpace.watch import Rank

RECORDED = {
    row["case"]: (row["expected"], from_json(json.dumps(row["rank"]), Rank))
    for row in json.loads((Path(__file__).parent / "h200_ranks.json").read_text())
}
WORDS = {"synchronisation": "logging"}
COMPUTES = {"a_gemm": 60.0, "vectorized_elementwise_kernel": 40.0}


def of_case(name):
    return diagnose(recording(RECORDED[name][1]))


def changes(d):
    return {a.title: a for a in (*d.advice, *d.not_worth)}


def share(d, cause):
    return next(s for s in d.shares if s.cause == cause)


@pytest.mark.parametrize("case", RECORDED)
def test_verdict_matches_planted_cause_on_h200(case):
    d = of_case(case)
    assert d.verdict in {WORDS.get(cause, cause) for cause in RECORDED[case][0]}
    assert sum(s.ms for s in d.shares) == pytest.approx(d.step_ms)


def test_blocking_host_copies_do_not_count_as_compute():
    """Float64 batches from pageable memory: copies take 44 of 60 ms, both by device clock and by intervention."""
    d = of_case("gpu_pageable")
    assert share(d, "host_to_device").ms == pytest.approx(43.1, abs=0.1)
    assert share(d, "compute").ms == pytest.approx(
        17.5, abs=0.5
    )  # 16.2 were measured with the batch on the device
    assert share(d, "host_to_device").proved
    assert "16.2 ms instead of 60.3" in d.why[1]


@pytest.mark.parametrize(
    ("case", "title", "saved_share"),
    [
        ("gpu_fp32", "autocast to bf16", 0.84),  # measured: 271 ms became 44
        ("gpu_compute", "torch.compile", 0.17),
        ("gpu_images_compute", "torch.compile", 0.27),
        ("gpu_adamw", "AdamW(fused)", 0.39),
    ],
)
def test_saving_matches_prediction(case, title, saved_share):
    d = of_case(case)
    assert changes(d)[title].saves_ms / d.step_ms == pytest.approx(saved_share, rel=0.2)


def test_host_bound_step_gets_no_torch_compile_advice():
    """BERT under Trainer, where the device is busy 71 % of the time. torch.compile saved nothing."""
    d = of_case("gpu_trainer")
    assert "torch.compile" not in changes(d)
    assert "The device is busy in 71% of the step" in d.why[1]
    assert d.why[1].endswith("do not shorten the step.")


def test_device_bound_ranks_get_kernel_advice():
    """Communication kernels are not in the busy time, so a rank that waits for another looks idle."""
    seen = {
        "forward": 50,
        "backward": 50,
        "device_busy_ms": 60.0,
        "device_kernels_ms": COMPUTES,
        "world_size": 2,
    }
    rates = {"flops": 3e12, "matmul_gflops": 50_000.0, "other_gflops": {"amp_bf16": 800_000.0}}
    d = diagnose(recording(*(rank(number=i, **seen, **rates) for i in range(2))))
    assert d.why[1].startswith("The device is busy in 60% of the step")
    assert d.why[1].endswith("Communication between ranks is not included.")
    assert {"autocast to bf16", "torch.compile"} <= changes(d).keys()


def test_kernel_time_is_reported_by_kind():
    d = diagnose(
        recording(rank(forward=50, backward=50, device_busy_ms=100.0, device_kernels_ms=COMPUTES))
    )
    assert d.why[1] == (
        "The device is busy in 100% of the step: 60 ms in matmuls, convolutions, attention, 40 ms in element-wise and"
        " other memory-bound kernels."
    )


def on_device(kernels=COMPUTES, **more):
    figures = {
        "flops": 3e12,
        "matmul_gflops": 50_000.0,
        "other_gflops": {"amp_bf16": 800_000.0, "tf32": 400_000.0},
    }
    return diagnose(
        recording(
            rank(
                forward=50,
                backward=50,
                device_busy_ms=100.0,
                device_kernels_ms=kernels,
                **figures | more,
            )
        )
    )


def test_precision_advice_uses_measured_matmul_speedup():
    found = changes(on_device())
    assert found["autocast to bf16"].saves_ms == pytest.approx(60 * (1 - 50 / 800))
    assert found["TF32 in products of fp32 numbers"].saves_ms == pytest.approx(60 * (1 - 50 / 400))
    assert found["autocast to bf16"].at_most


def test_tf32_convolutions_gain_less_from_bf16():
    """cuDNN uses TF32 by default: 18 TFLOP in 60 ms are 300 TFLOP/s."""
    assert changes(on_device(flops=18e12))["autocast to bf16"].saves_ms == pytest.approx(
        60 * (1 - 300 / 800)
    )


def test_slower_precision_saves_nothing():
    assert changes(on_device(other_gflops={"amp_bf16": 20_000.0}))["autocast to bf16"].saves_ms == 0


def test_compiled_model_gets_no_compile_advice():
    assert "torch.compile" in changes(on_device())
    assert "torch.compile" not in changes(on_device({**COMPUTES, "triton_poi_fused_gelu_0": 5.0}))


def test_batch_on_device_is_paired_with_cached_batch():
    blocks = [
        block("plain", data=20, host_to_device=10, forward=10),
        block("cached_batch", host_to_device=10, forward=10),
        block("batch_on_device", forward=10),
    ] * 3
    d = diagnose(recording(rank(data=20, host_to_device=10, forward=10, blocks=blocks)))
    assert next(p for p in d.proofs if p.trial == "batch_on_device").saved_ms == pytest.approx(10)
