"""Operators timed one by one have the rows of a trace, and their times add up."""

import time
from collections import Counter

import pytest
import torch
from torch import nn

from trainpace.measure.micro_benchmarks import (
    LARGEST_BYTES,
    LARGEST_FLOPS,
    OperatorTimer,
    block,
    tiny_step,
)
from trainpace.workload import Variant
from trainpace.workload.task import Task
from trainpace.workload.trace import trace_task


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * 64, 10),
    )


def test_timed_operators_match_traced_operators():
    model = network()
    task = Task(
        "a network",
        network(),
        lambda m, b: m(b),
        lambda m, b: m(b).mean(),
        lambda n: torch.randn(n, 3, 16, 16),
        None,
        "an image",
    )
    operators = trace_task(task, ("fp32",), Variant(cpu=True)).form("fp32").operators
    # Operators inside the CPU's convolution are part of its own time.
    expected = Counter()
    for kind, function, phase, count, launches in zip(
        operators.kind,
        operators.function,
        operators.phase,
        operators.count,
        operators.launches,
        strict=True,
    ):
        if phase != "optimizer" and launches and not function.startswith("conv_bias"):
            expected[kind, function] += int(count)
    timer = OperatorTimer()
    with timer:
        model(torch.randn(4, 3, 16, 16)).mean().backward()
    seen = Counter((row.kind, row.function) for row, _ in timer.rows if row.launches)
    for name in (
        "conv",
        "conv_wgrad",
        "native_batch_norm",
        "native_batch_norm_backward",
        "mm",
        "addmm",
        "max_pool2d_with_indices",
        "bernoulli_",
    ):
        same = [(kind, function) for kind, function in expected if function == name]
        assert same, name
        assert [seen[key] for key in same] == [expected[key] for key in same]
    convolution = next(row for row, _ in timer.rows if row.kind == "conv")
    assert convolution.flops == 2.0 * 4 * 16 * 16 * 8 * 27


def test_operator_timer_keeps_gradients_and_fits_step_time():
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 3, 16, 16)
    torch.manual_seed(0)
    model(x).mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    timer = OperatorTimer()
    start = time.perf_counter()
    with timer:
        torch.manual_seed(0)
        model(x).mean().backward()
    took = time.perf_counter() - start
    for a, b in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)
    assert 0 < timer.seconds < took
    assert sum(seconds for _, seconds in timer.rows) <= timer.seconds * 1.001
    assert all(seconds > 0 for _, seconds in timer.rows)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_random_block_trains_within_flop_limit(seed):
    torch.manual_seed(0)
    made = block(seed)
    x = made.make_input()
    loss = made.module(x)
    assert loss.dim() == 0
    loss.backward()
    gradients = [p.grad for p in made.module.parameters() if p.requires_grad]
    assert any(g is not None for g in gradients) or not gradients
    assert x.numel() * 4 < 4 * LARGEST_BYTES
    timer = OperatorTimer()
    with timer:
        made.module(made.make_input()).backward()
    assert max(row.flops for row, _ in timer.rows) < 5 * LARGEST_FLOPS


def test_seed_determines_random_block():
    assert str(block(7).module) == str(block(7).module)
    assert len({str(block(seed).module) for seed in range(20)}) > 15


def test_tiny_step_has_few_flops():
    timer = OperatorTimer()
    with timer:
        tiny_step([nn.Linear(4, 4), nn.ReLU()])()
    assert sum(row.flops for row, _ in timer.rows) < 1000
