"""The forecast of the number that a run states as its peak memory, by the way in which it was measured.

A monitor (nvidia-smi) shows more than a job needs, in two ways that belong to its software and not to its execution:

- CUDA before 11.7 loaded every kernel of torch and its libraries with the context. BigScience found 1573 MiB of it on an A100
  (train/tr11-176B-ml/chronicles-prequel.md); what `CONTEXT_GIB` says holds since kernels are loaded when first used.
- Under `torch.backends.cudnn.benchmark` convolutions are tried with every algorithm whose workspace fits the memory that is
  still free, "e.g. a few GBs" (aten's Conv_v7.cpp), so that the card fills up, whatever its size: in lambda_aggregated SSD300
  with 32 images shows 15, 23, 39 and 47 GiB on cards of 16, 24, 40 and 48. What such a run needs cannot be read off it.
"""

from trainpace.forecast import CONTEXT_GIB, needed_gib, room_gib
from trainpace.outcome import Memory
from trainpace.validation.conditions import Case

EAGER_CONTEXT_GIB = 1573 / 1024


def stated_peak_gib(case: Case, memory: Memory) -> float:
    """The peak in GiB that the run's way of measuring would show."""
    if case.peak == "allocated":
        return memory.allocated_gib
    if case.peak == "reserved":
        return memory.reserved_gib
    capacity = case.cluster.device.memory_gib
    if capacity is None:
        return memory.device_gib
    more = EAGER_CONTEXT_GIB - CONTEXT_GIB if case.loads_all_kernels else 0.0
    full = max(float(needed_gib(memory)) + more, room_gib(capacity.value))
    # short of memory, an allocator gives back what it only keeps
    return full if case.run.cudnn_benchmark == "yes" else min(memory.device_gib + more, full)
