"""All measured kernels of the families, from the lent cards and from others, read once and kept."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np

from fitting.calls import Measured
from fitting.families import family_of
from fitting.lent_kernels import CARDS, single_calls, step_calls
from fitting.public_kernels import kernels16, liger

LENT = Path(__file__).parent / "data"
MOST_A_GROUP = 200
"""Kernels of one family, card, number format, layout and source."""
MEASURED_LONGER_US = 3.0
"""Shorter kernels are their launch."""


def measured_kernels(data: Path, kept: Path | None = None, seed: int = 0) -> list[Measured]:
    """A seeded sample.

    It takes minutes to make each call again on the meta device, so the answer is kept in the file
    `kept`.
    """
    if kept is not None and kept.is_file():
        found: list[Measured] = pickle.loads(kept.read_bytes())
        return found
    every = kernels16(data / "kernels16.parquet", seed) + liger(data / "liger_kernels.csv")
    for card in CARDS:
        every += single_calls(LENT, card) + step_calls(LENT, card, seed)
    every = _thinned(
        [one for one in every if one.us > MEASURED_LONGER_US and family_of(one.rows)], seed
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(every))
    return every


def _thinned(every: list[Measured], seed: int) -> list[Measured]:
    groups = defaultdict(list)
    for i, one in enumerate(every):
        groups[
            family_of(one.rows), one.device, one.precision, one.channels_last, one.source
        ].append(i)
    draw = np.random.default_rng(seed)
    kept = [
        draw.choice(places, min(MOST_A_GROUP, len(places)), replace=False)
        for places in groups.values()
    ]
    return [every[i] for i in np.sort(np.concatenate(kept))]
