"""How many rounds of interventions a diagnosis makes, and of how many steps: what its time and the noise ask for."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

LEAST_BLOCK, LEAST_ROUNDS = 2, 2
"""Steps of a block, and rounds, below which a difference proves nothing."""
LEAST_WARM_UP = 3
WARM_UP_SHARE = 0.25
"""Of the time that interventions have, for the steps before them."""
MOST_ROUNDS = 4
"""Times as many as asked for, where noise leaves it open what an intervention saves."""
PRECISE = 0.03
"""Share of a step: where that much could have been told from noise, it is settled also that a cause takes no time."""
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
"""Student's t, one-sided 95 %, by degrees of freedom from 1; packages that know it may be missing where this runs."""


def warm_up_steps(asked: int, budget_s: float, step_s: float) -> int:
    """Steps before the first intervention: fewer than asked where each takes long."""
    affordable = math.floor(WARM_UP_SHARE * budget_s / step_s) if step_s > 0 else asked
    return max(LEAST_WARM_UP, min(asked, affordable))


def fitted(
    steps: float, blocks_a_round: int, settling: int, block: int, rounds: int
) -> tuple[int, int]:
    """(steps of a block, rounds) at most as asked for that `steps` suffice for. Blocks get shorter before rounds get fewer."""
    for fewer in range(rounds, 0, -1):
        each = math.floor(steps / (fewer * blocks_a_round)) - settling
        if each >= LEAST_BLOCK or fewer <= min(LEAST_ROUNDS, rounds):
            return max(LEAST_BLOCK, min(block, each)), fewer
    return block, rounds


def settled(plain_ms: Sequence[float], without_ms: Sequence[float]) -> bool:
    """Whether pairs of blocks tell if an intervention saves time: their difference's 90 % interval lies above 0, or is narrow."""
    saved = [a - b for a, b in zip(plain_ms, without_ms, strict=False)]
    if len(saved) < LEAST_ROUNDS:
        return False
    half = T_95[min(len(saved) - 1, len(T_95)) - 1] * stdev(saved) / math.sqrt(len(saved))
    return fmean(saved) > half or half <= PRECISE * fmean(plain_ms)
