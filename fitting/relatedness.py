"""What the errors of held-out forecasts have in common: the shares of `forecast/posterior.py`, by maximum likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import minimize

from trainpace.forecast.intervals import Relatedness
from trainpace.forecast.posterior import MEASURING_SD, Observed, covariance

MOST_OF_A_COLLECTION = 100
"""Runs of one collection, evenly taken: more add nothing."""
START = (0.0, 0.0, 0.0, 0.0, 1.5)
"""Equal shares (as softmax has them), and a scale of four factors of e between batch sizes."""
PRIOR_WEIGHT = 0.05


def fit_relatedness(collections: Mapping[str, Sequence[Observed]]) -> Relatedness:
    """The shares under which each collection's errors, those of one user, are likeliest. A collection has to be of one kind of
    fold: a run that was held out twice is no second run."""
    blocks = [_evenly(runs) for runs in collections.values()]

    def loss(x: np.ndarray) -> float:
        r = _relatedness(x)
        return sum(_unlikely(block, r) for block in blocks) + PRIOR_WEIGHT * float(((x - START) ** 2).sum())

    r = _relatedness(minimize(loss, START, method="L-BFGS-B", bounds=[(-4.0, 4.0)] * 4 + [(-1.0, 4.0)]).x)
    rounded = {name: round(getattr(r, name), 3) for name in ("user", "device", "model")}
    run = round(1.0 - sum(rounded.values()), 3)
    return Relatedness(**rounded, run=run, batch_scale=round(r.batch_scale, 2))


def _relatedness(x: np.ndarray) -> Relatedness:
    user, device, model, run = (np.exp(x[:4]) / np.exp(x[:4]).sum()).tolist()
    return Relatedness(user=user, device=device, model=model, run=run, batch_scale=float(np.exp(x[4])))


def _unlikely(block: Sequence[Observed], r: Relatedness) -> float:
    """The negative logarithm of the normal density of a block's errors, but for a constant."""
    runs = [observed.run for observed in block]
    between = covariance(runs, runs, r) + MEASURING_SD**2 * np.eye(len(runs))
    factor = np.linalg.cholesky(between)
    standard = np.linalg.solve(factor, [observed.log_ratios[0] for observed in block])
    return float(0.5 * standard @ standard + np.log(np.diag(factor)).sum())


def _evenly(runs: Sequence[Observed]) -> list[Observed]:
    step = max(1.0, len(runs) / MOST_OF_A_COLLECTION)
    return [runs[int(i * step)] for i in range(int(len(runs) / step))]
