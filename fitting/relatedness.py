"""What the errors of held-out forecasts have in common:

the shares of `forecast/uncertainty.py`, by maximum likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import minimize

from trainpace.forecast.uncertainty import (
    MEASURING_SD,
    Observed,
    Posterior,
    Relatedness,
    Runs,
    covariance,
)

MOST_OF_A_COLLECTION = 100
"""Runs of one collection, evenly taken: more add nothing."""
SHARES = (
    "user",
    "device",
    "model",
    "user_near",
    "device_near",
    "model_near",
    "run",
    "run_elsewhere",
)
SCALES = ("batch_scale", "time_scale", "shares_scale")
START = (*(0.0 for _ in SHARES), 1.5, 0.7, -1.0)
"""Equal shares (as softmax has them); scales of four factors of e between batch sizes, two between
step times, and a third of the distance between a step of one part alone and one without it.
"""
BOUNDS = [*((-4.0, 4.0) for _ in SHARES), (-1.0, 4.0), (-1.0, 2.0), (-2.5, 1.0)]
PRIOR_WEIGHT = 0.05


def fit_relatedness(collections: Mapping[str, Sequence[Observed]]) -> Relatedness:
    """The shares under which each collection's errors, those of one user, are likeliest. A
    collection has to be of one kind of
    fold: a run that was held out twice is no second run.
    """
    blocks = [_evenly(runs) for runs in collections.values()]
    readers = [
        (Posterior(block, _relatedness(np.array(START))), block) for block in blocks if block
    ]
    numbered = [
        (
            reader.runs_of([o.run for o in block]),
            np.array([o.log_ratios[0] for o in block]),
            reader.least_variance,
        )
        for reader, block in readers
    ]

    def loss(x: np.ndarray) -> float:
        r = _relatedness(x)
        return sum(_unlikely(*block, r) for block in numbered) + PRIOR_WEIGHT * float(
            ((x - START) ** 2).sum()
        )

    r = _relatedness(minimize(loss, START, method="L-BFGS-B", bounds=BOUNDS).x)
    rounded = {name: round(getattr(r, name), 3) for name in SHARES[:-1]}
    scales = {name: round(getattr(r, name), 2) for name in SCALES}
    return Relatedness(**rounded, **scales, run_elsewhere=round(1.0 - sum(rounded.values()), 3))


def _relatedness(x: np.ndarray) -> Relatedness:
    shares = np.exp(x[: len(SHARES)]) / np.exp(x[: len(SHARES)]).sum()
    scales = np.exp(x[len(SHARES) :])
    return Relatedness(
        **dict(zip((*SHARES, *SCALES), [*shares.tolist(), *scales.tolist()], strict=True))
    )


def _unlikely(runs: Runs, errors: np.ndarray, least_variance: float, r: Relatedness) -> float:
    """The negative logarithm of the normal density of a block's errors, but for a constant."""
    variances = np.maximum(runs.variances, least_variance)
    between = covariance(runs, runs, variances, variances, r) + MEASURING_SD**2 * np.eye(
        len(errors)
    )
    factor = np.linalg.cholesky(between)
    standard = np.linalg.solve(factor, errors)
    return float(0.5 * standard @ standard + np.log(np.diag(factor)).sum())


def _evenly(runs: Sequence[Observed]) -> list[Observed]:
    step = max(1.0, len(runs) / MOST_OF_A_COLLECTION)
    return [runs[int(i * step)] for i in range(int(len(runs) / step))]
