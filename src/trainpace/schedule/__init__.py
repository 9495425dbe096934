"""The arithmetic of batches, epochs and training time."""

from trainpace.schedule.ask import Answer, Question, answer
from trainpace.schedule.learning_rate import LearningRateAdvice, learning_rate_advice
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
    "LearningRateAdvice",
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
    "step_time_for_deadline",
    "time_of_steps",
    "total_steps",
    "training_time",
]
