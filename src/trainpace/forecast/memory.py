"""Peak memory of one rank during a step, from the replayed trace.

The trace gives the memory of an unsharded step at several moments. Sharding scales it. Parameters,
gradients and optimizer states scale with the rank's share of the parameters. Activations scale with
the bytes that the rank's blocks keep, divided by those that all blocks keep without sharding
(Korthikanti et al. 2022), times the micro-batches in flight (Narayanan et al. 2021).

In the trace, gradients and states have the dtype of their parameters, as in plain torch. Training
in 16 bits on one device or with DDP therefore keeps 2 + 2 + 4 bytes per parameter with Adam.
Engines that shard also keep fp32 master weights and fp32 states. The table shows the bytes per
parameter with Adam and 16-bit weights on d data-parallel ranks, as weights + gradients + states:

| sharded by | bytes | source |
|---|---|---|
| nothing, DDP | 2 + 2 + 4 | torch.optim: states have their parameters' dtype |
| tensor or pipeline parallel | 2 + 4 + 12 | Korthikanti et al. 2022, figure 1 |
| the same with ZeRO 1 or 2, bf16 | 2 + 4 + 12/d | Megatron Core: 6 + 12/d |
| the same with ZeRO 1 or 2, fp16 | 2 + 2 + 12/d, 4 + 18/d in the update | Megatron Core: 4 + 16/d |
| ZeRO 1 or 2 alone | 2 + 2 + 12/d, 4 + 18/d in the update | DeepSpeed's stage_1_and_2.py |
| FSDP | 4/d + 4/d + 8/d, gathered blocks besides | FSDP2 shards the fp32 parameters |
| FSDP, `pure_16_bit` | 2/d + 2/d + 4/d, gathered blocks besides | fms-acceleration's runs, to 4% |

DeepSpeed's update flattens its share of the 16-bit gradients and makes an fp32 copy of it. Both
need 6/d bytes during the update. DeepSpeed's pipelines in bf16 keep both 16-bit and fp32 gradients
(bf16_optimizer.py), which is 2 bytes more than in the table. From ZeRO 2 on, a rank keeps only the
gradients of its shard. Training in fp32 or with autocast needs 4 + 4 + 8 bytes in every case,
before they are divided among ranks.

Shapes: n is the number of executions. Arrays have shape (n,), or (n, 3) with one column per kind of
pipeline stage: first, middle and last (see `grid.Stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from trainpace.core.execution import Execution
from trainpace.core.outcome import FITS_AT, Memory
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.grid import Grid, Groups, Stages, groups_of, has_vocabulary_head, stages_of
from trainpace.forecast.ranks import gives_up_attention, kept_bytes
from trainpace.forecast.rewrites import PLAIN_COPIES, logits_bytes
from trainpace.workload import Blocks, Counts, Flags, Floats, Operators, TracedForm

RESERVED_FACTOR = 1.18
"""Ratio of reserved to allocated memory if the device has room.

torch's caching allocator does not return memory, including cuDNN's trial workspaces. In ResNet-50
runs in NVIDIA's containers, the monitor shows 1.14 to 1.32 times the forecast of allocated memory,
context included.
"""
FRAGMENTATION = 1.06
"""Ratio of reserved to allocated memory if memory is short.

Segments of 2 and 20 MiB stay partly empty. By this rule, 770 of 781 timm runs that fitted into 24
GB fit. The other models use other normalization layers today than when they were measured.
"""
CONTEXT_GIB = 0.45
"""Memory of the CUDA context with cuBLAS and cuDNN loaded.

It is 0.3 to 0.6 GiB from Pascal to Hopper. A CPU has no context.
"""
COMMUNICATOR_GIB = 0.25
"""Memory of NCCL's buffers per communicator. torch's allocator does not count it.

A connection has 4 MiB for the Simple protocol, 4.7 MiB for LL128 and 0.5 MiB for LL (NCCL's
DEFAULT_BUFFSIZE and others in src/include/comm.h). A ring and a tree make about three connections
per channel, which is 28 MiB. There are 2 channels over PCIe and about 8 over several network cards.
"""
INSIDE_COMMUNICATOR_GIB = 0.65
"""Memory of NCCL's buffers for a tensor-parallel group in a node with NVSwitch.

NCCL uses 24 channels there on A100.
"""

NEED_SD = 0.13
"""Standard deviation of log(needed memory / forecast memory) in eager mode.

It is the maximum-likelihood value for 50 measured peaks and 19 runs that fitted or ran out of
memory, from six models (benchmarks/results/memory.md). Five other models have 0.065.
"""
COMPILED_NEED_SD = 0.18
"""Standard deviation of log(needed memory / forecast memory) with torch.compile.

torch.compile recomputes some activations that the trace keeps. The value comes from 77 runs of
three models. Two other models have 0.31, and always need less than forecast.
"""
MOST_SAMPLES = 2**24
"""Largest micro-batch that the search for the largest one tries."""
MOST_BETWEEN = 10
"""Number of micro-batches that the search for the largest one tries at once."""
FIT_MARGIN = 0.97
"""Usable share of the card's memory. The driver, the display and fragmentation need the rest."""
FITS_SD = NormalDist().inv_cdf(FITS_AT)
"""Distance between forecast and usable memory at which a training fits, in standard deviations."""
OFFLOAD_BUCKET = 5e8
"""Number of gradients that wait for their copy to the host.

This is DeepSpeed's default reduce_bucket_size.
"""
MOST_FRONTS = 4096
"""Number of cached values: `Front` by micro-batch, and the largest micro-batch by execution."""
Front = tuple[tuple[float, float], ...]
"""Moments of a step that can be its peak, as pairs of gradient and activation bytes."""
UPDATE_COPIES = 3.0
"""Memory of gradient copies during an update, relative to a shard's 16-bit gradients.

There is a flat 16-bit copy, and an fp32 copy that is twice as large.
"""
COMPILED_COPIES = 2.0
"""Number of tensors of the logits' size under torch.compile: the logits and their gradient.

The compiled loss keeps no log-softmax. For nanochat's d20 at 32 samples, the forecast is then 77
GiB. Six of its published reports have 73.7 GiB.
"""
GATHERED_BLOCKS = 2.0
"""Number of blocks whose parameters FSDP holds gathered: the current one and the prefetched one."""


class RankMemory(NamedTuple):
    """Memory of the fullest rank in GiB, as arrays of shape (n,).

    The fields are those of `Memory`, plus `paged_gib`: optimizer states that CUDA pages to the host
    if the device is full. No other field includes them.
    """

    parameters_gib: Floats
    gradients_gib: Floats
    optimizer_states_gib: Floats
    activations_gib: Floats
    allocated_gib: Floats
    reserved_gib: Floats
    device_gib: Floats
    paged_gib: Floats
    logits_gib: Floats

    def record(self, i: int) -> Memory:
        return Memory(**{name: float(getattr(self, name)[i]) for name in Memory.__struct_fields__})


class _Lasting(NamedTuple):
    """Memory of each kind of stage that lasts over the whole step. Arrays have shape (n, 3).

    Attributes:
        groups: Process groups of the executions.
        stages: Pipeline stages of the executions.
        held: Share of the model's parameters in the stage.
        shard: Number of ranks over which sharded states are divided.
        width: Factors on the bytes of the trace.
        parameters: Bytes of parameters, without those that FSDP gathers temporarily.
        states: Bytes of optimizer states and fp32 master weights.
    """

    groups: Groups
    stages: Stages
    held: Floats
    shard: Floats
    width: Widths
    parameters: Floats
    states: Floats


class Widths(NamedTuple):
    """Factors on the bytes of the trace, each of shape (n, 1), before division among ranks.

    A factor of 2 means, for example, that fp32 values replace the 16-bit values of the trace.

    Attributes:
        shards: Factor on parameter bytes, for the shards of FSDP.
        gathered: Factor on parameter bytes, for parameters that FSDP has gathered.
        states: Factor on the bytes of optimizer states.
        masters: Factor on parameter bytes, for master weights. They count as optimizer states.
        gradients: Factor on gradient bytes.
        update: Factor on parameter bytes, for temporary copies during the update.
    """

    shards: Floats
    gathered: Floats
    states: Floats
    masters: Floats
    gradients: Floats
    update: Floats


def widths(grid: Grid, half: bool, trains: bool, wide_states: bool = False) -> Widths:
    """Return the factors on the bytes of the trace for every execution.

    Args:
        grid: The executions.
        half: True if the weights of the trace have 16 bits.
        trains: True if the trace has an optimizer.
        wide_states: True if the dtype of the optimizer states does not depend on the parameters'.
    """
    stage, pure = grid.zero_stage[:, None], grid.pure_16_bit[:, None]
    one, zero = np.ones(stage.shape), np.zeros(stage.shape)
    keeps_fp32 = trains & half & ((stage > 0) | grid.is_megatron[:, None]) & ~pure
    masters = keeps_fp32 & (stage < 3)
    zero_12 = masters & (stage > 0)
    unsharded = masters & (stage == 0)
    wide = unsharded | (half & ~pure & (grid.fp32_gradients[:, None] | (stage >= 3)))
    return Widths(
        shards=np.where(keeps_fp32 & (stage >= 3) & ~grid.offload_optimizer[:, None], 2.0, one),
        gathered=np.where(grid.casts_shards[:, None], 0.5, one),
        states=np.where(keeps_fp32 & (not wide_states), 2.0, one),
        masters=np.where(masters, 2.0, zero),
        gradients=np.where(wide, 2.0, one),
        update=np.where(zero_12 & ~wide & ~grid.offload_optimizer[:, None], UPDATE_COPIES, zero),
    )


class MemoryModel:
    """Memory model of one traced form of a workload.

    Args:
        form: The traced form.
        half: True if the weights of the trace have 16 bits.
        checkpointed: True if the trace already recomputes activations.
        wide_states: True if the dtype of the optimizer states does not depend on the parameters'.
        adapted: True if the trained parameters are already in fp32, as with adapters.
        saves_as_eager: True for an old torch.compile, which saves what eager mode saves.
    """

    def __init__(
        self,
        form: TracedForm,
        half: bool,
        checkpointed: bool = False,
        wide_states: bool = False,
        adapted: bool = False,
        saves_as_eager: bool = False,
    ) -> None:
        self.form, self.half, self.checkpointed = form, half, checkpointed
        self.wide_states, self.adapted = wide_states, adapted
        self.saves_as_eager = saves_as_eager
        # A file with only whole numbers is read as an integer array.
        peaks = form.memory.peaks.astype(np.float64)
        updates = peaks[:, 2] == 0
        self._updates = _upper_hull(peaks[updates], 0.0)
        self._front = lru_cache(MOST_FRONTS)(partial(_upper_hull, peaks[~updates]))
        self.largest_micro_batch = lru_cache(MOST_FRONTS)(self._largest_micro_batch)

    def least_gib(self, grid: Grid) -> Floats:
        """Return the GiB of parameters and states on the fullest stage, shape (n,).

        This is a lower bound of the peak.
        """
        lasting = self._lasting(grid)
        return np.asarray((lasting.parameters + lasting.states).max(axis=1) / BYTES_PER_GIB)

    def _lasting(self, grid: Grid) -> _Lasting:
        memory, trains = self.form.memory, "optimizer" in self.form.operators.phase
        trained_bytes = memory.parameter_bytes - memory.frozen_bytes
        groups, (stages, total) = groups_of(grid, 1), stages_of(grid, self.form.blocks)
        held = np.where(stages.number > 0, stages.parameters, 0.0) / max(total, 1.0)
        stage, shard = grid.zero_stage[:, None], stages.shard(groups)
        width = widths(grid, self.half and not self.adapted, trains, self.wide_states)
        states = held * (width.states * memory.optimizer_bytes + width.masters * trained_bytes)
        states = np.where(stage >= 1, states / shard, states) * ~grid.offload_optimizer[:, None]
        whole = held * memory.parameter_bytes
        sharded = held * (trained_bytes * width.shards + memory.frozen_bytes) / shard
        parameters = np.where(stage >= 3, sharded * ~grid.offload_parameters[:, None], whole)
        return _Lasting(groups, stages, held, shard, width, parameters, states)

    def at(self, grid: Grid, on_gpu: bool) -> RankMemory:
        """Return the peak memory of every execution, on its fullest stage.

        With accumulation or a pipeline, gradients stay over all micro-batches, so they count in
        full at the peak. ZeRO shards optimizer states from stage 1, gradients from stage 2 and
        parameters from stage 3 (Rajbhandari et al. 2020). If the optimizer is on the host, sharded
        gradients move there as soon as they are computed (Ren et al. 2021). Only one bucket of them
        stays on the device.

        Args:
            grid: The executions.
            on_gpu: True to add the memory of the allocator, the CUDA context and NCCL.
        """
        grid = grid.uncompiled() if self.saves_as_eager else grid
        form, half, blocks, stage = self.form, self.half, self.form.blocks, grid.zero_stage[:, None]
        groups, stages, held, shard, width, parameters, states = self._lasting(grid)
        whole = held * form.memory.parameter_bytes
        trained_bytes = form.memory.parameter_bytes - form.memory.frozen_bytes
        paged = held * form.memory.paged_bytes / np.where(stage >= 1, shard, 1.0)
        gradient_bytes = float(form.memory.peaks[:, 0].max())
        gathered = _gathered(grid, blocks, stages, whole * width.gathered, shard > 1) * (stage >= 3)
        collected = grid.collects_gradients[:, None]
        wide = width.gradients * np.where((stage >= 2) & ~collected, 1 / shard, 1.0)
        leaves = (grid.offload_optimizer & (grid.zero_stage >= 1))[:, None] & ~collected
        bucket = OFFLOAD_BUCKET * (2.0 if half else 4.0) / np.maximum(held * gradient_bytes, 1.0)
        wide = np.where(leaves, np.minimum(wide, bucket), wide)
        buckets = (grid.zero_stage == 0) & (groups.whole.data > 1) & (grid.tp * grid.pp == 1)
        buckets &= ~grid.has("engine", "data_parallel")
        reduced = held * gradient_bytes * buckets[:, None]
        activations, working, is_plain = _activations(grid, form, stages, self.checkpointed)
        kept = ((grid.accumulation > 1) | (grid.pp > 1))[:, None]
        # Start with the end of the backward pass if it differs from the trace. `consider` then
        # replaces it by every moment that needs more memory.
        alive, active = (
            np.where(is_plain, 0.0, held * gradient_bytes * wide + reduced),
            working.copy(),
        )
        beside = gathered.copy()

        def consider(
            gradient: Floats | float, activation: Floats, whole_blocks: Floats = gathered
        ) -> None:
            more = np.where(kept, gradient_bytes, gradient) * held * wide + reduced
            higher = more + activation + whole_blocks > alive + active + beside
            for highest, values in ((alive, more), (active, activation), (beside, whole_blocks)):
                np.copyto(highest, values, where=higher)

        # The update has temporaries, which are sharded like the states. Gathered parameters count
        # only if they stay gathered.
        stays = np.where(
            (grid.collects_gradients | ~grid.reshard_after_forward)[:, None], gathered, 0.0
        )
        for gradient, constant in self._updates:
            consider(gradient, held * constant / np.where(stage >= 1, shard, 1.0), stays)
        update = held * trained_bytes * width.update / shard
        consider(gradient_bytes, np.where(width.update > 0, update, -np.inf))
        # The part of the saved bytes that does not grow with the batch is autocast's copies of
        # weights. FSDP's MixedPrecision makes no such copies.
        copies = 0.0 if blocks is None else blocks.all_saved_bytes[0]
        spared = copies * (is_plain & grid.casts_shards[:, None])
        batches, batch_of = np.unique(grid.micro_batch, return_inverse=True)
        fronts = [self._front(float(batch)) for batch in batches]
        for position in range(max(map(len, fronts))):
            moment = np.array([front[min(position, len(front) - 1)] for front in fronts])[batch_of]
            consider(moment[:, :1], np.maximum(activations * moment[:, 1:] - spared, 0.0))
        parameters = parameters + beside
        allocated = np.where(stages.number > 0, alive + active + parameters + states, -1.0)
        fullest = allocated.argmax(axis=1)
        every = np.arange(len(fullest))
        parts = [values[every, fullest] for values in (parameters, alive, states, active)]
        parameters, gradients, states, activation = (values / BYTES_PER_GIB for values in parts)
        total_gib = parameters + gradients + states + activation
        reserved = device = total_gib
        if on_gpu:
            # The flat copies of the update are larger than any memory block that was freed before.
            # The allocator never joins segments, so it reserves new memory for them.
            flat = update[every, fullest] / BYTES_PER_GIB
            reserved = total_gib * RESERVED_FACTOR + np.where(activation > flat, flat, 0.0)
            device = reserved + (CONTEXT_GIB + _communicators_gib(grid, groups))
        paged_gib = paged[every, fullest] / BYTES_PER_GIB
        # The logits are alive at the peak if they need more than a block's backward pass.
        logits = _logits(grid, form) * stages.has_last
        at_loss = np.where(logits > working, np.minimum(logits, active), 0.0)[every, fullest]
        return RankMemory(
            parameters,
            gradients,
            states,
            activation,
            total_gib,
            reserved,
            device,
            paged_gib,
            at_loss / BYTES_PER_GIB,
        )

    def _largest_micro_batch(self, execution: Execution, capacity_gib: float) -> int:
        """Return the largest micro-batch that fits a GPU, or 0 if not even one sample fits."""

        def first_that_does_not(batches: Counts) -> int:
            """Return the position of the first batch that does not fit, or len(batches)."""
            memory = self.at(Grid.vary(execution, micro_batch=batches), True)
            within = fits(memory, capacity_gib, execution.compile)
            return len(batches) if within.all() else int(np.argmin(within))

        doubling = 2 ** np.arange(MOST_SAMPLES.bit_length(), dtype=np.int64)
        position = first_that_does_not(doubling)
        if position in (0, len(doubling)):
            return 0 if position == 0 else int(doubling[-1])
        low, high = int(doubling[position - 1]), int(doubling[position])
        while high - low > 1:
            sizes = np.linspace(low, high, MOST_BETWEEN, dtype=np.int64)
            between = sizes[np.diff(sizes, prepend=low - 1) > 0]
            position = first_that_does_not(between)
            low, high = int(between[position - 1]), int(between[position])
        return low


def _communicators_gib(grid: Grid, groups: Groups) -> Floats:
    """Return the GiB of NCCL's buffers on a rank, shape (n,).

    There is one communicator for each kind of parallelism, and two more to the neighbors in a
    pipeline. If tensor or pipeline parallelism is combined with data parallelism, there are two
    more to sum gradient norms: one of all ranks, and one of a replica (Megatron-LM's
    parallel_state.py).
    """
    copies = groups.whole
    several = (copies.data > 1) & (grid.tp * grid.pp > 1)
    kinds = (copies.data > 1) * 1.0 + ((copies.replicas > 1) & (copies.shard > 1)) + (grid.cp > 1)
    return COMMUNICATOR_GIB * (
        kinds + 3.0 * (grid.pp > 1) + 2.0 * several + (grid.ep > 1)
    ) + INSIDE_COMMUNICATOR_GIB * (grid.tp > 1)


def _upper_hull(peaks: Floats, batch: float) -> Front:
    """Return the upper convex hull of the moments in `MemoryProfile.peaks` at one batch size.

    Sharding weights gradients and activations differently. Only moments on the hull can be the peak
    for some weights.
    """
    gradients, activations = peaks[:, 0], peaks[:, 1] + peaks[:, 2] * batch
    front: list[tuple[float, float]] = []
    # Visit the moments by falling activation bytes.
    for i in np.lexsort((gradients, activations)).tolist()[::-1]:
        x, y = float(gradients[i]), float(activations[i])
        if front and x <= front[-1][0]:
            continue
        while len(front) > 1:
            (x0, y0), (x1, y1) = front[-2:]
            # Keep the last point if it lies above the line from its predecessor to the new point.
            if (x - x0) * (y1 - y0) > (x1 - x0) * (y - y0):
                break
            front.pop()
        front.append((x, y))
    return tuple(front)


def _gathered(
    grid: Grid, blocks: Blocks | None, stages: Stages, whole: Floats, is_sharded: Flags
) -> Floats:
    """Return the bytes of parameters that FSDP holds gathered, shape (n, 3).

    These are the parameters of the two largest blocks and all parameters outside all blocks. They
    are all parameters of the stage if parameters stay gathered, as in a pipeline, or if the model
    has no blocks.
    """
    if blocks is None:
        return np.where(is_sharded, whole, 0.0)
    divided = blocks.tensor_parameters * (1 - 1 / grid.tp)[:, None]
    block = blocks.parameters - blocks.expert_parameters - divided
    block = block + (blocks.expert_parameters / (grid.ep * grid.experts_tp))[:, None]
    a_block = np.divide(
        whole * block, stages.parameters, out=np.zeros_like(whole), where=stages.parameters > 0
    )
    inside = a_block * stages.blocks
    for one in blocks.others:
        each = np.divide(
            whole * one.parameters * stages.has_first,
            stages.parameters,
            out=np.zeros_like(whole),
            where=stages.parameters > 0,
        )
        a_block, inside = np.maximum(a_block, each), inside + one.count * each
    some = whole - inside + np.minimum(GATHERED_BLOCKS * a_block, inside)
    keeps = grid.collects_gradients | ~grid.reshard_after_forward
    return np.where(is_sharded, np.where(keeps[:, None], whole, some), 0.0)


def _activations(
    grid: Grid, form: TracedForm, stages: Stages, checkpointed: bool
) -> tuple[Floats, Floats, Flags]:
    """Return how sharding, pipelines and recomputation change the activations of the trace.

    The head and the loss are on the last stage. Their activations are the part of the trace's peak
    that the blocks do not explain, temporaries included.

    Returns:
        Ratio of a stage's activations, for all micro-batches in flight, to those of the whole
        unsharded model, shape (n, 3).
        Bytes alive at the end of the backward pass, shape (n, 3).
        Mask of unsharded executions without recomputation, shape (n, 1).
    """
    blocks, operators = form.blocks, form.operators
    shape = stages.blocks.shape
    if blocks is None:
        return np.ones(shape), np.zeros(shape), np.ones((shape[0], 1), dtype=bool)
    batch = grid.micro_batch.astype(np.float64)

    def at(pair: tuple[float, float] | Floats, ranks: Counts | int = 1) -> Floats:
        """Return the bytes of an affine pair at this batch size.

        `ranks` divides only the part that grows with the number of samples.
        """
        return pair[0] + pair[1] * batch / ranks

    def kept(pair: tuple[float, float]) -> Floats:
        """Return the bytes of a pair, without autocast's weight copies if FSDP casts weights.

        These copies are the constant part of the pair.
        """
        return at(pair, grid.cp) - np.where(grid.casts_shards, pair[0], 0.0)

    saved, divided = kept(blocks.saved_bytes), kept(blocks.sharded_saved_bytes)
    core, working = at(blocks.attention_saved_bytes, grid.cp), at(blocks.working_bytes, grid.cp)
    entering = at(blocks.input_bytes, grid.cp)
    in_all, of_all = at(blocks.saved_bytes), at(blocks.all_saved_bytes)
    outside = at(blocks.outside_saved_bytes) - (of_all - blocks.count * in_all)
    sequence = np.where(grid.sequence_parallel, grid.tp, 1)
    # Rajbhandari et al. 2020, section 6.1
    partition = np.where(grid.partition_activations, grid.tp, sequence)
    # Without a backward pass no activations are stored, so recomputation saves nothing.
    recomputes = "backward" in operators.phase and not checkpointed
    full, some = (
        grid.has("activation_checkpointing", name) & recomputes for name in ("full", "selective")
    )
    # Activations of the tokens that the router sends to this rank's experts beyond the mean.
    more = (
        np.where(grid.ep > 1, grid.expert_load - 1, 0.0)
        * at(blocks.expert_saved_bytes, grid.cp)
        / grid.tp
    )
    whole_block = divided / grid.tp + (saved - divided) / sequence + more
    if gives_up_attention(blocks):
        selective = whole_block - core / grid.tp
    else:
        selective = whole_block * np.minimum(
            1.0, at(kept_bytes(operators, blocks)) / np.maximum(in_all, 1.0)
        )
    compiled = np.where(grid.is_compiled, _compiled_share(operators, blocks, batch), 1.0)
    whole_block = whole_block * compiled
    selective = np.minimum(selective, whole_block)
    block = np.select([full, some], [entering / partition, selective], whole_block)
    at_work = working / grid.tp + whole_block - block
    selected = selective / np.maximum(whole_block, 1.0)
    others = _Others.of(blocks, (full, some), selected, compiled, kept)
    moments = form.memory.peaks[form.memory.peaks[:, 2] != 0]
    sizes, of_size = np.unique(batch, return_inverse=True)
    in_one_piece = (moments[:, 1:2] + moments[:, 2:] * sizes).max(axis=0, initial=0.0)[of_size]
    divided_head = np.where(has_vocabulary_head(blocks), grid.tp, 1) * grid.cp
    flying, waiting, last = _in_flight(grid, stages)
    loss = np.maximum(in_one_piece - of_all, outside)
    # What runs before the blocks stays until the end of the backward pass.
    first = np.maximum(outside - (at(blocks.after_saved_bytes) - others.saved_after), 0.0)
    fused = np.where(grid.compiles_loss, first + _logits(grid, form)[:, 0] * divided_head, np.inf)
    loss = np.where(logits_bytes(operators).any(), np.minimum(loss, fused), loss)
    loss = loss + (last - 1) * outside
    loss = loss / divided_head + _torch_head(grid, form, entering)
    of_chain = flying * block[:, None]
    at_head = stages.has_last * (loss + others.before + others.after)[:, None]
    early = stages.has_first * first[:, None] + stages.has_last * others.before[:, None]
    in_chain = early + at_work[:, None]
    behind = early + stages.has_last * (others.after + others.working_after)[:, None]
    in_front = early + stages.has_last * others.working_before[:, None] - of_chain
    highest = np.maximum.reduce([at_head, in_chain, behind, in_front])
    sent = waiting * (1 - stages.has_last) * (grid.virtual_stages * entering / sequence)[:, None]
    bytes_alive = of_chain + sent + highest
    is_plain = (grid.tp * grid.pp * grid.cp == 1) & ~(full | some | grid.is_compiled)
    ratio = bytes_alive / np.maximum(in_one_piece, 1.0)[:, None]
    plainly = 1.0 + stages.blocks * (more / np.maximum(in_one_piece, 1.0))[:, None]
    return (
        np.where(is_plain[:, None], plainly, ratio),
        np.maximum(at_work, others.working_before)[:, None] * np.ones(shape),
        is_plain[:, None],
    )


def _compiled_share(operators: Operators, blocks: Blocks, batch: Floats) -> Floats:
    """Return the share of a block's saved bytes that torch.compile keeps, shape (n,).

    Its partitioner keeps results of matmuls and attention, and recomputes everything between them
    (torch/_functorch/partitioners.py). Copies of weights, which do not grow with the batch, stay.
    """
    rows = (np.array(operators.phase) == "forward") & operators.is_matrix
    counts = rows * blocks.operator_counts / blocks.count
    _, results = (counts[:, None] * operators.written_bytes).sum(axis=0)
    constant, slope = blocks.saved_bytes
    kept = constant + np.minimum(results + blocks.input_bytes[1], slope) * batch
    return np.asarray(kept / np.maximum(constant + slope * batch, 1.0))


def _logits(grid: Grid, form: TracedForm) -> Floats:
    """Return the bytes of all tensors of the logits' size at the loss, shape (n, 1)."""
    (constant, slope), compiled = (
        logits_bytes(form.operators, copies) for copies in (PLAIN_COPIES, COMPILED_COPIES)
    )
    plain = constant + slope * grid.micro_batch
    alive = np.where(grid.compiles_loss, compiled[0] + compiled[1] * grid.micro_batch, plain)
    is_divided = form.blocks is not None and has_vocabulary_head(form.blocks)
    return np.asarray(alive / (grid.tp * grid.cp if is_divided else 1))[:, None]


class _Others(NamedTuple):
    """Bytes of the blocks outside the chain, each of shape (n,).

    Attributes:
        before: Bytes kept by the blocks that run before the chain.
        after: Bytes kept by the blocks that run after the chain.
        working_before: Further bytes in the backward pass of a block before the chain.
        working_after: Further bytes in the backward pass of a block after the chain.
        saved_after: Bytes saved by the blocks after the chain without recomputation.
    """

    before: Floats
    after: Floats
    working_before: Floats
    working_after: Floats
    saved_after: Floats

    @classmethod
    def of(
        cls,
        blocks: Blocks,
        recomputes: tuple[Flags, Flags],
        selected: Floats,
        compiled: Floats,
        kept: Callable[[tuple[float, float]], Floats],
    ) -> _Others:
        """Sum up the blocks outside the chain. Tensor parallelism does not divide them.

        Args:
            blocks: The blocks of the model.
            recomputes: Masks of full and of selective recomputation.
            selected: Share of its bytes that a block keeps under selective recomputation. It is
                taken from the chain.
            compiled: Share of its bytes that a block keeps under torch.compile, like `selected`.
            kept: Function that returns a pair of bytes at each batch size.
        """
        before = after = working_before = working_after = saved_after = np.zeros_like(selected)
        for one in blocks.others:
            saved = kept(one.saved_bytes)
            left = kept(one.left_bytes)
            whole = saved * compiled
            keeps = np.select(recomputes, [np.minimum(left, whole), whole * selected], whole)
            works = kept(one.working_bytes) + whole - keeps
            if one.is_after:
                after, working_after = after + one.count * keeps, np.maximum(working_after, works)
                saved_after = saved_after + one.count * saved
            else:
                before = before + one.count * keeps
                working_before = np.maximum(working_before, works)
        return cls(before, after, working_before, working_after, saved_after)


def _torch_head(grid: Grid, form: TracedForm, entering: Floats) -> Floats:
    """Return the extra bytes of the vocabulary head under torch's tensor parallelism, shape (n,).

    They come on top of the head's share of the trace, for two reasons:

    - torch's loss does both steps of the backward pass at once
      (torch/distributed/tensor/parallel/loss.py). Four fp32 tensors of the size of the logits are
      then alive instead of three.
    - With sequence parallelism, the linear layer saves its gathered input.

    Megatron's kernels work in place and gather the input again, so they need neither.
    """
    operators, blocks = form.operators, form.blocks
    if blocks is None or not has_vocabulary_head(blocks):
        return np.zeros_like(entering)
    outside = (np.array(blocks.roles) == "column") & (blocks.operator_counts == 0)
    product = operators.written_bytes[outside & (np.array(operators.phase) == "forward")].sum(
        axis=0
    )
    width = 2.0 if operators.half[outside].any() else 4.0
    logits = 4.0 / width * (product[0] + product[1] * grid.micro_batch) / (grid.tp * grid.cp)
    gathered = np.where(grid.sequence_parallel, entering * (1 - 1 / grid.tp), 0.0)
    return np.where((grid.tp > 1) & (grid.zero_stage >= 3), logits + gathered, 0.0)


def _in_flight(grid: Grid, stages: Stages) -> tuple[Floats, Floats, Floats]:
    """Return the most activations that a stage keeps for the micro-batches in flight.

    Stage i of pp stages keeps, with v chunks of blocks per device:

    - 1f1b: pp - i micro-batches.
    - interleaved: 2 (pp - 1 - i) + (v - 1) pp + 1 chunks (Narayanan et al. 2021, section 2.2).
    - gpipe: all micro-batches of the step.

    Returns:
        Activations in units of one block and one micro-batch, shape (n, 3).
        Outputs that were sent to the next stage and are kept for the backward pass, in
        micro-batches, shape (n, 3).
        Micro-batches for which the last stage keeps activations of the head, shape (n,).
    """
    m, pp, v = (a.astype(np.float64) for a in (grid.accumulation, grid.pp, grid.virtual_stages))
    position = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1], axis=1)
    one_by_one = np.minimum(m[:, None], pp[:, None] - position)
    chunks = 2 * (pp[:, None] - 1 - position) + ((v - 1) * pp)[:, None] + 1
    chunks = np.minimum(chunks, (m * v)[:, None]) / v[:, None]
    gpipe, interleaved = (grid.has("pipeline_schedule", name) for name in ("gpipe", "interleaved"))
    staged = np.where(interleaved[:, None], chunks, one_by_one)
    staged = np.where(gpipe[:, None], m[:, None], staged)
    flying = np.where(pp[:, None] > 1, staged, 1.0)
    # DeepSpeed's and torch's pipelines keep sent outputs. Megatron frees their data (Korthikanti et
    # al. 2022, appendix B).
    waiting = flying * ((grid.pp > 1) & (grid.zero_stage > 0))[:, None]
    return flying * stages.blocks, waiting, np.where(gpipe & (grid.pp > 1), m, 1.0)


def needed_gib(memory: Memory | RankMemory) -> Floats:
    """Return the memory in GiB that one device must have.

    This is the sum of allocated tensors, the waste by fragmentation on a GPU, and the CUDA context
    with NCCL's buffers.
    """
    context = np.asarray(memory.device_gib - memory.reserved_gib)
    return memory.allocated_gib * np.where(context > 0, FRAGMENTATION, 1.0) + context


def usable_gib(capacity_gib: float) -> float:
    """Return the part of a device's memory that a training can use, in GiB."""
    return capacity_gib * FIT_MARGIN


def room_gib(capacity_gib: float, compiles: bool | Flags = False) -> Floats:
    """Return the largest forecast of the needed memory that fits with probability `FITS_AT`."""
    return np.asarray(usable_gib(capacity_gib) * np.exp(-FITS_SD * _need_sd(compiles)))


def fit_probability(
    memory: Memory | RankMemory, capacity_gib: float, compiles: bool = False
) -> Floats:
    """Return the probability that a training fits in memory.

    The logarithm of the needed memory is assumed to be normal around the forecast. Its standard
    deviation is `NEED_SD`, or `COMPILED_NEED_SD` with torch.compile.
    """
    relative = usable_gib(capacity_gib) / np.maximum(needed_gib(memory), 1e-9)
    distance = np.log(relative) / _need_sd(compiles)
    return np.asarray(np.vectorize(NormalDist().cdf, otypes=[float])(distance))


def _need_sd(compiles: bool | Flags) -> Floats:
    return np.where(compiles, COMPILED_NEED_SD, NEED_SD)


def fits(memory: Memory | RankMemory, capacity_gib: float, compiles: bool | Flags = False) -> Flags:
    """Return True if a training fits in memory with at least the probability `FITS_AT`."""
    return np.asarray(needed_gib(memory) <= room_gib(capacity_gib, compiles))
