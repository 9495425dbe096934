"""Which parameters and how many blocks the stages of a pipeline hold: the first with what comes before the blocks, the last
with what comes behind, the others alike.

Where stages times virtual stages do not divide the blocks, the first stages hold one more (of each virtual stage) and the
last the fewest, since it has the head besides; frameworks let users place them so.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.grid import Grid
from trainpace.workload import Blocks

Floats = NDArray[np.float64]

FIRST, MIDDLE, LAST = range(3)


class Stages(NamedTuple):
    """n x 3 (first, middle, last). Where there is one stage it is the first; a kind that does not exist has no blocks.

    number: stages of the kind. blocks: in one of them, in the fullest of the middle ones; mean_share: the mean over them of
    that (n x 3, from 0 to 1). has_first, has_last: whether it holds what is before or behind the blocks. parameters: a
    tensor-parallel rank's own.
    """

    number: Floats
    blocks: Floats
    has_first: Floats
    has_last: Floats
    parameters: Floats
    mean_share: Floats


def has_vocabulary_head(blocks: Blocks) -> bool:
    """Is there a product over the vocabulary behind the blocks? A classifier of texts has an embedding alone."""
    return any(role == "column" and not count for role, count in zip(blocks.roles, blocks.operator_counts, strict=True))


def stages_of(grid: Grid, blocks: Blocks | None, all_parameters: float) -> Stages:
    """The stages of every execution."""
    pp, tp = grid.pp.astype(np.float64), grid.tp.astype(np.float64)
    one, zero = np.ones_like(pp), np.zeros_like(pp)
    number = np.stack([one, np.maximum(pp - 2, 0), np.minimum(pp - 1, 1)], axis=1)
    has_first = np.stack([one, zero, zero], axis=1)
    has_last = np.stack([np.where(pp == 1, one, zero), zero, np.where(pp > 1, one, zero)], axis=1)
    if blocks is None:
        alike = np.ones_like(number)
        return Stages(number, np.zeros_like(number), has_first, has_last, number * all_parameters, alike)
    chunks = pp * grid.virtual_stages
    most = np.ceil(blocks.count / chunks) * grid.virtual_stages
    least = np.where(pp == 2, blocks.count - most, np.floor(blocks.count / chunks) * grid.virtual_stages)
    held = np.stack([np.minimum(most, blocks.count), most, least], axis=1) * (number > 0)
    mean = (blocks.count - most - least) / np.maximum(pp - 2, 1)
    mean_share = np.stack([one, np.where(pp > 2, np.clip(mean / most, 0, 1), one), one], axis=1)
    block = blocks.parameters - blocks.tensor_parameters * (1 - 1 / tp)
    vocabulary = blocks.outside_tensor_parameters
    # an embedding and a head that are not tied are alike in size
    head = vocabulary / 2 if has_vocabulary_head(blocks) and not blocks.tied_parameters else 0.0
    before = vocabulary - head
    behind = np.where(pp > 1, blocks.tied_parameters or head, head)
    rest = blocks.outside_parameters - vocabulary
    parameters = held * block[:, None]
    parameters += has_first * (before / tp + rest)[:, None] + has_last * (behind / tp)[:, None]
    return Stages(number, held, has_first, has_last, parameters, mean_share)
