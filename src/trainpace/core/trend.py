"""The step time over the batch size as a whole: is it a line, what does a sample cost, from where on does more bring little?"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainpace.core.records import Record

Floats = NDArray[np.float64]

FEWEST_BATCHES = 4
"""Fewer sizes fit every curve."""
CLOSE = 0.03
"""Mean error, as a share of the step, up to which a step time follows a curve."""
KNEE = 0.05
"""Share of the best throughput that the smallest sufficient batch may lack."""
WINDOW = 8
"""Neighbouring gaps on either side over which the usual cost of a sample is taken."""
MOST_UNEVEN = 4
Shape = Literal["linear", "quadratic", "cubic", "none of these"]


class Trend(Record):
    """Least squares over a sweep's step times. fixed_ms + ms_per_sample x batch is the line; mean_errors: the mean of
    |fit / step - 1| of the polynomials of degree 1, 2, 3; worst_error: the line's largest, signed, at `worst_batch`.

    best_batch: that of the highest throughput; knee_batch: the smallest with at most 5 % less. uneven: the sizes behind which one
    more sample costs most beyond what it costs around there, and by what share of the step.
    """

    first_batch: int
    last_batch: int
    fixed_ms: float
    ms_per_sample: float
    r_squared: float
    mean_errors: tuple[float, float, float]
    worst_error: float
    worst_batch: int
    best_batch: int
    best_samples_per_second: float
    knee_batch: int
    knee_samples_per_second: float
    uneven: tuple[tuple[int, float], ...]
    noise: float = 0.0
    """Relative standard deviation of a step time."""

    @property
    def shape(self) -> Shape:
        """The simplest polynomial that the step time follows, as far as its noise lets it."""
        shapes: tuple[Shape, ...] = ("linear", "quadratic", "cubic")
        limit = max(CLOSE, self.noise)
        close = (
            shape for shape, error in zip(shapes, self.mean_errors, strict=True) if error <= limit
        )
        return next(close, "none of these")


def trend_of(
    batches: Sequence[int],
    step_ms: Sequence[float] | Floats,
    samples_per_second: Sequence[float] | Floats,
    noise: float = 0.0,
) -> Trend | None:
    """The trend over ascending batch sizes; None over fewer than FEWEST_BATCHES."""
    if len(batches) < FEWEST_BATCHES:
        return None
    x, y, rate = (
        np.asarray(values, dtype=float) for values in (batches, step_ms, samples_per_second)
    )
    u = x / x[-1]  # powers of large batches lose digits
    fits = [np.polynomial.polynomial.polyfit(u, y, degree) for degree in (1, 2, 3)]
    lines = [np.polynomial.polynomial.polyval(u, fit) for fit in fits]
    errors = [line / y - 1 for line in lines]
    spread = float(((y - y.mean()) ** 2).sum())
    worst, best = int(np.abs(errors[0]).argmax()), int(rate.argmax())
    knee = int(np.flatnonzero(rate >= (1 - KNEE) * rate[best])[0])
    share = excesses(batches, y)[0] / y[:-1]
    return Trend(
        first_batch=batches[0],
        last_batch=batches[-1],
        fixed_ms=float(fits[0][0]),
        ms_per_sample=float(fits[0][1] / x[-1]),
        r_squared=1 - float(((y - lines[0]) ** 2).sum()) / spread if spread else 1.0,
        mean_errors=tuple(float(np.abs(error).mean()) for error in errors),  # type: ignore[arg-type]
        worst_error=float(errors[0][worst]),
        worst_batch=batches[worst],
        best_batch=batches[best],
        best_samples_per_second=float(rate[best]),
        knee_batch=batches[knee],
        knee_samples_per_second=float(rate[knee]),
        noise=noise,
        uneven=tuple(
            (batches[i], float(share[i]))
            for i in sorted(np.argsort(-share)[:MOST_UNEVEN].tolist())
            if share[i] > 0
        ),
    )


def excesses(batches: Sequence[int], step_ms: Floats) -> tuple[Floats, Floats]:
    """Between neighbours among ascending batch sizes: (milliseconds beyond the usual slope, the usual milliseconds a sample)."""
    width = np.diff(np.asarray(batches, dtype=float))
    slope = np.diff(step_ms) / width
    usual = np.array(
        [
            max(
                float(
                    np.median(
                        np.concatenate(
                            [slope[max(0, i - WINDOW) : i], slope[i + 1 : i + 1 + WINDOW]]
                        )
                    )
                ),
                0.0,
            )
            for i in range(len(slope))
        ]
    )
    return (slope - usual) * width, usual
