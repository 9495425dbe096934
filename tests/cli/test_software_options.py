"""Tests of the options for software, attention, optimizer and loss kernels."""

import json

import pytest
from msgspec.structs import replace

import trainpace
from nouns import stacked, workload
from trainpace.cli.program import main
from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.hardware import find_device
from trainpace.core.records import save
from trainpace.web import whatif
from trainpace.web.whatif import WhatIfRequest, forecaster_of


@pytest.fixture
def model(tmp_path):
    """Return a saved model with fused attention."""
    path = tmp_path / "model.json"
    save(stacked(), path)
    return str(path)


def said(capsys, *words, gpu="A100", code=0):
    """Return what `trainpace forecast` prints on both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["forecast", *words, "--gpu", gpu, "--batch", "4", "--no-journal"])
    assert (ended.value.code or 0) == code
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


def row_of(capsys, *words, gpu="A100"):
    (row,) = json.loads(said(capsys, *words, "--json", gpu=gpu))["rows"]
    return row


def test_assumed_software_is_stated_for_attention_models(model, capsys):
    half = (model, "--precision", "bf16")
    assert "assuming PyTorch of today, FlashAttention 2" in said(capsys, *half)
    assert "PyTorch of today, cuDNN's attention" in said(capsys, *half, gpu="H100")
    assert "Software: PyTorch 2.1, FlashAttention 1." in said(
        capsys, *half, "--software", "torch 2.1"
    )
    assert "oftware" not in said(capsys, "resnet50")
    assert "Software: TensorFlow of today." in said(capsys, "resnet50", "--software", "keras")
    row = row_of(capsys, *half)
    assert (row["software"], row["software_assumed"], row["software_idle"]) == (
        "PyTorch of today, FlashAttention 2",
        True,
        [],
    )


def test_kernel_options_change_the_step_time(model, capsys):
    ms = {
        name: row_of(capsys, model, "--precision", "bf16", "--attention", name)["step_time_ms"]
        for name in ("eager", "flash1", "flash_attention_2")
    }
    assert ms["eager"] > ms["flash1"] > ms["flash_attention_2"]
    fused, loop = (
        row_of(capsys, "resnet50", "--optimizer-implementation", name)["breakdown_ms"][
            "optimizer_ms"
        ]
        for name in ("fused", "for_loop")
    )
    assert fused < loop
    old, new = (
        row_of(capsys, "mobilenet_v2", "--software", name)["step_time_ms"]
        for name in ("torch1.9", "torch2.8")
    )
    assert old > 1.5 * new


def test_jax_implies_compile_and_tensorflow_implies_channels_last(capsys):
    compiled = row_of(capsys, "resnet50", "--compile")["step_time_ms"]
    assert row_of(capsys, "resnet50", "--software", "jax")["step_time_ms"] == compiled
    half = ("resnet50", "--precision", "amp_fp16", "--software", "tensorflow")
    assert (
        row_of(capsys, *half)["step_time_ms"]
        == row_of(capsys, *half, "--channels-last")["step_time_ms"]
    )


def test_options_without_effect_are_reported(model, capsys):
    row = row_of(capsys, "resnet50", "--attention", "flash3", "--cross-entropy", "fused")
    assert row["software_idle"] == [
        "FlashAttention 3: the model has no fused attention",
        "fused cross-entropy: the model has no loss over a vocabulary",
    ]
    assert "Without effect: fused cross-entropy" in said(
        capsys, "resnet50", "--cross-entropy", "fused"
    )
    (idle,) = row_of(capsys, model, "--attention", "flash2", "--precision", "fp32")["software_idle"]
    assert idle == "FlashAttention 2: fp32 uses memory-efficient attention"
    (idle,) = row_of(capsys, model, "--precision", "fp8", "--fp8-recipe", "mxfp8", gpu="H100")[
        "software_idle"
    ]
    assert idle.startswith("MXFP8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--software", "mxnet"), "unknown framework 'mxnet'"),
        (("--software", "torch28"), "unknown version of torch"),
        (("--attention", "flash9"), "Nearest: flash"),
        (("--software", "torch1.9", "--compile"), "torch.compile needs torch 2.0"),
        (("--fp8-recipe", "block"), "--fp8-recipe needs --precision fp8"),
        (("--engine", "megatron_core"), "--engine needs --num-gpus"),
    ],
)
def test_invalid_software_options_are_rejected(model, capsys, options, words):
    assert words in said(capsys, model, *options, code=2)


def test_plan_and_whatif_accept_software_options(model):
    with pytest.raises(TrainpaceError, match="needs a `gpu`"):
        trainpace.forecast(model, gpu="cpu", attention="eager", no_journal=True)
    with pytest.raises(Contradiction):
        trainpace.forecast(model, gpu="A100", software="torch1.9", compile=True, no_journal=True)
    jobs = [
        trainpace.plan(
            model, gpu="A100", batch=4, precision="bf16", max_steps=100, attention=attention
        )
        for attention in (None, "eager")
    ]
    assert jobs[0].now.job_s < jobs[1].now.job_s
    assert "PyTorch of today, eager attention" in jobs[1].assumed
    question = WhatIfRequest(precision="bf16", batch=4)
    forecaster, card = forecaster_of(stacked()), find_device("A100")
    now, then = (
        whatif.run(q, forecaster, card, None).forecast
        for q in (question, replace(question, attention="eager"))
    )
    assert now.step.total_ms < then.step.total_ms
    assert whatif.run(
        replace(question, software="mxnet"), forecaster, card, None
    ).reason.startswith("unknown framework")


def test_match_accepts_software(tmp_path):
    path = tmp_path / "one.json"
    save(workload(), path)
    common = {"samples": 10_000, "epochs": 1, "gpu": "A100", "precision": "bf16"}
    now, then = (
        trainpace.match(str(path), software=name, **common).matches[0] for name in (None, "keras")
    )
    assert then.forecast.software == "TensorFlow of today"
    assert now.forecast.step.total_ms < then.forecast.step.total_ms
