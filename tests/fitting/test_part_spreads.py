"""The fit of error spreads recovers the deviations of simulated errors."""

import numpy as np
import pytest
from fitting.intervals import Error, fit_spreads

from trainpace.forecast.uncertainty import PARTS, deviation, fitted_spreads


def test_fit_spreads_recovers_deviations_with_90_percent_coverage() -> None:
    draw = np.random.default_rng(0)
    errors = []
    for _ in range(3000):
        shares = draw.dirichlet(np.full(len(PARTS), 0.3))
        seen = bool(draw.random() < 0.5)
        sd = np.sqrt(
            0.05**2
            + (
                (shares * np.where(np.arange(len(PARTS)) == 0, 0.3 if seen else 0.6, 0.1)) ** 2
            ).sum()
        )
        errors.append(Error(float(draw.normal(0, sd)), shares.tolist(), seen, "drawn"))
    spreads = fit_spreads(errors, (), fitted_spreads().relatedness)
    assert spreads.parts[PARTS[0]].seen_card == pytest.approx(0.3, rel=0.25)
    assert spreads.parts[PARTS[0]].new_card == pytest.approx(0.6, rel=0.25)
    inside = [
        spreads.low < e.log_error / deviation(spreads, e.shares, e.seen) < spreads.high
        for e in errors
    ]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.01)
