"""What a measured speed-up means.

"363 %" reads in two ways. The sources of this project mean the ratio of old to new time (363 % = 3.63 times as fast,
27.5 % of the old time); "faster by 363 %" would be 4.63 times as fast. Trainpace says which it uses wherever it prints.
"""

import math

from trainpace.errors import TrainpaceError
from trainpace.records import Record


class SpeedUp(Record):
    """`ratio` = old time / new time. Above 1 is faster."""

    ratio: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise TrainpaceError(f"a speed-up of {self.ratio} is not above 0.")

    @property
    def share_of_old_time(self) -> float:
        """New time / old time: 0.0465 for a ratio of 21.53."""
        return 1 / self.ratio

    @property
    def percent_of_old_speed(self) -> float:
        """2153 for a ratio of 21.53."""
        return 100 * self.ratio

    def new_time_s(self, old_time_s: float) -> float:
        """What the old time becomes."""
        return old_time_s / self.ratio


def cumulative(rungs: list[SpeedUp]) -> list[SpeedUp]:
    """Each rung against the start, from each rung against the one before it."""
    ratios: list[SpeedUp] = []
    product = 1.0
    for rung in rungs:
        product *= rung.ratio
        ratios.append(SpeedUp(ratio=product))
    return ratios
