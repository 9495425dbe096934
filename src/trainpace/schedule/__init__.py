"""The arithmetic of batches, epochs and learning rates."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.schedule.halving import HalvingRound, successive_halving
    from trainpace.schedule.learning_rate import (
        FEWEST_STEPS,
        GradientNorms,
        LearningRateAdvice,
        NoiseScale,
        NoiseScaleRule,
        learning_rate_advice,
        learning_rate_for_noise_scale,
        noise_scale,
        samples_factor,
        steps_factor,
    )
    from trainpace.schedule.work import (
        MAX_COUNT,
        EpochSteps,
        Schedule,
        SpeedUp,
        accumulation_for_global_batch,
        epoch_steps,
        total_steps,
    )

__getattr__, __all__ = exports(__name__, __file__)
