"""The repeated blocks of a model: how to find, shorten, repeat and divide them.

[tensor_roles] What tensor parallelism does to each operator, from how values flow between products with weights.

In every branch of a block the last product with a weight before the branch joins the residual stream is divided by its
inputs ("row"); the products that feed it are divided by their outputs ("column"; Shoeybi et al. 2019,
arXiv:1909.08053). What lies between the two is "sharded", the rest "replicated": also a product further up (low-rank
projections of queries, the first of three layers), a product that nothing feeds (a gate, an expert router), and every
convolution. A fused projection of queries, keys and values is one column product; parallel attention and MLP are two
branches that join together.

[blocks] A model's repeated blocks: the longest chain of alike modules, and what runs and is kept in one of them.

The second is read from recorded steps and gives `Blocks`.

[repeats] A long chain of alike blocks: a few of them run, and what was recorded of one is repeated for the rest.

Llama-405B has 126 layers that do the same; five of them tell all. The chain is shortened only where its blocks have the same
modules with the same settings, and the recording is repeated only where the blocks that ran did the same: one that does
something else in every sixth layer runs whole, unless there are so many layers that a few times six tell all.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from trainpace.workload.recorder import (
    AFTER,
    BEFORE,
    Origin,
    Recorded,
    Recorder,
    Step,
    share_of_memory,
)
from trainpace.workload.recording import BlockSizes
from trainpace.workload.workload import ATTENTION, GEMM, GROUPED, MATRIX_KINDS, Role

# --- tensor_roles
_JOINS = frozenset({"add", "add_", "sub", "sub_"})


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


# --- blocks
SHORTEST = 4
"""Alike blocks that make a chain. ResNet-50's longest stage has 5 of them, and fails for its share of the model."""

PERIODS = (1, 2, 3, 4, 6, 8)
"""After how many blocks of a list they may be alike again: Llama 4 Maverick has experts in every second layer, Jamba attention in
every eighth."""

LEAST_SHARE = 0.5
"""The share of the model's parameters, or of its forward FLOPs, that blocks must hold to be worth cutting along."""
_HOST_KINDS = frozenset({"view", "module"})
_PRODUCTS = frozenset({"gemm", "embedding"})
_SUMS = frozenset({"add", "add_"})


class Chain(NamedTuple):
    """Consecutive children of the same classes, whose parameters have the same names and shapes, in order.

    modules: the first of them, which run. length: of the whole chain. period: after how many of them they are alike again, where
    dense layers and layers of experts, say, take turns.
    """

    name: str
    modules: tuple[nn.Module, ...]
    length: int
    period: int = 1

    @property
    def parameters(self) -> int:
        """Of one block; the mean of those that take turns."""
        return (
            sum(
                share_of_memory(p)
                for block in self.modules[: self.period]
                for p in block.parameters()
            )
            // self.period
        )


def longest_chain(model: nn.Module) -> Chain | None:
    """The chain that holds the most parameters, the longer of two that hold as many; None without one of SHORTEST."""

    def form(child: nn.Module) -> tuple[object, ...]:
        return type(child), *((name, p.shape) for name, p in child.named_parameters())

    chains = []
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if len(children) < SHORTEST:
            continue
        forms, names, modules = (
            [form(child) for child in children.values()],
            list(children),
            tuple(children.values()),
        )
        in_turn = PERIODS if isinstance(parent, nn.ModuleList) else (1,)
        for start, end, period in (run for n in in_turn for run in _runs(forms, n)):
            chains.append(
                Chain(f"{name}.{names[start]}".strip("."), modules[start:end], end - start, period)
            )
    chains = [chain for chain in chains if len(chain.modules) >= SHORTEST and chain.parameters]
    return max(chains, key=lambda c: (c.parameters * c.length, c.length, -c.period), default=None)


def _runs(forms: Sequence[object], period: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, period) of the stretches that repeat with a period and with no shorter one, at least twice, and as often as
    they do so as a whole."""
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
    """A chain that ran as one, and the division of the calls inside and outside of it."""

    chain: Chain
    inside: Division
    outside: Division

    def role(self, kind: str, function: str, origin: Origin) -> Role:
        """The role of one row. Of a divided product's calls only the products themselves are "column" or "row".

        Its bias' gradient is a sum over what it wrote; autograd adds the gradients of what it read where that has
        other readers too.
        """
        is_inside = origin.place > BEFORE
        if kind in _HOST_KINDS:
            return "replicated" if is_inside else ""
        roles = self.inside.roles if is_inside else self.outside.roles
        role = roles.get(origin.call, "replicated" if is_inside else "")
        if kind == "embedding" and role == "row" and function != "embedding":
            return "sharded"  # a table's gradient is as large as the rank's part of it
        if role in ("column", "row") and kind not in _PRODUCTS:
            is_whole = (role == "column") == (function in _SUMS)
            role = "replicated" if is_whole else "sharded"
        return "" if role == "replicated" and not is_inside else role


def layout_of(chain: Chain | None, run: Recorder) -> Layout | None:
    """The layout of a recorded step; None where the blocks did not run one after the other, or are a small part."""
    if (
        chain is None
        or run.steps is None
        or not _ran_in_order(chain, run)
        or not _is_most(chain, run)
    ):
        return None
    by_place: dict[int, dict[int, Step]] = {}
    for call, step in run.steps.items():
        by_place.setdefault(run.places[call], {})[call] = step
    inside = [
        divide_block(by_place.get(number, {}), [hidden], [run.left[number - 1]], run.parameters)
        for number, *_, hidden in run.entered
    ]
    shapes = {value: tuple(parameter.shape) for value, parameter in run.parameters.items()}
    outside = {call: step for call, step in run.steps.items() if run.places[call] <= BEFORE}
    together = Division(
        {call: role for part in inside for call, role in part.roles.items()},
        set().union(*(part.divided for part in inside)),
        set().union(*(part.core for part in inside)),
        set().union(*(part.attention_inputs for part in inside)),
        set().union(*(part.experts for part in inside)),
    )
    return Layout(chain, together, divide_vocabulary(outside, shapes))


def _ran_in_order(chain: Chain, run: Recorder) -> bool:
    """Each block once, in order, and on what another one returned: experts and parallel heads all get the same input."""
    if [number for number, *_ in run.entered] != list(range(1, len(chain.modules) + 1)):
        return False
    if len(run.left) != len(run.entered) or len({shape for _, shape, _, _ in run.entered}) != 1:
        return False
    values = [value for *_, value in run.entered]
    return all(
        values[i + 1] == run.left[i] or values[i + 1] != values[i] for i in range(len(values) - 1)
    )


def _is_most(chain: Chain, run: Recorder) -> bool:
    if chain.parameters * chain.length >= LEAST_SHARE * run.parameter_count:
        return True
    products = [r for r in run.recorded if r.phase == "forward" and r.row.kind in MATRIX_KINDS]
    outside = sum(r.row.flops for r in products if r.origin.place <= BEFORE)
    inside = (
        sum(r.row.flops for r in products if r.origin.place > BEFORE)
        * chain.length
        / len(chain.modules)
    )
    return inside > 0 and inside >= LEAST_SHARE * (inside + outside)


def blocks_of(
    layout: Layout, runs: Sequence[Recorder], steps: Sequence[Sequence[Recorded]]
) -> BlockSizes | None:
    """What is kept of the blocks, or None where the runs differ in their calls.

    runs: recorded at BATCHES. steps: the same of the whole chain.
    """
    if any(run.places != runs[0].places for run in runs):
        return None
    described = next(run for run in runs if run.steps is not None)
    pairs = [_bytes(layout, run, step) for run, step in zip(runs[:2], steps, strict=False)]
    sizes, working, after_working = (np.stack(both) for both in zip(*pairs, strict=True))
    heads, key_value_heads = _heads(layout, described)
    count, ran = layout.chain.length, len(layout.chain.modules)
    numbers = {
        value: share_of_memory(parameter) for value, parameter in described.parameters.items()
    }
    owned = {id(parameter) for module in layout.chain.modules for parameter in module.parameters()}
    elsewhere = {
        value for value, parameter in described.parameters.items() if id(parameter) not in owned
    }
    grouped = [r for place in range(1, ran + 1) for r in _grouped(described, place)]
    of_experts = described.parameters_of({r.module for r in grouped})
    fixed: dict[str, int | str] = {
        "module": layout.chain.name.rpartition(".")[0] or layout.chain.name,
        "count": count,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "parameters": layout.chain.parameters,
        "tensor_parameters": (
            sum(numbers[value] for value in numbers.keys() & (layout.inside.divided - of_experts))
            // ran
        ),
        "experts": int(grouped[0].row.dims[GEMM.batch]) if grouped else 0,
        "expert_parameters": sum(numbers[value] for value in of_experts) // ran,
        "outside_parameters": described.parameter_count - count * layout.chain.parameters,
        "outside_tensor_parameters": sum(
            n for value, n in numbers.items() if value in layout.outside.divided & elsewhere
        ),
        "tied_parameters": _tied(described),
    }
    return BlockSizes(fixed=fixed, sizes=sizes, working=working, after_working=after_working)


def _bytes(
    layout: Layout, run: Recorder, step: Sequence[Recorded]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The figures named in `BLOCK_BYTES`, at the run's batch size, of a block in the middle of the chain; and what is alive
    at each moment in which it works, and after the blocks, of which the most counts. Where blocks take turns, the mean of a
    period there, and the moments of all of it."""
    period = layout.chain.period
    first = len(layout.chain.modules) // period // 2 * period + 1
    middle = range(first, first + period)
    saved = sharded = attention = before = after = of_experts = 0.0
    up_to = dict.fromkeys(middle, 0.0)
    for storage in run.saved:
        call, size = storage.call, storage.size
        place = run.places[call] if call >= 0 else BEFORE
        if place == BEFORE:
            before += size
        elif place == AFTER:
            after += size
        if place in middle:
            saved += size / period
            sharded += (
                size / period * (layout.inside.roles.get(call) in ("column", "sharded", "expert"))
            )
            of_experts += size / period * (call in layout.inside.experts)
            attention += size / period * (call in layout.inside.core)
        for one in middle:
            up_to[one] += size * (BEFORE < place <= one)
    repeats = layout.chain.length - len(layout.chain.modules)
    saved_in_all = sum(storage.size for storage in run.saved) + repeats * saved
    phase = "backward" if any(r.phase == "backward" for r in run.recorded) else "forward"
    working = [
        r.activation_bytes - r.set_aside_bytes - before - up_to[r.origin.place]
        for r in run.recorded
        if r.origin.place in middle and r.phase == phase
    ]
    after_working = [
        r.activation_bytes - saved_in_all
        for r in step
        if r.origin.place == AFTER and r.phase != "optimizer"
    ]
    dispatched = sum(_dispatched(run, one) for one in middle) / period
    entered = run.entered[first - 1][2]
    sizes = [
        entered,
        saved,
        sharded,
        attention,
        0.0,
        before + after,
        after,
        0.0,
        dispatched,
        of_experts,
    ]
    return np.array(sizes), np.array(working), np.array(after_working)


def _grouped(run: Recorder, place: int) -> list[Recorded]:
    """The grouped products of one block's forward pass."""
    return [
        r
        for r in run.recorded
        if r.row.function == GROUPED and r.phase == "forward" and r.origin.place == place
    ]


def _dispatched(run: Recorder, place: int) -> float:
    """Bytes of what the first of a block's grouped products reads, its weights aside."""
    for recorded in _grouped(run, place)[:1]:
        sizes = recorded.row.dims
        return (
            sizes[GEMM.batch] * sizes[GEMM.m] * sizes[GEMM.k] * (2.0 if recorded.row.half else 4.0)
        )
    return 0.0


def _heads(layout: Layout, run: Recorder) -> tuple[int, int]:
    """(heads, key-value heads): from the sizes of attention, and from what the products that feed it write.

    Queries, keys and values together are (heads + 2 x key-value heads) x head dim wide.
    """
    assert run.steps is not None
    first = [
        (r.row, r.origin.call) for r in run.recorded if r.origin.place == 1 and r.phase == "forward"
    ]
    attention = [row for row, _ in first if row.kind == "attention"]
    products = [(row, call) for row, call in first if row.kind == "gemm"]
    width = sum(
        int(row.dims[GEMM.n]) for row, call in products if call in layout.inside.attention_inputs
    )
    if attention:
        heads, head_dim = (
            int(attention[0].dims[at]) for at in (ATTENTION.heads, ATTENTION.head_size)
        )
    else:
        heads = _stated_heads(layout.chain.modules[0])
        core = [row for row, call in products if call in layout.inside.core]
        if not heads or not core:
            return heads, heads
        head_dim = int(core[0].dims[GEMM.k])
    key_value, rest = divmod(width - heads * head_dim, 2 * head_dim) if head_dim else (0, 1)
    return (
        (heads, key_value)
        if rest == 0 and 1 <= key_value <= heads and heads % key_value == 0
        else (heads, heads)
    )


def _stated_heads(block: nn.Module) -> int:
    """Heads of attention that is not fused: its products' batch holds windows too, so the module is asked."""
    for module in block.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead"):
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return 0


def _tied(run: Recorder) -> int:
    """Numbers in parameters that are used both before and after the blocks."""
    assert run.steps is not None
    used: dict[int, set[int]] = {BEFORE: set(), AFTER: set()}
    for call, step in run.steps.items():
        if run.places[call] in used:
            used[run.places[call]] |= {value for value, _ in step.inputs}
    both = used[BEFORE] & used[AFTER] & run.parameters.keys()
    return sum(run.parameters[value].numel() for value in both)


# --- repeats
KEPT = 5
"""Blocks that run, the first ones and the last: the second is repeated, and those after it show that it may be. Periods of blocks
that take turns, where they do."""
SHORTEST_CUT = 8
"""A chain of fewer blocks runs whole."""
_NUMBERED_BY = frozenset(
    "layer_idx layer_id layer_index layer_number block_idx block_index idx index depth_index".split()
)
"""Attributes that number a block, and so differ from one to the next."""
_SETTINGS = (bool, int, float, str, type(None))


def in_turns(chain: Chain) -> Chain:
    """The chain with the period of its blocks' settings: layers of the same shapes may attend to a window and to all tokens in
    turn. Where no period divides it, it stays as it is."""
    settings = [_settings(block) for block in chain.modules]
    periods = (
        n
        for n in PERIODS
        if chain.length % n == 0 and n % chain.period == 0 and 2 * n <= chain.length
    )
    return next((chain._replace(period=n) for n in periods if settings[n:] == settings[:-n]), chain)


def shortened(model: nn.Module, chain: Chain) -> Chain:
    """The chain with a few blocks to run, or as it is where the others may do something else."""
    parent, period = model.get_submodule(chain.name.rpartition(".")[0]), chain.period
    listed = isinstance(parent, nn.ModuleList | nn.Sequential)
    settings = [_settings(block) for block in chain.modules]
    if (
        chain.length < SHORTEST_CUT * period
        or not listed
        or settings[period:] != settings[:-period]
    ):
        return chain
    return chain._replace(modules=(*chain.modules[: (KEPT - 1) * period], *chain.modules[-period:]))


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """Every module inside with what it was told that is a number, a flag or a word."""
    found = []
    for name, module in block.named_modules():
        told = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
        found.append(
            (
                name,
                type(module),
                tuple(item for item in sorted(told.items()) if item[0] not in _NUMBERED_BY),
            )
        )
    return tuple(found)


@contextlib.contextmanager
def only_these_blocks(model: nn.Module, chain: Chain | None) -> Iterator[None]:
    """Take the blocks that do not run out of the model."""
    if chain is None or len(chain.modules) == chain.length:
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
    numbered = all(name.isdigit() for name in names)  # which a list looks its modules up by
    parent._modules = {str(i) if numbered else name: every[name] for i, name in enumerate(left)}
    try:
        yield
    finally:
        parent._modules = every


def idle_parameters(model: nn.Module, chain: Chain) -> list[nn.Parameter]:
    """The parameters of the blocks that do not run. Call it outside of `only_these_blocks`."""
    if len(chain.modules) == chain.length:
        return []
    with only_these_blocks(model, chain):
        running = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in running]


def repeated(run: Recorder, chain: Chain | None) -> list[Recorded] | None:
    """What a step of the whole chain would have recorded; None where the blocks that ran did not do the same."""
    recorded = run.recorded
    if chain is None or len(chain.modules) == chain.length:
        return recorded
    entered = [hidden for *_, hidden in run.entered]
    if len(entered) != len(chain.modules) or entered[1:] != run.left[:-1]:
        return None  # modules beside each other may be as many as something else has parts
    period = chain.period
    times = (chain.length - len(chain.modules)) // period
    first: dict[tuple[str, int], int] = {}
    for i, one in enumerate(recorded):
        first.setdefault((one.phase, one.origin.place), i)
    forward = [first.get(("forward", n * period + 1), -1) for n in (1, 2, 3)]
    backward = [first.get(("backward", n * period), -1) for n in (4, 3, 2)]
    trained = any(one.phase == "backward" for one in recorded)
    stretches = [forward, backward] if trained else [forward]
    if not all(_alike(recorded, *stretch) for stretch in stretches):
        return None
    grown = _growth(recorded, *forward[:2])
    saved = sum(
        s.size for s in run.saved if s.call >= 0 and period < run.places[s.call] <= 2 * period
    )
    result = recorded[: forward[1]]
    result += _copies(recorded[forward[0] : forward[1]], times, grown)
    end = backward[1] if trained else len(recorded)
    for one in recorded[forward[1] : end]:
        # a cast of a weight lives until the forward pass ends, and is no part of what is saved
        result.append(_moved(one, times, grown if one.phase == "forward" else (0.0, saved)))
    if not trained:
        return result
    shrunk = _growth(recorded, *backward[:2])
    base = [_moved(one, times, (0.0, saved)) for one in recorded[backward[0] : backward[1]]]
    result += _copies(base, times, shrunk)
    left = (shrunk[0], saved + shrunk[1])
    return result + [
        one if one.phase == "optimizer" else _moved(one, times, left)
        for one in recorded[backward[1] :]
    ]


def _alike(recorded: Sequence[Recorded], a: int, b: int, c: int) -> bool:
    """Whether two stretches that follow each other hold the same rows, and as many bytes more at their ends."""
    if not 0 <= a < b < c or [one.row for one in recorded[a:b]] != [
        one.row for one in recorded[b:c]
    ]:
        return False
    return _growth(recorded, a, b) == _growth(recorded, b, c)


def _growth(recorded: Sequence[Recorded], a: int, b: int) -> tuple[float, float]:
    """Bytes of gradients and of activations by which a stretch grows what is alive."""
    return (
        recorded[b].gradient_bytes - recorded[a].gradient_bytes,
        recorded[b].activation_bytes - recorded[a].activation_bytes,
    )


def _moved(one: Recorded, times: int, growth: tuple[float, float]) -> Recorded:
    gradients, activations = (
        one.gradient_bytes + times * growth[0],
        one.activation_bytes + times * growth[1],
    )
    # said in full: dataclasses.replace takes several times as long, and Llama-405B has 100,000 of them
    return Recorded(
        one.row, one.phase, one.module, one.origin, gradients, activations, one.set_aside_bytes
    )


def _copies(stretch: Sequence[Recorded], times: int, growth: tuple[float, float]) -> list[Recorded]:
    return [_moved(one, i, growth) for i in range(1, times + 1) for one in stretch]
