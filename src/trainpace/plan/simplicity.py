"""How much a choice asks of its user: plain data parallelism before sharding before tensor parallelism before a pipeline, no
recomputation before recomputation, and fewer changes before more.

The points are an order, not a measurement. What the training does already costs nothing.
"""

from collections.abc import Mapping

import numpy as np

from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.forecast import Grid
from trainpace.plan.knobs import differing_rows
from trainpace.workload import Floats

TIGHT = 0.92
"""Share of the usable memory above which a forecast that errs by a tenth may run out of it."""
TIGHT_POINTS = 2.0
DATA_POINTS, OFFLINE_POINTS = 1.0, 3.0


def points(grid: Grid, start: Execution, needed_gib: Floats, room_gib: float) -> Floats:
    """The points of every execution of a grid. needed_gib, room_gib: of a device."""
    differ = differing_rows(grid, start)
    total = np.zeros(len(grid))
    for name, cost in _costs(grid).items():
        total += np.where(differ[name], cost, 0.0)
    moved = np.any(list(differ.values()), axis=0)
    return total + TIGHT_POINTS * (moved & (needed_gib > TIGHT * room_gib))


def _costs(grid: Grid) -> Mapping[str, Floats | float]:
    """What it takes to turn each knob to the value of a row."""
    e = grid
    parallel = (
        6.0 * (e.tp > 1)
        + 6.5 * (e.cp > 1)
        + 5.0 * (e.ep > 1)
        + 10.0 * (e.pp > 1)
        + 2.0 * (e.virtual_stages > 1)
        + 0.5 * e.sequence_parallel
        + 1.0 * e.async_tensor_parallel
    )
    # GradScaler beside fp16, and scaling factors and a loss to follow beside fp8
    asks = {"amp_fp16": 1.5, "fp16": 1.5, "fp8": 3.0}
    precision = np.ones(len(grid))
    for name, cost in asks.items():
        precision[e.precision == EXECUTION_FIELDS["precision"].encode(name)] = cost
    recomputes = ~e.has("activation_checkpointing", "none")
    return {
        "precision": precision,
        "micro-batch": 1.0,
        "compile": 1.0 + 0.5 * e.compile,
        "memory format": 1.0 + 0.5 * e.channels_last,
        "sharding": 1.0 + e.zero_stage + 0.5 * ((e.zero_stage == 3) & ~e.reshard_after_forward),
        "checkpointing": 1.0 + 1.0 * recomputes,
        "offload": 1.0 + 2.0 * e.offload_optimizer + 2.0 * e.offload_parameters,
        "model parallelism": 1.0 + parallel,
        "GPUs": 1.0,
        "global batch": 5.0,
    }
