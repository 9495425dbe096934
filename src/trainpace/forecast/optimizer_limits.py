"""Optimizers that cannot run as an execution asks, and states that CUDA pages between device and host."""

import numpy as np

from trainpace.core.execution import OPTIMIZERS, host_update_bytes
from trainpace.core.hardware import Cluster
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.exchanges import PINNED_SHARE
from trainpace.forecast.grid import Grid
from trainpace.forecast.links import pcie_gb_per_s
from trainpace.forecast.memory import RankMemory, needed_gib, room_gib
from trainpace.workload import Flags, Floats


def impossible_updates(grid: Grid, optimizer: str) -> list[tuple[Flags, str]]:
    """The executions that an optimizer cannot have, with the reason and what to do instead."""
    refused: list[tuple[Flags, str]] = []
    if host_update_bytes(optimizer) is None:
        on_host = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.on_host)
        refused.append(
            (
                grid.offload_optimizer,
                f"offload of {optimizer}'s update: engines update on the host with {on_host}.",
            )
        )
    kind = OPTIMIZERS.get(optimizer)
    if kind is None or not kind.whole_matrices:
        return refused
    if optimizer == "muon":
        refused.append(
            (
                grid.tp > 1,
                (
                    "muon under tensor parallelism: it needs whole matrices, and ranks hold parts."
                    " Use zero 1 or 2."
                ),
            )
        )
        refused.append(
            (
                grid.zero_stage >= 3,
                (
                    "muon under FSDP or ZeRO 3: it needs whole matrices, and ranks hold parts. Use"
                    " zero 1 or 2."
                ),
            )
        )
    else:
        flat = (grid.zero_stage == 1) | (grid.zero_stage == 2)
        refused.append(
            (
                flat,
                (
                    f"{optimizer} under ZeRO 1 or 2: their shards are flat, and it factors"
                    " matrices. Use zero 3 (FSDP2)."
                ),
            )
        )
    return refused


def paging_ms(memory: RankMemory, capacity_gib: float | None, cluster: Cluster) -> Floats:
    """Milliseconds in which states that find no room on the device come over PCIe and go back, once an update (n).

    bitsandbytes prefetches a tensor's states just before its kernel, so nothing hides them (Dettmers et al. 2023, section 3).
    """
    if capacity_gib is None:
        return np.zeros_like(memory.paged_gib)
    spilled = np.clip(
        needed_gib(memory) + memory.paged_gib - room_gib(capacity_gib), 0.0, memory.paged_gib
    )
    return np.asarray(2 * spilled * BYTES_PER_GIB / (pcie_gb_per_s(cluster) * PINNED_SHARE * 1e6))
