"""Find the repeated blocks of a model, such as the layers of a transformer.

The blocks are the longest chain of equal modules. `longest_chain` finds them, and `blocks_of` reads
the sizes of one block from recorded steps.

Long chains are traced in a short form. Only a few of the blocks run, and the recording of one block
is repeated for the rest. For example, Llama-405B has 126 equal layers, and tracing five of them
suffices. `shortened` shortens a chain only if its blocks have the same modules with the same
settings. `repeated` repeats a recording only if the blocks that ran recorded the same operators. If
every sixth layer differs, the chain runs whole unless it has at least eight periods of six layers.

`divide_block` derives tensor parallelism from how values flow between the matmuls with weights
(Shoeybi et al. 2019, arXiv:1909.08053). Each call gets one of these roles:

- "row": The last matmul with a weight in a branch of the block, before the branch is added to the
  residual stream. Its weight is split along the input dim.
- "column": A matmul that feeds a row matmul. Its weight is split along the output dim. A fused
  projection of queries, keys and values is one column matmul.
- "sharded": A call between a column and a row matmul. Each rank works on its part of the values.
- "expert": A call on the tokens that were routed to experts.
- "replicated": All other calls, which every rank runs in full. They include matmuls that feed a
  column matmul (low-rank projections of queries, the first of three layers), matmuls that feed no
  row matmul (a gate, an expert router), and every convolution.

Parallel attention and MLP are two branches that are added to the residual stream together.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from trainpace.workload.operators import Row
from trainpace.workload.recorder import (
    AFTER,
    BATCHES,
    BEFORE,
    Recorded,
    Recorder,
    Step,
    Storage,
    share_of_memory,
)
from trainpace.workload.workload import ATTENTION, GEMM, GROUPED, MATRIX_KINDS, Role

_JOINS = frozenset({"add", "add_", "sub", "sub_"})


class Division(NamedTuple):
    """Division of calls among the ranks of tensor parallelism.

    Calls are indices of ATen calls in the forward pass. Values are numbers of storages, as in
    `recorder.Step`.

    Attributes:
        roles: Role of each call.
        divided: Values of the parameters that are split among the ranks.
        core: Calls inside attention, from the scores to the probabilities.
        attention_inputs: Column matmuls that feed attention.
        experts: Calls of the experts, on the tokens routed to them.
    """

    roles: dict[int, Role]
    divided: frozenset[int] = frozenset()
    core: frozenset[int] = frozenset()
    attention_inputs: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()

    @classmethod
    def together(cls, parts: Sequence["Division"]) -> "Division":
        """Merge the divisions of several blocks."""
        roles = {call: role for part in parts for call, role in part.roles.items()}
        sets = [frozenset[int]().union(*some) for some in list(zip(*parts, strict=True))[1:]]
        return cls(roles, *sets)


class _Flow:
    """Data flow between the matmuls with weights of one block.

    Attributes:
        hidden: Values that hold the residual stream.
        of_parameters: Values of parameters, and values computed only from parameters.
        pending: {value: matmuls that it was computed from}, until the value is added to the
            residual stream.
        weights: {matmul: values of its weights}.
        feeds: {matmul: matmuls that read its result}.
        last: The last matmuls before the residual stream.
        core: Calls inside attention, from the scores to the probabilities.
        attention_inputs: Matmuls that feed attention.
        matrix: Matmuls with a weight. Convolutions are not included.
    """

    def __init__(
        self, steps: Mapping[int, Step], hidden: Iterable[int], parameters: Collection[int]
    ) -> None:
        self.hidden = set(hidden)
        self.of_parameters = set(parameters)
        self.pending: dict[int, frozenset[int]] = {}
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
        if values and self.of_parameters.issuperset(values):
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
            self._write(step, sources, not sources and not self.hidden.isdisjoint(values))

    def _joins(self, step: Step) -> bool:
        """Return True if an addition adds the result of a branch to the residual stream."""
        if len(step.inputs) < 2 or step.inputs[0][1] != step.inputs[1][1]:
            return False
        (one, _), (other, _) = step.inputs[:2]
        return (one in self.hidden and other in self.pending) or (
            other in self.hidden and one in self.pending
        )

    def _attention(self, call: int, step: Step, sources: frozenset[int]) -> None:
        """Collect the calls of attention, and the matmuls that feed it."""
        inside = any(value in self._scores for value, _ in step.inputs)
        fused = "scaled_dot_product" in step.function
        if fused or (len(step.operands) == 2 and sources):
            self.attention_inputs |= sources
            if fused or inside:
                # the matmul with the values ends the core, and a fused kernel stores no scores
                return
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
    """Return the division of one block's calls among tensor-parallel ranks.

    Args:
        steps: The calls of the block's forward pass, in order.
        entering: Values of the hidden state that enters the block.
        leaving: Values of the hidden state that the block returns.
        parameters: Values of the model's parameters.
    """
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
    """Return the division of calls outside the blocks: the embedding, the head and the loss.

    The largest embedding is "row": each rank looks up its part of the vocabulary, and an all-reduce
    adds the partial results. The head of the same vocabulary is "column", and the loss on its
    logits is "sharded". Other calls have no role.

    Args:
        steps: The calls outside the blocks.
        parameters: {value of a parameter: its shape}.
    """
    tables = _tables(steps, parameters)
    if not tables:
        return Division({})
    vocabulary = max(parameters[value][0] for value in tables.values())
    flow = _Flow(steps, (), parameters.keys())
    shapes = _shapes_of_derived(steps, parameters)
    column = {
        call
        for call in flow.matrix
        if any(vocabulary in shapes.get(value, ()) for value in flow.weights[call])
    }
    found = _division(steps, flow, column, set())
    embeddings = {call for call, value in tables.items() if parameters[value][0] == vocabulary}
    roles: dict[int, Role] = {c: role for c, role in found.roles.items() if role != "replicated"}
    roles |= dict.fromkeys(embeddings, "row")
    return Division(roles, found.divided | {tables[call] for call in embeddings})


def _tables(steps: Mapping[int, Step], parameters: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """Return {embedding call: value of its table}."""
    tables = {}
    for call, step in steps.items():
        read = [value for value, _ in step.inputs if value in parameters]
        if step.function == "embedding" and read:
            tables[call] = max(read, key=lambda value: parameters[value][0])
    return tables


def _shapes_of_derived(
    steps: Mapping[int, Step], parameters: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return the shapes of parameters and of values computed from one of them, such as casts."""
    shapes = dict(parameters)
    for step in steps.values():
        if len(step.inputs) == 1 and step.inputs[0][0] in shapes:
            for value in step.outputs:
                shapes.setdefault(value, shapes[step.inputs[0][0]])
    return shapes


def _division(steps: Mapping[int, Step], flow: _Flow, column: set[int], row: set[int]) -> Division:
    divided = _divided_parameters(steps, flow, column, row)
    given: dict[int, Role] = {**dict.fromkeys(column, "column"), **dict.fromkeys(row, "row")}
    roles: dict[int, Role] = {}
    experts: set[int] = set()
    parts: dict[int, Role] = {}
    """{value of which each rank has a part: "sharded" or "expert"}."""
    for call, step in steps.items():
        values = {value for value, _ in step.inputs}
        if call in given:
            roles[call] = given[call]
        elif values and values <= flow.of_parameters:
            roles[call] = "sharded" if values & divided else "replicated"
            continue
        else:
            read = {parts[value] for value in values & parts.keys()}
            roles[call] = max(read, key=_IN_PARTS.index, default="replicated")
        part: Role = "sharded"
        if roles[call] == "expert" or step.function == GROUPED:
            part = "expert"
            experts.add(call)
        if roles[call] not in _IN_PARTS:
            for value in step.outputs:
                parts.pop(value, None)
            continue
        parts |= dict.fromkeys(step.outputs, part)
        if step.function in _JOINS:  # the bias of a column matmul, if a separate call adds it
            divided |= values & flow.of_parameters
    inputs = flow.attention_inputs & column
    return Division(roles, *map(frozenset, (divided, flow.core, inputs, experts)))


_IN_PARTS: tuple[Role, ...] = ("column", "sharded", "expert")
"""Roles of calls whose results are split among the ranks."""


def _divided_parameters(
    steps: Mapping[int, Step], flow: _Flow, column: set[int], row: set[int]
) -> set[int]:
    """Return the values of the parameters that are split among the ranks."""
    divided: set[int] = set()
    for call in (*column, *row):
        divided |= flow.weights[call]
        # every rank has the whole bias of a row matmul and adds it after the all-reduce
        if call in column:
            divided |= {value for value, _ in steps[call].inputs if value in flow.of_parameters}
    for step in reversed(list(steps.values())):
        if not divided.isdisjoint(step.outputs):
            divided |= {value for value, _ in step.inputs if value in flow.of_parameters}
    return divided


SHORTEST = 4
"""Minimum number of equal blocks in a chain.

ResNet-50's longest stage has 5.
"""

PERIODS = (1, 2, 3, 4, 6, 8)
"""Periods with which the blocks of a list may repeat.

Llama 4 Maverick has experts in every second layer. Jamba has attention in every eighth layer.
"""

LEAST_SHARE = 0.5
"""Minimum share of the parameters, or of the forward FLOPs, that a chain must have to be used."""
_HOST_KINDS = frozenset({"view", "module"})
_MATMULS = frozenset({"gemm", "embedding"})
_SUMS = frozenset({"add", "add_"})


class Chain(NamedTuple):
    """Consecutive child modules with the same parameter names and shapes.

    Attributes:
        name: Name of the first block.
        modules: The blocks that run during tracing, in order.
        length: Number of blocks in the whole chain.
        period: Number of blocks after which the pattern repeats. 1 if all blocks are equal, 2 if
            dense layers and layers of experts alternate.
        others: {name of the module that contains them: equal blocks outside the chain}.
    """

    name: str
    modules: tuple[nn.Module, ...]
    length: int
    period: int = 1
    others: tuple[tuple[str, tuple[nn.Module, ...]], ...] = ()

    @property
    def units(self) -> list[nn.Module]:
        """Blocks outside the chain. Recomputation and FSDP wrap them like those of the chain."""
        return [module for _, modules in self.others for module in modules]

    @property
    def is_whole(self) -> bool:
        return len(self.modules) == self.length

    @property
    def parameters(self) -> int:
        """Number of parameters of one block. The mean of a period if the blocks alternate."""
        period = self.modules[: self.period]
        return sum(share_of_memory(p) for block in period for p in block.parameters()) // len(
            period
        )


def longest_chain(model: nn.Module) -> Chain | None:
    """Return the chain with the most parameters, or None if the model has no chain.

    Among chains with equally many parameters, the longest wins. Its period is the one with which
    shapes and settings of its blocks repeat.
    """

    chains = []
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if len(children) < SHORTEST:
            continue
        forms, names = [_form(child) for child in children.values()], list(children)
        modules = tuple(children.values())
        periods = PERIODS if isinstance(parent, nn.ModuleList) else (1,)
        for start, end, period in (run for n in periods for run in _runs(forms, n)):
            first = f"{name}.{names[start]}".strip(".")
            chain = Chain(first, modules[start:end], end - start, period)
            if chain.length >= SHORTEST and chain.parameters:
                chains.append(chain)
    if not chains:
        return None
    longest = max(chains, key=lambda c: (c.parameters * c.length, c.length, -c.period))
    return _in_turns(longest._replace(others=_other_blocks(model, longest)))


def _form(child: nn.Module) -> tuple[object, ...]:
    return type(child), *((name, p.shape) for name, p in child.named_parameters())


def _other_blocks(model: nn.Module, chain: Chain) -> tuple[tuple[str, tuple[nn.Module, ...]], ...]:
    """Return the equal blocks outside the chain, by the module that contains them.

    These are all modules of the chain's classes, and runs of at least `SHORTEST` modules of another
    class with at least two weight matrices each. The first layer of T5 has another form than the
    layers of its chain, because it also has the positions.
    """
    classes = {type(module) for module in chain.modules}
    taken = {id(module) for block in chain.modules for module in block.modules()}
    found = []
    for name, parent in model.named_modules():
        lists = isinstance(parent, nn.ModuleList | nn.Sequential)
        for kind, run in groupby(parent.children() if lists else (), type):
            free = [module for module in run if taken.isdisjoint(map(id, module.modules()))]
            is_run = len(free) >= SHORTEST and all(map(_has_matrices, free))
            if id(parent) in taken or not (kind in classes or is_run):
                continue
            taken |= {id(module) for block in free for module in block.modules()}
            alike = defaultdict(list)
            for module in free:
                alike[_form(module)].append(module)
            found += [(name, tuple(modules)) for modules in alike.values()]
    return tuple(found)


def _has_matrices(block: nn.Module) -> bool:
    return sum(parameter.dim() > 1 for parameter in block.parameters()) > 1


def _runs(forms: Sequence[object], period: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, period) for each run of blocks that repeats with this period.

    A run has at least two whole periods and does not consist of equal blocks unless the period
    is 1.
    """
    repeats = [i + period < len(forms) and forms[i] == forms[i + period] for i in range(len(forms))]
    start = 0
    for same, run in groupby(repeats):
        length = len(list(run))
        if same and period == 1:
            yield start, start + length + 1, period
        elif same and length >= period and len(set(forms[start : start + period])) > 1:
            yield start, start + (length + period) // period * period, period
        start += length


class Layout(NamedTuple):
    """Chain whose blocks ran in order, and the division of calls inside and outside the blocks.

    `run` is the recorder of the step that shows it.
    """

    chain: Chain
    run: Recorder
    inside: Division
    outside: Division

    def places(self, recorded: Sequence[Recorded]) -> list[tuple[bool, Role, int]]:
        """Return the place of each row.

        Returns:
            Tuples of (True inside the chain, role, number of the equal blocks in `Chain.others`).
            The number counts from 1, and is 0 for rows that belong to none of them.
        """
        groups, units = self.groups, [*self.run.units, 0]  # calls of -1 belong to no block
        return [
            (r.origin.place > BEFORE, self.role(r), groups.get(units[r.origin.call], 0))
            for r in recorded
        ]

    @property
    def groups(self) -> dict[int, int]:
        """{number of a block outside the chain: number of its group}, if the block ran once."""
        groups = [n for n, (_, blocks) in enumerate(self.chain.others, 1) for _ in blocks]
        left = self.run.left_units
        return {unit: n for unit, n in enumerate(groups, 1) if len(left.get(unit, ())) == 1}

    def role(self, recorded: Recorded) -> Role:
        """Return the tensor-parallel role of one row.

        The rows of a column or row matmul include its backward pass. Only the matmuls among them
        are "column" or "row". Other rows are "sharded" or "replicated", depending on the size of
        their result. Examples are the gradient of the bias, which is a sum over the matmul's
        outputs, and autograd's sum of the gradients of an input with several readers.
        """
        kind, function, place = recorded.row.kind, recorded.row.function, recorded.origin.place
        is_inside = place > BEFORE
        default: Role = "replicated" if is_inside else ""
        if kind in _HOST_KINDS:
            return default
        part = self.inside if is_inside else self.outside
        role = part.roles.get(recorded.origin.call, default)
        if kind == "embedding" and role == "row" and function != "embedding":
            return "sharded"  # the gradient has the size of the rank's part of the table
        if role in ("column", "row") and kind not in _MATMULS:
            is_whole = (role == "column") == (function in _SUMS)
            return default if is_whole else "sharded"
        return role


def layout_of(chain: Chain | None, runs: Sequence[Recorder]) -> Layout | None:
    """Return the layout of a recorded step.

    None if no run has steps, if the blocks did not run one after the other, or if they are
    less than `LEAST_SHARE` of the model.
    """
    run = next((run for run in runs if run.steps), None)
    if chain is None or run is None or not run.steps:
        return None
    if not _ran_in_order(chain, run):
        return None
    by_place: defaultdict[int, dict[int, Step]] = defaultdict(dict)
    for call, step in run.steps.items():
        by_place[run.places[call]][call] = step
    inside = [
        divide_block(by_place[number], [hidden], [left], run.parameters)
        for (number, *_, hidden), left in zip(run.entered, run.left, strict=True)
    ]
    shapes = {value: tuple(parameter.shape) for value, parameter in run.parameters.items()}
    outside = divide_vocabulary(by_place[BEFORE] | by_place[AFTER], shapes)
    layout = Layout(chain, run, Division.together(inside), outside)
    return layout if _is_most(layout) else None


def _ran_in_order(chain: Chain, run: Recorder) -> bool:
    """Return True if each block ran once, in order, and not all on the same input.

    Modules that all get the same input, such as experts and parallel heads, are not a chain.
    """
    if [number for number, *_ in run.entered] != list(range(1, len(chain.modules) + 1)):
        return False
    if len(run.left) != len(run.entered) or len({shape for _, shape, _, _ in run.entered}) != 1:
        return False
    values = [value for *_, value in run.entered]
    return all(
        values[i + 1] == run.left[i] or values[i + 1] != values[i] for i in range(len(values) - 1)
    )


def _is_most(layout: Layout) -> bool:
    """Return True if the blocks have `LEAST_SHARE` of the parameters or of the forward FLOPs.

    The blocks outside the chain count too, and the vocabulary does not count. In Gemma 3 270M, its
    table has 63% of the parameters.
    """
    chain, run, outside = layout.chain, layout.run, layout.outside
    vocabulary = sum(
        share_of_memory(run.parameters[value]) for value in run.parameters.keys() & outside.divided
    )
    of_others = sum(share_of_memory(p) for block in chain.units for p in block.parameters())
    whole = run.parameter_count - vocabulary
    if chain.parameters * chain.length + of_others >= LEAST_SHARE * whole:
        return True
    matmuls = [r for r in run.recorded if r.phase == "forward" and r.row.kind in MATRIX_KINDS]
    ran = sum(r.row.flops for r in matmuls if r.origin.place > BEFORE)
    rest = [r for r in matmuls if r.origin.place <= BEFORE and r.origin.call not in outside.roles]
    others = sum(r.row.flops for r in rest if run.units[r.origin.call])
    inside = ran * chain.length / len(chain.modules) + others
    return inside > 0 and inside >= LEAST_SHARE * (inside - others + sum(r.row.flops for r in rest))


def blocks_of(
    layout: Layout, runs: Sequence[Recorder], steps: Sequence[Sequence[Recorded]]
) -> dict[str, Any] | None:
    """Return the fields of `Blocks` without those of rows. None if the calls differ.

    Args:
        layout: The blocks.
        runs: Recorders of one step at each batch size of `BATCHES`, or at only one.
        steps: The recorded steps of the whole chain, at the same batch sizes.
    """
    if any(run.places != runs[0].places for run in runs):
        return None
    pairs = zip(runs[:2], steps, strict=False)
    return _fixed_sizes(layout) | _affine([_bytes(layout, run, step) for run, step in pairs])


def _affine(sizes: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return {name: (constant, per sample)} of sizes at the first one or two of `BATCHES`."""
    first, *more = sizes
    fields = {}
    for name, size in first.items():
        slope = 0.0
        if more:
            slope = max((more[0][name] - size) / (BATCHES[1] - BATCHES[0]), 0.0)
        # the maximum over moments is convex in the batch size, so the constant may be negative
        fields[name] = (max(size - slope * BATCHES[0], 0.0), slope)
    return fields


def other_blocks_of(layout: Layout, runs: Sequence[Recorder]) -> dict[int, dict[str, Any]]:
    """Return {number of a group of equal blocks: fields of `OtherBlocks` without those of rows}.

    Args:
        layout: The blocks.
        runs: Recorders of one step at each batch size of `BATCHES`, or at only one.
    """
    groups, result = layout.groups, {}
    for n, (name, modules) in enumerate(layout.chain.others, 1):
        units = [unit for unit, group in groups.items() if group == n]
        if not units:
            continue
        calls = [call for call, unit in enumerate(runs[0].units) if unit in units]
        parameters = {id(p): share_of_memory(p) for block in modules for p in block.parameters()}
        result[n] = {
            "module": name,
            "count": len(units),
            "parameters": sum(parameters.values()) // len(modules),
            "is_after": runs[0].places[calls[0]] == AFTER,
            **_affine([_unit_bytes(run, units) for run in runs[:2]]),
        }
    return result


def _unit_bytes(run: Recorder, units: Sequence[int]) -> dict[str, float]:
    """Return {field of `OtherBlocks`: bytes} of equal blocks. Sizes are the mean of all blocks."""
    saved = sum(s.size for s in run.saved if s.call >= 0 and run.units[s.call] in units)
    working = 0.0
    for unit in units:
        last = len(run.units) - 1 - run.units[::-1].index(unit)
        up_to = sum(s.size for s in run.saved if s.call <= last)
        moments = [
            r.activation_bytes - r.set_aside_bytes - up_to
            for r in run.recorded
            if r.phase == "backward" and r.origin.call >= 0 and run.units[r.origin.call] == unit
        ]
        working = max([working, *moments])
    return {
        "left_bytes": sum(run.left_units[unit][0] for unit in units) / len(units),
        "saved_bytes": saved / len(units),
        "working_bytes": working,
    }


def _fixed_sizes(layout: Layout) -> dict[str, Any]:
    """Return the fields of `Blocks` that do not depend on the batch."""
    chain, run, ran = layout.chain, layout.run, len(layout.chain.modules)
    heads, key_value_heads = _heads(layout, run)
    numbers = {value: share_of_memory(parameter) for value, parameter in run.parameters.items()}
    owned = {id(parameter) for module in chain.modules for parameter in module.parameters()}
    elsewhere = {value for value, parameter in run.parameters.items() if id(parameter) not in owned}
    grouped = _grouped(run, range(1, ran + 1))
    of_experts = run.parameters_of({r.module for r in grouped})

    def count(values: Collection[int]) -> int:
        return sum(numbers[value] for value in values)

    return {
        "module": chain.name.rpartition(".")[0] or chain.name,
        "count": chain.length,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "parameters": chain.parameters,
        "tensor_parameters": count(numbers.keys() & (layout.inside.divided - of_experts)) // ran,
        "experts": int(grouped[0].row.dims[GEMM.batch]) if grouped else 0,
        "expert_parameters": count(of_experts) // ran,
        "outside_parameters": run.parameter_count - chain.length * chain.parameters,
        "outside_tensor_parameters": count(numbers.keys() & layout.outside.divided & elsewhere),
        "tied_parameters": _tied(run),
    }


def _bytes(layout: Layout, run: Recorder, step: Sequence[Recorded]) -> dict[str, float]:
    """Return {field of `Blocks`: bytes} at the run's batch size.

    They describe one block in the middle of the chain. If blocks alternate, sizes are the mean of a
    period, and working bytes are the maximum of the period.
    """
    period, chain = layout.chain.period, layout.chain
    first = len(chain.modules) // period // 2 * period + 1
    middle = range(first, first + period)
    placed = [(s, run.places[s.call] if s.call >= 0 else BEFORE) for s in run.saved]
    inside = [s for s, place in placed if place in middle]
    sizes = _saved_sizes(layout, inside)
    before, after = _size(placed, [BEFORE]), _size(placed, [AFTER])
    up_to = {n: before + _size(placed, range(1, n + 1)) for n in middle}
    in_all = sum(s.size for s in run.saved)
    in_all += (chain.length - len(chain.modules)) * sizes["saved_bytes"]
    ends = [r for r in step if r.origin.place == AFTER and r.phase != "optimizer"]
    return sizes | {
        "input_bytes": run.entered[first - 1][2],
        "working_bytes": _working(run, up_to),
        "outside_saved_bytes": before + after,
        "after_saved_bytes": after,
        "after_working_bytes": max([0.0, *(r.activation_bytes - in_all for r in ends)]),
        "dispatched_bytes": sum(_dispatched(run, one) for one in middle) / period,
    }


def _saved_sizes(layout: Layout, inside: Sequence[Storage]) -> dict[str, float]:
    """Return the bytes that one block saves, and the parts of them that certain calls create."""
    groups: dict[str, Container[int]] = {
        "saved_bytes": {s.call for s in inside},
        "sharded_saved_bytes": {c for c, r in layout.inside.roles.items() if r in _IN_PARTS},
        "attention_saved_bytes": layout.inside.core,
        "expert_saved_bytes": layout.inside.experts,
    }
    return {
        name: sum((s.size / layout.chain.period for s in inside if s.call in calls), 0.0)
        for name, calls in groups.items()
    }


def _size(placed: Iterable[tuple[Storage, int]], places: Container[int]) -> float:
    """Return the bytes of the storages that were created in some places."""
    return sum((storage.size for storage, place in placed if place in places), 0.0)


def _working(run: Recorder, saved: Mapping[int, float]) -> float:
    """Return the peak in these blocks' backward pass beyond the saved bytes.

    Args:
        run: The recorder of a step.
        saved: {block number: bytes saved for the backward pass up to this block}.
    """
    phase = "backward" if any(r.phase == "backward" for r in run.recorded) else "forward"
    moments = [r for r in run.recorded if r.phase == phase and r.origin.place in saved]
    beyond = (r.activation_bytes - r.set_aside_bytes - saved[r.origin.place] for r in moments)
    return max([0.0, *beyond])


def _grouped(run: Recorder, places: Container[int]) -> list[Recorded]:
    """Return the grouped matmuls of the forward pass in some blocks."""
    forward = (r for r in run.recorded if r.phase == "forward" and r.origin.place in places)
    return [r for r in forward if r.row.function == GROUPED]


def _dispatched(run: Recorder, place: int) -> float:
    """Return the bytes of the tokens that the first grouped matmul of a block reads."""
    for recorded in _grouped(run, [place])[:1]:
        sizes = recorded.row.dims
        width = 2.0 if recorded.row.half else 4.0
        return sizes[GEMM.batch] * sizes[GEMM.m] * sizes[GEMM.k] * width
    return 0.0


def _heads(layout: Layout, run: Recorder) -> tuple[int, int]:
    """Return (heads, key-value heads), from the sizes of attention and the matmuls that feed it.

    The width of queries, keys and values together is (heads + 2 x key-value heads) x head size.
    """
    forward = (r for r in run.recorded if r.origin.place == 1 and r.phase == "forward")
    first = [(r.row, r.origin.call) for r in forward]
    heads, size = _heads_and_size(layout, first)
    if not heads or not size:
        return heads, heads
    feeding = [row for row, call in first if call in layout.inside.attention_inputs]
    width = sum(int(row.dims[GEMM.n]) for row in feeding if row.kind == "gemm")
    key_value, rest = divmod(width - heads * size, 2 * size)
    fits = rest == 0 and key_value > 0 and heads % key_value == 0
    return heads, key_value if fits else heads


def _heads_and_size(layout: Layout, first: Sequence[tuple[Row, int]]) -> tuple[int, int]:
    """Return (heads, head size) from the rows of the first block. Unknown numbers are 0."""
    for row, _ in first:
        if row.kind == "attention":
            return int(row.dims[ATTENTION.heads]), int(row.dims[ATTENTION.head_size])
    core = [row for row, call in first if row.kind == "gemm" and call in layout.inside.core]
    return _stated_heads(layout.chain.modules[0]), int(core[0].dims[GEMM.k]) if core else 0


def _stated_heads(block: nn.Module) -> int:
    """Return the number of heads in the attributes or configuration of a block, or 0.

    The sizes of unfused attention do not tell it, because its batch dim may also hold windows.
    """
    for module in block.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead"):
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return 0


def _tied(run: Recorder) -> int:
    """Return the number of elements of the parameters used both before and after the blocks."""
    assert run.steps is not None
    used: dict[int, set[int]] = {BEFORE: set(), AFTER: set()}
    for call, step in run.steps.items():
        if run.places[call] in used:
            used[run.places[call]] |= {value for value, _ in step.inputs}
    both = used[BEFORE] & used[AFTER] & run.parameters.keys()
    return sum(run.parameters[value].numel() for value in both)


KEPT = 5
"""Number of blocks, or periods of alternating blocks, that run in a shortened chain.

They are the first four and the last. The recording of the second is repeated. The blocks after it
show that all blocks record the same.
"""
SHORTEST_CUT = 8
"""Minimum number of blocks, or periods, in a chain to shorten it."""
_NUMBERED_BY = frozenset(
    """
    layer_idx layer_id layer_index layer_number block_idx block_index idx index depth_index
    """.split()
)
"""Attributes that hold the number of a block, so they differ between equal blocks."""
_SETTINGS = (bool, int, float, str, type(None))


def _in_turns(chain: Chain) -> Chain:
    """Return the chain with the period in which the settings of its blocks repeat.

    Layers of equal shapes may differ in settings, such as alternating local and global attention.
    """
    settings = [_settings(block) for block in chain.modules]
    for n in PERIODS:
        divides = chain.length % n == 0 and n % chain.period == 0 and 2 * n <= chain.length
        if divides and settings[n:] == settings[:-n]:
            return chain._replace(period=n)
    return chain


def shortened(model: nn.Module, chain: Chain) -> Chain:
    """Return the chain with only a few blocks to run.

    A chain that is short, or whose blocks have different settings, is returned unchanged.
    """
    parent, period = model.get_submodule(chain.name.rpartition(".")[0]), chain.period
    if chain.length < SHORTEST_CUT * period or not isinstance(
        parent, nn.ModuleList | nn.Sequential
    ):
        return chain
    settings = [_settings(block) for block in chain.modules]
    if settings[period:] != settings[:-period]:
        return chain
    return chain._replace(modules=(*chain.modules[: (KEPT - 1) * period], *chain.modules[-period:]))


def _settings(block: nn.Module) -> list[tuple[Any, ...]]:
    """Return (name, class, settings) of every module in a block.

    Settings are the attributes that are numbers, booleans, strings or None.
    """
    found = []
    for name, module in block.named_modules():
        settings = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, _SETTINGS) and key not in _NUMBERED_BY
        )
        found.append((name, type(module), settings))
    return found


@contextlib.contextmanager
def only_these_blocks(model: nn.Module, chain: Chain | None) -> Iterator[None]:
    """Remove the blocks that do not run from the model, until the context ends."""
    if chain is None or chain.is_whole:
        yield
        return
    parent = model.get_submodule(chain.name.rpartition(".")[0])
    every = parent._modules
    names = list(every)
    start = next(i for i, module in enumerate(every.values()) if module is chain.modules[0])
    left = (
        names[: start + len(chain.modules) - chain.period]
        + names[start + chain.length - chain.period :]
    )
    # a ModuleList looks its modules up by number, so the remaining ones are renumbered
    numbered = all(name.isdigit() for name in names)
    parent._modules = {str(i) if numbered else name: every[name] for i, name in enumerate(left)}
    try:
        yield
    finally:
        parent._modules = every


def idle_parameters(model: nn.Module, chain: Chain) -> list[nn.Parameter]:
    """Return the parameters of blocks that do not run. Call it outside `only_these_blocks`."""
    if chain.is_whole:
        return []
    with only_these_blocks(model, chain):
        running = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in running]


def repeated(run: Recorder, chain: Chain | None) -> list[Recorded] | None:
    """Return the rows that a step of the whole chain would have recorded.

    None if the blocks that ran recorded different operators.
    """
    recorded = run.recorded
    if chain is None or chain.is_whole:
        return recorded
    entered = [hidden for *_, hidden in run.entered]
    if len(entered) != len(chain.modules) or entered[1:] != run.left[:-1]:
        # the modules are not a chain: each one must run on the result of the one before
        return None
    begins: defaultdict[tuple[str, int], int] = defaultdict(lambda: -1)
    for i in reversed(range(len(recorded))):
        begins[recorded[i].phase, recorded[i].origin.place] = i
    forward = [begins["forward", n * chain.period + 1] for n in (1, 2, 3)]
    backward = [begins["backward", n * chain.period] for n in (4, 3, 2)]
    trained = any(one.phase == "backward" for one in recorded)
    if not _alike(recorded, *forward) or (trained and not _alike(recorded, *backward)):
        return None
    return _stretched(run, chain, forward, backward if trained else None)


def _stretched(
    run: Recorder, chain: Chain, forward: Sequence[int], backward: Sequence[int] | None
) -> list[Recorded]:
    """Return the rows of the whole chain, with the rows of one block (or period) repeated.

    Args:
        run: The recorder of the shortened chain.
        chain: The shortened chain.
        forward: Indices of the rows at which the second, third and fourth block (or period) begin
            in the forward pass.
        backward: Indices of the rows at which the fourth, third and second begin in the backward
            pass. None without a backward pass.
    """
    recorded, period = run.recorded, chain.period
    times = (chain.length - len(chain.modules)) // period
    start, begin_next = forward[:2]
    grown = _growth(recorded, start, begin_next)
    saved = sum(
        s.size for s in run.saved if s.call >= 0 and period < run.places[s.call] <= 2 * period
    )
    result = recorded[:begin_next] + _copies(recorded[start:begin_next], times, grown)
    end = len(recorded) if backward is None else backward[1]
    for one in recorded[begin_next:end]:
        # in the backward pass only saved bytes remain: casts of weights die with the forward pass
        result.append(_moved(one, times, grown if one.phase == "forward" else (0.0, saved)))
    if backward is None:
        return result
    shrunk = _growth(recorded, *backward[:2])
    base = [_moved(one, times, (0.0, saved)) for one in recorded[backward[0] : end]]
    result += _copies(base, times, shrunk)
    left = (shrunk[0], saved + shrunk[1])
    return result + [
        one if one.phase == "optimizer" else _moved(one, times, left) for one in recorded[end:]
    ]


def _alike(recorded: Sequence[Recorded], a: int, b: int, c: int) -> bool:
    """Return True if rows a to b equal rows b to c, and memory grows equally during both."""
    if not 0 <= a < b < c:
        return False
    if [one.row for one in recorded[a:b]] != [one.row for one in recorded[b:c]]:
        return False
    return _growth(recorded, a, b) == _growth(recorded, b, c)


def _growth(recorded: Sequence[Recorded], a: int, b: int) -> tuple[float, float]:
    """Return the growth of (gradients, activations) from row a to row b, in bytes."""
    return (
        recorded[b].gradient_bytes - recorded[a].gradient_bytes,
        recorded[b].activation_bytes - recorded[a].activation_bytes,
    )


def _moved(one: Recorded, times: int, growth: tuple[float, float]) -> Recorded:
    """Return a row with `times` the growth in memory added."""
    gradients = one.gradient_bytes + times * growth[0]
    activations = one.activation_bytes + times * growth[1]
    # dataclasses.replace is several times slower, and Llama-405B has 100,000 rows
    return Recorded(
        one.row, one.phase, one.module, one.origin, gradients, activations, one.set_aside_bytes
    )


def _copies(stretch: Sequence[Recorded], times: int, growth: tuple[float, float]) -> list[Recorded]:
    return [_moved(one, i, growth) for i in range(1, times + 1) for one in stretch]
