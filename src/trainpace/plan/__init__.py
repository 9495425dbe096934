"""Plans of changes to a training: their order, and how much time each change saves."""

from trainpace.plan.changes import (
    NO_WAIT,
    NOISE,
    Change,
    Choice,
    DataPath,
    Effort,
    Maybe,
    Plan,
    Projection,
    Rejected,
    Risk,
)
from trainpace.plan.data_paths import data_paths
from trainpace.plan.evaluate import Evaluator, Problem, forecast_of
from trainpace.plan.plan import plan_changes
from trainpace.plan.search import PARALLELISM, Limit, SearchSpace
from trainpace.plan.settings import config_line, resolution

__all__ = [
    "NOISE",
    "NO_WAIT",
    "PARALLELISM",
    "Change",
    "Choice",
    "DataPath",
    "Effort",
    "Evaluator",
    "Limit",
    "Maybe",
    "Plan",
    "Problem",
    "Projection",
    "Rejected",
    "Risk",
    "SearchSpace",
    "config_line",
    "data_paths",
    "forecast_of",
    "plan_changes",
    "resolution",
]
