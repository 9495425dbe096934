"""What a rank's kernels cost: per repeated block, and for what lies before and behind the blocks. Steps are assembled from these
numbers, which are worked out once for every way to shard the operators and every micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.recomputation import repeated_share
from trainpace.forecast.target import RankTimes
from trainpace.workload import ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, Blocks, Operators, multiplies_activations

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class StageCosts(NamedTuple):
    """Milliseconds by execution (n, and n x 2 for forward and backward): device and host of one block, of what lies
    before the blocks and behind them; of the whole optimizer step; of a block's attention alone (device, forward), and of what
    selective recomputation repeats of a block. start: the host's, outside of the phases."""

    block_device: Floats
    first_device: Floats
    last_device: Floats
    optimizer_device: Floats
    attention_device: Floats
    repeated_device: Floats
    block_host: Floats
    first_host: Floats
    last_host: Floats
    optimizer_host: Floats
    repeated_host: Floats
    start: Floats

    @classmethod
    def of(cls, rows: Floats) -> StageCosts:
        """From rows as `RankTable.costs` gives them."""
        device, host = rows[:, :9], rows[:, 9:18]
        return cls(
            device[:, 0:2], device[:, 2:4], device[:, 4:6], device[:, 6], device[:, 7], device[:, 8],
            host[:, 0:2], host[:, 2:4], host[:, 4:6], host[:, 6], host[:, 8], rows[:, 18],
        )  # fmt: skip


class RankTable:
    """The operators of one rank, ready for a kernel model, and how much of each runs in which part of a stage."""

    def __init__(self, operators: Operators, blocks: Blocks | None) -> None:
        self.operators, self.kernels = operators, KernelTable(operators)
        kind, phase = np.array(operators.kind), np.array(operators.phase)
        self.inside = inside = block_shares(operators, blocks)
        self.updates = phase == "optimizer"
        self.grouped = np.isin(kind, CONVOLUTION_KINDS) & (operators.dims[:, CONV.groups].sum(axis=1) > 1)
        self.half = bool(operators.half.any())
        first = (kind == "embedding") | np.array([name.startswith("embedding") for name in operators.function])
        core = np.zeros(len(operators), dtype=bool)
        if blocks is None:
            first = np.ones(len(operators), dtype=bool)
        else:
            if blocks.heads:
                first |= np.isin(kind, CONVOLUTION_KINDS)  # that cut an image into patches
            core = attention_rows(operators, blocks) & (phase == "forward")
        block = inside / max(1, blocks.count if blocks else 1)
        passes = [phase == "forward", phase == "backward"]
        self._weights = np.array([
            *(part * when for part in (block, (1 - inside) * first, (1 - inside) * ~first) for when in passes),
            self.updates, block * core, block * repeated_share(operators, blocks),
        ], dtype=np.float64)  # fmt: skip

    def costs(self, timed: RankTimes) -> Floats:
        """What `StageCosts.of` reads, a row a batch size. Every row's numbers do not depend on the other rows'."""
        device = 1e3 * timed.times.device_s
        columns = [(device * weight).sum(axis=1) for weight in self._weights]
        columns += [np.full(len(device), (timed.host_ms * weight).sum()) for weight in self._weights]
        return np.stack([*columns, np.full(len(device), timed.start_ms)], axis=1)


def block_shares(operators: Operators, blocks: Blocks | None) -> Floats:
    """Share of each row's operators that run inside the repeated blocks."""
    if blocks is None:
        return np.zeros(len(operators))
    shares: Floats = blocks.operator_counts / operators.count
    return shares


def attention_rows(operators: Operators, blocks: Blocks) -> Flags:
    """The rows inside blocks that are attention's own: fused, or its products of two activations and their softmax."""
    kind = np.array(operators.kind)
    own = multiplies_activations(operators) | np.isin(kind, (*ATTENTION_KINDS, "softmax"))
    return np.asarray((blocks.operator_counts > 0) & own)
