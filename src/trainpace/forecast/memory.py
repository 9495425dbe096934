"""Memory of one rank at the peak of a step, from the replayed trace.

A plain step's moments come from the trace as they are. Sharding scales them: states by a rank's
share of the parameters, activations by the ratio of what its blocks keep to what all of them keep
in one piece (Korthikanti et al. 2022), times the micro-batches in flight (Narayanan et al. 2021).

The trace has torch's plain way: gradients and states as wide as their parameters, so that training
in 16 bits on one device or under DDP keeps 2 + 2 + 4 bytes per parameter with Adam. Engines that
shard keep an fp32 copy of the weights and fp32 states besides. Bytes per parameter with Adam on d
data-parallel ranks (weights, gradients, states), 16-bit weights:

| sharded by | one precision | source |
|---|---|---|
| nothing, DDP | 2 + 2 + 4 | torch.optim: states have their parameters' dtype |
| tensor or pipeline parallel | 2 + 4 + 12 | Korthikanti et al. 2022, figure 1; Megatron Core, "Distributed Optimizer": 18 |
| the same with ZeRO 1 or 2, bf16 | 2 + 4 + 12/d | Megatron Core: 6 + 12/d |
| the same with ZeRO 1 or 2, fp16 | 2 + 2 + 12/d, 4 + 18/d in the update | Megatron Core: 4 + 16/d; DeepSpeed below |
| ZeRO 1 or 2 alone | 2 + 2 + 12/d, 4 + 18/d in the update | DeepSpeed's stage_1_and_2.py |
| FSDP | 4/d + 4/d + 8/d, gathered blocks besides | FSDP2 keeps the user's fp32 parameters as shards |
| FSDP of a model in 16 bits (`pure_16_bit`) | 2/d + 2/d + 4/d, gathered blocks besides | fms-acceleration's runs, to 4 % |

DeepSpeed's update flattens its share of the 16-bit gradients and makes an fp32 copy of it: 6/d
while it lasts. Its pipelines in bf16 keep 16-bit gradients beside fp32 ones (bf16_optimizer.py), 2
bytes more than here. From ZeRO 2 on gradients are a shard's. fp32 and autocast train with 4 + 4 + 8
whatever shards them.
"""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from trainpace.core.execution import Execution
from trainpace.core.outcome import Memory
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.grid import Grid, Groups, Stages, groups_of, has_vocabulary_head, stages_of
from trainpace.forecast.ranks import gives_up_attention, kept_bytes
from trainpace.workload import Blocks, Counts, Flags, Floats, TracedForm

RESERVED_FACTOR = 1.18
"""Reserved over allocated memory if there is room: torch's caching allocator keeps what it once
took, cuDNN's trial workspaces included. ResNet-50 runs in NVIDIA's containers show 1.14 to 1.32
times the forecast's allocated memory on their monitors, context included."""
FRAGMENTATION = 1.06
"""Reserved over allocated memory if memory is short: segments of 2 and 20 MiB stay partly empty.
770 of 781 timm runs that fitted 24 GB fit by this rule; the others have other normalisations today
than when they were measured."""
CONTEXT_GIB = 0.45
"""CUDA context with cuBLAS and cuDNN loaded: 0.3 to 0.6 GiB from Pascal to Hopper. Nothing on a
CPU."""
COMMUNICATOR_GIB = 0.25
"""NCCL's buffers of one communicator, which torch's allocators do not see. A connection has 4 MiB
for the Simple protocol, 4.7 for LL128 and 0.5 for LL (NCCL's DEFAULT_BUFFSIZE and others in
src/include/comm.h); a ring and a tree make about three per channel: 28 MiB, times 2 channels over
PCIe and about 8 over several network cards."""
INSIDE_COMMUNICATOR_GIB = 0.65
"""The same for tensor-parallel groups, inside a node with NVSwitch: 24 channels on A100."""

NEED_SD = 0.13
"""Standard deviation of log(memory needed / forecast) in eager mode: the likeliest for 50 measured
peaks and 19 runs that fitted or ran out, of six models (benchmarks/results/memory.md). Five other
models have 0.065."""
COMPILED_NEED_SD = 0.18
"""The same under torch.compile, which recomputes some activations instead of keeping them, unlike
the trace: 77 runs of three models. Two others have 0.31, always on the safe side."""
MOST_SAMPLES = 2**24
MOST_BETWEEN = 10
"""Batches that the search for the largest one tries at once."""
FIT_MARGIN = 0.97
"""Usable share of the card: the driver, the display and fragmentation take the rest."""
OFFLOAD_BUCKET = 5e8
"""Gradients that wait for their copy to the host: DeepSpeed's default reduce_bucket_size."""
MOST_FRONTS = 4096
Front = tuple[tuple[float, float], ...]
"""Pairs of gradient and activation bytes."""
UPDATE_COPIES = 3.0
"""Copies of a shard's 16-bit gradients during an update: a flat one, and one in fp32, which counts
twice."""
GATHERED_BLOCKS = 2.0
"""Blocks whose parameters are gathered at a time under FSDP: the one that computes and the one that
is prefetched."""


class RankMemory(NamedTuple):
    """GiB on the fullest rank, n each; the parts are those of `Memory`.

    paged: further optimizer states, which CUDA pages to the host if the device is full.
    """

    parameters_gib: Floats
    gradients_gib: Floats
    optimizer_states_gib: Floats
    activations_gib: Floats
    allocated_gib: Floats
    reserved_gib: Floats
    device_gib: Floats
    paged_gib: Floats

    def record(self, i: int) -> Memory:
        return Memory(**{name: float(getattr(self, name)[i]) for name in Memory.__struct_fields__})


class _Lasting(NamedTuple):
    """Static content of each kind of stage (n x 3).

    held: its share of the model. shard: the ranks that divide a sharded byte. parameters: bytes,
    without those that FSDP gathers. states: bytes of optimizer states.
    """

    groups: Groups
    stages: Stages
    held: Floats
    shard: Floats
    width: Widths
    parameters: Floats
    states: Floats


class Widths(NamedTuple):
    """Factors on the bytes of the trace, n x 1 each, before anything is divided among ranks.

    shards: on parameters that FSDP shards. gathered: on parameters in one piece under FSDP. states:
    on optimizer states; masters: on parameters, counted among the states. gradients: on gradients.
    update: on parameters, alive in the update.
    """

    shards: Floats
    gathered: Floats
    states: Floats
    masters: Floats
    gradients: Floats
    update: Floats


def widths(grid: Grid, half: bool, trains: bool, wide_states: bool = False) -> Widths:
    """Return the widths of every execution.

    Args:
        grid: the executions.
        half: the trace's weights are 16 bits wide.
        trains: it has an optimizer.
        wide_states: its states do not have their parameters' dtype.
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
    """The memory of one traced form.

    checkpointed: the trace recomputes activations already. wide_states: the optimizer's states are
    equally wide for all weights. adapted: the trained parameters are in fp32 already.
    """

    def __init__(
        self,
        form: TracedForm,
        half: bool,
        checkpointed: bool = False,
        wide_states: bool = False,
        adapted: bool = False,
    ) -> None:
        self.form, self.half, self.checkpointed = form, half, checkpointed
        self.wide_states, self.adapted = wide_states, adapted
        peaks = form.memory.peaks.astype(np.float64)  # whole numbers in a file may be read as such
        updates = peaks[:, 2] == 0
        self._updates = _upper_hull(peaks[updates], 0.0)
        self._front = functools.lru_cache(MOST_FRONTS)(
            functools.partial(_upper_hull, peaks[~updates])
        )

    def least_gib(self, grid: Grid) -> Floats:
        """Return the parameters and states on the fullest stage, which are below any peak."""
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
        """Return the peak memory of every execution, each on its fullest stage.

        With accumulation or a pipeline the gradients stay over all micro-steps, so they count in
        full at the peak. ZeRO shards optimizer states from stage 1, gradients from 2, parameters
        from 3 (Rajbhandari et al. 2020). With the optimizer on the host, sharded gradients leave as
        they come (Ren et al. 2021), so one bucket of them stays.
        """
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
        # the end of the backward pass, where it differs from the trace's; then the trace's moments
        alive, active = np.where(is_plain, 0.0, held * gradient_bytes * wide + reduced), working
        beside = gathered.copy()

        def consider(
            gradient: Floats | float, activation: Floats, whole_blocks: Floats = gathered
        ) -> None:
            more = np.where(kept, gradient_bytes, gradient) * held * wide + reduced
            higher = more + activation + whole_blocks > alive + active + beside
            for highest, values in ((alive, more), (active, activation), (beside, whole_blocks)):
                np.copyto(highest, values, where=higher)

        # the update has its own temporaries, sharded as its states are, and only those gathered
        # parameters that stay
        stays = np.where(
            (grid.collects_gradients | ~grid.reshard_after_forward)[:, None], gathered, 0.0
        )
        for gradient, constant in self._updates:
            consider(gradient, held * constant / np.where(stage >= 1, shard, 1.0), stays)
        update = held * trained_bytes * width.update / shard
        consider(gradient_bytes, np.where(width.update > 0, update, -np.inf))
        # what the blocks keep for any batch are autocast's copies of their weights
        copies = 0.0 if blocks is None else blocks.count * blocks.saved_bytes[0]
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
            # the update's flat copies are larger than any block that was freed before them, and the
            # allocator never joins segments
            flat = update[every, fullest] / BYTES_PER_GIB
            reserved = total_gib * RESERVED_FACTOR + np.where(activation > flat, flat, 0.0)
            device = reserved + (CONTEXT_GIB + _communicators_gib(grid, groups))
        paged_gib = paged[every, fullest] / BYTES_PER_GIB
        return RankMemory(
            parameters, gradients, states, activation, total_gib, reserved, device, paged_gib
        )

    def largest_micro_batch(self, execution: Execution, capacity_gib: float) -> int:
        """Return the largest micro-batch that fits a GPU; 0 if not even one sample does."""

        def first_that_does_not(batches: Counts) -> int:
            """Return the position of the first batch that does not fit, or their number."""
            within = fits(self.at(Grid.vary(execution, micro_batch=batches), True), capacity_gib)
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
    """Return NCCL's buffers on a rank (n).

    There is a communicator for each kind of parallelism, and two more to its neighbours in a
    pipeline. If tensor or pipeline parallelism meets data parallelism, those of all ranks and of
    one replica sum gradient norms (Megatron-LM's parallel_state.py).
    """
    copies = groups.whole
    several = (copies.data > 1) & (grid.tp * grid.pp > 1)
    kinds = (copies.data > 1) * 1.0 + ((copies.replicas > 1) & (copies.shard > 1)) + (grid.cp > 1)
    return COMMUNICATOR_GIB * (
        kinds + 3.0 * (grid.pp > 1) + 2.0 * several + (grid.ep > 1)
    ) + INSIDE_COMMUNICATOR_GIB * (grid.tp > 1)


def _upper_hull(peaks: Floats, batch: float) -> Front:
    """Return the upper convex hull of a MemoryProfile's peaks.

    These are the moments that are highest under some weights of gradients and activations.
    """
    gradients, activations = peaks[:, 0], peaks[:, 1] + peaks[:, 2] * batch
    front: list[tuple[float, float]] = []
    # activations fall from one to the next
    for i in np.lexsort((gradients, activations)).tolist()[::-1]:
        x, y = float(gradients[i]), float(activations[i])
        if front and x <= front[-1][0]:
            continue
        while len(front) > 1:
            (x0, y0), (x1, y1) = front[-2:]
            # stop if the last one lies above the line to the new one
            if (x - x0) * (y1 - y0) > (x1 - x0) * (y - y0):
                break
            front.pop()
        front.append((x, y))
    return tuple(front)


def _gathered(
    grid: Grid, blocks: Blocks | None, stages: Stages, whole: Floats, is_sharded: Flags
) -> Floats:
    """Return FSDP's gathered parameters: those of two blocks and all outside of the blocks.

    It is all of them if they stay gathered, as in a pipeline, or if there are no blocks.
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
    some = whole - inside + np.minimum(GATHERED_BLOCKS * a_block, inside)
    keeps = grid.collects_gradients | ~grid.reshard_after_forward
    return np.where(is_sharded, np.where(keeps[:, None], whole, some), 0.0)


def _activations(
    grid: Grid, form: TracedForm, stages: Stages, checkpointed: bool
) -> tuple[Floats, Floats, Flags]:
    """Return (activations, bytes alive at the end of the backward pass, executions in one piece).

    Activations are those of a stage's micro-batches in flight over those of the whole model in one
    piece (n x 3). The part of the trace's peak beyond the blocks belongs to the head and the loss,
    temporaries included: to the last stage.
    """
    blocks, operators = form.blocks, form.operators
    shape = stages.blocks.shape
    if blocks is None:
        return np.ones(shape), np.zeros(shape), np.ones((shape[0], 1), dtype=bool)
    batch = grid.micro_batch.astype(np.float64)

    def at(pair: tuple[float, float], ranks: Counts | int = 1) -> Floats:
        """Return bytes. Context-parallel ranks divide those that grow with the samples."""
        return pair[0] + pair[1] * batch / ranks

    def kept(pair: tuple[float, float]) -> Floats:
        """Return bytes without the constant ones, autocast's copies, if FSDP casts weights."""
        return at(pair, grid.cp) - np.where(grid.casts_shards, pair[0], 0.0)

    saved, divided = kept(blocks.saved_bytes), kept(blocks.sharded_saved_bytes)
    core, working = at(blocks.attention_saved_bytes, grid.cp), at(blocks.working_bytes, grid.cp)
    entering = at(blocks.input_bytes, grid.cp)
    outside, in_all = at(blocks.outside_saved_bytes), at(blocks.saved_bytes)
    sequence = np.where(grid.sequence_parallel, grid.tp, 1)
    # Rajbhandari et al. 2020, section 6.1
    partition = np.where(grid.partition_activations, grid.tp, sequence)
    # without a backward pass no activations are stored, so recomputation saves nothing
    recomputes = "backward" in operators.phase and not checkpointed
    full, some = (
        grid.has("activation_checkpointing", name) & recomputes for name in ("full", "selective")
    )
    # rows of other ranks' tokens that a router sends beyond the mean
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
    block = np.select([full, some], [entering / partition, selective], whole_block)
    at_work = working / grid.tp + whole_block - block
    moments = form.memory.peaks[form.memory.peaks[:, 2] != 0]
    sizes, of_size = np.unique(batch, return_inverse=True)
    in_one_piece = (moments[:, 1:2] + moments[:, 2:] * sizes).max(axis=0, initial=0.0)[of_size]
    divided_head = np.where(has_vocabulary_head(blocks), grid.tp, 1) * grid.cp
    flying, waiting, last = _in_flight(grid, stages)
    loss = np.maximum(in_one_piece - blocks.count * in_all, outside) + (last - 1) * outside
    loss = loss / divided_head + _torch_head(grid, form, entering)
    at_head = stages.has_last * loss[:, None]
    sent = waiting * (1 - stages.has_last) * (grid.virtual_stages * entering / sequence)[:, None]
    bytes_alive = flying * block[:, None] + sent + np.maximum(at_head, at_work[:, None])
    is_plain = (grid.tp * grid.pp * grid.cp == 1) & ~(full | some)
    ratio = bytes_alive / np.maximum(in_one_piece, 1.0)[:, None]
    plainly = 1.0 + stages.blocks * (more / np.maximum(in_one_piece, 1.0))[:, None]
    return (
        np.where(is_plain[:, None], plainly, ratio),
        at_work[:, None] * np.ones(shape),
        is_plain[:, None],
    )


def _torch_head(grid: Grid, form: TracedForm, entering: Floats) -> Floats:
    """Return what a vocabulary's head holds under torch's tensor parallelism beyond its share (n).

    Its loss makes both steps of the backward pass in one
    (torch/distributed/tensor/parallel/loss.py), for which four fp32 tensors of the logits' size are
    alive instead of three; and if the sequence is divided, the linear layer saves its input
    gathered. Megatron's kernels work in place, and gather again.
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
    """Return what a stage keeps at most while micro-batches are in flight.

    1f1b: stage i of pp keeps pp - i micro-batches. Interleaved: of v chunks per device, 2 (pp - 1 -
    i) + (v - 1) pp + 1 chunks are in flight (Narayanan et al. 2021, section 2.2), for the first
    stage 1 + (pp - 1) / (pp v) of all. DualPipe: pp + 1.

    Returns:
        Activations in blocks (n x 3); results that were sent on and are kept for the backward pass,
        in micro-batches (n x 3); and micro-batches that the last stage keeps.
    """
    m, pp, v = (a.astype(np.float64) for a in (grid.accumulation, grid.pp, grid.virtual_stages))
    position = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1], axis=1)
    one_by_one = np.minimum(m[:, None], pp[:, None] - position)
    chunks = 2 * (pp[:, None] - 1 - position) + ((v - 1) * pp)[:, None] + 1
    chunks = np.minimum(chunks, (m * v)[:, None]) / v[:, None]
    gpipe, interleaved = (grid.has("pipeline_schedule", name) for name in ("gpipe", "interleaved"))
    everything = m[:, None] * np.ones_like(position)
    both_ways = np.minimum(m, pp + 1)[:, None] * np.ones_like(
        position
    )  # DeepSeek-V3's report, table 2
    cases = [gpipe[:, None], interleaved[:, None], (grid.copies > 1)[:, None]]
    staged = np.select(cases, [everything, chunks, both_ways], one_by_one)
    flying = np.where(pp[:, None] > 1, staged, 1.0)
    # DeepSpeed's and torch's pipelines keep them; Megatron frees their data (Korthikanti et al.
    # 2022, appendix B)
    waiting = flying * ((grid.pp > 1) & (grid.zero_stage > 0))[:, None]
    return flying * stages.blocks, waiting, np.where(gpipe & (grid.pp > 1), m, 1.0)


def needed_gib(memory: Memory | RankMemory) -> Floats:
    """Return the memory that one device must have.

    It has allocated tensors, the waste of fragmentation on a GPU, and the context.
    """
    context = np.asarray(memory.device_gib - memory.reserved_gib)
    return memory.allocated_gib * np.where(context > 0, FRAGMENTATION, 1.0) + context


def room_gib(capacity_gib: float) -> float:
    """Return the part of a device's memory that a training can use."""
    return capacity_gib * FIT_MARGIN


def fit_probability(
    memory: Memory | RankMemory, capacity_gib: float, compiles: bool = False
) -> Floats:
    """Return the probability that a training fits.

    Its need is forecast with a relative error of `NEED_SD`, under torch.compile `COMPILED_NEED_SD`.
    """
    sd = COMPILED_NEED_SD if compiles else NEED_SD
    distance = np.log(room_gib(capacity_gib) / np.maximum(needed_gib(memory), 1e-9)) / sd
    return np.asarray(np.vectorize(NormalDist().cdf, otypes=[float])(distance))


def fits(memory: Memory | RankMemory, capacity_gib: float) -> Flags:
    return needed_gib(memory) <= room_gib(capacity_gib)
