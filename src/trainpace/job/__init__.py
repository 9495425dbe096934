"""Hours and cost of a whole training: steps, epochs, evaluation, checkpoints and failures."""

from typing import TYPE_CHECKING

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.job.ask import Answer, Question, answer
    from trainpace.job.learning_rate import (
        FEWEST_STEPS,
        GradientNorms,
        LearningRateAdvice,
        NoiseScaleRule,
        learning_rate_advice,
        learning_rate_for_noise_scale,
        noise_scale,
        samples_factor,
        steps_factor,
    )
    from trainpace.job.training import (
        ASSUMED,
        ONLY_STEPS,
        JobConditions,
        Training,
        assumed_in_words,
        assumptions,
        job_ranges,
        power_w,
        state_bytes,
        stated_conditions,
        training_of,
        with_job,
    )
    from trainpace.job.work import (
        MAX_COUNT,
        EpochSteps,
        Schedule,
        SpeedUp,
        accumulation_for_global_batch,
        epoch_steps,
        total_steps,
    )

__getattr__, __all__ = exports(__name__, __file__)
