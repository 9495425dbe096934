"""Real optimizer steps, timed one by one, in the process that this module runs in."""

from __future__ import annotations

import gc
import itertools
import math
import time
from typing import Any

import torch

from trainpace.errors import UserCodeError
from trainpace.execution import NUMBER_FORMATS
from trainpace.machine import cpu_name, environment
from trainpace.measure.device import (
    Marks,
    MemoryMeter,
    allow_tf32,
    autocast,
    check_device,
    marks_of,
    place_batch,
    place_model,
)
from trainpace.measure.probes import Conditions
from trainpace.medians import median, median_interval, warmup_steps
from trainpace.outcome import Interval, Measurement, StepTime
from trainpace.trace import Task, build_task, longest_first, make_optimizer

MOST_STEPS = 1000
FEWEST_STEPS = 8
STEPS_BETWEEN_SYNCHRONISATIONS = 10
"""On a GPU the host must be free to run ahead, as it is in a real loop; waiting for every step would forbid it."""
DISTINCT_BATCHES = 4
"""Batches are made before the clock starts and used in turn, so that the loss is a real one and data never waits."""


def measure_steps(conditions: Conditions, batch_size: int) -> Measurement:
    """Train for about `conditions.seconds` at one batch size and time every step.

    A step is: clear the gradients, then forward and backward for each micro-batch, then the optimizer. Parts are
    separated by CUDA events on a GPU, where they count the device's time, and by the clock on a CPU.
    """
    c = conditions
    check_device(c.device, c.precision)
    torch.manual_seed(c.seed)
    meter = MemoryMeter(c.device)
    task = build_task(c.model, c.sequence_length, c.image_size)
    stepper = _Stepper(task, c, batch_size)
    clock = _Clock(marks_of(c.device))
    gc.collect()
    end = time.perf_counter() + c.seconds
    while clock.steps < MOST_STEPS and (clock.steps < FEWEST_STEPS or time.perf_counter() < end):
        stepper.step(clock)
        if clock.steps % STEPS_BETWEEN_SYNCHRONISATIONS == 0:
            clock.settle()
    clock.settle()
    losses = [float(loss) for loss in stepper.losses]
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    if bad is not None and NUMBER_FORMATS[c.precision].products != "fp16":
        raise UserCodeError(f"the loss of {task.name} became {bad} during the measurement.", "Lower the learning rate.")
    parts = clock.parts_ms
    totals = [sum(step) for step in parts]
    warm = warmup_steps(totals)
    steady = totals[warm:]
    forward_ms, backward_ms, optimizer_ms = (median([step[i] for step in parts[warm:]]) for i in range(3))
    middle = median(steady)
    low, high = median_interval(steady)
    if stepper.longest is not None:  # after the clock: it sizes the memory, and is no typical step
        stepper.step(clock, stepper.longest)
        clock.settle()
    peak_gib, reserved_gib = meter.peak_gib()
    return Measurement(
        model=task.name,
        device=torch.cuda.get_device_name() if c.device == "cuda" else cpu_name(),
        execution=c.execution(batch_size, stepper.optimizer_name),
        step_times_ms=tuple(steady),
        warmup_ms=tuple(totals[:warm]),
        step=StepTime(
            forward_ms=forward_ms, backward_ms=backward_ms, optimizer_ms=optimizer_ms,
            idle_ms=max(0.0, middle - forward_ms - backward_ms - optimizer_ms),
        ),
        median_ms=middle,
        interval_ms=Interval(low=low, high=high, coverage=0.9, basis="order statistics of the timed steps of one process"),
        peak_memory_gib=peak_gib,
        reserved_memory_gib=reserved_gib,
        losses=tuple(loss for loss in losses if math.isfinite(loss)),
        environment=environment(c.device),
        sequence_length=task.sequence_length,
        image_size=c.image_size,
    )  # fmt: skip


class _Stepper:
    """Model, optimizer and batches under the conditions, and one step of them."""

    def __init__(self, task: Task, c: Conditions, batch_size: int) -> None:
        self._task, self._accumulation, self._precision = task, c.accumulation, c.precision
        self._device = c.device
        allow_tf32(c.precision)
        model = place_model(task.model, c.device, c.precision, c.channels_last)
        own = task.optimizer if c.optimizer is None else None
        # a task's own optimizer holds the parameters themselves, and `to` keeps them
        self._optimizer = own or make_optimizer(c.optimizer or "sgd_momentum", model)
        self.optimizer_name = c.optimizer or (type(own).__name__.lower() if own is not None else "sgd_momentum")
        self._model: Any = model.train()
        if c.compile:
            self._model = torch.compile(self._model)
        self._scaler = torch.amp.GradScaler(c.device) if c.precision == "amp_fp16" else None

        def place(batch: Any) -> Any:
            return place_batch(batch, c.device, c.precision, c.channels_last)

        self._batches = itertools.cycle([place(task.make_batch(batch_size)) for _ in range(DISTINCT_BATCHES)])
        longest = longest_first(task, batch_size)
        self.longest = None if longest is None else place(longest)
        self.losses: list[torch.Tensor] = []

    def step(self, clock: _Clock, batch: Any = None) -> None:
        """One optimizer step between the marks of the clock; `batch` in place of the next one."""
        clock.start()
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(self._accumulation):
            micro = next(self._batches) if batch is None else batch
            with autocast(self._device, self._precision):
                loss = self._task.loss(self._model, micro) / self._accumulation
            clock.mark()
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            clock.mark()
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        clock.mark()
        self.losses.append(loss.detach())


class _Clock:
    """Marks within steps, and the milliseconds of (forward, backward, optimizer) of each step that has settled."""

    def __init__(self, marks: Marks) -> None:
        self.parts_ms: list[tuple[float, float, float]] = []
        self._device = marks
        self._marks: list[list[Any]] = []

    @property
    def steps(self) -> int:
        """The number of steps that were started."""
        return len(self.parts_ms) + len(self._marks)

    def start(self) -> None:
        """A step begins."""
        self._marks.append([self._device.now()])

    def mark(self) -> None:
        """A forward or a backward pass of this step ends, or its optimizer."""
        self._marks[-1].append(self._device.now())

    def settle(self) -> None:
        """Wait for the device and turn the marks into times."""
        self._device.wait()
        for marks in self._marks:
            spans = [self._device.span_ms(a, b) for a, b in itertools.pairwise(marks)]
            # forward and backward take turns under accumulation; the optimizer comes last
            self.parts_ms.append((sum(spans[0:-1:2]), sum(spans[1:-1:2]), spans[-1]))
        self._marks.clear()
