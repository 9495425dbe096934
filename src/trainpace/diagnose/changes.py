"""A change that an advisor proposes."""

import msgspec

from trainpace.core.records import Record


class Advice(Record):
    """One change: its description, the saving per step, and its ceiling, the whole time of its cause.

    `settings`: the values to set, where it is a setting; `basis`: the source of the figure. `at_most`: something remains of what
    the figure counts as saved, and nobody can say how much.
    """

    cause: str
    title: str
    how: str
    saves_ms: float
    ceiling_ms: float
    basis: str
    settings: dict[str, int | str] = msgspec.field(default_factory=dict)
    at_most: bool = False
