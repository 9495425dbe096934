"""Hours and cost of a whole training: steps, epochs, evaluation, checkpoints and failures."""

from typing import TYPE_CHECKING

from trainpace.core import exports

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
        CORE_SPREAD,
        MAX_COUNT,
        NO_WAIT,
        ONLY_STEPS,
        DataPath,
        EpochSteps,
        JobConditions,
        Schedule,
        SpeedUp,
        Training,
        accumulation_for_global_batch,
        assumed_in_words,
        assumptions,
        epoch_steps,
        job_ranges,
        power_w,
        state_bytes,
        stated_conditions,
        total_steps,
        training_of,
        with_data_ms,
        with_host_work,
        with_job,
    )

__getattr__, __all__ = exports(__name__, __file__)
