"""What a rank keeps for each of its parameters, by precision and by what shards it.

The trace holds torch's plain way: gradients and states as wide as their parameters, so that training in 16 bits on one device
or under DDP keeps 2 + 2 + 4 bytes a parameter with Adam. Engines that shard keep an fp32 copy of the weights and fp32 states
besides. Bytes a parameter with Adam on d data-parallel ranks (weights, gradients, states), 16-bit weights:

| sharded by | one precision | source |
|---|---|---|
| nothing, DDP | 2 + 2 + 4 | torch.optim: states have their parameters' dtype |
| tensor or pipeline parallel | 2 + 4 + 12 | Korthikanti et al. 2022, figure 1; Megatron Core, "Distributed Optimizer": 18 |
| the same with ZeRO 1 or 2, bf16 | 2 + 4 + 12/d | Megatron Core: 6 + 12/d |
| the same with ZeRO 1 or 2, fp16 | 2 + 2 + 12/d, 4 + 18/d in the update | Megatron Core: 4 + 16/d; DeepSpeed below |
| ZeRO 1 or 2 alone | 2 + 2 + 12/d, 4 + 18/d in the update | DeepSpeed's stage_1_and_2.py |
| FSDP | 4/d + 4/d + 8/d, gathered blocks besides | FSDP2 keeps the user's fp32 parameters as shards |

DeepSpeed's update flattens its share of the 16-bit gradients and makes an fp32 copy of it: 6/d while it lasts. Its pipelines in
bf16 keep 16-bit gradients beside fp32 ones (bf16_optimizer.py), 2 bytes more than here. From ZeRO 2 on gradients are a
shard's. fp32 and autocast train 4 + 4 + 8 whatever shards them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.grid import Grid

Floats = NDArray[np.float64]

UPDATE_COPIES = 3.0
"""Copies of a shard's 16-bit gradients during an update: a flat one, and one in fp32 that counts twice."""


class Widths(NamedTuple):
    """Factors on what the trace holds, n x 1 each, before anything is divided among ranks.

    shards: on parameters where FSDP shards them. gathered: on parameters in one piece under FSDP. states: on optimizer states;
    masters: on parameters, counted among the states. gradients: on gradients. update: on parameters, alive in the update.
    """

    shards: Floats
    gathered: Floats
    states: Floats
    masters: Floats
    gradients: Floats
    update: Floats


def widths(grid: Grid, half: bool, trains: bool) -> Widths:
    """The widths of every execution. `half`: the trace's weights are 16 bits wide; `trains`: it has an optimizer."""
    stage = grid.zero_stage[:, None]
    one, zero = np.ones(stage.shape), np.zeros(stage.shape)
    keeps_fp32 = trains & half & ((stage > 0) | grid.is_megatron[:, None])
    masters = keeps_fp32 & (stage < 3)
    zero_12 = masters & (stage > 0)
    unsharded = masters & (stage == 0)
    wide = unsharded | (half & (grid.fp32_gradients[:, None] | (stage >= 3)))
    return Widths(
        shards=np.where(keeps_fp32 & (stage >= 3) & ~grid.offload_optimizer[:, None], 2.0, one),
        gathered=np.where(grid.casts_shards[:, None], 0.5, one),
        states=np.where(keeps_fp32, 2.0, one),
        masters=np.where(masters, 2.0, zero),
        gradients=np.where(wide, 2.0, one),
        update=np.where(zero_12 & ~wide & ~grid.offload_optimizer[:, None], UPDATE_COPIES, zero),
    )
