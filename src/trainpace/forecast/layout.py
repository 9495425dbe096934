"""Which parameters and how many blocks the stages of a pipeline hold: the first with what comes before the blocks, the last
with what comes behind, the others alike.

Where stages times virtual stages do not divide the blocks, the first stages hold one more (of each virtual stage) and the
last the fewest, since it has the head besides; frameworks let users place them so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.executions import Grid
from trainpace.workload import Blocks

Floats = NDArray[np.float64]

FIRST, MIDDLE, LAST = range(3)


class Stages(NamedTuple):
    """n x 3 (first, middle, last). Where there is one stage it is the first; a kind that does not exist has no blocks.

    number: stages of the kind. blocks: in one of them. has_first, has_last: whether it holds what is before or behind the
    blocks. parameters, tensor-parallel ranks' own; replicated: those of them that are alike on all tensor-parallel ranks.
    """

    number: Floats
    blocks: Floats
    has_first: Floats
    has_last: Floats
    parameters: Floats


def stages_of(grid: Grid, blocks: Blocks | None, all_parameters: float) -> Stages:
    """The stages of every execution."""
    pp, tp = grid.pp.astype(np.float64), grid.tp.astype(np.float64)
    one, zero = np.ones_like(pp), np.zeros_like(pp)
    number = np.stack([one, np.maximum(pp - 2, 0), np.minimum(pp - 1, 1)], axis=1)
    has_first = np.stack([one, zero, zero], axis=1)
    has_last = np.stack([np.where(pp == 1, one, zero), zero, np.where(pp > 1, one, zero)], axis=1)
    if blocks is None:
        return Stages(number, np.zeros_like(number), has_first, has_last, number * all_parameters)
    chunks = pp * grid.virtual_stages
    most = np.ceil(blocks.count / chunks) * grid.virtual_stages
    least = np.where(pp == 2, blocks.count - most, np.floor(blocks.count / chunks) * grid.virtual_stages)
    held = np.stack([np.minimum(most, blocks.count), most, least], axis=1) * (number > 0)
    block = blocks.parameters - blocks.tensor_parameters * (1 - 1 / tp)
    vocabulary = blocks.outside_tensor_parameters
    # an embedding and a head that are not tied are alike in size
    before = vocabulary if blocks.tied_parameters else vocabulary / 2
    behind = np.where(
        pp > 1, blocks.tied_parameters or vocabulary / 2, 0.0 if blocks.tied_parameters else vocabulary / 2
    )
    rest = blocks.outside_parameters - vocabulary
    parameters = held * block[:, None]
    parameters += has_first * (before / tp + rest)[:, None] + has_last * (behind / tp)[:, None]
    return Stages(number, held, has_first, has_last, parameters)
