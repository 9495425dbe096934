"""Memory of one device at the peak of a step, from the replayed trace."""

from __future__ import annotations

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.outcome import Memory
from trainpace.units import gib_from_bytes
from trainpace.workload import TracedForm, form_of

RESERVED_FACTOR = 1.18
"""Reserved over allocated while there is room: torch's caching allocator keeps what it once took, cuDNN's trial workspaces
included. ResNet-50 runs in NVIDIA's containers show 1.14 to 1.32 times the forecast's allocated memory on their monitors,
context included."""
FRAGMENTATION = 1.06
"""What cannot be given back when memory is short: segments of 2 and 20 MiB that stay partly empty. 770 of 781 timm runs that
fitted 24 GB fit by this rule; the others have other normalisations today than when they were measured."""
CONTEXT_GIB = 0.45
"""CUDA context with cuBLAS and cuDNN loaded: 0.3 to 0.6 GiB from Pascal to Hopper. Nothing on a CPU."""


MOST_SAMPLES = 2**24
FIT_MARGIN = 0.97
"""Share of the card that is counted as usable: the driver, the display and fragmentation take the rest."""


def step_memory(form: TracedForm, execution: Execution, is_gpu: bool) -> Memory:
    """Peak memory of one rank.

    With accumulation the gradients stay over all micro-steps, so they count in full at the peak. ZeRO shards optimizer
    states from stage 1, gradients from 2, parameters from 3 (Rajbhandari et al. 2020); sharded 16-bit training keeps
    its shards in fp32, as FSDP's mixed precision and DeepSpeed do. DDP reduces gradients through buckets of the same
    size beside them.
    """
    gradient, activation = form.memory.at_peak(execution.micro_batch)
    if execution.accumulation > 1:
        gradient = max(gradient, float(form.memory.peaks[:, 0].max()))
    parameters, states = form.memory.parameter_bytes, form.memory.optimizer_bytes
    ranks, stage = execution.data_parallel_size, execution.zero_stage
    master = 2.0 if stage >= 1 and form_of(execution.precision) == "half" else 1.0
    if stage >= 1:
        states *= master / ranks
    if stage >= 2:
        gradient *= master / ranks
    if stage >= 3:
        parameters *= master / ranks
    if stage == 0 and ranks > 1 and execution.engine != "data_parallel":
        gradient *= 2
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


def fits(memory: Memory, capacity_gib: float) -> bool:
    """Would it run: what is allocated, what fragmentation wastes, and the context, within FIT_MARGIN of the card."""
    context = memory.device_gib - memory.reserved_gib
    waste = FRAGMENTATION if context > 0 else 1.0
    return memory.allocated_gib * waste + context <= capacity_gib * FIT_MARGIN


def largest_micro_batch(form: TracedForm, execution: Execution, capacity_gib: float) -> int:
    """The largest micro-batch that fits; 0 where not even one does."""

    def fits_at(batch: int) -> bool:
        return fits(step_memory(form, replace(execution, micro_batch=batch), True), capacity_gib)

    if not fits_at(1):
        return 0
    low, high = 1, 2
    while fits_at(high) and high < MOST_SAMPLES:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_at(middle) else (low, middle)
    return low
