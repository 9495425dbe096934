"""``python -m trainpace.measure.steps``: real optimizer steps, timed one by one in a process of their own."""

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import NUMBER_FORMATS
from trainpace.core.outcome import DeviceRun, Interval, Measurement, StepTime
from trainpace.core.records import to_json
from trainpace.core.stats import has_settled, median, median_interval, warmup_steps
from trainpace.core.worker import serve
from trainpace.measure.detection import cpu_name, environment
from trainpace.measure.device_clock import StepClock
from trainpace.measure.device_memory import MemoryMeter
from trainpace.measure.devices import device_name, driver_id, set_up_device
from trainpace.measure.engine import PlainEngine
from trainpace.measure.gpu_monitor import GpuMonitor
from trainpace.measure.noise_scale import measure_noise_scale
from trainpace.measure.queued_launches import launch_ms, queued_ms
from trainpace.measure.sweep import Conditions
from trainpace.measure.whole_step import StepPhases, check_whole_step
from trainpace.workload import (
    build_task,
    longest_first,
    make_optimizer,
    optimizer_name,
    usual_optimizer,
)

MOST_STEPS = 1000
FEWEST_STEPS = 8
STEPS_BETWEEN_SYNCHRONISATIONS = 10
"""On a GPU the host must be free to run ahead, as it is in a real loop; waiting for every step would forbid it."""
WARMUP_WINDOW, SETTLED_WITHIN, MOST_WARMUP_STEPS = 5, 0.02, 100
"""On an accelerator steps warm up until the medians of two successive windows agree: in the first ones cudnn tries algorithms
out, allocators grow, and clocks rise."""
QUEUED_STEPS, LONGEST_QUEUED_MS = 3, 1000.0
"""Steps beyond the timed ones that tell of gaps between kernels. Longer ones are not repeated: launches hardly count in them."""
DISTINCT_BATCHES = 4
"""Batches are made before the clock starts and used in turn, so that the loss is a real one and data never waits."""


def measure_steps(conditions: Conditions, batch_size: int) -> Measurement:
    """Train for about `conditions.seconds` at one batch size and time every step; on an accelerator after a warm-up that takes
    as long at most.

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
    batches = itertools.cycle(
        [engine.place(task.make_batch(batch_size)) for _ in range(DISTINCT_BATCHES)]
    )
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

    def parts() -> list[tuple[float, float, float]]:
        if task.step is not None:
            return phases.parts()
        # forward and backward take turns under accumulation; the optimizer comes last
        return [(sum(spans[:-1:2]), sum(spans[1:-1:2]), spans[-1]) for spans in clock.spans_ms]

    def warm_up_steps() -> list[float]:
        for _ in range(WARMUP_WINDOW):
            step(batches)
        clock.settle()
        return [sum(each) for each in parts()]

    gc.collect()
    on_device = c.device != "cpu"
    monitor = GpuMonitor(driver_id(c.device))
    settled = _warm_up(warm_up_steps, c.seconds) if on_device else None
    first = len(losses)
    with monitor:
        end = time.perf_counter() + c.seconds
        while len(losses) < MOST_STEPS and (
            len(losses) - first < FEWEST_STEPS or time.perf_counter() < end
        ):
            step(batches)
            if len(losses) % STEPS_BETWEEN_SYNCHRONISATIONS == 0:
                clock.settle()
        clock.settle()
    curve = [float(loss) for loss in losses]
    bad = next((loss for loss in curve if not math.isfinite(loss)), None)
    if bad is not None and NUMBER_FORMATS[c.precision].products != "fp16":
        raise UserCodeError(
            f"the loss of {task.name} became {bad} during the measurement.",
            "Lower the learning rate.",
        )
    totals = [sum(each) for each in parts()]
    warm = first if settled else max(first, warmup_steps(totals))
    steady = totals[warm:]
    forward_ms, backward_ms, optimizer_ms = map(median, zip(*parts()[warm:], strict=True))
    middle = median(steady)
    low, high = median_interval(steady)
    if longest is not None:  # after the clock: it sizes the memory, and is no typical step
        step(itertools.repeat(engine.place(longest)))
        clock.wait()
    peak_gib, reserved_gib = meter.peak_gib()
    run = None
    if on_device:
        run = monitor.run_of(len(totals) - first, DeviceRun(settled=settled))
        if (
            c.precision != "amp_fp16"
        ):  # GradScaler reads from the device in every step, so that launching waits for it
            run = replace(run, **_gaps(c.device, lambda: step(batches), middle))
    return Measurement(
        model=task.name,
        device=device_name(c.device) or cpu_name(),
        execution=execution,
        step_times_ms=tuple(steady),
        warmup_ms=tuple(totals[:warm]),
        step=StepTime(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            optimizer_ms=optimizer_ms,
            idle_ms=max(0.0, middle - forward_ms - backward_ms - optimizer_ms),
        ),
        median_ms=middle,
        interval_ms=Interval(
            low=low,
            high=high,
            coverage=0.9,
            basis="order statistics of the timed steps of one process",
        ),
        peak_memory_gib=peak_gib,
        reserved_memory_gib=reserved_gib,
        losses=tuple(loss for loss in curve if math.isfinite(loss)),
        environment=environment(c.device),
        sequence_length=task.sequence_length,
        image_size=c.image_size,
        loss=task.loss_name,
        run=run,
    )


def _warm_up(more_steps: Callable[[], list[float]], seconds: float) -> bool | None:
    """Whether the steps' times settled before MOST_WARMUP_STEPS and the time were over; None where they were too few to tell.
    `more_steps` runs a window of them, and gives the times of all."""
    end = time.perf_counter() + seconds
    while True:
        times = more_steps()
        if has_settled(times, WARMUP_WINDOW, SETTLED_WITHIN):
            return True
        if len(times) >= MOST_WARMUP_STEPS or time.perf_counter() > end:
            return None if len(times) < 2 * WARMUP_WINDOW else False


def _gaps(kind: str, step: Callable[[], None], step_ms: float) -> dict[str, float | None]:
    """DeviceRun's `launch_ms` and `busy_share`, from a few more steps. The copies that it takes may find no memory."""
    if step_ms > LONGEST_QUEUED_MS:
        return {}
    try:
        host_ms = median([launch_ms(kind, step) for _ in range(QUEUED_STEPS)])
        queued = [queued_ms(kind, step, host_ms) for _ in range(QUEUED_STEPS)]
    except RuntimeError:
        return {}
    busy = [ms for ms in queued if ms is not None]
    return {"launch_ms": host_ms, "busy_share": min(1.0, median(busy) / step_ms) if busy else None}


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
        raise TrainpaceError(
            f"a memory limit cannot be set on {sys.platform}.", "Leave it out."
        ) from None


if __name__ == "__main__":
    serve(_work)
