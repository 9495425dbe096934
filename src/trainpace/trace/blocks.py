"""A model's repeated blocks: the longest chain of alike modules, and what runs and is kept in one of them.

The second is read from recorded steps and gives `Blocks`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import nn

from trainpace.trace.recorder import AFTER, BEFORE, Origin, Recorded, Recorder, share_of_memory
from trainpace.trace.roles import Division, Step, divide_block, divide_vocabulary
from trainpace.workload import ATTENTION, GEMM, GROUPED, MATRIX_KINDS, Blocks, Role

SHORTEST = 4
"""Alike blocks that make a chain. ResNet-50's longest stage has 5 of them, and fails for its share of the model."""

LEAST_SHARE = 0.5
"""The share of the model's parameters, or of its forward FLOPs, that blocks must hold to be worth cutting along."""
_BYTES = (
    "input_bytes", "saved_bytes", "sharded_saved_bytes", "attention_saved_bytes", "working_bytes", "outside_saved_bytes",
    "after_saved_bytes", "after_working_bytes", "dispatched_bytes", "expert_saved_bytes",
)  # fmt: skip
_HOST_KINDS = frozenset({"view", "module"})
_PRODUCTS = frozenset({"gemm", "embedding"})
_SUMS = frozenset({"add", "add_"})


class Chain(NamedTuple):
    """Consecutive children of one class whose parameters have the same names and shapes, in order.

    modules: the first of them, which run. length: of the whole chain.
    """

    name: str
    modules: tuple[nn.Module, ...]
    length: int

    @property
    def parameters(self) -> int:
        return sum(map(share_of_memory, self.modules[0].parameters()))


def longest_chain(model: nn.Module) -> Chain | None:
    """The chain that holds the most parameters, the longer of two that hold as many; None without one of SHORTEST.

    Modules that alternate between two classes or shapes (dense and expert layers in turn) are no chain.
    """

    def form(child: tuple[str, nn.Module]) -> tuple[object, ...]:
        return type(child[1]), *((name, p.shape) for name, p in child[1].named_parameters())

    parents = [(name, parent) for name, parent in model.named_modules() if len(list(parent.children())) >= SHORTEST]
    runs = [(name, list(run)) for name, parent in parents for _, run in groupby(parent.named_children(), key=form)]
    chains = [
        Chain(f"{name}.{run[0][0]}".strip("."), tuple(module for _, module in run), len(run)) for name, run in runs
    ]
    chains = [chain for chain in chains if len(chain.modules) >= SHORTEST and chain.parameters]
    return max(chains, key=lambda c: (c.parameters * c.length, c.length), default=None)


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
    if chain is None or run.steps is None or not _ran_in_order(chain, run) or not _is_most(chain, run):
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
    return all(values[i + 1] == run.left[i] or values[i + 1] != values[i] for i in range(len(values) - 1))


def _is_most(chain: Chain, run: Recorder) -> bool:
    if chain.parameters * chain.length >= LEAST_SHARE * run.parameter_count:
        return True
    products = [r for r in run.recorded if r.phase == "forward" and r.row.kind in MATRIX_KINDS]
    outside = sum(r.row.flops for r in products if r.origin.place <= BEFORE)
    inside = sum(r.row.flops for r in products if r.origin.place > BEFORE) * chain.length / len(chain.modules)
    return inside > 0 and inside >= LEAST_SHARE * (inside + outside)


def blocks_of(
    layout: Layout, runs: Sequence[Recorder], steps: Sequence[Sequence[Recorded]], batches: Sequence[int],
    inside: Sequence[bool], roles: Sequence[Role], counts: np.ndarray,
) -> Blocks | None:  # fmt: skip
    """The record, or None where the runs differ in their calls.

    runs: recorded at `batches`, the first two of which give the coefficients. steps: the same of the whole chain. inside, roles,
    counts: one for each row of the operator table.
    """
    if any(run.places != runs[0].places for run in runs):
        return None
    described = next(run for run in runs if run.steps is not None)
    sizes = [_bytes(layout, run, step) for run, step in zip(runs[:2], steps, strict=False)]
    # a maximum over moments is convex in the batch size, so that its line may cross zero
    slope = np.maximum((sizes[1] - sizes[0]) / (batches[1] - batches[0]), 0.0)
    constant = np.maximum(sizes[0] - slope * batches[0], 0.0)
    pairs = [(float(c), float(s)) for c, s in zip(constant, slope, strict=True)]
    heads, key_value_heads = _heads(layout, described)
    count, ran = layout.chain.length, len(layout.chain.modules)
    numbers = {value: share_of_memory(parameter) for value, parameter in described.parameters.items()}
    grouped = [r for place in range(1, ran + 1) for r in _grouped(described, place)]
    of_experts = described.parameters_of({r.module for r in grouped})
    return Blocks(
        module=layout.chain.name.rpartition(".")[0] or layout.chain.name,
        count=count, heads=heads, key_value_heads=key_value_heads, parameters=layout.chain.parameters,
        tensor_parameters=sum(numbers[value] for value in numbers.keys() & (layout.inside.divided - of_experts)) // ran,
        experts=int(grouped[0].row.dims[GEMM.batch]) if grouped else 0,
        expert_parameters=sum(numbers[value] for value in of_experts) // ran,
        outside_parameters=described.parameter_count - count * layout.chain.parameters,
        outside_tensor_parameters=sum(n for value, n in numbers.items() if value in layout.outside.divided),
        tied_parameters=_tied(described), operator_counts=np.where(inside, counts, 0), roles=tuple(roles),
        **dict(zip(_BYTES, pairs, strict=True)),
    )  # fmt: skip


def _bytes(layout: Layout, run: Recorder, step: Sequence[Recorded]) -> np.ndarray:
    """The figures named in `_BYTES`, at the run's batch size, of a block in the middle of the chain."""
    middle = len(layout.chain.modules) // 2 + 1
    saved = sharded = attention = before = after = up_to_here = of_experts = 0.0
    for storage in run.saved:
        call, size = storage.call, storage.size
        place = run.places[call] if call >= 0 else BEFORE
        if place == BEFORE:
            before += size
        elif place == AFTER:
            after += size
        if place == middle:
            saved += size
            sharded += size * (layout.inside.roles.get(call) in ("column", "sharded", "expert"))
            of_experts += size * (call in layout.inside.experts)
            attention += size * (call in layout.inside.core)
        up_to_here += size * (BEFORE < place <= middle)
    repeats = layout.chain.length - len(layout.chain.modules)
    saved_in_all = sum(storage.size for storage in run.saved) + repeats * saved
    phase = "backward" if any(r.phase == "backward" for r in run.recorded) else "forward"
    working = after_working = 0.0
    for r in run.recorded:
        if r.origin.place == middle and r.phase == phase:
            working = max(working, r.activation_bytes - r.set_aside_bytes - before - up_to_here)
    for r in step:
        if r.origin.place == AFTER and r.phase != "optimizer":
            after_working = max(after_working, r.activation_bytes - saved_in_all)
    entered = run.entered[middle - 1][2]
    outside = before + after, after, after_working
    return np.array([entered, saved, sharded, attention, working, *outside, _dispatched(run, middle), of_experts])


def _grouped(run: Recorder, place: int) -> list[Recorded]:
    """The grouped products of one block's forward pass."""
    return [r for r in run.recorded if r.row.function == GROUPED and r.phase == "forward" and r.origin.place == place]


def _dispatched(run: Recorder, place: int) -> float:
    """Bytes of what the first of a block's grouped products reads, its weights aside."""
    for recorded in _grouped(run, place)[:1]:
        sizes = recorded.row.dims
        return sizes[GEMM.batch] * sizes[GEMM.m] * sizes[GEMM.k] * (2.0 if recorded.row.half else 4.0)
    return 0.0


def _heads(layout: Layout, run: Recorder) -> tuple[int, int]:
    """(heads, key-value heads): from the sizes of attention, and from what the products that feed it write.

    Queries, keys and values together are (heads + 2 x key-value heads) x head dim wide.
    """
    assert run.steps is not None
    first = [(r.row, r.origin.call) for r in run.recorded if r.origin.place == 1 and r.phase == "forward"]
    attention = [row for row, _ in first if row.kind == "attention"]
    products = [(row, call) for row, call in first if row.kind == "gemm"]
    width = sum(int(row.dims[GEMM.n]) for row, call in products if call in layout.inside.attention_inputs)
    if attention:
        heads, head_dim = (int(attention[0].dims[at]) for at in (ATTENTION.heads, ATTENTION.head_size))
    else:
        heads = _stated_heads(layout.chain.modules[0])
        core = [row for row, call in products if call in layout.inside.core]
        if not heads or not core:
            return heads, heads
        head_dim = int(core[0].dims[GEMM.k])
    key_value, rest = divmod(width - heads * head_dim, 2 * head_dim) if head_dim else (0, 1)
    return (heads, key_value) if rest == 0 and 1 <= key_value <= heads and heads % key_value == 0 else (heads, heads)


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
