"""The time of a step by what layers do: all layers of a role together, whatever a library calls them."""

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
def test_the_role_of_a_layer(module, kind, role):
    assert role_of(module, kind, "forward") == role


def test_updates_belong_to_the_optimizer():
    assert role_of("model.layers.0.mlp.up_proj", "elementwise", "optimizer") == "optimizer"


def shares(modules, device_s, repeats=(1, 1, 1)):
    seconds = np.array(device_s)
    times = KernelTimes(seconds, seconds, seconds, seconds)
    return by_role(replace(operators(), module=modules), times, np.array(repeats))


def test_all_layers_and_both_passes_of_a_role_are_one():
    first, last = (
        "model.layers.0.mlp.gate_proj",
        "model.layers.31.mlp.up_proj",
    )  # as a forward and a backward pass name them
    mlp, optimizer = shares((first, last, ""), (0.002, 0.004, 0.001), (2, 2, 1))
    assert (mlp.role, mlp.layers) == ("MLP up and gate projections", 32)
    assert mlp.time_ms == pytest.approx(12.0)
    assert (optimizer.role, optimizer.layers) == ("optimizer", 0)
    assert optimizer.time_ms == pytest.approx(1.0)


def test_the_longest_is_first_and_what_takes_no_time_is_left_out():
    assert [share.role for share in shares(("fc", "h.1.mlp.fc1", ""), (0.001, 0.002, 0.0))] == [
        "MLP up projections",
        "output head",
    ]


def test_modules_named_by_numbers_are_not_layers():
    (linear, _) = shares(("3.3", "3.6", ""), (0.001, 0.002, 0.001))
    assert (linear.role, linear.layers) == ("linear layers", 0)
