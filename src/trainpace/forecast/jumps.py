"""Jumps of the step time over the batch size: where they are, which operators make them and why, and the next good size.

A step grows by about the same time with every sample. Where one more sample costs far more (another wave of tiles, a padded
batch, another algorithm), there is a jump: the batch before it is the better choice, or one at which the new stair is full.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.stats import FEWEST_BATCHES, excesses
from trainpace.forecast.convolutions import WINOGRAD_IMAGES
from trainpace.forecast.cuts import ALGORITHMS, Algorithm, Cut
from trainpace.workload import CONV, CONVOLUTION_KINDS, Floats, Operators, at_batch

LEAST_SHARE = 0.02
"""The least share of the step that a jump adds."""
LEAST_OVER_SLOPE = 3.0
"""The least cost of a jump's sample, as a multiple of the usual cost of a sample around it."""
MOST_CAUSES = 2
LEAST_CAUSE = 0.25
"""What a second cause adds, as a share of what the first does."""
MOST_STAIRS = 6
SMALLER_TILES = 1.2
"""Waves beyond proportion, from which on the tiles must be smaller."""
AS_GOOD = 0.999
"""Throughput of a size behind a jump, over that before it, from which on it is as good."""


def find_jumps(batches: Sequence[int], step_ms: Floats) -> list[tuple[int, float]]:
    """(index of the first batch after the jump, milliseconds beyond the usual slope), for ascending batch sizes."""
    if len(batches) < FEWEST_BATCHES:
        return []
    excess, usual = excesses(batches, step_ms)
    width = np.diff(batches)
    jumps = (excess > LEAST_SHARE * step_ms[:-1]) & (
        excess + usual * width > LEAST_OVER_SLOPE * usual * width
    )
    return [(int(i) + 1, float(excess[i])) for i in np.flatnonzero(jumps)]


class Explained(NamedTuple):
    """Causes as phrases, the first one in two or three words, and the sizes at which the main operator's stairs behind it end."""

    causes: tuple[str, ...]
    mechanism: str
    stairs: tuple[int, ...]


CutOf = Callable[[Operators, Sequence[int]], Cut | None]
"""How the work of a table's rows is cut at some batch sizes (batches x rows)."""


def explain(
    operators: Operators,
    device_s: Floats,
    before: int,
    after: int,
    multiprocessors: int | None,
    cut_of: CutOf,
) -> Explained:
    """device_s: seconds of every row (2 x rows) at the two sizes. Rows count by what they grow beyond proportion."""
    growth = device_s[1] - device_s[0] * after / before
    cut = cut_of(operators, [before, after])
    rows = [int(j) for j in np.argsort(-growth) if growth[j] > 0]
    groups: dict[str, list[int]] = {}
    for j in rows:
        groups.setdefault(_mechanism(cut, j), []).append(j)
    weight = {name: float(growth[some].sum()) for name, some in groups.items()}
    order = sorted(groups, key=lambda name: -weight[name])[:MOST_CAUSES]
    if not order:
        return Explained((), "", ())
    main, *others = order
    told = [
        main,
        *(name for name in others if name != OTHER and weight[name] >= LEAST_CAUSE * weight[main]),
    ]
    causes = tuple(
        _cause(name, operators, groups[name], cut, after, multiprocessors) for name in told
    )
    return Explained(
        causes, _SHORT[main], _stairs(main, operators, groups[main][0], before, after, cut_of)
    )


PADDED, ALGORITHM, UNALIGNED, WAVES, OTHER = "padded", "algorithm", "unaligned", "waves", "other"
_SHORT = {
    PADDED: "padded batch",
    ALGORITHM: "another algorithm",
    UNALIGNED: "batch not a multiple of 8",
    WAVES: "another wave of tiles",
    OTHER: "",
}


def _padded(images: Any) -> Any:
    return np.ceil(images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES


def _mechanism(cut: Cut | None, j: int) -> str:
    """What makes row `j` grow out of proportion from the first size to the second."""
    if cut is None:
        return OTHER
    algorithm, images, waves, aligned = (column[:, j] for column in cut)
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
    cut: Cut | None,
    after: int,
    multiprocessors: int | None,
) -> str:
    top = rows[0]
    count = int(operators.count[rows].sum())
    noun = (
        "convolution" if all(operators.kind[j] in CONVOLUTION_KINDS for j in rows) else "operator"
    )
    most = _named(operators, top, after)
    where = f"{count} {noun}s, most in the {most}" if count > 1 else f"the {most}"
    if cut is None or name == OTHER:
        return f"more time than in proportion in {where}"
    algorithm, images, waves, _ = (column[:, top] for column in cut)
    if name == PADDED:
        slower = "" if algorithm[1] == Algorithm.PADDED_WINOGRAD else " or a slower algorithm"
        return (
            f"cuDNN's Winograd algorithm pads the batch to a multiple of {WINOGRAD_IMAGES:.0f}, so"
            f" that {images[1]:.0f} images take the work of {_padded(images[1]):.0f}{slower}, in"
            f" {where}"
        )
    if name == ALGORITHM:
        old, new = (ALGORITHMS[Algorithm(int(code))] for code in algorithm)
        return f"cuDNN takes another algorithm ({new} in place of {old}) in {where}"
    if name == UNALIGNED:
        return (
            "the batch is no multiple of 8, so that matrix units load 16-bit numbers in smaller"
            f" pieces, in {where}"
        )
    on = f" on the {multiprocessors} multiprocessors" if multiprocessors else ""
    old, new = np.ceil(waves)
    smaller = waves[1] > SMALLER_TILES * waves[0] * images[1] / images[0] if images[0] else False
    rounds = f"{new:.0f} waves of smaller tiles{on}" if smaller else f"{new:.0f} waves of tiles{on}"
    return (
        f"the tiles of the output no longer fit in as many waves in {where}: {rounds} in place of"
        f" {old:.0f}"
    )


def _named(operators: Operators, j: int, batch: int) -> str:
    """A row in the field's words: "3x3 convolution 12.body.3 (256 to 256 channels at 14x14), forward"."""
    kind, module, phase = operators.kind[j], operators.module[j], operators.phase[j]
    name = f" {module}" if module else ""
    if kind not in CONVOLUTION_KINDS:
        noun = {"gemm": "matrix product"}.get(kind, kind.replace("_", " "))
        return f"{noun}{name}, {phase}"
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


def _stairs(
    name: str, operators: Operators, j: int, before: int, after: int, cut_of: CutOf
) -> tuple[int, ...]:
    """The sizes from `after` on at which a row's stairs are full: the last before the next wave or padding, or aligned again."""
    sizes = range(after, 4 * after + 2 * int(WINOGRAD_IMAGES))
    cut = None if name in (OTHER, ALGORITHM) else cut_of(one_row(operators, j), [before, *sizes])
    if cut is None:
        return ()
    if name == UNALIGNED:
        full = np.flatnonzero(cut.aligned[1:, 0] >= cut.aligned[0, 0])
    else:
        level = _padded(cut.images[1:, 0]) if name == PADDED else np.ceil(cut.waves[1:, 0])
        full = np.flatnonzero(np.diff(level) > 0)
    return tuple(int(sizes[i]) for i in full[:MOST_STAIRS])


def one_row(operators: Operators, j: int) -> Operators:
    """The table of row `j` alone."""
    columns: dict[str, Any] = {}
    for field in operators.__struct_fields__:
        column = getattr(operators, field)
        columns[field] = column[j : j + 1]
    return replace(operators, **columns)


def next_good(before: int, sizes: Sequence[int], step_ms: Floats) -> int | None:
    """The first of `sizes` with as much throughput as before the jump. step_ms: of `before`, then of the sizes."""
    rate = np.asarray(sizes, dtype=float) / step_ms[1:]
    good = np.flatnonzero(rate >= AS_GOOD * before / step_ms[0])
    return int(sizes[int(good[0])]) if len(good) else None
