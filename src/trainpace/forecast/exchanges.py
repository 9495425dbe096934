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

from trainpace.core.execution import Engine
from trainpace.core.hardware import Cluster
from trainpace.forecast.collectives import Collective, collective_ms
from trainpace.forecast.grid import ExpertGroups, Grid, Groups, Stages
from trainpace.forecast.links import pcie_gb_per_s
from trainpace.workload import GROUPED, Counts, Flags, Floats, Mode, TracedForm

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
exchanging piece by piece (torchtitan's runs of Llama on 8 ranks gain 8 to 10 %, PyTorch's blog of 2024).
Megatron-Core hides them in the same way under sequence parallelism."""
DATA_PARALLEL_COPY_SHARE = 0.52
"""Share of PCIe's bandwidth at which nn.DataParallel copies parameters to all devices and adds up their gradients, as a pipeline
through all of them. Fitted with REPLICATION on what two to four RTX 2080 Ti take longer than one (192 means of 32 image models);
models that were left out are 9.9 % off on average."""
REPLICATION = 0.73
"""Host time of nn.DataParallel for copying modules and adding up gradients one by one, in forward passes of one replica."""

PINNED_SHARE = 0.8
"""Share of PCIe's bandwidth that copies from and to pinned memory reach (12 to 13 of 15.75 GB/s in CUDA's bandwidthTest,
generation 3)."""

FP8_DISPATCH = (1 + 4 / 128) / 2
"""Bytes of a token sent in FP8 with an fp32 scale for 128 numbers, as a share of those in 16 bits (DeepSeek-V3's report, section
3.3.3)."""

KINDS = (
    "data_parallel",
    "parameters",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline",
    "offload",
)
"""Kinds of exposed exchanges: gradients; parameters (FSDP, ZeRO); tensor, context, expert and pipeline parallelism; host
memory."""


class MissingLink(Exception):
    """The figure of a link is not known; the message is the reason. Never leaves this room."""


def exposed(total: Floats, bare: Floats, window: Floats) -> Floats:
    """The exposed part of exchanges of `total`, of which `bare` overlaps with nothing, under a pass of `window`; all in ms."""
    hidden = np.minimum(np.maximum(total - bare, 0.0), OVERLAP * window)
    return total - (1 - CONTENTION) * hidden


class PassExchanges(NamedTuple):
    """Milliseconds a micro-batch by kind of stage (n x 3), nothing hidden yet."""

    tensor: Floats
    context: Floats
    expert: Floats
    pipeline: Floats


class StepExchanges(NamedTuple):
    """Exposed milliseconds a step by kind of stage (n x 3)."""

    data_parallel: Floats
    parameters: Floats
    offload: Floats


class Exchanges(NamedTuple):
    """The exchanges of executions of one engine. Raises `MissingLink` where a link's figure is not known."""

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
        """`collective_ms`; nothing to send needs no link."""
        payload, ranks = np.asarray(payload), np.asarray(ranks)
        ranks = np.where(payload > 0, ranks, 1)
        if (ranks <= 1).all():
            return np.zeros(np.broadcast_shapes(payload.shape, ranks.shape))
        answer = collective_ms(collective, payload, ranks, inside, self.cluster)
        if isinstance(answer, str):
            raise MissingLink(answer)
        return answer

    def micro_batch(self, recomputes: Flags, attention_ms: Floats) -> PassExchanges:
        """Exposed exchanges of one micro-batch's forward and backward pass together, or in inference of the forward pass
        alone. `recomputes`: which executions repeat the forward pass of their blocks. `attention_ms`: of a block.
        """
        grid, stages, blocks = self.grid, self.stages, self.form.blocks
        zero = np.zeros(stages.blocks.shape)
        if blocks is None:
            return PassExchanges(zero, zero, zero, zero)
        hidden_bytes = (blocks.input_bytes[0] + blocks.input_bytes[1] * grid.micro_batch) / grid.cp
        passes = np.where(recomputes, 2.0, 1.0), 0.0 if self.mode == "inference" else 1.0
        tensor = zero if (grid.tp == 1).all() else self._tensor(hidden_bytes, *passes)
        # what was kept divided is gathered before a block is computed again (Rajbhandari et al. 2020, section 8)
        divided = recomputes & grid.partition_activations & ~grid.sequence_parallel
        gathered = self.ms(
            "all_gather", np.where(divided, hidden_bytes, 0.0), grid.tp, self.groups.tensor_inside
        )
        tensor = tensor + stages.blocks * gathered[:, None]
        context = zero
        if (grid.cp > 1).any():
            context = self._context(hidden_bytes, attention_ms, *passes)[:, None] * stages.blocks
        # tensor-parallel ranks send a part each, and gather it where it arrives unless sequence parallelism keeps it divided
        # (Narayanan et al. 2021, section 4.1)
        sends = self.ms(
            "send", hidden_bytes / grid.tp * (grid.pp > 1), 2, self.groups.pipeline_inside
        )
        whole = np.where((grid.pp > 1) & ~grid.sequence_parallel, hidden_bytes, 0.0)
        sends = sends + self.ms("all_gather", whole, grid.tp, self.groups.tensor_inside)
        # inner stages receive and send in both passes, the ends do half of that
        boundaries = np.broadcast_to([1.0, 2.0, 1.0], stages.blocks.shape)
        inner = (grid.virtual_stages > 1)[
            :, None
        ]  # the ends pass on to each other, from one virtual stage to the next
        boundaries = np.where(inner, 2.0, boundaries) * (stages.number > 0)
        if self.mode == "inference":
            boundaries = np.minimum(boundaries, 1.0)
        expert = stages.blocks * self._expert(*passes)[:, None] if (grid.ep > 1).any() else zero
        # a send and the receive of the other direction go at the same time
        return PassExchanges(
            tensor, context, expert, boundaries * (sends * grid.virtual_stages)[:, None]
        )

    def _tensor(self, hidden_bytes: Floats, forward: Floats, backward: float) -> Floats:
        """Sums of hidden states; sequence parallelism scatters and gathers them instead, which counts as the same here. Its
        backward pass gathers a column's input once more, under a product (Korthikanti et al. 2022). `forward`, which
        recomputing repeats, and `backward` count the passes."""
        grid, stages = self.grid, self.stages
        one = self.ms("all_reduce", hidden_bytes, grid.tp, self.groups.tensor_inside)
        each = one * (forward + backward) * self._row_products()
        # --tp-comm-overlap needs sequence parallelism, and NVIDIA's recipes set it wherever that is
        by_piece = grid.async_tensor_parallel | (
            grid.sequence_parallel & (self.engine == "megatron_core")
        )
        each = np.where(by_piece, each * (1 - ASYNC_HIDDEN), each)
        # the vocabulary's ends: a sum after the embedding, another in the head's backward pass
        ends = (stages.has_first + stages.has_last * backward) * one[:, None]
        return stages.blocks * each[:, None] + ends

    def _row_products(self) -> Floats:
        """Products with a row-parallel weight in a block's forward pass (n): each is followed by a sum over the tensor-parallel
        ranks, as is the column products' backward. Experts that are divided otherwise give their tokens back instead.
        """
        operators, blocks = self.form.operators, self.form.blocks
        assert blocks is not None
        kind, phase, role = (
            np.array(names) for names in (operators.kind, operators.phase, blocks.roles)
        )
        rows = (kind == "gemm") & (phase == "forward") & (role == "row")
        grouped = rows & (np.array(operators.function) == GROUPED)
        apart = (self.grid.ep > 1) | (self.grid.experts_tp != self.grid.tp)
        number = blocks.operator_counts[rows].sum() - np.where(
            apart, blocks.operator_counts[grouped].sum(), 0
        )
        return np.asarray(number / blocks.count)

    def _expert(self, forward: Floats, backward: float) -> Floats:
        """Sending a block's tokens to their experts and their results back, in each pass (n); those of experts that several ranks
        divide are gathered there, and scattered when they come back. Passes as in `_tensor`."""
        grid, blocks, inside = self.grid, self.form.blocks, self.groups.experts.expert_inside
        assert blocks is not None
        rows = blocks.dispatched_bytes[0] + blocks.dispatched_bytes[1] * grid.micro_batch
        payload = np.where(grid.ep > 1, rows * grid.expert_load / (grid.cp * grid.tp), 0.0)
        each_copy = self.ms("all_to_all", payload, grid.ep, inside)
        nodes = np.maximum(grid.ep // inside, 1)
        copies = max(blocks.dispatched_bytes[1] / max(blocks.input_bytes[1], 1.0), 1.0)

        def reached(places: Counts) -> Floats:
            """The places that have any of a token's experts, spread evenly, over its experts."""
            return np.asarray(places * (1 - (1 - 1 / places) ** copies) / copies)

        # experts of one token on few nodes (DeepSeek-V3's report, section 2.1.2): so many are reached, and their ranks
        limited = np.where(grid.expert_nodes > 0, np.minimum(grid.expert_nodes, nodes), nodes)
        near = self.ms(
            "all_to_all",
            payload * reached(np.where(nodes > 1, limited * inside, grid.ep)),
            inside,
            inside,
        )
        once_a_node = np.maximum(near, self.ms("all_to_all", payload * reached(limited), nodes, 1))
        one = np.where(
            grid.has("expert_exchange", "all_to_all"), each_copy, np.minimum(once_a_node, each_copy)
        )
        gathered = payload * grid.experts_tp
        one = one + self.ms(
            "all_gather", gathered, grid.experts_tp, self.groups.experts.tensor_inside
        )
        there = np.where(grid.has("expert_exchange", "overlapped_fp8"), FP8_DISPATCH, 1.0)
        return np.asarray((there + 1) * one * (forward + backward))

    def _context(
        self, hidden_bytes: Floats, attention_ms: Floats, forward: Floats, backward: float
    ) -> Floats:
        """Keys and values go round once forward; backward they go round again with their gradients. Passes as in `_tensor`."""
        grid, blocks = self.grid, self.form.blocks
        assert blocks is not None
        share = (
            blocks.key_value_heads / blocks.heads
            if blocks.heads and blocks.key_value_heads
            else 1.0
        )
        pair = 2 * share * hidden_bytes * grid.cp / grid.tp
        ring = self.ms("all_gather", pair, grid.cp, self.groups.context_inside)
        result = forward * exposed(ring, ring / grid.cp, attention_ms)
        result = result + backward * exposed(2 * ring, 2 * ring / grid.cp, 2.5 * attention_ms)
        return np.where(grid.cp > 1, result, 0.0)

    def step(
        self,
        gradient_bytes: Floats,
        parameter_bytes: Floats,
        forward_ms: Floats,
        backward_ms: Floats,
    ) -> StepExchanges:
        """Gradients and parameters between data-parallel ranks, and between devices and hosts.

        `gradient_bytes`, `parameter_bytes`: what a stage's rank holds in one piece (n x 3), in the format that is exchanged.
        `forward_ms`, `backward_ms`: a micro-batch's passes. Replicated gradients are reduced in the last micro-batch's
        backward pass (no_sync), sharded ones in every one's. FSDP's units are the blocks and the rest; a model without
        blocks is one unit, which hides nothing.
        """
        grid, groups, blocks = self.grid, self.groups, self.stages.blocks
        stage, m = grid.zero_stage[:, None], grid.accumulation[:, None].astype(np.float64)
        hides = 0.0 if self.engine == "unoverlapped" else 1.0
        ahead_window, window = hides * forward_ms, hides * backward_ms
        fully = stage >= 3
        units = np.where(fully, blocks + 1, np.maximum(1.0, np.ceil(gradient_bytes / BUCKET_BYTES)))
        bucket, of_experts = gradient_bytes / units, self.stages.expert_share
        reduced = self._reduced(bucket * (1 - of_experts), groups)
        if of_experts.any():
            reduced = reduced + self._reduced(bucket * of_experts, groups.experts)
        collected = grid.collects_gradients[:, None]
        times = np.where((stage >= 2) & ~collected, m, 1.0)
        pieces = np.where(
            fully, blocks + 1, np.maximum(1.0, np.ceil(parameter_bytes / BUCKET_BYTES))
        )
        piece = np.where(stage >= 1, parameter_bytes / pieces, 0.0)
        gather = self.ms(
            "all_gather",
            piece * (1 - of_experts),
            groups.shard[:, None],
            groups.shard_inside[:, None],
        )
        if of_experts.any():
            own = groups.experts
            gather = gather + self.ms(
                "all_gather", piece * of_experts, own.shard[:, None], own.shard_inside[:, None]
            )
        again = grid.reshard_after_forward[:, None] & fully & (self.mode != "inference")
        ahead = exposed(pieces * gather, gather, ahead_window)
        # gradients that are collected are scattered after the last backward pass, with nothing to hide under
        afterwards = np.where(collected, units * reduced, 0.0)
        reduced = np.where(collected, 0.0, reduced)
        both = units * reduced + np.where(again, pieces * gather, 0.0)
        # one bucket is two: a small first one, so that the link has work early, and the rest
        first = FIRST_BUCKET_BYTES / np.maximum(gradient_bytes, FIRST_BUCKET_BYTES)
        early = np.where((stage == 0) & (units == 1), first, 0.0)
        bare = reduced * np.where(gradient_bytes > FIRST_BUCKET_BYTES, 1 - early, 1.0)
        behind = exposed(both, bare + np.where(again, gather, 0.0), window)
        gathered_backward = np.where(again, behind * pieces * gather / np.maximum(both, 1e-12), 0.0)
        after_step = pieces * gather * (self.mode == "train")  # ZeRO 1 and 2
        if self.engine == "megatron_core":
            after_step = exposed(after_step, gather * (self.mode == "train"), ahead_window)
        parameters = np.where(
            fully, np.where(collected, 1.0, m) * ahead + m * gathered_backward, after_step
        )
        offload = self._to_hosts(gradient_bytes, parameter_bytes, forward_ms, window)
        return StepExchanges(times * (behind - gathered_backward) + afterwards, parameters, offload)

    def _reduced(self, bucket: Floats, groups: Groups | ExpertGroups) -> Floats:
        """Summing a bucket of gradients over the ranks that share it, each keeping its part where they are sharded."""
        stage = self.grid.zero_stage[:, None]
        data, shard, replicas = (a[:, None] for a in (groups.data, groups.shard, groups.replicas))
        summed = self.ms(
            "all_reduce", np.where(stage == 0, bucket, 0.0), data, groups.data_inside[:, None]
        )
        scattered = self.ms(
            "reduce_scatter", np.where(stage >= 1, bucket, 0.0), shard, groups.shard_inside[:, None]
        )
        between = np.where((stage >= 1) & (replicas > 1), bucket / shard, 0.0)
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
        """Offloading over PCIe: gradients out under every backward pass, updated parameters back after the step (Ren et al.
        2021, ZeRO-Offload); offloaded parameters in ahead of both passes (Rajbhandari et al. 2021, ZeRO-Infinity).
        """
        grid = self.grid
        optimizer_away, parameters_away = (
            grid.offload_optimizer[:, None],
            grid.offload_parameters[:, None],
        )
        nothing = np.zeros_like(gradient_bytes)
        if not (optimizer_away | parameters_away).any():
            return nothing
        per_ms = pcie_gb_per_s(self.cluster) * PINNED_SHARE * 1e6
        shards = (grid.zero_stage >= 1)[:, None]
        held = np.where(shards, self.stages.shard(self.groups), 1.0)
        out, back = gradient_bytes / held / per_ms, parameter_bytes / held / per_ms
        m = grid.accumulation[:, None]
        times = np.where(shards & ~grid.collects_gradients[:, None], m, 1)
        updated = np.where(parameters_away, 0.0, back)
        states = times * exposed(out, nothing, backward_ms) + (
            updated if self.mode == "train" else 0.0
        )
        passes = exposed(back, nothing, forward_ms)
        if self.mode != "inference":
            passes = passes + exposed(back, nothing, backward_ms)
        states = np.where(optimizer_away & (self.mode != "inference"), states, 0.0)
        return states + np.where(parameters_away, m * passes, 0.0)

    def data_parallel_ms(self, gradient_bytes: Floats, parameter_bytes: Floats) -> Floats:
        """nn.DataParallel's copies of parameters and gradients in a step: with every micro-batch anew."""
        per_ms = pcie_gb_per_s(self.cluster) * 1e6 * DATA_PARALLEL_COPY_SHARE
        copied = np.where(self.grid.data_parallel_size > 1, parameter_bytes + gradient_bytes, 0.0)
        return self.grid.accumulation * copied / per_ms
