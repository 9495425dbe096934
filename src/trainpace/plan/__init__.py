"""What to change, in which order, and what each change saves."""

from trainpace.plan.changes import Change, Plan

__all__ = ["Change", "Plan"]
