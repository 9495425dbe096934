"""``python -m trainpace.measure.steps``: real optimizer steps, timed one by one in a process of their own."""

import contextlib
import gc
import itertools
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import NUMBER_FORMATS
from trainpace.core.outcome import DeviceRun, Interval, MeasuredNoiseScale, Measurement, StepTime
from trainpace.core.records import to_json
from trainpace.core.stats import has_settled, median, median_interval, warmup_steps
from trainpace.core.worker import serve
from trainpace.job import FEWEST_STEPS as FEWEST_NORMS
from trainpace.job import noise_scale
from trainpace.measure.detection import cpu_name, environment
from trainpace.measure.device import (
    MemoryMeter,
    StepClock,
    device_name,
    driver_id,
    launch_ms,
    queued_ms,
    set_up_device,
)
from trainpace.measure.engine import NoiseNorms, PlainEngine, move
from trainpace.measure.gpus import GpuMonitor
from trainpace.measure.sweep import Conditions
from trainpace.workload import (
    WholeStep,
    build_task,
    longest_first,
    make_optimizer,
    map_tensors,
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
MOST_NOISE_STEPS = 500
FIRST_STEPS = 30
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


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The noise scale of a task over some steps on fresh samples of its own data set, in the process that this runs in.

    It trains from the first weights, each step in `accumulation` micro-batches of `batch_size` samples, or in two halves of it
    where there is no accumulation, for `conditions.seconds` and FIRST_STEPS steps at least.

    Raises TrainpaceError for a model without a data set of its own: the gradients of random samples point nowhere.
    """
    c = conditions
    torch.manual_seed(c.seed)
    task = build_task(c.model, c.sequence_length, c.image_size)
    if task.dataset is None or task.collate is None:
        raise TrainpaceError(
            f"{c.model} has no data: the noise scale is one of real samples.",
            "Name FILE.py:FUNCTION, whose function returns (model, loss, optimizer, dataset).",
        )
    parts = c.accumulation if c.accumulation > 1 else 2
    samples = batch_size if c.accumulation > 1 else batch_size // 2
    if samples < 1:
        raise TrainpaceError("a batch of 1 sample has no halves.", "Give a larger --batch.")
    model = move(task.model, c.device).train()
    own = task.optimizer if c.optimizer is None else None
    optimizer = own or make_optimizer(c.optimizer or usual_optimizer(task), model)
    gradients = NoiseNorms(model, samples, parts)
    order = _shuffled(len(task.dataset), c.seed)
    device_clock = StepClock(c.device)
    to_device = operator.methodcaller("to", c.device)
    clock, steps, norms_s = time.perf_counter, 0, 0.0
    begin = clock()
    while steps < MOST_NOISE_STEPS and (steps < FIRST_STEPS or clock() - begin < c.seconds):
        optimizer.zero_grad(set_to_none=True)
        for part in range(parts):
            batch = map_tensors(
                to_device, task.collate([task.dataset[i] for i in itertools.islice(order, samples)])
            )
            (task.loss(model, batch) / parts).backward()
            if part in (0, parts - 1):
                device_clock.wait()
                start = clock()
                (gradients.after_last if part else gradients.after_first)()
                device_clock.wait()
                norms_s += clock() - start
        optimizer.step()
        steps += 1
    seconds = clock() - begin
    norms = gradients.norms()
    if len(norms.small_squared) < FEWEST_NORMS:
        raise UserCodeError("most gradients were no numbers (NaN).", "Lower the learning rate.")
    return MeasuredNoiseScale(
        batch=samples * parts,
        parts=parts,
        scale=noise_scale(norms),
        norms_ms=1e3 * norms_s / steps,
        step_ms=1e3 * (seconds - norms_s) / steps,
    )


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Positions of samples, shuffled anew for each pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()


def check_whole_step(conditions: Conditions, name: str) -> None:
    """Raise TrainpaceError for conditions that such a step cannot be measured under."""
    c = conditions
    asked = {
        "accumulation": c.accumulation > 1,
        "an optimizer": c.optimizer is not None,
        "compile": c.compile,
        "amp_fp16, which scales losses,": c.precision == "amp_fp16",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise TrainpaceError(
                f"{name} has a step of its own: {what} cannot be put around it.",
                "Put it into the step.",
            )


class StepPhases:
    """Runs whole steps under a clock, and tells backward passes and updates from the rest by torch's own entries to them."""

    def __init__(self, clock: StepClock, engine: PlainEngine) -> None:
        self._clock, self._engine = clock, engine
        self._phase = "forward"
        self._phases: list[list[str]] = []

    def run(self, step: WholeStep, batch: Any) -> torch.Tensor:
        """One step. Gives the loss, where the step returns one, and 0 where it does not."""
        self._clock.start_step()
        self._phases.append([])
        hooks = [
            h
            for optimizer in step.optimizers
            for h in (
                optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer")),
                optimizer.register_step_post_hook(lambda *_: self._enter("forward")),
            )
        ]
        try:
            with self._engine.autocast(), self._backward_told():
                value = step.run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        self._enter("forward")
        if isinstance(value, dict):
            value = value.get("loss")
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value.detach()
        return torch.tensor(float(value) if isinstance(value, int | float) else 0.0)

    def parts(self) -> list[tuple[float, float, float]]:
        """(forward, backward, optimizer) in ms of each settled step."""
        return [
            (_of("forward", *step), _of("backward", *step), _of("optimizer", *step))
            for step in zip(self._phases, self._clock.spans_ms, strict=False)
        ]

    def _enter(self, phase: str) -> None:
        """End the span of the phase until now."""
        self._clock.mark()
        self._phases[-1].append(self._phase)
        self._phase = phase

    @contextlib.contextmanager
    def _backward_told(self) -> Iterator[None]:
        owner: Any = torch.autograd
        saved = {name: getattr(owner, name) for name in ("backward", "grad")}

        def told(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._enter("backward")
                try:
                    return function(*args, **kwargs)
                finally:
                    self._enter("forward")

            return run

        try:
            for name, function in saved.items():
                setattr(owner, name, told(function))
            yield
        finally:
            for name, function in saved.items():
                setattr(owner, name, function)


def _of(phase: str, phases: list[str], spans_ms: list[float]) -> float:
    return sum(ms for name, ms in zip(phases, spans_ms, strict=True) if name == phase)


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
