"""The noun that `plan` makes and `run` carries out."""

from __future__ import annotations

from trainpace.execution import Execution
from trainpace.records import Record


class Change(Record):
    """One rung: the execution after it, and the seconds it saves in the whole job (forecast, then measured)."""

    title: str
    execution: Execution
    forecast_saved_s: float
    measured_saved_s: float | None = None


class Plan(Record):
    """An ordered list of changes to an execution."""

    start: Execution
    changes: tuple[Change, ...]

    @property
    def end(self) -> Execution:
        """The execution after the last change."""
        return self.changes[-1].execution if self.changes else self.start
