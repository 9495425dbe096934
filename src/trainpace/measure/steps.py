"""Real optimizer steps, timed one by one."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.measure.machine import cpu_name, environment
from trainpace.measure.statistics import median, median_interval, warmup_steps
from trainpace.outcome import Interval, Measurement, StepTime
from trainpace.trace.task import build_task, make_optimizer

MOST_STEPS = 200
FEWEST_TIMED = 10
DISTINCT_BATCHES = 4
"""Batches are made before the clock starts and used in turn, so that the loss is a real one and data never waits."""


def measure_steps(
    spec: str, batch_size: int, optimizer: str | None, device: str, seconds: float, sequence_length: int | None = None
) -> Measurement:
    """Train `spec` for about `seconds` at one batch size, in fp32, and time every step.

    On CUDA each part ends with a synchronisation, so that host time and device time are the same thing.
    """
    torch.manual_seed(0)
    task = build_task(spec, sequence_length)
    model = task.model.to(device).train()
    stepper = task.optimizer if task.optimizer is not None and optimizer is None else None
    if stepper is None:
        stepper = make_optimizer(optimizer or "sgd_momentum", model)
    name = optimizer or (type(stepper).__name__.lower() if task.optimizer is not None else "sgd_momentum")
    batches = [_to_device(task.make_batch(batch_size), device) for _ in range(DISTINCT_BATCHES)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    parts: list[tuple[float, float, float]] = []
    losses: list[float] = []
    end = time.perf_counter() + seconds
    while len(parts) < MOST_STEPS and (len(parts) < FEWEST_TIMED + 3 or time.perf_counter() < end):
        batch = batches[len(parts) % len(batches)]
        start = _now(device)
        stepper.zero_grad(set_to_none=True)
        loss = task.loss(model, batch)
        forward = _now(device)
        loss.backward()
        backward = _now(device)
        stepper.step()
        parts.append((forward - start, backward - forward, _now(device) - backward))
        losses.append(float(loss.detach()))
    if not all(math.isfinite(loss) for loss in losses):
        raise TrainpaceError(
            f"the loss of {task.name} became {losses[-1]} during the measurement.", "Lower the learning rate."
        )
    totals = [1e3 * sum(step) for step in parts]
    warm = warmup_steps(totals)
    steady, steady_parts = totals[warm:], parts[warm:]
    forward_ms, backward_ms, optimizer_ms = (1e3 * median([step[i] for step in steady_parts]) for i in range(3))
    middle = median(steady)
    low, high = median_interval(steady)
    return Measurement(
        model=task.name,
        device=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        execution=Execution(micro_batch=batch_size, optimizer=name),
        step_times_ms=tuple(steady),
        warmup_ms=tuple(totals[:warm]),
        step=StepTime(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            optimizer_ms=optimizer_ms,
            idle_ms=max(0.0, middle - forward_ms - backward_ms - optimizer_ms),
        ),
        median_ms=middle,
        interval_ms=Interval(low=low, high=high, coverage=0.9, basis="order statistics of the timed steps"),
        peak_memory_gib=torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        losses=tuple(losses),
        environment=environment(),
    )


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _to_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(part, device) for part in value)
    return {k: _to_device(v, device) for k, v in value.items()} if isinstance(value, dict) else value
