"""Whole steps of random networks beside their forecast from micro-benchmarks alone: what the operators do not tell.

Between operators lie colder caches, the allocator and the interpreter. Their ratio corrects every forecast of the machine, and
its scatter is the forecast's interval. The networks are drawn by seed; no model that anyone trains is among them.
"""

import statistics
import time
from collections.abc import Iterator

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.forecast import CalibratedKernels, Forecaster, MachineModel, Target
from trainpace.hardware import Cluster, Device
from trainpace.trace import build_task, make_optimizer, trace_task
from trainpace.workload import Variant

NETWORKS = tuple((f"random:{family}:{seed}", batch) for seed in range(101, 105)
                 for family, batch in (("cnn", 8), ("transformer", 4), ("cnn", 24)))  # fmt: skip
ON_CPU = Variant(cpu=True)
SECONDS_EACH = 0.8
FEWEST_STEPS = 5
WARMUP_STEPS = 2


def step_factors(model: MachineModel, device: Device, seconds: float) -> tuple[float, ...]:
    """The ratio measured / forecast for as many random networks as `seconds` allow, three at least."""
    return tuple(_factors(model, device, time.perf_counter() + seconds))


def _factors(model: MachineModel, device: Device, end: float) -> Iterator[float]:
    target = Target(Cluster(device=device), CalibratedKernels(model))
    for i, (spec, batch) in enumerate(NETWORKS):
        if i >= 3 and time.perf_counter() > end:
            return
        task = build_task(spec)
        workload = trace_task(task, ("fp32",), ON_CPU)
        foreseen = Forecaster(workload, target).forecast(Execution(micro_batch=batch))
        if foreseen.step is None:
            raise TrainpaceError(f"{spec} cannot be forecast: {foreseen.reason}")
        yield _step_ms(spec, batch) / foreseen.step.total_ms


def _step_ms(spec: str, batch: int) -> float:
    task = build_task(spec)
    stepper = make_optimizer("sgd_momentum", task.model.train())
    samples = task.make_batch(batch)
    times: list[float] = []
    end = time.perf_counter() + SECONDS_EACH
    while len(times) < WARMUP_STEPS + FEWEST_STEPS or time.perf_counter() < end:
        start = time.perf_counter()
        stepper.zero_grad(set_to_none=True)
        task.loss(task.model, samples).backward()
        stepper.step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARMUP_STEPS:])
