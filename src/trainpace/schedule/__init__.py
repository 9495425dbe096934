"""The arithmetic of batches, epochs and training time."""

from trainpace.schedule.ask import Answer, Question, answer
from trainpace.schedule.learning_rate import (
    LearningRateAdvice,
    NoiseScaleRule,
    learning_rate_advice,
    learning_rate_for_noise_scale,
)
from trainpace.schedule.noise_scale import GradientNorms, NoiseScale, noise_scale, samples_factor, steps_factor
from trainpace.schedule.solve import (
    DataParallelChoice,
    accumulation_for_global_batch,
    data_parallel_for_deadline,
    epochs_for_deadline,
    step_time_for_deadline,
)
from trainpace.schedule.speedup import SpeedUp, cumulative
from trainpace.schedule.training_time import TrainingTime, time_of_steps, training_time
from trainpace.schedule.work import EpochSteps, Schedule, epoch_steps, total_steps

__all__ = [
    "Answer",
    "DataParallelChoice",
    "EpochSteps",
    "GradientNorms",
    "LearningRateAdvice",
    "NoiseScale",
    "NoiseScaleRule",
    "Question",
    "Schedule",
    "SpeedUp",
    "TrainingTime",
    "accumulation_for_global_batch",
    "answer",
    "cumulative",
    "data_parallel_for_deadline",
    "epoch_steps",
    "epochs_for_deadline",
    "learning_rate_advice",
    "learning_rate_for_noise_scale",
    "noise_scale",
    "samples_factor",
    "step_time_for_deadline",
    "steps_factor",
    "time_of_steps",
    "total_steps",
    "training_time",
]
