"""What was counted in a few steps, and what it is in all of them."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from trainpace.core.stats import median
from trainpace.watch.inside.trail import PARTS, Step

ALIKE = 1.05
"""Times the FLOPs of the smallest of several steps that the largest has at most, where they count as equally large."""
USUAL = 0.8
"""Of all steps, those with the usual number of backward passes from which on the others count as an epoch's last ones."""
_OTHER = PARTS.index("other")


class Counted(NamedTuple):
    """What was counted in some steps, by their numbers, among all steps."""

    by_step: dict[int, dict[str, Any]]
    steps: Sequence[Step]

    def typical(self, name: str) -> Any:
        """The middle one; of the times of equally large steps the least, since other programs only make them longer.

        Where a step has more backward passes than another, as in actor-critic trainings, the mean, in proportion to the backward
        passes of all steps.
        """
        if not self.by_step:
            return 0
        counts = sorted(c.get(name, 0) for c in self.by_step.values())
        passes = {s.number: s.micro_steps for s in self.steps}
        here = [passes.get(number, 0) for number in self.by_step]
        usual, often = Counter(passes.values()).most_common(1)[0]
        is_regular = set(here) == {usual} and often >= USUAL * len(passes)
        if is_regular or not sum(here):
            return counts[0 if name.endswith("_ns") and self._are_alike() else len(counts) // 2]
        every = fmean(s.micro_steps for s in self.steps[1:] or self.steps)
        return type(counts[0])(fmean(counts) * every / fmean(here))

    def _are_alike(self) -> bool:
        flops = [c.get("flops", 0.0) for c in self.by_step.values()]
        return max(flops) <= ALIKE * min(flops)

    def outside(self, steady: Sequence[Step]) -> float:
        """The share of the script's own code, in steps that were not counted, in which operators ran that gradients flow through,
        outside of any module: what remains without the rest of a counted step's own code, which counting does not lengthen.
        """
        own = {s.number: s.parts_ns[_OTHER] for s in self.steps}
        among = [(c.get("outside_ns", 0), own[n]) for n, c in self.by_step.items() if own.get(n)]
        every = [s.parts_ns[_OTHER] for s in steady]
        if not among or not any(every):
            return 0.0
        outside, rest = median([ns for ns, _ in among]), median([whole - ns for ns, whole in among])
        # the middle step, as those that were counted are: one in sixteen may hold a whole rollout
        return min(outside, max(0.0, median(every) - max(0.0, rest))) / fmean(every)
