"""What a search for hyper-parameters takes where bad trainings are stopped early: successive halving (Jamieson and Talwalkar
2016, arXiv:1502.07943, algorithm 1; with a factor of 3 as in Hyperband, Li et al. 2018, arXiv:1603.06560).
"""

from trainpace.core.errors import Contradiction
from trainpace.core.records import Record


class HalvingRound(Record):
    """`trainings` go on until they have done `epochs`. `share`: of the time that all trainings would take to their ends."""

    trainings: int
    epochs: float
    share: float


def successive_halving(trainings: int, epochs: float, factor: int) -> tuple[HalvingRound, ...]:
    """The rounds from which one of `factor` trainings each goes on, resumed where it stopped; those of the last round train to
    the end. It presumes that who leads early leads at the end, and counts neither evaluations nor waiting for a round's slowest.

    Raises Contradiction where there are fewer trainings than `factor`, or a factor below 2.
    """
    if factor < 2 or trainings < factor:
        raise Contradiction(
            f"of {trainings} trainings, no round can keep one of {factor}.",
            "`halving` is 2 or more, and `repeats` at least as many.",
        )
    left = [trainings]
    while left[-1] >= factor:
        left.append(left[-1] // factor)
    rounds, done = [], 0.0
    for i, count in enumerate(left):
        until = epochs / factor ** (len(left) - 1 - i)
        share = count * (until - done) / (trainings * epochs)
        rounds.append(HalvingRound(trainings=count, epochs=until, share=share))
        done = until
    return tuple(rounds)
