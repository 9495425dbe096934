"""The legal executions, as columns: a mesh of devices times batches times everything that is independent of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.errors import TrainpaceError
from trainpace.execution import Checkpointing, Execution, Precision
from trainpace.forecast import divisors
from trainpace.hardware import Cluster, Device
from trainpace.plan.knobs import KNOB_NAMES
from trainpace.records import Record
from trainpace.workload import MATRIX_KINDS, Blocks, Workload, form_of

MOST_MICRO_BATCHES = 24
"""Micro-batches tried at most, of the divisors of a rank's share; the largest and the present one are among them."""
LEAST_TOKENS_A_RANK = 2048
"""Context parallelism is for long sequences: below this its exchange costs more than it divides."""
LARGEST_VIRTUAL = 8
GLOBAL_BATCH_FACTORS = (1, 2, 4, 8)
STEPS_DOWN = ("fp32", "tf32", "amp_bf16", "amp_fp16")
"""Precisions in which the same weights are trained; storage in 16 bits is never chosen for the user."""


class Freedom(Record):
    """What the search may touch: `keep` names knobs (see KNOB_NAMES) that stay as they are."""

    keep: tuple[str, ...] = ()
    allow_global_batch: bool = False
    allow_fp8: bool = False

    def __post_init__(self) -> None:
        for name in self.keep:
            if name not in KNOB_NAMES:
                raise TrainpaceError(f"{name!r} is nothing that could be kept.", f"Known: {', '.join(KNOB_NAMES)}.")

    def may(self, knob: str) -> bool:
        """Is this knob free?"""
        return knob not in self.keep


class Space(NamedTuple):
    """Columns of equal length, one a field of Execution that varies."""

    base: Execution
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["micro_batch"])

    def execution(self, row: int) -> Execution:
        """One row as an Execution. Raises Contradiction where it is illegal."""
        return replace(self.base, **{name: column[row].item() for name, column in self.columns.items()})

    def rows(self, wanted: NDArray[Any]) -> Space:
        """Some of the rows."""
        return Space(self.base, {name: column[wanted] for name, column in self.columns.items()})

    def data_parallel_size(self) -> NDArray[np.int64]:
        """The data-parallel size of every row."""
        c = self.columns
        ranks: NDArray[np.int64] = c["nnodes"] * c["nproc_per_node"] // (c["tp"] * c["pp"] * c["cp"])
        return ranks


def space_of(
    workload: Workload, start: Execution, cluster: Cluster, freedom: Freedom, global_batch: int | None = None
) -> Space:
    """Every legal execution on the cluster or on a part of it, with `global_batch` samples an update: those of `start`, if not
    said, or a multiple where `freedom` allows it. The start is among them. Which of them fit, and how fast they are, is
    not asked here."""
    blocks = _blocks(workload)
    batch = global_batch or start.global_batch
    meshes = list(_meshes(workload, start, cluster, freedom, blocks))
    batched = np.array([(*mesh, *b) for mesh in meshes for b in _batches(start, mesh, freedom, batch)], dtype=np.int64)
    other = list(_other(workload, start, cluster.device, freedom, blocks))
    if not len(batched):
        raise TrainpaceError(
            f"a global batch of {batch} cannot be divided over any part of these devices.",
            "Give a global batch that is a multiple of the number of GPUs.",
        )
    n, m = len(batched), len(other)
    columns = {name: np.repeat(batched[:, i], m) for i, name in enumerate((*MESH, "micro_batch", "accumulation"))}
    for i, name in enumerate(OTHER):
        columns[name] = np.tile(np.array([row[i] for row in other]), n)
    columns["pipeline_schedule"] = np.where(
        columns["virtual_stages"] > 1, "interleaved",
        "1f1b" if start.pipeline_schedule == "interleaved" else start.pipeline_schedule,
    )  # fmt: skip
    space = Space(start, columns)
    return space.rows(_legal(space))


MESH = ("nnodes", "nproc_per_node", "tp", "pp", "cp", "virtual_stages")
OTHER = ("precision", "zero_stage", "activation_checkpointing", "offload_optimizer", "offload_parameters",
         "sequence_parallel", "compile", "channels_last", "reshard_after_forward", "async_tensor_parallel")  # fmt: skip


def is_legal(execution: Execution, start: Execution) -> bool:
    """Would one execution be in a space of `start`, as far as its fields have to go together?"""
    columns = {name: np.array([getattr(execution, name)]) for name in (*MESH, *OTHER, "micro_batch", "accumulation")}
    return bool(_legal(Space(start, columns))[0])


def _legal(space: Space) -> NDArray[np.bool_]:
    c, start, ranks = space.columns, space.base, space.data_parallel_size()
    sharded = c["zero_stage"] > 0
    legal = ~sharded | (ranks > 1) | (c["zero_stage"] == start.zero_stage)
    legal &= ~c["offload_optimizer"] | (c["zero_stage"] >= 1) | (ranks == 1)
    legal &= ~c["offload_parameters"] | (c["zero_stage"] == 3)
    legal &= ~c["sequence_parallel"] | (c["tp"] > 1)
    # torch splits products to hide their exchange in compiled code, along the sequence
    legal &= ~c["async_tensor_parallel"] | (c["sequence_parallel"] & c["compile"])
    legal &= (c["zero_stage"] == 3) | (c["reshard_after_forward"] == start.reshard_after_forward)
    legal &= (c["virtual_stages"] == 1) | (c["accumulation"] % c["pp"] == 0)
    if start.shard_size is not None:
        legal &= ranks % start.shard_size == 0
    result: NDArray[np.bool_] = legal
    return result


def _meshes(
    workload: Workload, start: Execution, cluster: Cluster, freedom: Freedom, blocks: Blocks | None
) -> Iterator[tuple[int, ...]]:
    """(nnodes, nproc_per_node, tp, pp, cp, virtual_stages)."""
    shapes = {(start.nnodes, start.nproc_per_node)}
    if freedom.may("GPUs"):
        most_nodes, most = cluster.nodes, cluster.devices_per_node
        shapes |= {(n, most) for n in _powers(most_nodes)} | {(1, k) for k in _powers(most)}
    now = (start.tp, start.pp, start.cp, start.virtual_stages)
    layouts: set[tuple[int, ...]] = {now}
    if blocks is not None and freedom.may("model parallelism"):
        layouts |= set(_layouts(workload, blocks, max(k for _, k in shapes)))
    for (nodes, processes), layout in product(sorted(shapes), sorted(layouts)):
        if nodes * processes % (layout[0] * layout[1] * layout[2]) == 0:
            yield nodes, processes, *layout


def _layouts(workload: Workload, blocks: Blocks, devices_per_node: int) -> Iterator[tuple[int, ...]]:
    """(tp, pp, cp, virtual_stages). Tensor parallelism stays inside a node: its exchange is never hidden."""
    heads = max(1, blocks.heads)
    groups = blocks.key_value_heads or heads
    tensor = [t for t in divisors(devices_per_node) if heads % t == 0 and (groups % t == 0 or t % groups == 0)]
    context = [1]
    if workload.sequence_length:
        context = [c for c in (1, 2, 4, 8) if c == 1 or workload.sequence_length >= c * LEAST_TOKENS_A_RANK]
    for tp, pp, cp in product(tensor, divisors(blocks.count), context):
        for virtual in divisors(blocks.count // pp) if pp > 1 else [1]:
            if virtual <= LARGEST_VIRTUAL:
                yield tp, pp, cp, virtual


def _batches(start: Execution, mesh: tuple[int, ...], freedom: Freedom, batch: int) -> Iterator[tuple[int, int]]:
    """(micro_batch, accumulation) of one mesh."""
    nodes, processes, tp, pp, cp, _ = mesh
    ranks = nodes * processes // (tp * pp * cp)
    for factor in GLOBAL_BATCH_FACTORS if freedom.allow_global_batch else (1,):
        share, rest = divmod(batch * factor, ranks)
        if rest:
            continue
        sizes = divisors(share)
        if not freedom.may("micro-batch"):
            sizes = [size for size in sizes if size == start.micro_batch]
        if len(sizes) > MOST_MICRO_BATCHES:
            spread = {sizes[i] for i in np.linspace(0, len(sizes) - 1, MOST_MICRO_BATCHES).astype(int)}
            sizes = sorted(spread | ({start.micro_batch} & set(sizes)))
        for size in sizes:
            yield size, share // size


def _other(
    workload: Workload, start: Execution, device: Device, freedom: Freedom, blocks: Blocks | None
) -> Iterator[tuple[Any, ...]]:
    """Rows of OTHER."""

    def values(knob: str, now: Any, others: Iterable[Any]) -> list[Any]:
        return [now, *(v for v in others if v != now)] if freedom.may(knob) else [now]

    kinds = {kind for form in workload.forms.values() for kind in form.operators.kind}
    recomputed: Sequence[Checkpointing] = (
        ("none", "selective", "full") if blocks is not None and not workload.checkpointed else ()
    )
    stored = (start.offload_optimizer, start.offload_parameters)
    return (
        (precision, zero, recompute, *offloaded, along_sequence, compiled, channels_last, reshards, splits)
        for precision, zero, recompute, offloaded, along_sequence, compiled, channels_last, reshards, splits in product(
            values("precision", start.precision, precisions(workload, start, freedom, device)),
            values("sharding", start.zero_stage, (0, 1, 2, 3)),
            values("checkpointing", start.activation_checkpointing, recomputed),
            values("offload", stored, ((False, False), (True, False), (True, True))),
            values("model parallelism", start.sequence_parallel, (False, True) if blocks is not None else ()),
            values("compile", start.compile, (True,)),
            values("memory format", start.channels_last, (True,) if kinds & CONVOLUTIONS else ()),
            values("sharding", start.reshard_after_forward, (True, False)),
            values("model parallelism", start.async_tensor_parallel, (False, True) if blocks is not None else ()),
        )
    )  # fmt: skip


CONVOLUTIONS = {kind for kind in MATRIX_KINDS if kind.startswith("conv")}


def precisions(workload: Workload, start: Execution, freedom: Freedom, device: Device) -> list[Precision]:
    """Steps down from the present precision that the workload was traced for. FP8 only where it is allowed."""
    allowed: list[Precision] = [start.precision]
    if start.precision in STEPS_DOWN:
        first = min(STEPS_DOWN.index(start.precision), STEPS_DOWN.index("amp_bf16"))
        allowed += [p for p in STEPS_DOWN[first:] if p not in allowed]  # type: ignore[misc]
    if freedom.allow_fp8 and "fp8" not in allowed:
        allowed.append("fp8")
    if device.tf32_tensor_tflops is None and start.precision != "tf32":  # where torch computes it in fp32
        allowed = [p for p in allowed if p != "tf32"]
    return [p for p in allowed if form_of(p) in workload.forms]


def _blocks(workload: Workload) -> Blocks | None:
    return next((form.blocks for form in workload.forms.values() if form.blocks is not None), None)


def _powers(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
