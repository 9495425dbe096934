"""How finely forecasts of two executions of one model on one card can be told apart, by what they differ in.

Both share most of their errors (the card, the model, the host), so that their ratio is forecast better than either of them. What
is left was measured: `fitting/differences.py` compares the ratios of packaged measurements with the forecast ones.
"""

import functools
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from trainpace.plan.changes import NOISE
from trainpace.workload import Floats

RESOLUTION: Mapping[str, float] = {
    "precision": 0.16,
    "micro-batch": 0.11,
    "compile": 0.26,
    "memory format": 0.15,
    "sharding": 0.16,
    "checkpointing": 0.14,
    "model parallelism": 0.16,
    "GPUs": NOISE,
    "offload": 0.16,
    "global batch": 0.11,
    "data": 0.11,
}
"""By knob: what 8 of 10 forecast ratios err by at most, as a logarithm, so that a change forecast to save more does save
something in 9 of 10 cases. From 12 pairs (checkpointing) to 1,659 (micro-batch) of 2026-11-24. No pair differs in the stage of
sharding on the same GPUs, or in offload: taken as model parallelism; nor in the global batch or the data: taken as the
micro-batch. Not below `NOISE`, by which a repeated measurement differs."""


def told_apart(knobs: Iterable[str]) -> float:
    """What two forecasts that differ in these knobs are told apart by, as a logarithm: the largest of theirs. Measured pairs that
    differ in several err by 0.6 to 1.2 times that where there are 12 pairs or more, and 1.34 times in one group of ten
    (`fitting/differences.py`), which is less than independent errors would."""
    return max((RESOLUTION[name] for name in knobs), default=0.0)


def told_apart_each(differ: Mapping[str, NDArray[np.bool_]]) -> Floats:
    """The same for many executions at once; `differ`: by knob, which of them differ."""
    each = [RESOLUTION[name] * flags for name, flags in differ.items()]
    return np.asarray(functools.reduce(np.maximum, each), dtype=np.float64)
