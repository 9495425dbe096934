"""What to change, in which order, and what each change saves."""

from trainpace.plan.changes import (
    NO_WAIT,
    NOISE,
    Change,
    Choice,
    DataPath,
    Effort,
    Maybe,
    Outlook,
    Plan,
    Rejected,
    Risk,
    Sensitivity,
)
from trainpace.plan.evaluate import Judge, Setting, forecast_of
from trainpace.plan.knobs import config_line
from trainpace.plan.layouts import Layout, layouts_of
from trainpace.plan.plan import plan_changes
from trainpace.plan.resolution import told_apart
from trainpace.plan.search import PARALLELISM, Freedom, Limit

__all__ = [
    "NOISE",
    "NO_WAIT",
    "PARALLELISM",
    "Change",
    "Choice",
    "DataPath",
    "Effort",
    "Freedom",
    "Judge",
    "Layout",
    "Limit",
    "Maybe",
    "Outlook",
    "Plan",
    "Rejected",
    "Risk",
    "Sensitivity",
    "Setting",
    "config_line",
    "forecast_of",
    "layouts_of",
    "plan_changes",
    "told_apart",
]
