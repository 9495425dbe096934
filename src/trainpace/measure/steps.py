"""Process that runs real training steps and times each of them.

It is started as ``python -m trainpace.measure.steps``.
"""

import contextlib
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
from trainpace.core.execution import NUMBER_FORMATS, Execution
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
    set_up_device,
    synchronize,
)
from trainpace.measure.engine import NoiseNorms, PlainEngine
from trainpace.measure.gpus import GpuMonitor
from trainpace.measure.kernels import device_work
from trainpace.measure.sweep import Conditions
from trainpace.workload import (
    Task,
    WholeStep,
    build_task,
    longest_first,
    make_optimizer,
    optimizer_name,
    usual_optimizer,
)

MOST_STEPS = 1000
FEWEST_STEPS = 8
STEPS_BETWEEN_SYNCHRONISATIONS = 10
"""Number of steps between synchronizations on a GPU.

The host can then run ahead as in a real training loop. If it waited for every step, it could not.
"""
WARMUP_WINDOW, SETTLED_WITHIN, MOST_WARMUP_STEPS = 5, 0.02, 100
"""Window, tolerance and maximum number of steps of the warm-up on an accelerator.

The warm-up ends when the medians of two successive windows agree. In the first steps, cuDNN tries
algorithms, the allocator grows, and clocks rise.
"""
EXTRA_STEPS, LONGEST_EXTRA_MS = 3, 1000.0
"""Number of extra steps that show gaps between kernels, and the longest step to repeat.

In longer steps, launches hardly matter.
"""
MOST_NOISE_STEPS = 500
FIRST_STEPS = 30
DISTINCT_BATCHES = 4
"""Number of batches, which are made before the timing starts and are used in turn.

So the losses are real, and steps do not wait for data.
"""


class _Phases:
    """Times of the phases of each step: forward, backward and optimizer."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._names: list[list[str]] = []

    def start_step(self) -> None:
        self._clock.start_step()
        self._names.append([])

    def end(self, phase: str) -> None:
        """Mark the end of a phase. It began at the previous mark."""
        self._clock.mark()
        self._names[-1].append(phase)

    def parts(self) -> list[tuple[float, float, float]]:
        """Return (forward, backward, optimizer) in ms for each settled step."""
        found = []
        for names, spans_ms in zip(self._names, self._clock.spans_ms, strict=False):
            spent = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
            for name, ms in zip(names, spans_ms, strict=True):
                spent[name] += ms
            found.append((spent["forward"], spent["backward"], spent["optimizer"]))
        return found


class PlainSteps:
    """Steps of a task with a loss.

    A step runs forward and backward for each micro-batch, then the optimizer.
    """

    def __init__(self, task: Task, c: Conditions) -> None:
        own = task.optimizer if c.optimizer is None else None
        self.optimizer_name = usual_optimizer(task) if own is None else optimizer_name(own)
        self.optimizer = own or make_optimizer(c.optimizer or usual_optimizer(task), task.model)
        self.model = task.model.train()
        self._task, self._accumulation = task, c.accumulation

    def run(self, batches: Iterator[Any], engine: PlainEngine, phases: _Phases) -> torch.Tensor:
        for batch in itertools.islice(batches, self._accumulation):
            loss = engine.forward(self._task.loss, batch)
            phases.end("forward")
            engine.backward(loss)
            phases.end("backward")
        engine.update()
        phases.end("optimizer")
        return loss.detach()


class WholeSteps:
    """Steps of a user's function that does the whole step, including the update.

    Hooks detect the backward passes and the optimizers.
    """

    def __init__(self, task: Task, step: WholeStep, c: Conditions) -> None:
        unsupported = {
            "accumulation": c.accumulation > 1,
            "an optimizer": c.optimizer is not None,
            "compile": c.compile,
            "amp_fp16, which scales losses,": c.precision == "amp_fp16",
        }
        for what, is_asked in unsupported.items():
            if is_asked:
                raise TrainpaceError(
                    f"{task.name} has its own step: {what} cannot be applied from outside.",
                    "Put it into the step.",
                )
        self.optimizer_name, self.optimizer = step.optimizer_name, None
        # Keep the train/eval modes that the user's function set: a teacher may be in eval mode.
        self.model = task.model
        self._step = step

    def run(self, batches: Iterator[Any], engine: PlainEngine, phases: _Phases) -> torch.Tensor:
        hooks = []
        for optimizer in self._step.optimizers:
            hooks.append(optimizer.register_step_pre_hook(lambda *_: phases.end("forward")))
            hooks.append(optimizer.register_step_post_hook(lambda *_: phases.end("optimizer")))
        try:
            with engine.autocast(), _backward_observed(phases):
                value = self._step.run(next(batches))
        finally:
            for hook in hooks:
                hook.remove()
        phases.end("forward")
        if isinstance(value, dict):
            value = value.get("loss")
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value.detach()
        return torch.tensor(float(value) if isinstance(value, int | float) else 0.0)


@contextlib.contextmanager
def _backward_observed(phases: _Phases) -> Iterator[None]:
    """Within this context, torch's functions that run a backward pass end phases."""
    owner: Any = torch.autograd
    saved = {name: getattr(owner, name) for name in ("backward", "grad")}

    def observed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            phases.end("forward")
            try:
                return function(*args, **kwargs)
            finally:
                phases.end("backward")

        return run

    try:
        for name, function in saved.items():
            setattr(owner, name, observed(function))
        yield
    finally:
        for name, function in saved.items():
            setattr(owner, name, function)


def measure_steps(conditions: Conditions, batch_size: int) -> Measurement:
    """Train for about `conditions.seconds` at one batch size and time every step.

    On an accelerator, a warm-up of at most the same duration comes first, and events separate the
    parts of a step, so the parts are device time. On a CPU, the host's clock separates them.
    """
    c = conditions
    set_up_device(c.device, c.precision)
    torch.manual_seed(c.seed)
    meter = MemoryMeter(c.device)
    task = build_task(c.model, c.sequence_length, c.image_size)
    steps = PlainSteps(task, c) if task.step is None else WholeSteps(task, task.step, c)
    execution = c.execution(batch_size, steps.optimizer_name)
    engine = PlainEngine(execution, c.device, steps.model, steps.optimizer)
    batches = itertools.cycle(
        [engine.place(task.make_batch(batch_size)) for _ in range(DISTINCT_BATCHES)]
    )
    longest = longest_first(task, batch_size)
    clock = StepClock(c.device)
    phases = _Phases(clock)
    losses: list[torch.Tensor] = []

    def step(batches: Iterator[Any] = batches) -> None:
        phases.start_step()
        losses.append(steps.run(batches, engine, phases))

    def warm_up_window() -> list[float]:
        for _ in range(WARMUP_WINDOW):
            step()
        clock.settle()
        return [sum(parts) for parts in phases.parts()]

    gc.collect()
    on_device = c.device != "cpu"
    monitor = GpuMonitor(driver_id(c.device))
    settled = _warm_up(warm_up_window, c.seconds) if on_device else None
    first = len(losses)
    with monitor:
        _run_for(c.seconds, step, clock)
    curve, parts = _checked(losses, task.name, c), phases.parts()
    totals = [sum(each) for each in parts]
    warm = first if settled else max(first, warmup_steps(totals))
    steady = totals[warm:]
    forward_ms, backward_ms, optimizer_ms = map(median, zip(*parts[warm:], strict=True))
    middle = median(steady)
    low, high = median_interval(steady)
    if longest is not None:
        # Run the largest batch after the timed steps. It determines the peak memory, but is not a
        # typical step.
        step(itertools.repeat(engine.place(longest)))
        clock.wait()
    peak_gib, reserved_gib = meter.peak_gib()
    run = None
    if on_device:
        run = monitor.run_of(len(totals) - first, DeviceRun(settled=settled))
        if c.precision != "amp_fp16":  # GradScaler makes the host wait in every step
            run = replace(run, **_gaps(c.device, step, middle))
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
        losses=curve,
        environment=environment(c.device),
        sequence_length=task.sequence_length,
        image_size=c.image_size,
        loss=task.loss_name,
        run=run,
    )


def _run_for(seconds: float, step: Callable[[], None], clock: StepClock) -> None:
    end = time.perf_counter() + seconds
    for count in range(1, MOST_STEPS + 1):
        step()
        if count % STEPS_BETWEEN_SYNCHRONISATIONS == 0:
            clock.settle()
        if count >= FEWEST_STEPS and time.perf_counter() > end:
            break
    clock.settle()


def _checked(losses: list[torch.Tensor], name: str, c: Conditions) -> tuple[float, ...]:
    """Return the finite losses. Raise `UserCodeError` for a loss that is not finite.

    Such losses are only allowed in fp16, because the GradScaler skips overflowing steps.
    """
    curve = [float(loss) for loss in losses]
    bad = next((loss for loss in curve if not math.isfinite(loss)), None)
    if bad is not None and NUMBER_FORMATS[c.precision].products != "fp16":
        raise UserCodeError(
            f"the loss of {name} became {bad} during the measurement.", "Lower the learning rate."
        )
    return tuple(loss for loss in curve if math.isfinite(loss))


def _warm_up(more_steps: Callable[[], list[float]], seconds: float) -> bool | None:
    """Run steps until their times settle.

    Args:
        more_steps: Function that runs a window of steps and returns the times of all steps so far.
        seconds: Time limit of the warm-up.

    Returns:
        True if the times settled, False if they did not, and None if there were too few steps.
    """
    end = time.perf_counter() + seconds
    while True:
        times = more_steps()
        if has_settled(times, WARMUP_WINDOW, SETTLED_WITHIN):
            return True
        if len(times) >= MOST_WARMUP_STEPS or time.perf_counter() > end:
            return None if len(times) < 2 * WARMUP_WINDOW else False


def _gaps(kind: str, step: Callable[[], None], step_ms: float) -> dict[str, float | None]:
    """Measure `launch_ms` and `busy_share` of DeviceRun with a few more steps.

    Returns an empty dict if steps are very long or memory does not suffice.
    """
    if step_ms > LONGEST_EXTRA_MS:
        return {}
    try:
        host_ms = median([launch_ms(kind, step) for _ in range(EXTRA_STEPS)])
        recorded = device_work(kind)
        if recorded is None:
            return {"launch_ms": host_ms}
        for _ in range(EXTRA_STEPS):
            step()
        work = recorded()
    except RuntimeError:
        return {}
    busy = None if work is None else min(1.0, work.busy_ms / EXTRA_STEPS / step_ms)
    return {"launch_ms": host_ms, "busy_share": busy}


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """Measure the gradient noise scale of a task on fresh samples of its own dataset.

    It trains from the initial weights for `conditions.seconds` and at least FIRST_STEPS steps. Each
    step has `accumulation` micro-batches of `batch_size` samples. Without accumulation, each step
    has two halves of one batch.

    Raises:
        TrainpaceError: If the model has no dataset. Random samples give gradients without a common
            direction.
    """
    c = conditions
    torch.manual_seed(c.seed)
    task = build_task(c.model, c.sequence_length, c.image_size)
    parts, samples = (c.accumulation, batch_size) if c.accumulation > 1 else (2, batch_size // 2)
    batches = _fresh_batches(task, samples, c)
    if samples < 1:
        raise TrainpaceError("the batch must have at least 2 samples.", "Give a larger --batch.")
    steps = PlainSteps(task, c)
    execution = Execution(micro_batch=samples, accumulation=parts)
    engine = PlainEngine(execution, c.device, steps.model, steps.optimizer)
    gradients = NoiseNorms(engine.model, samples, parts)
    observe = {0: gradients.after_first, parts - 1: gradients.after_last}
    clock = time.perf_counter
    count, norms_s, begin = 0, 0.0, clock()
    while count < MOST_NOISE_STEPS and (count < FIRST_STEPS or clock() - begin < c.seconds):
        for part in range(parts):
            engine.micro_step(task.loss, engine.place(next(batches)), last=part == parts - 1)
            if part in observe:
                synchronize(c.device)
                start = clock()
                observe[part]()
                synchronize(c.device)
                norms_s += clock() - start
        engine.update()
        count += 1
    seconds, norms = clock() - begin, gradients.norms()
    if len(norms.small_squared) < FEWEST_NORMS:
        raise UserCodeError("most gradients were not finite (NaN).", "Lower the learning rate.")
    return MeasuredNoiseScale(
        batch=samples * parts,
        parts=parts,
        scale=noise_scale(norms),
        norms_ms=1e3 * norms_s / count,
        step_ms=1e3 * (seconds - norms_s) / count,
    )


def _fresh_batches(task: Task, samples: int, c: Conditions) -> Iterator[Any]:
    """Return an endless iterator over batches of the task's own samples."""
    dataset, collate = task.dataset, task.collate
    if dataset is None or collate is None:
        raise TrainpaceError(
            f"{c.model} has no data, and the noise scale needs real samples.",
            "Name FILE.py:FUNCTION, whose function returns (model, loss, optimizer, dataset).",
        )
    order = _shuffled(len(dataset), c.seed)
    return (
        collate([dataset[i] for i in itertools.islice(order, samples)]) for _ in itertools.count()
    )


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Yield indices of samples forever. Each pass over the dataset is shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()


def _work(request: dict[str, Any]) -> str:
    conditions = msgspec.convert(request["conditions"], Conditions)
    if request["record"] == "MeasuredNoiseScale":
        return to_json(measure_noise_scale(conditions, request["batch_size"]))
    if conditions.memory_limit_gib is not None:
        _limit_memory(conditions.memory_limit_gib)
    return to_json(measure_steps(conditions, request["batch_size"]))


def _limit_memory(gib: float) -> None:
    """Limit the memory that this process may allocate from now on, in GiB.

    Call it after torch was imported, so that the limit does not include torch itself.
    """
    try:
        import resource

        import psutil

        limit = psutil.Process().memory_info().data + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, AttributeError, OSError, ValueError):
        raise TrainpaceError(
            f"a memory limit cannot be set on {sys.platform}.", "Omit the limit."
        ) from None


if __name__ == "__main__":
    serve(_work)
