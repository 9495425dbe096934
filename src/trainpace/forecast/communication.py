"""Communication of ranks in a step, and the part of it that computation does not hide.

- Data parallelism reduces gradients in buckets during the backward pass. ZeRO reduce-scatters them
  and gathers parameters after the step. FSDP gathers parameters block by block before each pass.
- Tensor parallelism sums a hidden state twice in each block and pass. Computation waits for the sum
  (Shoeybi et al. 2019).
- Context parallelism passes keys and values around a ring while attention computes (Liu et al.
  2023).
- Pipelines send hidden states to the next stage.

`collectives` computes the time of each collective.

Shapes: n is the number of executions. Arrays have shape (n,), or (n, 3) with one column per kind of
pipeline stage: first, middle and last (see `grid.Stages`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trainpace.core.execution import Engine
from trainpace.core.hardware import Cluster
from trainpace.forecast.collectives import Collective, collective_ms, pcie_gb_per_s
from trainpace.forecast.grid import Grid, Groups, ParameterGroups, Stages
from trainpace.workload import GROUPED, Blocks, Counts, Flags, Floats, Mode, TracedForm

BUCKET_BYTES = 25 * 2**20
"""torch DDP's default bucket_cap_mb."""
FIRST_BUCKET_BYTES = 2**20
"""torch DDP's _DEFAULT_FIRST_BUCKET_BYTES."""
OVERLAP = 0.9
"""Share of a pass that can hide communication."""
CONTENTION = 0.25
"""Cost of hidden communication as a share of its time.

Communication uses SMs and memory bandwidth, which slows computation down. Lee et al. 2025
(arXiv:2507.03114) measure that overlapped computation is 19% slower on average, and 40% at most.
"""
ASYNC_HIDDEN = 0.5
"""Share of tensor-parallel communication that asynchronous tensor parallelism hides.

It splits matmuls and communicates piece by piece. torchtitan's runs of Llama on 8 ranks gain 8 to
10% (PyTorch's blog of 2024). Megatron-Core does the same with sequence parallelism.
"""
DATA_PARALLEL_COPY_SHARE = 0.52
"""Share of the PCIe bandwidth that nn.DataParallel reaches for parameters and gradients.

It copies parameters to all devices and adds up their gradients, as a pipeline through all of them.
Fitted together with `REPLICATION` on the extra time of two to four RTX 2080 Ti over one (192 means
of 32 image models). The mean error on held-out models is 9.9%.
"""
REPLICATION = 0.73
"""Host time of nn.DataParallel's copies, relative to the host time of one replica's forward pass.

It copies modules and adds up gradients one by one.
"""
PINNED_SHARE = 0.8
"""Share of the PCIe bandwidth that copies from and to pinned memory reach.

CUDA's bandwidthTest reaches 12 to 13 of 15.75 GB/s on generation 3.
"""
KINDS = (
    "data_parallel",
    "parameters",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline",
    "offload",
)
"""Kinds of exposed communication.

data_parallel: gradients. parameters: parameters of FSDP and ZeRO. offload: transfers to and from
host memory. The others are named after their parallelism.
"""


class MissingLink(Exception):
    """Raised if a link's bandwidth is unknown. The message is the reason.

    Only this package raises and catches it.
    """


def exposed(total: Floats, bare: Floats, window: Floats) -> Floats:
    """Return the exposed part of communication, in the unit of the arguments.

    Args:
        total: Whole communication time.
        bare: Part of it that cannot overlap with computation.
        window: Time of the pass that can hide the rest.
    """
    hidden = np.minimum(np.maximum(total - bare, 0.0), OVERLAP * window)
    return total - (1 - CONTENTION) * hidden


class PassCommunication(NamedTuple):
    """Milliseconds of communication per micro-batch, each of shape (n, 3), before overlap."""

    tensor: Floats
    context: Floats
    expert: Floats
    pipeline: Floats


class StepCommunication(NamedTuple):
    """Milliseconds of exposed communication per step, each of shape (n, 3)."""

    data_parallel: Floats
    parameters: Floats
    offload: Floats


class Passes(NamedTuple):
    """Number of forward and backward passes per micro-batch in which a block communicates."""

    forward: Floats
    backward: float


class Communication(NamedTuple):
    """Communication model of n executions with the same engine.

    Methods raise `MissingLink` if the bandwidth of a link is unknown.
    """

    grid: Grid
    groups: Groups
    stages: Stages
    form: TracedForm
    engine: Engine
    mode: Mode
    cluster: Cluster

    def ms(
        self, collective: Collective, payload: ArrayLike, ranks: ArrayLike, inside: ArrayLike
    ) -> Floats:
        """Return `collective_ms` on this cluster. Empty payloads do not need a known link."""
        payload, ranks = np.asarray(payload), np.asarray(ranks)
        ranks = np.where(payload > 0, ranks, 1)
        if (ranks <= 1).all():
            return np.zeros(np.broadcast_shapes(payload.shape, ranks.shape))
        answer = collective_ms(collective, payload, ranks, inside, self.cluster)
        if isinstance(answer, str):
            raise MissingLink(answer)
        return answer

    def micro_batch(self, recomputes: Flags, attention_ms: Floats) -> PassCommunication:
        """Return the communication of one micro-batch, forward and backward pass together.

        Args:
            recomputes: Mask of executions that repeat the forward pass of their blocks, shape (n,).
            attention_ms: Forward time of attention in one block, shape (n,).
        """
        grid, stages, blocks = self.grid, self.stages, self.form.blocks
        zero = np.zeros(stages.blocks.shape)
        if blocks is None:
            return PassCommunication(zero, zero, zero, zero)
        hidden_bytes = (blocks.input_bytes[0] + blocks.input_bytes[1] * grid.micro_batch) / grid.cp
        infers = self.mode == "inference"
        passes = Passes(np.where(recomputes, 2.0, 1.0), 0.0 if infers else 1.0)
        tensor = zero if (grid.tp == 1).all() else self._tensor(blocks, hidden_bytes, passes)
        # Partitioned activations are gathered before a block is recomputed (Rajbhandari et al.
        # 2020, section 8).
        divided = recomputes & grid.partition_activations & ~grid.sequence_parallel
        inside = self.groups.tensor_inside
        gathered = self.ms("all_gather", np.where(divided, hidden_bytes, 0.0), grid.tp, inside)
        tensor = tensor + stages.blocks * gathered[:, None]
        context = expert = zero
        if (grid.cp > 1).any():
            context = self._context(blocks, hidden_bytes, attention_ms, passes)[:, None]
            context = context * stages.blocks
        if (grid.ep > 1).any():
            expert = stages.blocks * self._expert(blocks, passes)[:, None]
        return PassCommunication(tensor, context, expert, self._sends(hidden_bytes))

    def _sends(self, hidden_bytes: Floats) -> Floats:
        """Return the time to send hidden states between pipeline stages, shape (n, 3).

        Each tensor-parallel rank sends a part. The receivers gather the parts, unless sequence
        parallelism keeps them divided (Narayanan et al. 2021, section 4.1).
        """
        grid, stages = self.grid, self.stages
        payload = hidden_bytes / grid.tp * (grid.pp > 1)
        sends = self.ms("send", payload, 2, self.groups.pipeline_inside)
        whole = np.where((grid.pp > 1) & ~grid.sequence_parallel, hidden_bytes, 0.0)
        sends = sends + self.ms("all_gather", whole, grid.tp, self.groups.tensor_inside)
        # Inner stages receive and send in both passes. The first and the last stage do half of
        # that, unless virtual stages make them send to each other.
        boundaries = np.broadcast_to([1.0, 2.0, 1.0], stages.blocks.shape)
        inner = (grid.virtual_stages > 1)[:, None]
        boundaries = np.where(inner, 2.0, boundaries) * (stages.number > 0)
        if self.mode == "inference":
            boundaries = np.minimum(boundaries, 1.0)
        # A send and the receive in the other direction run at the same time.
        return boundaries * (sends * grid.virtual_stages)[:, None]

    def _tensor(self, blocks: Blocks, hidden_bytes: Floats, passes: Passes) -> Floats:
        """Return the time to sum hidden states over tensor-parallel ranks, shape (n, 3).

        Sequence parallelism uses a reduce-scatter and an all-gather instead, which are assumed to
        take the same time. Its backward pass gathers the input of column-parallel matmuls once
        more, but a matmul hides this (Korthikanti et al. 2022).
        """
        grid, stages = self.grid, self.stages
        one = self.ms("all_reduce", hidden_bytes, grid.tp, self.groups.tensor_inside)
        each = one * (passes.forward + passes.backward) * self._row_matmuls(blocks)
        # --tp-comm-overlap needs sequence parallelism. NVIDIA's recipes always set both together.
        by_piece = grid.async_tensor_parallel | (
            grid.sequence_parallel & (self.engine == "megatron_core")
        )
        each = np.where(by_piece, each * (1 - ASYNC_HIDDEN), each)
        # There is also one sum after the embedding, and one in the backward pass of the head.
        ends = (stages.has_first + stages.has_last * passes.backward) * one[:, None]
        return stages.blocks * each[:, None] + ends

    def _row_matmuls(self, blocks: Blocks) -> Floats:
        """Return the number of row-parallel matmuls in a block's forward pass, shape (n,).

        A sum over the tensor-parallel ranks follows each of them, and the backward pass of each
        column-parallel matmul. Expert matmuls do not count if experts are not divided by tensor
        parallelism, because their tokens are sent back instead.
        """
        operators = self.form.operators
        kind, phase, role = (
            np.array(names) for names in (operators.kind, operators.phase, blocks.roles)
        )
        rows = (kind == "gemm") & (phase == "forward") & (role == "row")
        grouped = rows & (np.array(operators.function) == GROUPED)
        apart = (self.grid.ep > 1) | (self.grid.experts_tp != self.grid.tp)
        of_experts = np.where(apart, blocks.operator_counts[grouped].sum(), 0)
        return np.asarray((blocks.operator_counts[rows].sum() - of_experts) / blocks.count)

    def _expert(self, blocks: Blocks, passes: Passes) -> Floats:
        """Return the time to send the tokens of a block to their experts and back, shape (n,).

        If several ranks share an expert, its tokens are gathered on them and scattered afterwards.
        """
        grid, inside = self.grid, self.groups.expert_inside
        rows = blocks.dispatched_bytes[0] + blocks.dispatched_bytes[1] * grid.micro_batch
        payload = np.where(grid.ep > 1, rows * grid.expert_load / (grid.cp * grid.tp), 0.0)
        each_copy = self.ms("all_to_all", payload, grid.ep, inside)
        nodes = np.maximum(grid.ep // inside, 1)
        copies = max(blocks.dispatched_bytes[1] / max(blocks.input_bytes[1], 1.0), 1.0)

        def reached(places: Counts) -> Floats:
            """Return the expected number of places with an expert of a token, per expert."""
            return np.asarray(places * (1 - (1 - 1 / places) ** copies) / copies)

        # The router may limit the nodes of a token's experts (DeepSeek-V3's report, section 2.1.2).
        limited = np.where(grid.expert_nodes > 0, np.minimum(grid.expert_nodes, nodes), nodes)
        ranks = np.where(nodes > 1, limited * inside, grid.ep)
        near = self.ms("all_to_all", payload * reached(ranks), inside, inside)
        once_a_node = np.maximum(near, self.ms("all_to_all", payload * reached(limited), nodes, 1))
        one = np.where(
            grid.has("expert_exchange", "all_to_all"), each_copy, np.minimum(once_a_node, each_copy)
        )
        gathered = payload * grid.experts_tp
        tensor_inside = self.groups.expert_tensor_inside
        one = one + self.ms("all_gather", gathered, grid.experts_tp, tensor_inside)
        return np.asarray(2 * one * (passes.forward + passes.backward))

    def _context(
        self, blocks: Blocks, hidden_bytes: Floats, attention_ms: Floats, passes: Passes
    ) -> Floats:
        """Return the exposed time of passing keys and values around the ring, shape (n,).

        The backward pass also passes their gradients.
        """
        grid, share = self.grid, 1.0
        if blocks.heads and blocks.key_value_heads:
            share = blocks.key_value_heads / blocks.heads
        pair = 2 * share * hidden_bytes * grid.cp / grid.tp
        ring = self.ms("all_gather", pair, grid.cp, self.groups.context_inside)
        result = passes.forward * exposed(ring, ring / grid.cp, attention_ms)
        result = result + passes.backward * exposed(
            2 * ring, 2 * ring / grid.cp, 2.5 * attention_ms
        )
        return np.where(grid.cp > 1, result, 0.0)

    def step(
        self,
        gradient_bytes: Floats,
        parameter_bytes: Floats,
        forward_ms: Floats,
        backward_ms: Floats,
    ) -> StepCommunication:
        """Return the communication between data-parallel ranks, and between devices and hosts.

        Replicated gradients are reduced only in the backward pass of the last micro-batch
        (no_sync). Sharded gradients are reduced in every backward pass. FSDP communicates in units:
        each block, and the rest of the model. A model without blocks is a single unit, so nothing
        is hidden.

        Args:
            gradient_bytes: Unsharded gradients of a stage's rank in the sent format, shape (n, 3).
            parameter_bytes: Unsharded parameters in the sent format, shape (n, 3).
            forward_ms: Forward pass of one micro-batch, shape (n, 3).
            backward_ms: Backward pass of one micro-batch, shape (n, 3).
        """
        grid, groups, blocks = self.grid, self.groups, self.stages.blocks
        stage, m = grid.zero_stage[:, None], grid.accumulation[:, None].astype(np.float64)
        hides = 0.0 if self.engine == "unoverlapped" else 1.0
        ahead_window, window = hides * forward_ms, hides * backward_ms
        fully, of_experts = stage >= 3, self.stages.expert_share

        def pieces(whole: Floats) -> Floats:
            """Return the number of pieces that are sent: FSDP's units, or buckets."""
            return np.where(fully, blocks + 1, np.maximum(1.0, np.ceil(whole / BUCKET_BYTES)))

        def gathered(payload: Floats, group: ParameterGroups) -> Floats:
            shard, inside = group.shard[:, None], group.shard_inside[:, None]
            return self.ms("all_gather", payload, shard, inside)

        units, parts = pieces(gradient_bytes), pieces(parameter_bytes)
        bucket, part = gradient_bytes / units, np.where(stage >= 1, parameter_bytes / parts, 0.0)
        reduced = self._reduced(bucket * (1 - of_experts), groups.whole)
        gather = gathered(part * (1 - of_experts), groups.whole)
        if of_experts.any():
            reduced = reduced + self._reduced(bucket * of_experts, groups.experts)
            gather = gather + gathered(part * of_experts, groups.experts)
        collected = grid.collects_gradients[:, None]
        times = np.where((stage >= 2) & ~collected, m, 1.0)
        again = grid.reshard_after_forward[:, None] & fully & (self.mode != "inference")
        ahead = exposed(parts * gather, gather, ahead_window)
        # Collected gradients are scattered after the last backward pass, so nothing hides them.
        afterwards = np.where(collected, units * reduced, 0.0)
        reduced = np.where(collected, 0.0, reduced)
        both = units * reduced + np.where(again, parts * gather, 0.0)
        # DDP splits off a small first bucket, so that communication starts early. A single bucket
        # is therefore two.
        first = FIRST_BUCKET_BYTES / np.maximum(gradient_bytes, FIRST_BUCKET_BYTES)
        early = np.where((stage == 0) & (units == 1), first, 0.0)
        bare = reduced * np.where(gradient_bytes > FIRST_BUCKET_BYTES, 1 - early, 1.0)
        behind = exposed(both, bare + np.where(again, gather, 0.0), window)
        gathered_backward = np.where(again, behind * parts * gather / np.maximum(both, 1e-12), 0.0)
        after_step = parts * gather * (self.mode == "train")  # ZeRO 1 and 2
        if self.engine == "megatron_core":
            after_step = exposed(after_step, gather * (self.mode == "train"), ahead_window)
        parameters = np.where(
            fully, np.where(collected, 1.0, m) * ahead + m * gathered_backward, after_step
        )
        offload = self._to_hosts(gradient_bytes, parameter_bytes, forward_ms, window)
        gradients = times * (behind - gathered_backward) + afterwards
        return StepCommunication(gradients, parameters, offload)

    def _reduced(self, bucket: Floats, groups: ParameterGroups) -> Floats:
        """Return the time to sum a bucket of gradients over the ranks of a group.

        Sharded gradients are reduce-scattered, and then summed over the replicas.
        """
        stage = self.grid.zero_stage[:, None]
        data, shard, replicas = (a[:, None] for a in (groups.data, groups.shard, groups.replicas))
        whole, divided = np.where(stage == 0, bucket, 0.0), np.where(stage >= 1, bucket, 0.0)
        between = np.where((stage >= 1) & (replicas > 1), bucket / shard, 0.0)
        summed = self.ms("all_reduce", whole, data, groups.data_inside[:, None])
        scattered = self.ms("reduce_scatter", divided, shard, groups.shard_inside[:, None])
        return summed + (
            scattered + self.ms("all_reduce", between, replicas, groups.replicas_inside[:, None])
        )

    def _to_hosts(
        self,
        gradient_bytes: Floats,
        parameter_bytes: Floats,
        forward_ms: Floats,
        backward_ms: Floats,
    ) -> Floats:
        """Return the exposed time of offloading over PCIe, shape (n, 3).

        With an offloaded optimizer, gradients move to the host during every backward pass, and
        updated parameters come back after the step (Ren et al. 2021, ZeRO-Offload). Offloaded
        parameters move to the device before both passes (Rajbhandari et al. 2021, ZeRO-Infinity).
        """
        grid, nothing = self.grid, np.zeros_like(gradient_bytes)
        optimizer_away = grid.offload_optimizer[:, None]
        parameters_away = grid.offload_parameters[:, None]
        if not (optimizer_away | parameters_away).any():
            return nothing
        per_ms = pcie_gb_per_s(self.cluster) * PINNED_SHARE * 1e6
        shards, m = (grid.zero_stage >= 1)[:, None], grid.accumulation[:, None]
        held = np.where(shards, self.stages.shard(self.groups), 1.0)
        out, back = gradient_bytes / held / per_ms, parameter_bytes / held / per_ms
        times = np.where(shards & ~grid.collects_gradients[:, None], m, 1)
        updated = np.where(parameters_away, 0.0, back) if self.mode == "train" else 0.0
        states = times * exposed(out, nothing, backward_ms) + updated
        passes = exposed(back, nothing, forward_ms)
        if self.mode != "inference":
            passes = passes + exposed(back, nothing, backward_ms)
        states = np.where(optimizer_away & (self.mode != "inference"), states, 0.0)
        return states + np.where(parameters_away, m * passes, 0.0)

    def data_parallel_ms(self, gradient_bytes: Floats, parameter_bytes: Floats) -> Floats:
        """Return the time of nn.DataParallel's copies of parameters and gradients per step, (n,).

        nn.DataParallel repeats them for every micro-batch.
        """
        per_ms = pcie_gb_per_s(self.cluster) * 1e6 * DATA_PARALLEL_COPY_SHARE
        copied = np.where(self.grid.data_parallel_size > 1, parameter_bytes + gradient_bytes, 0.0)
        return self.grid.accumulation * copied / per_ms
