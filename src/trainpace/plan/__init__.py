"""What to change, in which order, and what each change saves."""

from trainpace.plan.changes import NO_WAIT, Change, Choice, DataPath, Outlook, Plan, Rejected, Sensitivity
from trainpace.plan.evaluate import Judge, Setting
from trainpace.plan.plan import plan_changes
from trainpace.plan.space import Freedom

__all__ = [
    "NO_WAIT", "Change", "Choice", "DataPath", "Freedom", "Judge", "Outlook", "Plan", "Rejected", "Sensitivity", "Setting",
    "plan_changes",
]  # fmt: skip
