"""Recurrent layers as cuDNN runs them: matmuls of their definition, and a few kernels per time step."""

import pytest
import torch
from test_whole_step import products
from torch import nn

from trainpace.workload import Variant
from trainpace.workload.task import Task
from trainpace.workload.trace import trace_task

WIDTH, HIDDEN, STEPS = 16, 24, 10
SGD = Variant("sgd")


def traced(layer, forms=("fp32",), variant=SGD, batch_first=True):
    shape = (lambda n: (n, STEPS, WIDTH)) if batch_first else (lambda n: (STEPS, n, WIDTH))
    task = Task(
        "rnn",
        layer,
        lambda m, b: m(b)[0],
        lambda m, b: m(b)[0].sum(),
        lambda n: torch.randn(*shape(n)),
        None,
        "a sequence",
    )
    return trace_task(task, forms, variant)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (3, False), (2, True)])
def test_recurrent_flops_cover_gates_layers_and_directions(kind, gates, layers, bidirectional):
    directions = 1 + bidirectional
    inputs = [WIDTH] + [directions * HIDDEN] * (layers - 1)
    workload = traced(kind(WIDTH, HIDDEN, layers, bidirectional=bidirectional, batch_first=True))
    a_token = sum(directions * 2 * gates * HIDDEN * (width + HIDDEN) for width in inputs)
    first = directions * 2 * gates * HIDDEN * WIDTH  # Its inputs need no gradient.
    assert products(workload, "forward") == STEPS * a_token
    assert products(workload, "backward") == STEPS * (2 * a_token - first)


@pytest.mark.parametrize("batch_first", [True, False])
def test_lstm_launches_two_kernels_per_time_step(batch_first):
    workload = traced(nn.LSTM(WIDTH, HIDDEN, 2, batch_first=batch_first), batch_first=batch_first)
    table = workload.forms["fp32"].operators
    launched = dict.fromkeys(table.phase, 0)
    for phase, function, count, launches in zip(
        table.phase, table.function, table.count, table.launches, strict=True
    ):
        launched[phase] += int(count * launches) * function.startswith("_cudnn_rnn")
    assert launched["forward"] == 2 * (2 * STEPS + 1)
    assert launched["backward"] == 2 * (2 * STEPS + 3) + 1
    assert products(workload, "forward") == STEPS * 2 * 4 * HIDDEN * (WIDTH + 3 * HIDDEN)


def test_gru_under_autocast_runs_in_16_bits():
    table = traced(nn.GRU(WIDTH, HIDDEN, batch_first=True), ("amp",)).forms["amp"].operators
    assert {bool(h) for h, k in zip(table.half, table.kind, strict=True) if k == "gemm"} == {True}


@pytest.mark.parametrize("layer", [nn.LSTM(WIDTH, HIDDEN, proj_size=8, batch_first=True)])
def test_lstm_with_projection_uses_torch_definition(layer):
    on_cpu = traced(layer, variant=Variant("sgd", cpu=True))
    assert products(traced(layer), "forward") == products(on_cpu, "forward") > 0


def test_cpu_lstm_uses_no_cudnn_operators():
    workload = traced(nn.LSTM(WIDTH, HIDDEN, batch_first=True), variant=Variant("sgd", cpu=True))
    assert not any(name.startswith("_cudnn") for name in workload.forms["fp32"].operators.function)
    assert products(workload, "forward") == STEPS * 2 * 4 * HIDDEN * (WIDTH + HIDDEN)
