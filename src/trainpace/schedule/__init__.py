"""The arithmetic of batches, epochs and learning rates."""

from trainpace.schedule.learning_rate import (
    LearningRateAdvice,
    NoiseScaleRule,
    learning_rate_advice,
    learning_rate_for_noise_scale,
)
from trainpace.schedule.noise_scale import (
    FEWEST_STEPS,
    GradientNorms,
    NoiseScale,
    noise_scale,
    samples_factor,
    steps_factor,
)
from trainpace.schedule.speedup import SpeedUp, cumulative
from trainpace.schedule.work import (
    MAX_COUNT,
    EpochSteps,
    Schedule,
    accumulation_for_global_batch,
    epoch_steps,
    total_steps,
)

__all__ = [
    "FEWEST_STEPS", "MAX_COUNT", "EpochSteps", "GradientNorms", "LearningRateAdvice", "NoiseScale", "NoiseScaleRule",
    "Schedule", "SpeedUp", "accumulation_for_global_batch", "cumulative", "epoch_steps", "learning_rate_advice",
    "learning_rate_for_noise_scale", "noise_scale", "samples_factor", "steps_factor", "total_steps",
]  # fmt: skip
