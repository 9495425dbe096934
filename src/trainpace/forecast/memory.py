"""Memory of one device at the peak of a step, from the replayed trace."""

from __future__ import annotations

from trainpace.execution import Execution
from trainpace.outcome import Memory
from trainpace.units import gib_from_bytes
from trainpace.workload import TracedForm

RESERVED_FACTOR = 1.06
"""Reserved over allocated: torch's caching allocator hands out 2 MiB and 20 MiB segments that stay partly empty. A
round number between the 2 and 12 % that public runs show; a loop with changing shapes keeps more."""
CONTEXT_GIB = 0.45
"""CUDA context with cuBLAS and cuDNN loaded: 0.3 to 0.6 GiB from Pascal to Hopper. Nothing on a CPU."""


def step_memory(form: TracedForm, execution: Execution, is_gpu: bool) -> Memory:
    """Peak memory. With accumulation the gradients stay over all micro-steps, so they count in full at the peak."""
    gradient, activation = form.memory.at_peak(execution.micro_batch)
    if execution.accumulation > 1:
        gradient = max(gradient, float(form.memory.peaks[:, 0].max()))
    parameters, states = form.memory.parameter_bytes, form.memory.optimizer_bytes
    allocated = gib_from_bytes(parameters + states + gradient + activation)
    reserved = allocated * (RESERVED_FACTOR if is_gpu else 1.0)
    return Memory(
        parameters_gib=gib_from_bytes(parameters),
        gradients_gib=gib_from_bytes(gradient),
        optimizer_states_gib=gib_from_bytes(states),
        activations_gib=gib_from_bytes(activation),
        reserved_gib=reserved,
        device_gib=reserved + (CONTEXT_GIB if is_gpu else 0.0),
    )
