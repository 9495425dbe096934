"""What tensor parallelism does to each operator, from how values flow between products with weights.

In every branch of a block the last product with a weight before the branch joins the residual stream is divided by its
inputs ("row"); the products that feed it are divided by their outputs ("column"; Shoeybi et al. 2019,
arXiv:1909.08053). What lies between the two is "sharded", the rest "replicated": also a product further up (low-rank
projections of queries, the first of three layers), a product that nothing feeds (a gate, an expert router), and every
convolution. A fused projection of queries, keys and values is one column product; parallel attention and MLP are two
branches that join together.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from trainpace.workload.workload import GROUPED, Role

_JOINS = frozenset({"add", "add_", "sub", "sub_"})


class Step(NamedTuple):
    """One ATen call of the forward pass. Values are storages by number, so that a view is its base.

    inputs: (value, elements). operands: the matrices of a product, or a convolution's weight; none for other calls.
    """

    function: str
    inputs: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


class Division(NamedTuple):
    """Roles of calls, values of the parameters that are divided, calls inside the attention core (from scores to
    probabilities), the column products that feed attention, and the calls on the rows of experts.
    """

    roles: dict[int, Role]
    divided: set[int]
    core: set[int]
    attention_inputs: set[int]
    experts: set[int]


class _Flow:
    """One walk over a block: which products with weights feed which."""

    def __init__(
        self, steps: Mapping[int, Step], hidden: Iterable[int], parameters: Collection[int]
    ) -> None:
        self.hidden = set(hidden)
        self.of_parameters = set(parameters)
        self.pending: dict[int, frozenset[int]] = {}
        """value: the products it comes from that have not joined the residual stream."""
        self.weights: dict[int, set[int]] = {}
        self.feeds: dict[int, set[int]] = {}
        self.last: set[int] = set()
        self.core: set[int] = set()
        self.attention_inputs: set[int] = set()
        self.matrix: set[int] = set()
        self._scores: set[int] = set()
        for call, step in steps.items():
            self._walk(call, step)

    def _walk(self, call: int, step: Step) -> None:
        values = [value for value, _ in step.inputs]
        if values and all(value in self.of_parameters for value in values):
            self.of_parameters.update(step.outputs)
            return
        sources = frozenset().union(*(self.pending.get(value, frozenset()) for value in values))
        weights = {value for value in step.operands if value in self.of_parameters}
        if weights:
            for source in sources:
                self.feeds.setdefault(source, set()).add(call)
            self.weights[call] = weights
            if len(step.operands) == 2:
                self.matrix.add(call)
            self._write(step, frozenset({call}), False)
        elif step.function in _JOINS and self._joins(step):
            self.last |= sources
            self._write(step, frozenset(), True)
        else:
            self._attention(call, step, sources)
            self._write(
                step, sources, not sources and any(value in self.hidden for value in values)
            )

    def _joins(self, step: Step) -> bool:
        if len(step.inputs) < 2 or step.inputs[0][1] != step.inputs[1][1]:
            return False
        (one, _), (other, _) = step.inputs[:2]
        return (one in self.hidden and other in self.pending) or (
            other in self.hidden and one in self.pending
        )

    def _attention(self, call: int, step: Step, sources: frozenset[int]) -> None:
        inside = any(value in self._scores for value, _ in step.inputs)
        fused = "scaled_dot_product" in step.function
        if fused or (len(step.operands) == 2 and sources):
            self.attention_inputs |= sources
            if fused or inside:
                return  # the product with the values ends the core; a fused kernel keeps nothing of it
        elif not inside:
            return
        self.core.add(call)
        self._scores.update(step.outputs)

    def _write(self, step: Step, sources: frozenset[int], hidden: bool) -> None:
        for value in step.outputs:
            self.pending.pop(value, None)
            self.hidden.discard(value)
            if sources:
                self.pending[value] = sources
            elif hidden:
                self.hidden.add(value)


def divide_block(
    steps: Mapping[int, Step],
    entering: Iterable[int],
    leaving: Iterable[int],
    parameters: Collection[int],
) -> Division:
    """Roles of the calls of one block. entering, leaving: values of the hidden state; parameters: values of weights."""
    flow = _Flow(steps, entering, parameters)
    for value in leaving:
        flow.last |= flow.pending.get(value, frozenset())
    last = flow.last & flow.matrix
    column = {p for p in flow.matrix - flow.last if flow.feeds.get(p, set()) & last}
    column = {p for p in column if not flow.feeds[p] & column}
    row = {call for call in last if any(call in flow.feeds[p] for p in column)}
    return _division(steps, flow, column, row)


def divide_vocabulary(
    steps: Mapping[int, Step], parameters: Mapping[int, tuple[int, ...]]
) -> Division:
    """Roles outside of the blocks: the largest embedding and the head over the same vocabulary.

    parameters: value -> shape. The embedding is "row" (each rank looks up its part of the vocabulary, and the sum over the
    ranks is whole), the head "column", and the loss on its logits "sharded". All others have no role.
    """
    tables: dict[int, int] = {}
    for call, step in steps.items():
        read = [value for value, _ in step.inputs if value in parameters]
        if step.function == "embedding" and read:
            tables[call] = max(read, key=lambda value: parameters[value][0])
    if not tables:
        return Division({}, set(), set(), set(), set())
    vocabulary = max(parameters[value][0] for value in tables.values())
    flow = _Flow(steps, (), parameters.keys())
    shapes = _shapes_of_derived(steps, parameters)
    column = {
        call
        for call in flow.matrix
        if any(vocabulary in shapes.get(value, ()) for value in flow.weights[call])
    }
    division = _division(steps, flow, column, set())
    embeddings = {call for call, value in tables.items() if parameters[value][0] == vocabulary}
    roles: dict[int, Role] = {
        call: role for call, role in division.roles.items() if role != "replicated"
    }
    roles |= dict.fromkeys(embeddings, "row")
    return Division(
        roles, division.divided | {tables[call] for call in embeddings}, set(), set(), set()
    )


def _shapes_of_derived(
    steps: Mapping[int, Step], parameters: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Shapes of parameters, and of casts of them, which are values of their own."""
    shapes = dict(parameters)
    for step in steps.values():
        if len(step.inputs) == 1 and step.inputs[0][0] in shapes:
            for value in step.outputs:
                shapes.setdefault(value, shapes[step.inputs[0][0]])
    return shapes


def _division(steps: Mapping[int, Step], flow: _Flow, column: set[int], row: set[int]) -> Division:
    divided: set[int] = set()
    for call in (*column, *row):
        divided |= flow.weights[call]
        if call in column:  # a row product's bias is added once, after the sum
            divided |= {value for value, _ in steps[call].inputs if value in flow.of_parameters}
    for step in reversed(list(steps.values())):
        if any(value in divided for value in step.outputs):
            divided |= {value for value, _ in step.inputs if value in flow.of_parameters}
    parts: set[int] = set()
    of_experts: set[int] = set()
    experts = {call for call, step in steps.items() if step.function == GROUPED}
    roles: dict[int, Role] = {}
    for call, step in steps.items():
        values = {value for value, _ in step.inputs}
        if call in column:
            roles[call] = "column"
        elif call in row:
            roles[call] = "row"
        elif values and values <= flow.of_parameters:
            roles[call] = "sharded" if values & divided else "replicated"
            continue
        elif values & of_experts:
            roles[call] = "expert"
            experts.add(call)
        else:
            roles[call] = "sharded" if values & parts else "replicated"
        if call in experts and roles[call] != "row":
            of_experts.update(step.outputs)
        if roles[call] in ("column", "sharded", "expert"):
            parts.update(step.outputs)
            if step.function in _JOINS:  # the bias of a column product, added by a call of its own
                divided |= values & flow.of_parameters
        else:
            parts.difference_update(step.outputs)
    return Division(roles, divided, flow.core, flow.attention_inputs & column, experts)
