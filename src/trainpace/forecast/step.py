"""From kernel times to phases: host against device, and which operators weigh most."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.kernels import KernelTimes
from trainpace.outcome import OperatorShare
from trainpace.workload import PHASES, Operators

Floats = NDArray[np.float64]

HOST_SHARPNESS = 6.0
"""Exponent of the smooth maximum of host and device: where they are close, each sometimes waits for the other."""


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


def heaviest(
    operators: Operators, times: KernelTimes, repeats: NDArray[np.int64], most: int = 10
) -> tuple[OperatorShare, ...]:
    """The rows that take most device time in a step in which each runs `repeats` times, and what bounds each."""
    shares = []
    for i in np.argsort(-times.device_s * repeats)[:most]:
        if times.device_s[i] <= 0:
            break
        parts = {
            "compute": float(times.compute_s[i]), "memory": float(times.memory_s[i]), "launch": float(times.latency_s[i])
        }  # fmt: skip
        bound = max(parts, key=lambda part: parts[part])
        shares.append(
            OperatorShare(
                module=operators.module[i],
                kind=operators.kind[i],
                phase=operators.phase[i],
                count=int(operators.count[i]),
                time_ms=1e3 * float(times.device_s[i] * repeats[i]),
                bound=bound,  # type: ignore[arg-type]
                share_of_roof=max(parts["compute"], parts["memory"]) / float(times.device_s[i]),
            )
        )
    return tuple(shares)
