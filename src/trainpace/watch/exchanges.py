"""The collectives of a recorded training as each rank saw them: when it arrived, and when it left."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainpace.watch.inside.among import GRADIENTS
from trainpace.watch.inside.trail import COMMUNICATION, EVALUATION, Span, Step
from trainpace.watch.notes import Notes, inputs_of

WARM_UP_STEPS = 3
LEAVE_TOGETHER = (
    GRADIENTS,
    "all_reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_gather",
    "all_to_all_single",
    "all_to_all",
    "barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_object",
)
"""Collectives that no rank can leave before all have arrived, by the names under which they are recorded."""
HOST_WAITS = frozenset(("gloo", "mpi"))
"""Backends whose collectives end when the call returns. With the others a device waits, and the host does not say when."""


class Exchange(NamedTuple):
    """One collective on one rank, by the clock of its host."""

    name: str
    arrives_ns: int
    leaves_ns: int


class RankStep(NamedTuple):
    """A step of one rank: its time by part, the collectives that all ranks leave together, the time of all exchange by name (of
    which those are a part), their calls, and the numbers in its inputs (0 where nobody counted)."""

    number: int
    parts_ns: tuple[int, ...]
    together: tuple[Exchange, ...]
    by_name_ns: dict[str, int]
    calls: dict[str, int]
    input_elements: int

    @property
    def exchange_ns(self) -> int:
        return self.parts_ns[COMMUNICATION]

    def own_ns(self) -> int:
        """The step without exchange, which is this rank's own pace."""
        return sum(self.parts_ns) - self.exchange_ns


def rank_steps(records: Iterable[Any]) -> dict[int, RankStep]:
    """The plain steps after the warm-up of a trail whose spans were kept and that have no evaluation, by their number; none
    where the host does not wait for its collectives."""
    steps: list[tuple[Step, list[Span]]] = []
    notes, spans = Notes(), list[Span]()
    is_detailed = False
    for r in records:
        if isinstance(r, Span):
            is_detailed |= r.thread == 0
            if r.thread == 0 and r.part == COMMUNICATION:
                spans.append(r)
            continue
        notes.add(r)
        if isinstance(r, Step):
            # what an evaluation exchanges counts as evaluation, and not every step has one
            if (
                is_detailed
                and r.trial == 0
                and r.number >= WARM_UP_STEPS
                and not r.parts_ns[EVALUATION]
            ):
                steps.append((r, spans))
            spans, is_detailed = [], False
    if any(notes.values("accelerator")) or not set(notes.values("backend")) <= HOST_WAITS:
        return {}
    held = inputs_of(notes)
    names = {note.content["number"]: note.content["name"] for note in notes.with_name("number")}
    return {
        step.number: _rank_step(step, found, names, held.get(step.number, 0))
        for step, found in steps
    }


def _rank_step(step: Step, spans: Sequence[Span], names: Mapping[int, str], held: int) -> RankStep:
    together, by_name, calls, until = [], Counter[str](), Counter[str](), step.start_ns
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        if span.end_ns > until and span.end_ns <= step.end_ns:
            name = names.get(span.name, "")
            by_name[name] += span.end_ns - max(span.start_ns, until)
            calls[name] += 1
            until = span.end_ns
            if name in LEAVE_TOGETHER:
                together.append(Exchange(name, span.start_ns, span.end_ns))
    return RankStep(step.number, step.parts_ns, tuple(together), dict(by_name), dict(calls), held)


def common(ranks: Mapping[int, Mapping[int, RankStep]]) -> dict[int, list[RankStep]]:
    """By rank, the steps that all ranks recorded with the same collectives in the same order; the others tell nothing."""
    first, *rest = ranks.values()

    def alike(number: int) -> bool:
        names = [[e.name for e in steps[number].together] for steps in ranks.values()]
        return bool(names[0]) and all(n == names[0] for n in names)

    numbers = [n for n in sorted(first) if all(n in steps for steps in rest) and alike(n)]
    return {rank: [steps[n] for n in numbers] for rank, steps in ranks.items()}
