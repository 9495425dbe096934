"""From kernel times to a step: phases, host against device, accumulation, communication."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.communication import exposed_ms
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.kernels import KernelTimes
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import OperatorShare, StepTime
from trainpace.workload import PHASES, Operators

Floats = NDArray[np.float64]

HOST_SHARPNESS = 6.0
"""Exponent of the smooth maximum of host and device: where they are close, each sometimes waits for the other."""
ACCUMULATE_SHARE = 0.8
"""Share of the memory bandwidth at which gradients are added up."""


class PhaseTimes(NamedTuple):
    """Milliseconds by phase (last axis, in the order of PHASES), any axes before it."""

    device_ms: Floats
    host_ms: Floats

    def together_ms(self) -> Floats:
        """The later of host and device: the host launches ahead, so a phase of many small kernels takes as long as
        launching them."""
        p = HOST_SHARPNESS
        result: Floats = (self.device_ms**p + self.host_ms**p) ** (1 / p)
        return result


def phase_sums(operators: Operators, per_row: Floats) -> Floats:
    """Sums over the rows of each phase: (..., rows) -> (..., phases)."""
    names = np.array(operators.phase)
    return np.stack([per_row[..., names == phase].sum(axis=-1) for phase in PHASES], axis=-1)


def host_us(operators: Operators, c: KernelConstants) -> Floats:
    """The host's time for every row, all of its operators together, in microseconds."""
    kind, phase = np.asarray(operators.kind), np.asarray(operators.phase)
    launch = np.where(phase == "optimizer", c.host_optimizer_us, c.host_launch_us) * operators.launches
    each = np.where(kind == "module", c.host_module_us, np.where(kind == "view", c.host_view_us, launch))
    result: Floats = each * operators.count
    return result


def step_time(
    phases: PhaseTimes,
    on_gpu: bool,
    start_ms: float,
    execution: Execution,
    cluster: Cluster,
    gradient_bytes: float,
    parameter_bytes: float,
    host_to_device_ms: float = 0.0,
) -> StepTime | str:
    """One optimizer step from one micro-step's phases, or the reason why there is none.

    On a CPU host and device are one, and add up. What the host adds is `host_overhead_ms`; `start_ms` is its work outside the
    phases.
    """
    repeats = np.array([execution.accumulation, execution.accumulation, 1])
    device = np.array(phases.device_ms)
    if execution.zero_stage >= 1:
        device[2] /= execution.data_parallel_size
    phases = phases._replace(device_ms=device)
    overhead = phases.together_ms() - device if on_gpu else phases.host_ms
    if execution.engine == "data_parallel":
        # one Python process drives all replicas: their forward passes launch one after the other
        overhead = overhead + phases.host_ms * np.array([execution.data_parallel_size - 1, 0, 0])
    exposed = exposed_ms(execution, cluster, gradient_bytes, parameter_bytes, *(phases.together_ms()[:2]))
    if isinstance(exposed, str):
        return exposed
    accumulate_ms = 0.0
    bandwidth = cluster.device.memory_bandwidth_gb_per_s
    if execution.accumulation > 1 and bandwidth is not None:
        moved = 3 * gradient_bytes * (execution.accumulation - 1)  # read both, write one
        accumulate_ms = 1e3 * moved / (bandwidth.value * 1e9 * ACCUMULATE_SHARE)
    forward, backward, optimizer = repeats * device
    return StepTime(
        forward_ms=float(forward),
        backward_ms=float(backward) + accumulate_ms,
        optimizer_ms=float(optimizer),
        communication_ms=float(exposed),
        host_to_device_ms=host_to_device_ms * execution.accumulation,
        host_overhead_ms=float((repeats * overhead).sum()) + start_ms,
    )


def heaviest(
    operators: Operators, times: KernelTimes, execution: Execution, most: int = 10
) -> tuple[OperatorShare, ...]:
    """The rows that take most device time in a step, and what bounds each."""
    rows = np.argsort(-times.device_s)[:most]
    shares = []
    for i in rows:
        if times.device_s[i] <= 0:
            break
        parts = {
            "compute": float(times.compute_s[i]), "memory": float(times.memory_s[i]), "launch": float(times.latency_s[i])
        }  # fmt: skip
        bound = max(parts, key=lambda part: parts[part])
        repeats = 1 if operators.phase[i] == "optimizer" else execution.accumulation
        shares.append(
            OperatorShare(
                module=operators.module[i],
                kind=operators.kind[i],
                phase=operators.phase[i],
                count=int(operators.count[i]),
                time_ms=1e3 * float(times.device_s[i]) * repeats,
                bound=bound,  # type: ignore[arg-type]
                share_of_roof=max(parts["compute"], parts["memory"]) / float(times.device_s[i]),
            )
        )
    return tuple(shares)
