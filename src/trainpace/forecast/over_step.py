"""Memory over the course of a step, for executions whose moments are those of the trace."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.outcome import Memory, StepTime
from trainpace.units import BYTES_PER_GIB
from trainpace.workload import TracedForm

Floats = NDArray[np.float64]

AGREES = 0.02
"""Share of the forecast's peak by which a curve's highest moment may differ from it; beyond, the curve is not shown."""


class MemoryOverStep(NamedTuple):
    """GiB alive at ascending milliseconds of the last micro-step and the update; parameters and states stay all the time."""

    at_ms: Floats
    gradients_gib: Floats
    activations_gib: Floats
    parameters_gib: float
    optimizer_states_gib: float

    @property
    def total_gib(self) -> Floats:
        """All kinds together."""
        whole: Floats = self.gradients_gib + self.activations_gib + self.parameters_gib + self.optimizer_states_gib
        return whole


def memory_over_step(form: TracedForm, execution: Execution, step: StepTime, memory: Memory) -> MemoryOverStep | None:
    """From the trace's moments; None where the execution has others (it shards, cuts or recomputes), or the trace is too old.

    Within a phase a moment lies where the bytes moved up to it lie, which is nearly its time where memory traffic binds.
    """
    moments = form.memory.moments
    if not len(moments) or execution.world_size != execution.data_parallel_size or execution.zero_stage:
        return None
    ends = np.cumsum(
        [step.forward_ms / execution.accumulation, step.backward_ms / execution.accumulation, step.optimizer_ms]
    )
    phase = moments[:, 0].astype(int)
    starts = np.concatenate([[0.0], ends[:-1]])
    at_ms = starts[phase] + (ends - starts)[phase] * np.clip(moments[:, 1], 0.0, 1.0)
    gradients = moments[:, 2]
    whole = float(form.memory.peaks[:, 0].max())
    if execution.accumulation > 1:
        gradients = np.full_like(gradients, whole)
    if execution.data_parallel_size > 1 and execution.engine != "data_parallel":
        gradients = gradients + whole  # the buckets of DDP
    activations = np.maximum(moments[:, 3] + moments[:, 4] * execution.micro_batch, 0.0)
    found = MemoryOverStep(
        at_ms,
        gradients / BYTES_PER_GIB,
        activations / BYTES_PER_GIB,
        memory.parameters_gib,
        memory.optimizer_states_gib,
    )
    agrees = abs(float(found.total_gib.max()) - memory.allocated_gib) <= AGREES * memory.allocated_gib
    return found if agrees else None
