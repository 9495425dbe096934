"""A model's repeated blocks: the longest chain of alike modules, and what runs and is kept in one of them.

The second is read from recorded steps and gives `Blocks`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import nn

from trainpace.workload.recorded_operators import BlockSizes
from trainpace.workload.recorder import AFTER, BEFORE, Origin, Recorded, Recorder, share_of_memory
from trainpace.workload.tensor_roles import Division, Step, divide_block, divide_vocabulary
from trainpace.workload.workload import ATTENTION, GEMM, GROUPED, MATRIX_KINDS, Role

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
