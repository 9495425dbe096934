"""A whole training: conditions in, hours and dollars out. The only place that computes them."""

from trainpace.job.ask import Answer, Question, answer
from trainpace.job.conditions import (
    ASSUMED,
    ONLY_STEPS,
    JobConditions,
    assumed_in_words,
    assumptions,
    stated_conditions,
)
from trainpace.job.solve import (
    DataParallelChoice,
    data_parallel_for_deadline,
    epochs_for_deadline,
    step_time_for_deadline,
)
from trainpace.job.training import (
    JobRange,
    Training,
    job_range,
    job_ranges,
    power_w,
    state_bytes,
    training_of,
    with_job,
)

__all__ = [
    "ASSUMED", "ONLY_STEPS", "Answer", "DataParallelChoice", "JobConditions", "JobRange", "Question", "Training",
    "answer", "assumed_in_words", "assumptions", "data_parallel_for_deadline", "epochs_for_deadline", "job_range",
    "job_ranges", "power_w", "state_bytes", "stated_conditions", "step_time_for_deadline", "training_of", "with_job",
]  # fmt: skip
