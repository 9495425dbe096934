"""Learning rates for a changed global batch, and the gradient noise scale.

The noise scale limits how large a useful batch can be. It is B_simple = tr(Sigma) / |G|^2 of
McCandlish et al. 2018 (arXiv:1812.06162). Sigma is the covariance of one sample's gradient, and G
is the true gradient. It is measured from gradients of two batch sizes (their appendix A.1).

The noise scale equals the critical batch size if the Hessian is a multiple of the identity. In
their experiments the two agreed within a small factor. The noise scale grows during training.
"""

import math

import numpy as np
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import NoiseScale
from trainpace.core.records import Record

FEWEST_STEPS = 10
RESAMPLES = 2000
COVERAGE = 0.9
SEED = 0


class LearningRateAdvice(Record):
    """Learning rates for a changed global batch by the linear and the square-root rule.

    Each rule comes with its source and its limits.
    """

    old_global_batch: int
    new_global_batch: int
    learning_rate: float | None
    linear: float | None
    square_root: float | None
    linear_factor: float
    square_root_factor: float
    linear_source: str = (
        "linear: Goyal et al. 2017 (arXiv:1706.02677), SGD with momentum; needs warm-up; held up to"
        " a batch of 8,192 on ImageNet"
    )
    square_root_source: str = (
        "square root: Krizhevsky 2014 (arXiv:1404.5997), Hoffer et al. 2017 (arXiv:1705.08741); for"
        " Adam-like optimizers Malladi et al. 2022 (arXiv:2205.10287)"
    )
    limit: str = (
        "beyond a critical batch size no rule keeps the result (McCandlish et al. 2018,"
        " arXiv:1812.06162)"
    )


def learning_rate_advice(
    old_global_batch: int, new_global_batch: int, learning_rate: float | None = None
) -> LearningRateAdvice:
    """Return the learning rates of both rules for a new global batch.

    Without `learning_rate` only the factors are returned.
    """
    if old_global_batch < 1 or new_global_batch < 1:
        raise TrainpaceError(
            f"a global batch is {min(old_global_batch, new_global_batch)}; it must be 1 or more."
        )
    if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
        raise TrainpaceError(f"the learning rate is {learning_rate}; it must be above 0.")
    ratio = new_global_batch / old_global_batch
    return LearningRateAdvice(
        old_global_batch=old_global_batch,
        new_global_batch=new_global_batch,
        learning_rate=learning_rate,
        linear=None if learning_rate is None else learning_rate * ratio,
        square_root=None if learning_rate is None else learning_rate * math.sqrt(ratio),
        linear_factor=ratio,
        square_root_factor=math.sqrt(ratio),
    )


class NoiseScaleRule(Record):
    """Learning-rate factors derived from the gradient noise scale.

    They lie between the linear rule (batch far below the noise scale) and no change (batch far
    above).
    """

    sgd_factor: float
    adam_factor: float
    source: str = (
        "McCandlish et al. 2018 (arXiv:1812.06162): best rate = most / (1 + B_noise / B)^a, a = 1"
        " for SGD (section 2), 0.5 to 1 for Adam and RMSProp (appendix E); 0.5, the square root, is"
        " taken, which asks for less change"
    )
    limit: str = "from the noise scale of the measured steps; it grows during training"


def learning_rate_for_noise_scale(
    old_global_batch: float, new_global_batch: float, noise_scale_samples: float
) -> NoiseScaleRule:
    """Return the learning-rate factors for a new global batch. The noise scale is in samples."""
    factor = steps_factor(noise_scale_samples, new_global_batch, old_global_batch)
    return NoiseScaleRule(sgd_factor=factor, adam_factor=math.sqrt(factor))


class GradientNorms(Record):
    """Squared norms of the gradients of a mean loss, one pair per step.

    `small_squared` belongs to `small_batch` samples and is a mean over micro-batches or ranks.
    `big_squared` belongs to `big_batch` samples, which include the small batch.
    """

    small_batch: float
    big_batch: float
    small_squared: tuple[float, ...]
    big_squared: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < self.small_batch < self.big_batch:
            raise TrainpaceError(
                f"batches of {self.small_batch:g} and {self.big_batch:g} samples give no noise"
                " scale.",
                "The small batch must be a part of the big one.",
            )
        if len(self.small_squared) != len(self.big_squared):
            raise TrainpaceError(
                "each step needs one length for the small batch and one for the big one."
            )
        if any(not (math.isfinite(n) and n >= 0) for n in (*self.small_squared, *self.big_squared)):
            raise TrainpaceError("a squared length must be 0 or more.")


def noise_scale(norms: GradientNorms) -> NoiseScale:
    """Estimate the noise scale from the gradient norms of at least FEWEST_STEPS steps.

    Per step, |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b) and tr(Sigma) = (|G_b|^2 - |G_B|^2) / (1/b -
    1/B). Both are unbiased (McCandlish et al. 2018, appendix A.1). The estimate is the ratio of
    their means, because the mean of the ratios would be biased.

    The interval is a bootstrap over blocks of n^(1/3) consecutive steps (Künsch 1989; Hall et al.
    1995), because gradients of neighboring steps are correlated. The interval does not cover the
    drift of the noise scale during training.
    """
    small, big = np.array(norms.small_squared), np.array(norms.big_squared)
    b, whole, n = norms.small_batch, norms.big_batch, len(small)
    if n < FEWEST_STEPS:
        raise TrainpaceError(f"a noise scale needs at least {FEWEST_STEPS} steps, not {n}.")
    gradient = (whole * big - b * small) / (whole - b)
    trace = (small - big) / (1 / b - 1 / whole)
    means = _resampled_means(np.stack([gradient, trace], axis=-1))
    tail = (1 - COVERAGE) / 2
    signal, noise = float(gradient.mean()), float(trace.mean())
    if not np.quantile(means[:, 0], tail) > 0 or not signal > 0:
        return NoiseScale(
            samples=None,
            low=None,
            high=None,
            gradient_squared=signal,
            covariance_trace=noise,
            steps=n,
            reason=(
                f"the true gradient cannot be distinguished from 0 in {n} steps of {whole:g}"
                " samples: the noise is far larger. Use more steps or a larger batch."
            ),
        )
    ratios = np.divide(
        means[:, 1], means[:, 0], out=np.full(len(means), np.inf), where=means[:, 0] > 0
    )
    # The check above guarantees that fewer ratios are infinite than one tail holds. The value
    # nearest to a quantile is therefore finite.
    low, high = np.quantile(ratios, [tail, 1 - tail], method="nearest")
    # The trace of a covariance cannot be negative, but the unbiased estimate of a small one can be.
    return NoiseScale(
        samples=max(0.0, noise / signal),
        low=max(0.0, float(low)),
        high=max(0.0, float(high)),
        gradient_squared=signal,
        covariance_trace=noise,
        steps=n,
    )


def steps_factor(noise_scale_samples: float, old_batch: float, new_batch: float) -> float:
    """Return the ratio of updates (new batch / old batch) that reach the same loss.

    steps = S_min (1 + B_noise / B), if each batch uses its own best learning rate (McCandlish et
    al. 2018, section 2).
    """
    _check(noise_scale_samples, old_batch, new_batch)
    return (1 + noise_scale_samples / new_batch) / (1 + noise_scale_samples / old_batch)


def samples_factor(noise_scale_samples: float, old_batch: float, new_batch: float) -> float:
    """Return the ratio of samples (new / old) that reach the same loss.

    samples = E_min (1 + B / B_noise).
    """
    _check(noise_scale_samples, old_batch, new_batch)
    if not noise_scale_samples:
        return new_batch / old_batch
    return (1 + new_batch / noise_scale_samples) / (1 + old_batch / noise_scale_samples)


def _check(noise: float, *batches: float) -> None:
    if not (math.isfinite(noise) and noise >= 0) or not all(
        math.isfinite(b) and b > 0 for b in batches
    ):
        raise TrainpaceError("a noise scale must be 0 or more, and a global batch above 0.")


def _resampled_means(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return bootstrap means of shape (RESAMPLES, 2) from values of shape (n, 2).

    Blocks of consecutive rows wrap around at the end.
    """
    n = len(pairs)
    length = max(1, round(n ** (1 / 3)))
    blocks = -(-n // length)
    starts = np.random.default_rng(SEED).integers(0, n, size=(RESAMPLES, blocks))
    # Block sums from cumulative sums avoid an array of shape (RESAMPLES, n, 2).
    running = np.concatenate(
        [np.zeros((1, 2)), np.cumsum(np.concatenate([pairs, pairs[:length]]), axis=0)]
    )
    sums = running[starts + length] - running[starts]
    means: NDArray[np.float64] = sums.sum(axis=1) / (blocks * length)
    return means
