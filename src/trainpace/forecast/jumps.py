"""Jumps of the step time over the batch size: their place, their cause and the next good size.

Each further sample adds about the same time to a step. If one sample adds far more, there is a
jump. Causes are another wave of tiles, a padded batch or another algorithm. The batch before the
jump is a better choice, or a larger batch that fills the next wave.

Shapes: tilings and times of operators have shape (batches, rows).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.stats import FEWEST_BATCHES, excesses
from trainpace.forecast.matmul import WINOGRAD_IMAGES, Algorithm, Tiling
from trainpace.workload import CONV, CONVOLUTION_KINDS, Floats, Operators, at_batch

LEAST_SHARE = 0.02
"""Smallest extra time of a jump, as a share of the step before it."""
LEAST_OVER_SLOPE = 3.0
"""Smallest time per sample at a jump, as a multiple of the usual time per sample around it."""
MOST_CAUSES = 2
LEAST_CAUSE = 0.25
"""Minimum contribution of a second cause, as a share of the first."""
MOST_FULL_SIZES = 6
SMALLER_TILES = 1.2
"""Growth of the waves, relative to the growth of the batch, above which tiles became smaller."""
AS_GOOD = 0.999
"""Smallest throughput after a jump, relative to before it, that counts as equally good."""


def find_jumps(batches: Sequence[int], step_ms: Floats) -> list[tuple[int, float]]:
    """Return the jumps in a list of step times.

    Args:
        batches: Ascending batch sizes.
        step_ms: Step time of each batch size.

    Returns:
        Pairs of the index of the first batch after the jump, and the milliseconds beyond the usual
        slope.
    """
    if len(batches) < FEWEST_BATCHES:
        return []
    excess, usual = excesses(batches, step_ms)
    width = np.diff(batches)
    jumps = (excess > LEAST_SHARE * step_ms[:-1]) & (
        excess + usual * width > LEAST_OVER_SLOPE * usual * width
    )
    return [(int(i) + 1, float(excess[i])) for i in np.flatnonzero(jumps)]


class Explained(NamedTuple):
    """Explanation of a jump.

    Attributes:
        causes: Causes as phrases, most important first.
        mechanism: The main cause in a few words.
        full: Batch sizes after the jump that fill the waves or the padding of the main operator.
    """

    causes: tuple[str, ...]
    mechanism: str
    full: tuple[int, ...]


TilingOf = Callable[[Operators, Sequence[int]], Tiling | None]
"""Function that returns the tiling of a table's rows at some batch sizes, shape (batches, rows)."""


def explain(
    operators: Operators,
    device_s: Floats,
    before: int,
    after: int,
    multiprocessors: int | None,
    tiling_of: TilingOf,
) -> Explained:
    """Return the causes of a jump from one batch size to another.

    Rows are weighted by their growth beyond the growth of the batch.

    Args:
        operators: Table of operators.
        device_s: Seconds of every row at the two sizes, shape (2, rows).
        before: Batch size before the jump.
        after: Batch size after the jump.
        multiprocessors: Number of multiprocessors of the device, if known.
        tiling_of: Function that returns the tiling of operators.
    """
    growth = device_s[1] - device_s[0] * after / before
    tiling = tiling_of(operators, [before, after])
    groups: dict[str, list[int]] = {}
    for j in np.argsort(-growth).tolist():
        if growth[j] > 0:
            groups.setdefault(_mechanism(tiling, j), []).append(j)
    weight = {name: float(growth[rows].sum()) for name, rows in groups.items()}
    order = sorted(groups, key=lambda name: -weight[name])[:MOST_CAUSES]
    if not order:
        return Explained((), "", ())
    main, *others = order
    least = LEAST_CAUSE * weight[main]
    named = [main, *(name for name in others if name != OTHER and weight[name] >= least)]
    causes = tuple(
        _cause(name, operators, groups[name], tiling, after, multiprocessors) for name in named
    )
    full = _full_sizes(main, operators, groups[main][0], before, after, tiling_of)
    return Explained(causes, _SHORT[main], full)


PADDED, ALGORITHM, UNALIGNED, WAVES, OTHER = "padded", "algorithm", "unaligned", "waves", "other"
_SHORT = {
    PADDED: "padded batch",
    ALGORITHM: "another algorithm",
    UNALIGNED: "batch not a multiple of 8",
    WAVES: "another wave of tiles",
    OTHER: "",
}
_ALGORITHMS = {
    Algorithm.GEMM: "implicit GEMM",
    Algorithm.PADDED_WINOGRAD: "Winograd with a padded batch",
    Algorithm.WINOGRAD: "Winograd without padding",
}


def _padded(images: Any) -> Any:
    return np.ceil(images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES


def _mechanism(tiling: Tiling | None, j: int) -> str:
    """Return why row `j` grows more than the batch does from the first size to the second."""
    if tiling is None:
        return OTHER
    algorithm, images, waves, aligned = (column[:, j] for column in tiling)
    if Algorithm.PADDED_WINOGRAD in algorithm and _padded(images[0]) < _padded(images[1]):
        return PADDED
    if algorithm[0] != algorithm[1]:
        return ALGORITHM
    if aligned[1] < aligned[0]:
        return UNALIGNED
    return WAVES if np.ceil(waves[0]) < np.ceil(waves[1]) else OTHER


def _cause(
    name: str,
    operators: Operators,
    rows: list[int],
    tiling: Tiling | None,
    after: int,
    multiprocessors: int | None,
) -> str:
    top = rows[0]
    count = int(operators.count[rows].sum())
    convolve = all(operators.kind[j] in CONVOLUTION_KINDS for j in rows)
    most = _named(operators, top, after)
    noun = "convolutions" if convolve else "operators"
    where = f"{count} {noun}, most in the {most}" if count > 1 else f"the {most}"
    if tiling is None or name == OTHER:
        return f"more time than in proportion in {where}"
    algorithm, images, waves, _ = (column[:, top] for column in tiling)
    if name == PADDED:
        slower = "" if algorithm[1] == Algorithm.PADDED_WINOGRAD else " or a slower algorithm"
        return (
            f"cuDNN's Winograd algorithm pads the batch to a multiple of {WINOGRAD_IMAGES:.0f}, so"
            f" {images[1]:.0f} images take the work of {_padded(images[1]):.0f}{slower}, in {where}"
        )
    if name == ALGORITHM:
        old, new = (_ALGORITHMS[Algorithm(int(code))] for code in algorithm)
        return f"cuDNN uses another algorithm ({new} in place of {old}) in {where}"
    if name == UNALIGNED:
        return (
            "the batch is not a multiple of 8, so matrix units load 16-bit numbers in smaller"
            f" pieces, in {where}"
        )
    on = f" on the {multiprocessors} multiprocessors" if multiprocessors else ""
    old, new = np.ceil(waves)
    smaller = images[0] and waves[1] > SMALLER_TILES * waves[0] * images[1] / images[0]
    tiles = "smaller tiles" if smaller else "tiles"
    return (
        f"the tiles of the output need more waves in {where}: {new:.0f} waves of {tiles}{on} in"
        f" place of {old:.0f}"
    )


def _named(operators: Operators, j: int, batch: int) -> str:
    """Return a row as "3x3 convolution 12.body.3 (256 to 256 channels at 14x14), forward"."""
    kind, module, phase = operators.kind[j], operators.module[j], operators.phase[j]
    name = f" {module}" if module else ""
    if kind not in CONVOLUTION_KINDS:
        return f"{'matmul' if kind == 'gemm' else kind.replace('_', ' ')}{name}, {phase}"
    d = at_batch(operators.dims[j], batch)
    size = f"{d[CONV.kernel_h]:.0f}x{d[CONV.kernel_w]:.0f}"
    shape = (
        f"{d[CONV.c_in]:.0f} to {d[CONV.c_out]:.0f} channels at"
        f" {d[CONV.out_h]:.0f}x{d[CONV.out_w]:.0f}"
    )
    passes = {
        "conv": phase,
        "conv_dgrad": "gradient of its input",
        "conv_wgrad": "gradient of its weights",
    }
    return f"{size} convolution{name} ({shape}), {passes[kind]}"


def _full_sizes(
    name: str, operators: Operators, j: int, before: int, after: int, tiling_of: TilingOf
) -> tuple[int, ...]:
    """Return the batch sizes from `after` on that use row `j` well.

    These are the last sizes before another wave or more padding, or the aligned sizes.
    """
    if name in (OTHER, ALGORITHM):
        return ()
    sizes = range(after, 4 * after + 2 * int(WINOGRAD_IMAGES))
    tiling = tiling_of(one_row(operators, j), [before, *sizes])
    if tiling is None:
        return ()
    if name == UNALIGNED:
        full = np.flatnonzero(tiling.aligned[1:, 0] >= tiling.aligned[0, 0])
    else:
        is_padded = name == PADDED
        level = _padded(tiling.images[1:, 0]) if is_padded else np.ceil(tiling.waves[1:, 0])
        full = np.flatnonzero(np.diff(level) > 0)
    return tuple(int(sizes[i]) for i in full[:MOST_FULL_SIZES])


def one_row(operators: Operators, j: int) -> Operators:
    """Return a table with only row `j`."""
    fields = operators.__struct_fields__
    return replace(operators, **{name: getattr(operators, name)[j : j + 1] for name in fields})


def next_good(before: int, sizes: Sequence[int], step_ms: Floats) -> int | None:
    """Return the first of `sizes` with as much throughput as before the jump, or None.

    Args:
        before: Batch size before the jump.
        sizes: Candidate batch sizes.
        step_ms: Step time of `before`, followed by those of `sizes`.
    """
    rate = np.asarray(sizes, dtype=float) / step_ms[1:]
    good = np.flatnonzero(rate >= AS_GOOD * before / step_ms[0])
    return int(sizes[int(good[0])]) if len(good) else None
