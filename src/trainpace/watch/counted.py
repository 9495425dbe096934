"""What was counted in a few steps, and what it is in all of them."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from trainpace.watch.inside.trail import PARTS, Step


class Counted(NamedTuple):
    """What was counted in some steps, by their numbers, among all steps."""

    by_step: dict[int, dict[str, Any]]
    steps: Sequence[Step]

    def typical(self, name: str) -> Any:
        """The middle one, of times the least. Where some steps have more backward passes than others, as in actor-critic
        trainings, the mean, in proportion to the backward passes of all steps."""
        if not self.by_step:
            return 0
        counts = sorted(c.get(name, 0) for c in self.by_step.values())
        passes = {s.number: s.micro_steps for s in self.steps}
        here = [passes.get(number, 0) for number in self.by_step]
        if len(set(passes.values())) == 1 or not sum(here):
            # other programs only make times longer
            return counts[0 if name.endswith("_ns") else len(counts) // 2]
        every = fmean(s.micro_steps for s in self.steps[1:] or self.steps)
        return type(counts[0])(fmean(counts) * every / fmean(here))

    def outside(self) -> float:
        """The share of the script's own code in which operators ran that gradients flow through, outside of any module."""
        own = {s.number: s.parts_ns[PARTS.index("other")] for s in self.steps}
        among = [(c.get("outside_ns", 0), own[n]) for n, c in self.by_step.items() if own.get(n)]
        return min(1.0, math.fsum(ns for ns, _ in among) / sum(whole for _, whole in among)) if among else 0.0
