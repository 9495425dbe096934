"""The rows of a recorded step as a `Recording`."""

from collections.abc import Sequence

import numpy as np

from trainpace.workload.blocks import Layout
from trainpace.workload.recorded_operators import BlockSizes, Recording
from trainpace.workload.recorder import BEFORE, Recorded
from trainpace.workload.workload import MOST_SIZES


def numbers_of(recorded: Recorded) -> list[float]:
    """A row's numbers, and the bytes alive meanwhile: of gradients, of activations."""
    row = recorded.row
    sizes = [*map(float, row.dims), *([0.0] * (MOST_SIZES - len(row.dims)))]
    alive = (recorded.gradient_bytes, recorded.activation_bytes)
    return [row.flops, row.read_bytes, row.written_bytes, *sizes, *alive]


def recording_of(
    recorded: Sequence[Recorded],
    constant: np.ndarray,
    slope: np.ndarray,
    layout: Layout | None = None,
    states: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    blocks: BlockSizes | None = None,
) -> Recording:
    """The recording of rows whose numbers (`numbers_of`) have these coefficients over the batch size."""
    return Recording(
        kind=tuple(r.row.kind for r in recorded),
        function=tuple(r.row.function for r in recorded),
        phase=tuple(r.phase for r in recorded),
        module=tuple(r.module for r in recorded),
        half=np.array([r.row.half for r in recorded]),
        launches=np.array([r.row.launches for r in recorded]),
        inside=np.array([r.origin.place > BEFORE for r in recorded]),
        role=(
            ()
            if layout is None
            else tuple(layout.role(r.row.kind, r.row.function, r.origin) for r in recorded)
        ),
        numbers=np.stack([constant[:, :-2], slope[:, :-2]], axis=-1),
        order=np.arange(len(recorded)),
        alive=np.stack([constant[:, -2], constant[:, -1], slope[:, -1]], axis=1),
        states=states,
        blocks=blocks,
    )
