"""Communication of ranks in a step, and the part of it that no computation hides.

Gradients are reduced in buckets during the backward pass; ZeRO scatters them, and gathers
parameters after the step, FSDP block by block ahead of each pass. Tensor parallelism sums a hidden
state twice in each block and pass, and computation waits for it (Shoeybi et al. 2019); context
parallelism passes keys and values round while attention computes (Liu et al. 2023); pipelines send
hidden states on. `collectives` has the time of each collective. Arrays are n, or n x 3 by kind of
stage (`grid.Stages`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trainpace.core.execution import Engine
from trainpace.core.hardware import Cluster
from trainpace.forecast.collectives import Collective, collective_ms, pcie_gb_per_s
from trainpace.forecast.grid import Copies, Grid, Groups, Stages
from trainpace.workload import GROUPED, Blocks, Counts, Flags, Floats, Mode, TracedForm

BUCKET_BYTES = 25 * 2**20
"""torch DDP's default bucket_cap_mb."""
FIRST_BUCKET_BYTES = 2**20
"""torch DDP's _DEFAULT_FIRST_BUCKET_BYTES."""
OVERLAP = 0.9
"""Share of a pass under which communication can hide."""
CONTENTION = 0.25
"""Cost of hidden communication as a share of its time: it takes SMs and memory bandwidth from
computation. Lee et al. 2025 (arXiv:2507.03114) see computation slow by 19% on average, 40% at most,
while the two overlap."""
ASYNC_HIDDEN = 0.5
"""Share of tensor-parallel communication that asynchronous tensor parallelism hides, by cutting
matmuls and communicating piece by piece (torchtitan's runs of Llama on 8 ranks gain 8 to 10%,
PyTorch's blog of 2024). Megatron-Core hides it in the same way under sequence parallelism."""
DATA_PARALLEL_COPY_SHARE = 0.52
"""Share of PCIe's bandwidth at which nn.DataParallel copies parameters to all devices and adds up
their gradients, as a pipeline through all of them. Fitted with REPLICATION on what two to four RTX
2080 Ti take longer than one (192 means of 32 image models); held-out models are 9.9% off on
average."""
REPLICATION = 0.73
"""Host time of nn.DataParallel for copying modules and adding up gradients one by one, in forward
passes of one replica."""
PINNED_SHARE = 0.8
"""Share of PCIe's bandwidth that copies from and to pinned memory reach (12 to 13 of 15.75 GB/s in
CUDA's bandwidthTest, generation 3)."""
FP8_DISPATCH = (1 + 4 / 128) / 2
"""Bytes of a token sent in FP8 with an fp32 scale for 128 numbers, as a share of those in 16 bits
(DeepSeek-V3's report, section 3.3.3)."""

KINDS = (
    "data_parallel",
    "parameters",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline",
    "offload",
)
"""Kinds of exposed communication: gradients; parameters (FSDP, ZeRO); tensor, context, expert and
pipeline parallelism; host memory."""


class MissingLink(Exception):
    """The figure of a link is unknown; the message is the reason. Only this package sees it."""


def exposed(total: Floats, bare: Floats, window: Floats) -> Floats:
    """Return the exposed part of communication, in the unit of the arguments.

    Args:
        total: all of it.
        bare: the part that overlaps with nothing.
        window: the pass under which the rest can hide.
    """
    hidden = np.minimum(np.maximum(total - bare, 0.0), OVERLAP * window)
    return total - (1 - CONTENTION) * hidden


class PassCommunication(NamedTuple):
    """Milliseconds per micro-batch by kind of stage (n x 3), nothing hidden yet."""

    tensor: Floats
    context: Floats
    expert: Floats
    pipeline: Floats


class StepCommunication(NamedTuple):
    """Exposed milliseconds per step by kind of stage (n x 3)."""

    data_parallel: Floats
    parameters: Floats
    offload: Floats


class Passes(NamedTuple):
    """Number of forward and backward passes per micro-batch in which a block communicates."""

    forward: Floats
    backward: float


class Communication(NamedTuple):
    """The communication of executions of one engine.

    Methods raise `MissingLink` if a link's figure is unknown.
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
        """Return `collective_ms`. Nothing to send needs no link."""
        payload, ranks = np.asarray(payload), np.asarray(ranks)
        ranks = np.where(payload > 0, ranks, 1)
        if (ranks <= 1).all():
            return np.zeros(np.broadcast_shapes(payload.shape, ranks.shape))
        answer = collective_ms(collective, payload, ranks, inside, self.cluster)
        if isinstance(answer, str):
            raise MissingLink(answer)
        return answer

    def micro_batch(self, recomputes: Flags, attention_ms: Floats) -> PassCommunication:
        """Return the communication of one micro-batch's passes together.

        `recomputes` are the executions that repeat the forward pass of their blocks;
        `attention_ms` is that of a block.
        """
        grid, stages, blocks = self.grid, self.stages, self.form.blocks
        zero = np.zeros(stages.blocks.shape)
        if blocks is None:
            return PassCommunication(zero, zero, zero, zero)
        hidden_bytes = (blocks.input_bytes[0] + blocks.input_bytes[1] * grid.micro_batch) / grid.cp
        infers = self.mode == "inference"
        passes = Passes(np.where(recomputes, 2.0, 1.0), 0.0 if infers else 1.0)
        tensor = zero if (grid.tp == 1).all() else self._tensor(blocks, hidden_bytes, passes)
        # divided activations are gathered before a block is computed again (Rajbhandari et al.
        # 2020, section 8)
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
        """Return the time of hidden states sent between pipeline stages.

        Tensor-parallel ranks send a part each, and gather it at the receiver unless sequence
        parallelism keeps it divided (Narayanan et al. 2021, section 4.1).
        """
        grid, stages = self.grid, self.stages
        payload = hidden_bytes / grid.tp * (grid.pp > 1)
        sends = self.ms("send", payload, 2, self.groups.pipeline_inside)
        whole = np.where((grid.pp > 1) & ~grid.sequence_parallel, hidden_bytes, 0.0)
        sends = sends + self.ms("all_gather", whole, grid.tp, self.groups.tensor_inside)
        # inner stages receive and send in both passes, the ends do half of that, unless they pass
        # on to each other from one virtual stage to the next
        boundaries = np.broadcast_to([1.0, 2.0, 1.0], stages.blocks.shape)
        inner = (grid.virtual_stages > 1)[:, None]
        boundaries = np.where(inner, 2.0, boundaries) * (stages.number > 0)
        if self.mode == "inference":
            boundaries = np.minimum(boundaries, 1.0)
        # a send and the receive of the other direction go at the same time
        return boundaries * (sends * grid.virtual_stages)[:, None]

    def _tensor(self, blocks: Blocks, hidden_bytes: Floats, passes: Passes) -> Floats:
        """Return the sums of hidden states.

        Sequence parallelism scatters and gathers them instead, which counts as the same here. Its
        backward pass gathers a column's input once more, under a matmul (Korthikanti et al. 2022).
        """
        grid, stages = self.grid, self.stages
        one = self.ms("all_reduce", hidden_bytes, grid.tp, self.groups.tensor_inside)
        each = one * (passes.forward + passes.backward) * self._row_matmuls(blocks)
        # --tp-comm-overlap needs sequence parallelism, and NVIDIA's recipes set it wherever that is
        by_piece = grid.async_tensor_parallel | (
            grid.sequence_parallel & (self.engine == "megatron_core")
        )
        each = np.where(by_piece, each * (1 - ASYNC_HIDDEN), each)
        # the vocabulary's ends: a sum after the embedding, another in the head's backward pass
        ends = (stages.has_first + stages.has_last * passes.backward) * one[:, None]
        return stages.blocks * each[:, None] + ends

    def _row_matmuls(self, blocks: Blocks) -> Floats:
        """Return the matmuls with a row-parallel weight in a block's forward pass (n).

        Each is followed by a sum over the tensor-parallel ranks, as is the column matmuls' backward
        pass. Experts that are divided otherwise give their tokens back instead.
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
        """Return the time to send a block's tokens to their experts and the results back (n).

        Tokens of experts that several ranks divide are gathered there, and scattered afterwards.
        """
        grid, inside = self.grid, self.groups.expert_inside
        rows = blocks.dispatched_bytes[0] + blocks.dispatched_bytes[1] * grid.micro_batch
        payload = np.where(grid.ep > 1, rows * grid.expert_load / (grid.cp * grid.tp), 0.0)
        each_copy = self.ms("all_to_all", payload, grid.ep, inside)
        nodes = np.maximum(grid.ep // inside, 1)
        copies = max(blocks.dispatched_bytes[1] / max(blocks.input_bytes[1], 1.0), 1.0)

        def reached(places: Counts) -> Floats:
            """Return the share of places with any of a token's experts, per expert."""
            return np.asarray(places * (1 - (1 - 1 / places) ** copies) / copies)

        # a token's experts lie on few nodes (DeepSeek-V3's report, section 2.1.2)
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
        there = np.where(grid.has("expert_exchange", "overlapped_fp8"), FP8_DISPATCH, 1.0)
        return np.asarray((there + 1) * one * (passes.forward + passes.backward))

    def _context(
        self, blocks: Blocks, hidden_bytes: Floats, attention_ms: Floats, passes: Passes
    ) -> Floats:
        """Return the time of keys and values that go round, backward with their gradients."""
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

        Replicated gradients are reduced in the last micro-batch's backward pass (no_sync), sharded
        ones in every one's. FSDP's units are the blocks and the rest; a model without blocks is one
        unit, which hides nothing.

        Args:
            gradient_bytes: gradients of a stage's rank in one piece (n x 3), as they are sent.
            parameter_bytes: its parameters, likewise.
            forward_ms: a micro-batch's forward pass.
            backward_ms: its backward pass.
        """
        grid, groups, blocks = self.grid, self.groups, self.stages.blocks
        stage, m = grid.zero_stage[:, None], grid.accumulation[:, None].astype(np.float64)
        hides = 0.0 if self.engine == "unoverlapped" else 1.0
        ahead_window, window = hides * forward_ms, hides * backward_ms
        fully, of_experts = stage >= 3, self.stages.expert_share

        def pieces(whole: Floats) -> Floats:
            """Return the number of pieces in which bytes are sent: FSDP's units, or buckets."""
            return np.where(fully, blocks + 1, np.maximum(1.0, np.ceil(whole / BUCKET_BYTES)))

        def gathered(payload: Floats, group: Copies) -> Floats:
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
        # collected gradients are scattered after the last backward pass, with nothing to hide under
        afterwards = np.where(collected, units * reduced, 0.0)
        reduced = np.where(collected, 0.0, reduced)
        both = units * reduced + np.where(again, parts * gather, 0.0)
        # one bucket is two: a small first one, so that the link has work early, and the rest
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

    def _reduced(self, bucket: Floats, groups: Copies) -> Floats:
        """Return the time to sum a bucket of gradients over the ranks that share it.

        Each rank keeps its part if they are sharded.
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
        """Return the exposed time of offloading over PCIe.

        Gradients go out under every backward pass and updated parameters come back after the step
        (Ren et al. 2021, ZeRO-Offload); offloaded parameters come in ahead of both passes
        (Rajbhandari et al. 2021, ZeRO-Infinity).
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
        """Return nn.DataParallel's copies of parameters and gradients in a step.

        It makes them again in every micro-batch.
        """
        per_ms = pcie_gb_per_s(self.cluster) * 1e6 * DATA_PARALLEL_COPY_SHARE
        copied = np.where(self.grid.data_parallel_size > 1, parameter_bytes + gradient_bytes, 0.0)
        return self.grid.accumulation * copied / per_ms
