"""How far forecasts of held-out runs were off, by what their steps are made of:

the deviations of forecast/intervals.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.optimize import minimize

from trainpace.core.stats import Z_95
from trainpace.forecast.uncertainty import (
    COVERAGE,
    PARTS,
    PartSpread,
    Relatedness,
    Spreads,
    deviation,
)

PRIOR = {"seen_card": 0.15, "new_card": 0.25}
"""What a part's deviation is drawn towards where few runs tell, as one run of that part alone ...
"""
PRIOR_RUNS = 10.0
"""... this many times."""
MANY = 50
"""Below this a collection's runs weigh alike: a handful must not decide a tail."""


class Error(NamedTuple):
    """A held-out run: log(measured / forecast), the shares of its parts, was its card in the fit,
    its collection, and what is not known of its host, which stands for itself in the interval.
    """

    log_error: float
    shares: Sequence[float]
    seen: bool
    collection: str
    outside_sd: float = 0.0


def fit_spreads(
    errors: Sequence[Error], devices: tuple[str, ...], relatedness: Relatedness
) -> Spreads:
    """Deviations by maximum likelihood (Laplace's distribution, whose tails are as wide as these
    errors'), then the quantiles.
    """
    r = np.array([error.log_error for error in errors])
    squares = np.array([error.shares for error in errors]) ** 2
    seen = np.array([error.seen for error in errors])
    of_hosts = np.array([error.outside_sd for error in errors]) ** 2
    weight = weights(errors)
    design = np.concatenate([squares * seen[:, None], squares * ~seen[:, None]], axis=1)
    prior = np.log(np.repeat([PRIOR["seen_card"], PRIOR["new_card"]], len(PARTS)))
    start = np.concatenate([[np.log(0.08)], prior])

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        variances = np.exp(2 * x)
        variance = variances[0] + design @ variances[1:] + of_hosts
        sd = np.sqrt(variance)
        size = np.sqrt(2.0) * np.abs(r) / sd
        by_variance = weight * (1 - size) / (2 * variance)
        gradient = np.concatenate([[by_variance.sum()], design.T @ by_variance]) * 2 * variances
        off = x[1:] - prior
        gradient[1:] += PRIOR_RUNS * off / 4
        return float(
            (weight * (np.log(sd) + size)).sum() + PRIOR_RUNS * (off**2).sum() / 8
        ), gradient

    found = np.exp(
        minimize(loss, start, jac=True, bounds=[(np.log(0.02), np.log(1.0))] * len(start)).x
    )
    half = len(PARTS)
    # a card that was left out is not known better than one that was not, whatever the few of them
    # say
    found[1 + half :] = np.maximum(found[1 + half :], found[1 : 1 + half])
    parts = {
        name: PartSpread(
            seen_card=round(float(found[1 + i]), 3), new_card=round(float(found[1 + half + i]), 3)
        )
        for i, name in enumerate(PARTS)
    }
    unscaled = Spreads(
        devices=devices,
        parts=parts,
        model_sd=round(float(found[0]), 3),
        low=-1.0,
        high=1.0,
        n=len(errors),
        relatedness=relatedness,
    )
    return with_quantiles(unscaled, errors)


def with_quantiles(spreads: Spreads, errors: Sequence[Error]) -> Spreads:
    """Quantiles of the errors in each step's own deviations, with the finite-sample correction; the
    same to either side, since the sign of an error is a matter of the few cards that were left out.
    """
    standard = np.array(
        [abs(_standard(e, float(deviation(spreads, e.shares, e.seen)))) for e in errors]
    )
    order = np.argsort(standard)
    weight = weights(errors)[order]
    position = np.cumsum(weight) / weight.sum()
    n = len(errors)
    at = min(int(np.searchsorted(position, COVERAGE * (n + 1) / n)), n - 1)
    half = round(float(standard[order][at]), 3)
    return replace(spreads, low=-half, high=half)


def _standard(error: Error, sd: float) -> float:
    """The least quantile whose interval, with the host's on top (`widened`), holds the error."""
    beyond = max(error.log_error**2 - (Z_95 * error.outside_sd) ** 2, 0.0)
    return float(np.copysign(np.sqrt(beyond), error.log_error) / sd)


def weights(errors: Sequence[Error]) -> np.ndarray:
    """The runs of a collection share the weight of the square root of their number."""
    count: dict[str, int] = {}
    for error in errors:
        count[error.collection] = count.get(error.collection, 0) + 1
    weight = np.array([max(count[error.collection], MANY) ** -0.5 for error in errors])
    return np.asarray(weight * len(weight) / weight.sum())
