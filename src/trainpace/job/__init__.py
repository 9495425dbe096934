"""A whole training: conditions in, hours and dollars out. The only place that computes them."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.job.ask import Answer, Question, answer
    from trainpace.job.conditions import (
        ASSUMED,
        ONLY_STEPS,
        JobConditions,
        assumed_in_words,
        assumptions,
        stated_conditions,
    )
    from trainpace.job.training import (
        Training,
        job_ranges,
        power_w,
        state_bytes,
        training_of,
        with_job,
    )

__getattr__, __all__ = exports(__name__, __file__)
