"""Fit the numbers of a workload over the batch size, from steps recorded at several batch sizes.

`fitted_form` computes three things from recorded steps: a table in which equal operators share a
row, the moments that can be the memory peak, and the repeated blocks.
"""

from collections.abc import Sequence

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.workload.blocks import Chain, Layout, blocks_of, layout_of, other_blocks_of
from trainpace.workload.recorder import BATCHES, Recorded, Recorder
from trainpace.workload.workload import (
    MOST_SIZES,
    PHASES,
    Blocks,
    MemoryProfile,
    Operators,
    OtherBlocks,
    TracedForm,
)

MEASURE = "Measure it with `trainpace measure` instead."
MOMENTS = 64
"""Maximum number of moments of a step in a workload's memory chart.

They include the peaks for small and large batches.
"""
READ = slice(1, 3)
"""Columns of bytes read and bytes written in `numbers_of`."""
GRADIENTS, ACTIVATIONS = -2, -1
"""Columns of bytes alive in `numbers_of`."""


def numbers_of(recorded: Sequence[Recorded]) -> np.ndarray:
    """Return the numbers of each row, of shape (rows, 21).

    They are the FLOPs, bytes read, bytes written, 16 sizes, gradient bytes and activation bytes.
    Missing sizes are 0.
    """
    return np.array(
        [
            [
                *(r.row.flops, r.row.read_bytes, r.row.written_bytes),
                *(*r.row.dims, *[0.0] * (MOST_SIZES - len(r.row.dims))),
                *(r.gradient_bytes, r.activation_bytes),
            ]
            for r in recorded
        ],
        dtype=np.float64,
    )


def kinds_of(recorded: Sequence[Recorded]) -> list[str]:
    return [one.row.kind for one in recorded]


def fitted_form(
    name: str, runs: Sequence[Recorder], steps: Sequence[Sequence[Recorded]], chain: Chain | None
) -> TracedForm:
    """Fit the coefficients of every number over the batch size.

    Args:
        name: Name of the model, for errors.
        runs: Recorders at the sizes of `BATCHES`, or at only one size. The form of one step is only
            valid at its batch size.
        steps: Recorded steps of the whole chain, at the same sizes.
        chain: The blocks, or None.

    Raises:
        TrainpaceError: If the steps differ in their operators, or a number is not affine.
    """
    if not steps[0]:
        raise TrainpaceError(f"{name} does nothing on the device.")
    first = numbers_of(steps[0])
    slope = np.zeros_like(first)
    if len(runs) > 1:
        slope = _slope(name, steps, first)
    constant = first - slope * BATCHES[0]
    numbers = np.stack([constant, slope], axis=-1)
    layout = layout_of(chain, runs)
    places = None
    if layout is not None:
        places = layout.places(steps[0])
    operators, rows = table_of(steps[0], numbers, places)
    return TracedForm(
        operators=operators,
        memory=_memory(runs[0], steps[0], numbers),
        blocks=_blocks(layout, runs, steps, operators, [places[i] for i in rows] if places else []),
    )


def _slope(name: str, steps: Sequence[Sequence[Recorded]], first: np.ndarray) -> np.ndarray:
    """Return the increase of every number per sample, and check it at the third batch size."""
    kinds = [kinds_of(step) for step in steps]
    if not kinds[0] == kinds[1] == kinds[2]:
        raise TrainpaceError(
            f"{name} runs other operators at batch size {BATCHES[2]} than at {BATCHES[0]}, so"
            " sizes in between cannot be computed.",
            MEASURE,
        )
    b0, b1, b2 = BATCHES
    second, third = map(numbers_of, steps[1:])
    slope: np.ndarray = (second - first) / (b1 - b0)
    wrong = np.abs(first + slope * (b2 - b0) - third) > 1e-6 * np.maximum(1.0, np.abs(third))
    wrong[:, ACTIVATIONS] = False  # a tensor may be freed one operator later
    if wrong.any():
        number = int(np.flatnonzero(wrong.any(axis=1))[0])
        other = steps[0][number]
        raise TrainpaceError(
            f"{name} is not affine in the batch size: operator number {number}, kind"
            f" {other.row.kind} in {other.module or other.phase}, grows otherwise.",
            MEASURE,
        )
    return slope


def table_of(
    recorded: Sequence[Recorded], numbers: np.ndarray, places: Sequence[object] | None = None
) -> tuple[Operators, list[int]]:
    """Return the operator table, and the index of the first operator of each row.

    A row contains operators that differ in their module at most. Rows are in order of first
    appearance.

    Args:
        recorded: The recorded rows of a step.
        numbers: Constant and slope of `numbers_of`, of shape (rows, 21, 2).
        places: Further properties by which operators differ, or None.
    """
    words = [
        (r.row.kind, r.row.function, r.phase, r.row.half, r.row.launches, r.module)
        for r in recorded
    ]
    alike: dict[object, list[int]] = {}
    for i, word in enumerate(words):
        key = (word[:-1], places and places[i], numbers[i, :GRADIENTS].tobytes())
        alike.setdefault(key, []).append(i)
    first = [indices[0] for indices in alike.values()]
    kind, function, phase, half, launches, module = zip(*(words[i] for i in first), strict=True)
    numbers = numbers[first, :GRADIENTS]
    table = Operators(
        kind=kind,
        function=function,
        phase=phase,
        module=module,
        half=np.array(half),
        launches=np.array(launches),
        count=np.array([len(indices) for indices in alike.values()]),
        flops=numbers[:, 0],
        read_bytes=numbers[:, 1],
        written_bytes=numbers[:, 2],
        dims=numbers[:, 3:],
    )
    return table, first


def _memory(run: Recorder, recorded: Sequence[Recorded], numbers: np.ndarray) -> MemoryProfile:
    alive = (numbers[:, GRADIENTS, 0], *numbers[:, ACTIVATIONS].T)
    return MemoryProfile(
        parameter_bytes=run.parameter_bytes,
        optimizer_bytes=run.optimizer_bytes - run.paged_bytes,
        paged_bytes=run.paged_bytes,
        frozen_bytes=run.frozen_bytes,
        peaks=_peaks(*alive),
        moments=_moments(recorded, numbers, *alive),
    )


def _moments(
    recorded: Sequence[Recorded],
    numbers: np.ndarray,
    gradient: np.ndarray,
    constant: np.ndarray,
    slope: np.ndarray,
) -> np.ndarray:
    """Return the moments for the memory chart, as in `MemoryProfile.moments`.

    The step is split into stretches of operators, and each contributes its peak. The position of a
    moment within its phase is the share of bytes moved until then.
    """
    phase = np.array([PHASES.index(r.phase) for r in recorded])
    at_second = numbers[:, READ, 0] + numbers[:, READ, 1] * BATCHES[1]
    moved = at_second.sum(axis=1)
    total = gradient + constant + slope * np.array([[1.0], [1e6]])
    moments = {0, len(phase) - 1, *total.argmax(axis=1).tolist()}
    for stretch in np.array_split(np.arange(len(phase)), MOMENTS - 4):
        if len(stretch):
            moments.add(int(stretch[total[1, stretch].argmax()]))
    rows = np.array(sorted(moments))
    share = np.zeros(len(phase))
    for code in np.unique(phase):
        inside = phase == code
        share[inside] = np.cumsum(moved[inside]) / max(moved[inside].sum(), 1.0)
    alive = [gradient[rows], constant[rows], np.maximum(slope[rows], 0.0)]
    return np.stack([phase[rows].astype(float), share[rows], *alive], axis=1)


def _peaks(gradient: np.ndarray, constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return the moments that are the memory peak at some batch size.

    They are the upper envelope of gradient bytes + constant + slope x batch size. A moment with all
    gradients is added if none of them has it, since the total size of gradients is read from it.

    Args:
        gradient: Bytes of gradients at each moment.
        constant: Constant bytes of activations at each moment.
        slope: Bytes of activations per sample at each moment.

    Returns:
        Array of shape (k, 3) with the three numbers of each moment.
    """
    slope = np.maximum(slope, 0.0)
    total = gradient + constant
    envelope: list[int] = []
    for i in sorted(range(len(total)), key=lambda i: (-slope[i], -total[i])):
        if not envelope or total[i] > total[envelope[-1]]:
            envelope.append(i)
    if gradient[envelope].max() < gradient.max():
        envelope.append(max(range(len(total)), key=lambda i: (gradient[i], total[i])))
    return np.stack([gradient[envelope], constant[envelope], slope[envelope]], axis=1)


def _blocks(
    layout: Layout | None,
    runs: Sequence[Recorder],
    steps: Sequence[Sequence[Recorded]],
    operators: Operators,
    places: Sequence[tuple[bool, str, int]],
) -> Blocks | None:
    if layout is None or (fields := blocks_of(layout, runs, steps)) is None:
        return None
    inside, roles, groups = zip(*places, strict=True)
    others = tuple(
        OtherBlocks(**one, operator_counts=np.where(np.equal(groups, n), operators.count, 0))
        for n, one in other_blocks_of(layout, runs).items()
    )
    counts = np.where(inside, operators.count, 0)
    return Blocks(**fields, operator_counts=counts, roles=roles, others=others)
