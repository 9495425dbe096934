"""``python -m trainpace.measure.steps``: real optimizer steps, timed one by one in a process of their own."""

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from trainpace.accelerator import MemoryMeter, PlainEngine, StepClock, set_up_device
from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.execution import NUMBER_FORMATS
from trainpace.machine import cpu_name, environment
from trainpace.measure.noise_scale import measure_noise_scale
from trainpace.measure.sweep import Conditions
from trainpace.measure.whole_step import StepPhases, check_whole_step
from trainpace.medians import median, median_interval, warmup_steps
from trainpace.outcome import Interval, Measurement, StepTime
from trainpace.process import serve
from trainpace.records import to_json
from trainpace.trace import build_task, longest_first, make_optimizer, optimizer_name, usual_optimizer

MOST_STEPS = 1000
FEWEST_STEPS = 8
STEPS_BETWEEN_SYNCHRONISATIONS = 10
"""On a GPU the host must be free to run ahead, as it is in a real loop; waiting for every step would forbid it."""
DISTINCT_BATCHES = 4
"""Batches are made before the clock starts and used in turn, so that the loss is a real one and data never waits."""


def measure_steps(conditions: Conditions, batch_size: int) -> Measurement:
    """Train for about `conditions.seconds` at one batch size and time every step.

    A step is: forward and backward for each micro-batch, then the optimizer. Parts are separated by CUDA events on a GPU,
    where they count the device's time, and by the clock on a CPU.
    """
    c = conditions
    set_up_device(c.device, c.precision)
    torch.manual_seed(c.seed)
    meter = MemoryMeter(c.device)
    task = build_task(c.model, c.sequence_length, c.image_size)
    if task.step is not None:
        check_whole_step(c, task.name)
        own_name, optimizer = task.step.optimizer_name, None
        model = task.model  # in the modes that its function left it in: a teacher may not train
    else:
        own = task.optimizer if c.optimizer is None else None
        own_name = usual_optimizer(task) if own is None else optimizer_name(own)
        optimizer = own or make_optimizer(c.optimizer or usual_optimizer(task), task.model)
        model = task.model.train()
    execution = c.execution(batch_size, own_name)
    engine = PlainEngine(execution, c.device, model, optimizer)
    batches = itertools.cycle([engine.place(task.make_batch(batch_size)) for _ in range(DISTINCT_BATCHES)])
    longest = longest_first(task, batch_size)
    clock = StepClock(c.device)
    phases = StepPhases(clock, engine)
    losses: list[torch.Tensor] = []

    def step(batches: Iterator[Any]) -> None:
        if task.step is not None:
            losses.append(phases.run(task.step, next(batches)))
            return
        clock.start_step()
        for batch in itertools.islice(batches, c.accumulation):
            loss = engine.forward(task.loss, batch)
            clock.mark()
            engine.backward(loss)
            clock.mark()
        engine.update()
        clock.mark()
        losses.append(loss.detach())

    gc.collect()
    end = time.perf_counter() + c.seconds
    while len(losses) < MOST_STEPS and (len(losses) < FEWEST_STEPS or time.perf_counter() < end):
        step(batches)
        if len(losses) % STEPS_BETWEEN_SYNCHRONISATIONS == 0:
            clock.settle()
    clock.settle()
    curve = [float(loss) for loss in losses]
    bad = next((loss for loss in curve if not math.isfinite(loss)), None)
    if bad is not None and NUMBER_FORMATS[c.precision].products != "fp16":
        raise UserCodeError(f"the loss of {task.name} became {bad} during the measurement.", "Lower the learning rate.")
    # forward and backward take turns under accumulation; the optimizer comes last
    parts = (
        phases.parts()
        if task.step is not None
        else [(sum(spans[:-1:2]), sum(spans[1:-1:2]), spans[-1]) for spans in clock.spans_ms]
    )
    totals = [sum(step) for step in parts]
    warm = warmup_steps(totals)
    steady = totals[warm:]
    forward_ms, backward_ms, optimizer_ms = map(median, zip(*parts[warm:], strict=True))
    middle = median(steady)
    low, high = median_interval(steady)
    if longest is not None:  # after the clock: it sizes the memory, and is no typical step
        step(itertools.repeat(engine.place(longest)))
        clock.wait()
    peak_gib, reserved_gib = meter.peak_gib()
    return Measurement(
        model=task.name, device=torch.cuda.get_device_name() if c.device == "cuda" else cpu_name(), execution=execution,
        step_times_ms=tuple(steady), warmup_ms=tuple(totals[:warm]),
        step=StepTime(
            forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms,
            idle_ms=max(0.0, middle - forward_ms - backward_ms - optimizer_ms),
        ),
        median_ms=middle,
        interval_ms=Interval(low=low, high=high, coverage=0.9, basis="order statistics of the timed steps of one process"),
        peak_memory_gib=peak_gib, reserved_memory_gib=reserved_gib,
        losses=tuple(loss for loss in curve if math.isfinite(loss)), environment=environment(c.device),
        sequence_length=task.sequence_length, image_size=c.image_size, loss=task.loss_name,
    )  # fmt: skip


def _work(request: dict[str, Any]) -> str:
    conditions = msgspec.convert(request["conditions"], Conditions)
    if request["record"] == "MeasuredNoiseScale":
        return to_json(measure_noise_scale(conditions, request["batch_size"]))
    if conditions.memory_limit_gib is not None:
        _limit_memory(conditions.memory_limit_gib)
    return to_json(measure_steps(conditions, request["batch_size"]))


def _limit_memory(gib: float) -> None:
    """Let this process take only so much more than it has now, after torch was loaded. Data and anonymous memory count."""
    try:
        import resource

        import psutil

        limit = psutil.Process().memory_info().data + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, AttributeError, OSError, ValueError):
        raise TrainpaceError(f"a memory limit cannot be set on {sys.platform}.", "Leave it out.") from None


if __name__ == "__main__":
    serve(_work)
