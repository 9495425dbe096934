"""The exchanges of ranks in a step, and the part of them that no computation hides.

Gradients are reduced in buckets while the backward pass goes on; ZeRO scatters them, and gathers parameters after the
step, FSDP block by block ahead of each pass. Tensor parallelism exchanges a hidden state twice in each block and pass, and
computation waits for it (Shoeybi et al. 2019); context parallelism passes keys and values round while attention computes (Liu et
al. 2023); pipelines send hidden states on. The time of each is in `collectives`. Arrays are n, or n x 3 by kind of
stage (`grid.Stages`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trainpace.execution import Engine
from trainpace.forecast.collectives import PCIE_EFFICIENCY, Collective, collective_ms, pcie_gb_per_s
from trainpace.forecast.grid import Grid, Groups, Stages
from trainpace.hardware import Cluster
from trainpace.workload import Blocks, Flags, Floats, Mode, Operators

BUCKET_BYTES = 25 * 2**20
"""torch DDP's default bucket_cap_mb."""
FIRST_BUCKET_BYTES = 2**20
"""torch DDP's _DEFAULT_FIRST_BUCKET_BYTES."""
OVERLAP = 0.9
"""Share of a pass under which exchanges can hide."""
CONTENTION = 0.25
"""Cost of a hidden exchange as a share of its time: it takes SMs and memory bandwidth from computation. Lee et al. 2025
(arXiv:2507.03114) see computation slow by 19 % on average, 40 % at most, where the two overlap."""
ASYNC_HIDDEN = 0.5
"""Share of the exchanges of tensor parallelism that asynchronous tensor parallelism hides, by cutting products and
exchanging piece by piece (torchtitan's runs of Llama on 8 ranks gain 8 to 10 %, PyTorch's blog of 2024)."""
DATA_PARALLEL_COPY_SHARE = 1.2
"""nn.DataParallel copies parameters out and gradients back over PCIe in every step, through one device."""

KINDS = ("data_parallel", "parameters", "tensor_parallel", "context_parallel", "pipeline", "offload")
"""Kinds of exposed exchanges: gradients; parameters (FSDP, ZeRO); tensor, context and pipeline parallelism; host memory."""


class MissingLink(Exception):
    """A link figure that is not known; carries the reason. Never leaves this room."""


class Links(NamedTuple):
    """A cluster's collectives, with a missing figure as an exception."""

    cluster: Cluster

    def ms(self, collective: Collective, payload: ArrayLike, ranks: ArrayLike, inside: ArrayLike) -> Floats:
        """`collective_ms`; nothing to send needs no link."""
        payload, ranks = np.asarray(payload), np.asarray(ranks)
        ranks = np.where(payload > 0, ranks, 1)
        if (ranks <= 1).all():
            return np.zeros(np.broadcast_shapes(payload.shape, ranks.shape))
        answer = collective_ms(collective, payload, ranks, inside, self.cluster)
        if isinstance(answer, str):
            raise MissingLink(answer)
        return answer


def exposed(total: Floats, bare: Floats, window: Floats) -> Floats:
    """The exposed part of exchanges of `total`, of which `bare` overlaps with nothing, under a pass of `window`; all in ms."""
    hidden = np.minimum(np.maximum(total - bare, 0.0), OVERLAP * window)
    return total - (1 - CONTENTION) * hidden


class PassExchanges(NamedTuple):
    """Milliseconds a micro-batch by kind of stage (n x 3), nothing hidden yet."""

    tensor: Floats
    context: Floats
    pipeline: Floats


def micro_batch_exchanges(
    grid: Grid, groups: Groups, blocks: Blocks | None, stages: Stages, row_products: float, recomputes: Flags,
    attention_ms: Floats, mode: Mode, links: Links,
) -> PassExchanges:  # fmt: skip
    """Exposed exchanges of one micro-batch's forward and backward pass together, or in inference of the forward pass alone.
    `recomputes`: which executions repeat the forward pass of their blocks. `row_products`: of a block; each is
    followed by a sum over the tensor-parallel ranks, as is the column products' backward. `attention_ms`: of a block."""
    zero = np.zeros(stages.blocks.shape)
    if blocks is None:
        return PassExchanges(zero, zero, zero)
    hidden_bytes = (blocks.input_bytes[0] + blocks.input_bytes[1] * grid.micro_batch) / grid.cp
    passes = np.where(recomputes, 2.0, 1.0), 0.0 if mode == "inference" else 1.0
    tensor = _tensor(grid, groups, hidden_bytes, stages, row_products, passes, links)
    context = _context(grid, groups, blocks, hidden_bytes, attention_ms, passes, links)[:, None] * stages.blocks
    # tensor-parallel ranks send a part each, and gather it where it arrives unless sequence parallelism keeps it divided
    # (Narayanan et al. 2021, section 4.1)
    sends = links.ms("send", hidden_bytes / grid.tp * (grid.pp > 1), 2, groups.pipeline_inside)
    whole = np.where((grid.pp > 1) & ~grid.sequence_parallel, hidden_bytes, 0.0)
    sends = sends + links.ms("all_gather", whole, grid.tp, groups.tensor_inside)
    # inner stages receive and send in both passes, the ends do half of that
    boundaries = np.stack([np.ones_like(sends), np.full_like(sends, 2.0), np.ones_like(sends)], axis=1)
    inner = (grid.virtual_stages > 1)[:, None]  # the ends pass on to each other, from one virtual stage to the next
    boundaries = np.where(inner, 2.0, boundaries) * (stages.number > 0)
    if mode == "inference":
        boundaries = np.minimum(boundaries, 1.0)
    # a send and the receive of the other direction go at the same time
    return PassExchanges(tensor, context, boundaries * (sends * grid.virtual_stages)[:, None])


def _tensor(
    grid: Grid, groups: Groups, hidden_bytes: Floats, stages: Stages, row_products: float, passes: tuple[Floats, float],
    links: Links,
) -> Floats:  # fmt: skip
    """Sums of hidden states; sequence parallelism scatters and gathers them instead, which counts as the same here. Its
    backward pass gathers a column's input once more, under a product (Korthikanti et al. 2022). `passes`: how often forward,
    which recomputing repeats, and how often backward."""
    if (grid.tp == 1).all():
        return np.zeros(stages.blocks.shape)
    ranks, inside = grid.tp, groups.tensor_inside
    one = links.ms("all_reduce", hidden_bytes, ranks, inside)
    forward, backward = passes
    each = one * (forward + backward) * row_products
    each = np.where(grid.async_tensor_parallel, each * (1 - ASYNC_HIDDEN), each)
    # the vocabulary's ends: a sum after the embedding, another in the head's backward pass
    ends = (stages.has_first + stages.has_last * backward) * one[:, None]
    return stages.blocks * each[:, None] + ends


def _context(
    grid: Grid, groups: Groups, blocks: Blocks, hidden_bytes: Floats, attention_ms: Floats, passes: tuple[Floats, float],
    links: Links,
) -> Floats:  # fmt: skip
    """Keys and values go round once forward; backward they go round again with their gradients. `passes` as in `_tensor`."""
    if (grid.cp == 1).all():
        return np.zeros(len(grid.cp))
    share = blocks.key_value_heads / blocks.heads if blocks.heads and blocks.key_value_heads else 1.0
    pair = 2 * share * hidden_bytes * grid.cp / grid.tp
    ring = links.ms("all_gather", pair, grid.cp, groups.context_inside)
    forward, backward = passes
    result = forward * exposed(ring, ring / grid.cp, attention_ms)
    result = result + backward * exposed(2 * ring, 2 * ring / grid.cp, 2.5 * attention_ms)
    return np.where(grid.cp > 1, result, 0.0)


class StepExchanges(NamedTuple):
    """Exposed milliseconds a step by kind of stage (n x 3)."""

    data_parallel: Floats
    parameters: Floats
    offload: Floats


def step_exchanges(
    grid: Grid, groups: Groups, stages: Stages, gradient_bytes: Floats, parameter_bytes: Floats, forward_ms: Floats,
    backward_ms: Floats, engine: Engine, mode: Mode, links: Links,
) -> StepExchanges:  # fmt: skip
    """Gradients and parameters between data-parallel ranks, and between devices and hosts.

    `gradient_bytes`, `parameter_bytes`: what a stage's rank holds in one piece (n x 3), in the format that is exchanged.
    `forward_ms`, `backward_ms`: a micro-batch's passes. Replicated gradients are reduced in the last micro-batch's
    backward pass (no_sync), sharded ones in every one's. FSDP's units are the blocks and the rest; a model without blocks is
    one unit, which hides nothing.
    """
    stage, m = grid.zero_stage[:, None], grid.accumulation[:, None].astype(np.float64)
    data, shard, replicas = (a[:, None] for a in (groups.data, groups.shard, groups.replicas))
    hides = 0.0 if engine == "unoverlapped" else 1.0
    ahead_window, window = hides * forward_ms, hides * backward_ms
    fully = stage >= 3
    units = np.where(fully, stages.blocks + 1, np.maximum(1.0, np.ceil(gradient_bytes / BUCKET_BYTES)))
    bucket = gradient_bytes / units
    summed = links.ms("all_reduce", np.where(stage == 0, bucket, 0.0), data, groups.data_inside[:, None])
    scattered = links.ms("reduce_scatter", np.where(stage >= 1, bucket, 0.0), shard, groups.shard_inside[:, None])
    between = np.where((stage >= 1) & (replicas > 1), bucket / shard, 0.0)
    scattered = scattered + links.ms("all_reduce", between, replicas, groups.replicas_inside[:, None])
    reduced = summed + scattered
    collected = grid.collects_gradients[:, None]
    times = np.where((stage >= 2) & ~collected, m, 1.0)
    pieces = np.where(fully, stages.blocks + 1, np.maximum(1.0, np.ceil(parameter_bytes / BUCKET_BYTES)))
    gather = links.ms(
        "all_gather", np.where(stage >= 1, parameter_bytes / pieces, 0.0), shard, groups.shard_inside[:, None]
    )
    again = grid.reshard_after_forward[:, None] & fully & (mode != "inference")
    ahead = exposed(pieces * gather, gather, ahead_window)
    # gradients that are collected are scattered after the last backward pass, with nothing to hide under
    afterwards = np.where(collected, units * reduced, 0.0)
    reduced = np.where(collected, 0.0, reduced)
    both = units * reduced + np.where(again, pieces * gather, 0.0)
    # one bucket is two: a small first one, so that the link has work early, and the rest
    early = np.where(
        (stage == 0) & (units == 1), FIRST_BUCKET_BYTES / np.maximum(gradient_bytes, FIRST_BUCKET_BYTES), 0.0
    )
    bare = reduced * np.where(gradient_bytes > FIRST_BUCKET_BYTES, 1 - early, 1.0)
    behind = exposed(both, bare + np.where(again, gather, 0.0), window)
    gathered_backward = np.where(again, behind * pieces * gather / np.maximum(both, 1e-12), 0.0)
    after_step = pieces * gather * (mode == "train")  # ZeRO 1 and 2
    if engine == "megatron_core":
        after_step = exposed(after_step, gather * (mode == "train"), ahead_window)
    parameters = np.where(fully, np.where(collected, 1.0, m) * ahead + m * gathered_backward, after_step)
    offload = _to_hosts(grid, groups, gradient_bytes, parameter_bytes, forward_ms, window, mode, links.cluster)
    return StepExchanges(times * (behind - gathered_backward) + afterwards, parameters, offload)


PINNED_SHARE = 0.8
"""Share of PCIe's bandwidth that copies from and to pinned memory reach (12 to 13 of 15.75 GB/s in CUDA's bandwidthTest,
generation 3)."""


def _to_hosts(
    grid: Grid, groups: Groups, gradient_bytes: Floats, parameter_bytes: Floats, forward_ms: Floats, backward_ms: Floats,
    mode: Mode, cluster: Cluster,
) -> Floats:  # fmt: skip
    """Offloading over PCIe: gradients out under every backward pass, updated parameters back after the step (Ren et al. 2021,
    ZeRO-Offload); offloaded parameters in ahead of both passes (Rajbhandari et al. 2021, ZeRO-Infinity)."""
    if not (grid.offload_optimizer | grid.offload_parameters).any():
        return np.zeros_like(gradient_bytes)
    per_ms = pcie_gb_per_s(cluster) * PINNED_SHARE * 1e6
    held = np.where(grid.zero_stage >= 1, groups.shard, 1)[:, None]
    out, back = gradient_bytes / held / per_ms, parameter_bytes / held / per_ms
    m = grid.accumulation[:, None]
    nothing = np.zeros_like(back)
    times = np.where((grid.zero_stage[:, None] >= 1) & ~grid.collects_gradients[:, None], m, 1)
    updated = np.where(grid.offload_parameters[:, None], 0.0, back)
    states = times * exposed(out, nothing, backward_ms) + (updated if mode == "train" else 0.0)
    passes = exposed(back, nothing, forward_ms)
    if mode != "inference":
        passes = passes + exposed(back, nothing, backward_ms)
    away = grid.offload_optimizer[:, None] & (mode != "inference")
    return np.where(away, states, 0.0) + np.where(grid.offload_parameters[:, None], m * passes, 0.0)


def data_parallel_ms(grid: Grid, gradient_bytes: Floats, parameter_bytes: Floats, cluster: Cluster) -> Floats:
    """nn.DataParallel's copies of parameters and gradients in a step: with every micro-batch anew."""
    per_ms = pcie_gb_per_s(cluster) * 1e6 * PCIE_EFFICIENCY
    ranks = np.maximum(grid.data_parallel_size, 1)
    return grid.accumulation * (
        DATA_PARALLEL_COPY_SHARE * (ranks - 1) / ranks * (parameter_bytes + gradient_bytes) / per_ms
    )


def row_products(operators: Operators, blocks: Blocks | None) -> float:
    """Products with a row-parallel weight in a block's forward pass: each is followed by a sum over the ranks."""
    if blocks is None:
        return 0.0
    rows = (
        (np.array(operators.kind) == "gemm")
        & (np.array(operators.phase) == "forward")
        & (np.array(blocks.roles) == "row")
    )
    return float(blocks.operator_counts[rows].sum()) / blocks.count
