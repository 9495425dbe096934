"""The usual rules for the learning rate when the global batch changes. They are advice: nothing is changed."""

import math

from trainpace.errors import TrainpaceError
from trainpace.records import Record


class LearningRateAdvice(Record):
    """Learning rates for a changed global batch, with where each rule comes from and where it ends."""

    old_global_batch: int
    new_global_batch: int
    learning_rate: float | None
    linear: float | None
    square_root: float | None
    linear_factor: float
    square_root_factor: float
    linear_source: str = (
        "linear: Goyal et al. 2017 (arXiv:1706.02677), SGD with momentum; needs warm-up; held up to a batch of 8,192"
        " on ImageNet"
    )
    square_root_source: str = (
        "square root: Krizhevsky 2014 (arXiv:1404.5997), Hoffer et al. 2017 (arXiv:1705.08741); for Adam-like optimizers"
        " Malladi et al. 2022 (arXiv:2205.10287)"
    )
    limit: str = "beyond a critical batch size no rule keeps the result (McCandlish et al. 2018, arXiv:1812.06162)"


def learning_rate_advice(
    old_global_batch: int, new_global_batch: int, learning_rate: float | None = None
) -> LearningRateAdvice:
    """Both rules for going from one global batch to another; factors only, where no learning rate is given."""
    if old_global_batch < 1 or new_global_batch < 1:
        raise TrainpaceError(f"global batches are counts from 1, not {min(old_global_batch, new_global_batch)}.")
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
    """Factors for the learning rate where the gradient noise scale is known, between the linear rule (a batch far below it) and
    no change (far above it)."""

    sgd_factor: float
    adam_factor: float
    source: str = (
        "McCandlish et al. 2018 (arXiv:1812.06162): best rate = most / (1 + B_noise / B)^a, a = 1 for SGD (section 2), 0.5 to 1"
        " for Adam and RMSProp (appendix E); 0.5, the square root, is taken, which asks for less change"
    )
    limit: str = "from the noise scale of the steps that were measured; it grows during training"


def learning_rate_for_noise_scale(
    old_global_batch: float, new_global_batch: float, noise_scale_samples: float
) -> NoiseScaleRule:
    """The factors for going from one global batch to another at a noise scale of so many samples."""
    if not (old_global_batch > 0 and new_global_batch > 0 and noise_scale_samples >= 0):
        raise TrainpaceError("global batches are above 0, and a noise scale is a number of samples from 0.")
    factor = (1 + noise_scale_samples / old_global_batch) / (1 + noise_scale_samples / new_global_batch)
    return NoiseScaleRule(sgd_factor=factor, adam_factor=math.sqrt(factor))
