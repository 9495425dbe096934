"""Step time by role of the layers, independent of the names that a library uses."""

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import operators
from trainpace.forecast.explanations import by_role, role_of
from trainpace.forecast.kernels import KernelTimes


@pytest.mark.parametrize(
    ("module", "kind", "role"),
    [
        ("model.layers.31.mlp.up_proj", "gemm", "MLP up projections"),
        ("model.layers.0.mlp.down_proj", "gemm", "MLP down projections"),
        ("model.layers.0.self_attn.v_proj", "gemm", "attention query, key and value projections"),
        ("model.layers.0.self_attn.v_proj", "attention_backward", "attention"),
        ("model.layers.0.self_attn.o_proj", "gemm", "attention output projections"),
        ("model.layers.31.post_attention_layernorm", "elementwise", "normalisation"),
        ("transformer.h.3.attn.c_proj", "gemm", "attention output projections"),
        ("transformer.h.3.mlp.c_proj", "gemm", "MLP down projections"),
        ("transformer.h.3.ln_1", "norm", "normalisation"),
        ("bert.encoder.layer.0.attention.output.dense", "gemm", "attention output projections"),
        ("bert.encoder.layer.0.intermediate.dense", "gemm", "MLP up projections"),
        ("bert.encoder.layer.0.output.dense", "gemm", "MLP down projections"),
        ("blocks.3.attn.proj", "gemm", "attention output projections"),
        ("lm_head", "gemm", "output head"),
        ("layer3.0.conv2", "conv_dgrad", "convolutions of layer3"),
        ("0.12", "conv", "convolutions"),
        ("3.6", "gemm", "linear layers"),
        ("", "elementwise", "element-wise operators and copies"),
    ],
)
def test_role_follows_module_name_and_kind(module, kind, role):
    assert role_of(module, kind, "forward") == role


def test_optimizer_phase_has_optimizer_role():
    assert role_of("model.layers.0.mlp.up_proj", "elementwise", "optimizer") == "optimizer"


def shares(modules, device_s, repeats=(1, 1, 1)):
    seconds = np.array(device_s)
    times = KernelTimes(seconds, seconds, seconds, seconds)
    return by_role(replace(operators(), module=modules), times, np.array(repeats))


def test_roles_sum_all_layers_and_both_passes():
    first, last = (
        "model.layers.0.mlp.gate_proj",
        "model.layers.31.mlp.up_proj",
    )  # names from the forward and the backward pass
    mlp, optimizer = shares((first, last, ""), (0.002, 0.004, 0.001), (2, 2, 1))
    assert (mlp.role, mlp.layers) == ("MLP up and gate projections", 32)
    assert mlp.time_ms == pytest.approx(12.0)
    assert (optimizer.role, optimizer.layers) == ("optimizer", 0)
    assert optimizer.time_ms == pytest.approx(1.0)


def test_roles_are_sorted_by_time_without_empty_roles():
    assert [share.role for share in shares(("fc", "h.1.mlp.fc1", ""), (0.001, 0.002, 0.0))] == [
        "MLP up projections",
        "output head",
    ]


def test_numbered_modules_are_not_counted_as_layers():
    (linear, _) = shares(("3.3", "3.6", ""), (0.001, 0.002, 0.001))
    assert (linear.role, linear.layers) == ("linear layers", 0)
