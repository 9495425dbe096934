"""Step times of many executions at once: kernels, communication, pipeline bubble and optimizer.

Shapes: n is the number of executions. Arrays of shape (n, 3) have one column per kind of pipeline
stage: first, middle and last (see `grid.Stages`). Arrays of shape (n, 3, 2) also have one entry
for the forward pass and one for the backward pass. Times are in milliseconds.

Symbols: pp is the number of pipeline stages, v the virtual stages per rank, and m the
micro-batches per step. m is the field `accumulation` of the execution.

The busy time of a pipeline is m times the time of its slowest stage. The bubble is the time of one
micro-batch on all other stages, divided by v. For equal stages and v = 1, the bubble's share of
the step is

    (pp - 1) / (m + pp - 1)

(Huang et al. 2019; Narayanan et al. 2021).

Forward and backward times are reported for the slowest stage. Work that is done once per step is
reported for the stage where it takes longest.
"""

import math

import numpy as np

from trainpace.core.execution import (
    EXECUTION_FIELDS,
    NUMBER_FORMATS,
    PRECISIONS,
    Checkpointing,
    Engine,
    host_update_bytes,
)
from trainpace.core.hardware import Cluster
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.collectives import pcie_gb_per_s
from trainpace.forecast.communication import (
    OVERLAP,
    PINNED_SHARE,
    REPLICATION,
    Communication,
    PassCommunication,
    StepCommunication,
    exposed,
)
from trainpace.forecast.grid import Grid, groups_of, stages_of
from trainpace.forecast.memory import RankMemory, needed_gib, usable_gib
from trainpace.forecast.ranks import StageCosts
from trainpace.forecast.target import Target, together_ms
from trainpace.workload import Flags, Floats, TracedForm, Workload

ACCUMULATE_SHARE = 0.8
"""Share of memory bandwidth that gradient accumulation and clipping reach."""
COPY_START_US = 6.0
"""Fixed cost of one copy to the device, in microseconds, before its first byte moves.

A cudaMemcpyAsync costs 5 to 7 microseconds (Wu et al. 2026, "DualPath", arXiv:2602.21548, section
5.2). For pageable memory this is a lower bound, because the driver copies it to pinned memory
first.
"""
HOST_MEMORY_GB_PER_S = 250.0
"""Host memory bandwidth per node that Adam on the CPUs reaches, in GB/s.

Two sockets with eight channels of DDR4-3200 have 410 GB/s. STREAM reaches about 80% of it. Updates
that read and write in turn reach about 60%. `Cluster` has no field for host memory.
"""


class StepModel:
    """Step-time model of n valid executions.

    All executions must have the same precision and the same engine.
    """

    def __init__(self, workload: Workload, form: TracedForm, grid: Grid, target: Target) -> None:
        self.workload, self.form, self.grid, self.target = workload, form, grid, target
        self.cluster = target.cluster
        self.on_gpu = target.cluster.device.kind == "gpu"
        self.half = NUMBER_FORMATS[PRECISIONS[int(grid.precision[0])]].form == "half"
        self.engine: Engine = EXECUTION_FIELDS["engine"].decode(int(grid.engine[0]))
        self.groups = groups_of(grid, self.cluster.devices_per_domain)
        self.stages, total = stages_of(grid, form.blocks)
        self.held = self.stages.parameters / total
        self.shard = self.stages.shard(self.groups)
        trained = 0 if workload.mode == "inference" else workload.trainable_parameters
        self.gradient_bytes = trained * np.where(self.half & ~grid.fp32_gradients, 2.0, 4.0)
        """Bytes of all gradients of the model in their communicated format, shape (n,)."""

    def steps(self, costs: StageCosts) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return the parts of the step, and the exposed communication by kind.

        Args:
            costs: Kernel and host times of blocks and of the other layers.

        Returns:
            Two dictionaries of milliseconds per step. Their arrays have shape (n,). The sum of the
            second is `communication_ms` of the first.

        Raises:
            MissingLink: If the bandwidth of a link is unknown.
        """
        grid, stages = self.grid, self.stages
        m = grid.accumulation.astype(np.float64)
        device, overhead = self._passes_of(costs)
        took = device + overhead
        gradients = self.held * self.gradient_bytes[:, None]
        each, once, replicated = self._communication(costs, took, gradients)
        window = took.sum(axis=2)
        busy = window + each.tensor + each.context + each.expert + each.pipeline
        exists = stages.number > 0
        slowest = np.where(exists, busy, -1.0).argmax(axis=1)
        every = np.arange(len(slowest))

        def slow(values: Floats) -> Floats:
            return values[every, slowest]

        turn = each.pipeline + (busy - each.pipeline) * stages.mean_share
        bubble = ((stages.number * turn * exists).sum(axis=1) - slow(busy)) / grid.virtual_stages
        optimizer, update_overhead, accumulate = self._update(costs, gradients)
        # Work that is done once per step ends when its slowest stage is done.
        tail = once.data_parallel + once.parameters + once.offload
        tail = tail + optimizer + update_overhead + accumulate
        last = np.where(exists, tail, -1.0).argmax(axis=1)
        of_gradients = once.data_parallel[every, last] if replicated is None else replicated
        exposed_ms = {
            "data_parallel": of_gradients,
            "parameters": once.parameters[every, last],
            "tensor_parallel": m * slow(each.tensor),
            "context_parallel": m * slow(each.context),
            "expert_parallel": m * slow(each.expert),
            "pipeline": m * slow(each.pipeline),
            "offload": once.offload[every, last],
        }
        parts = {
            "forward_ms": m * slow(device[:, :, 0]),
            "backward_ms": m * slow(device[:, :, 1]) + accumulate[every, last],
            "optimizer_ms": optimizer[every, last],
            "communication_ms": sum(exposed_ms.values(), np.zeros(len(m))),
            "data_wait_ms": np.zeros(len(m)),
            "host_to_device_ms": self._host_copy_ms() * m,
            "host_overhead_ms": (
                m * slow(overhead.sum(axis=2)) + update_overhead[every, last] + costs.start
            ),
            "idle_ms": np.maximum(bubble, 0.0),
            "own_code_ms": np.zeros(len(m)),
        }
        return parts, exposed_ms

    def _passes_of(self, costs: StageCosts) -> tuple[Floats, Floats]:
        """Return device time and exposed host overhead per stage and pass, shape (n, 3, 2)."""
        device = self._passes(costs.passes_device, costs.repeated_device, costs.others_device)
        host = self._passes(costs.passes_host, costs.repeated_host, costs.others_host)
        overhead = together_ms(device, host) - device if self.on_gpu else host.copy()
        if self.engine == "data_parallel":
            # One Python process copies the modules and drives all replicas. It launches their
            # forward passes one after the other.
            ranks = self.grid.data_parallel_size
            more = np.where(ranks > 1, ranks - 1 + REPLICATION, 0.0)
            overhead[:, :, 0] += host[:, :, 0] * more[:, None]
        return device, overhead

    def _passes(self, passes: Floats, repeated: Floats, others: Floats) -> Floats:
        s, (block, first, last) = self.stages, passes.transpose(1, 0, 2)
        times = s.blocks[:, :, None] * block[:, None] + s.has_first[:, :, None] * first[:, None]
        times = times + s.has_last[:, :, None] * last[:, None]
        if self.form.blocks is not None:
            is_full, is_some = (self._recomputes(how)[:, None] for how in ("full", "selective"))
            full = np.where(is_full, block[:, :1], 0.0)
            some = np.where(is_some, repeated[:, None], 0.0)
            outside = np.where(is_full, others[:, :1], 0.0) + np.where(is_some, others[:, 1:], 0.0)
            times[:, :, 1] += s.blocks * (full + some) + s.has_last * outside
        return times

    def _recomputes(self, checkpointing: Checkpointing) -> Flags:
        """Return a mask of executions for which recomputation must be added to the trace.

        A trace with activation checkpointing already contains it. Inference never recomputes.
        """
        plain = self.workload.mode != "inference" and not self.workload.checkpointed
        return self.grid.has("activation_checkpointing", checkpointing) & plain

    def _communication(
        self, costs: StageCosts, took: Floats, gradients: Floats
    ) -> tuple[PassCommunication, StepCommunication, Floats | None]:
        """Return communication per micro-batch, per step, and of nn.DataParallel.

        The last is None for other engines. For nn.DataParallel, the communication per step is 0.
        """
        grid, stages = self.grid, self.stages
        if (grid.world_size == 1).all() and not (
            grid.offload_optimizer | grid.offload_parameters
        ).any():
            zero = np.zeros_like(gradients)
            return (
                PassCommunication(zero, zero, zero, zero),
                StepCommunication(zero, zero, zero),
                None,
            )
        all_of = Communication(
            grid, self.groups, stages, self.form, self.engine, self.workload.mode, self.cluster
        )
        each = all_of.micro_batch(self._recomputes("full"), costs.attention_device)
        parameter_bytes, replicated = self._parameter_bytes(), None
        if self.engine == "data_parallel":
            once = StepCommunication(*np.zeros((3, *gradients.shape)))
            replicated = all_of.data_parallel_ms(self.gradient_bytes, parameter_bytes)
        else:
            parameters = self.held * parameter_bytes[:, None]
            once = all_of.step(gradients, parameters, took[:, :, 0], took[:, :, 1])
        interleaved = (grid.virtual_stages[:, None] > 1) & (self.engine == "megatron_core")
        overlaps = grid.has("expert_exchange", "overlapped")[:, None]
        window = took.sum(axis=2)
        # Computation that hides expert communication cannot hide the pipeline's sends as well.
        left = np.where(overlaps, np.maximum(window - each.expert / OVERLAP, 0.0), window)
        expert = exposed(each.expert, np.zeros_like(window), window)
        pipeline = exposed(each.pipeline, np.zeros_like(window), left)
        each = each._replace(
            expert=np.where(overlaps, expert, each.expert),
            pipeline=np.where(interleaved, pipeline, each.pipeline),
        )
        return each, once, replicated

    def _host_copy_ms(self) -> Floats:
        """Return the milliseconds to copy one micro-batch to the device, tensor by tensor, (n,).

        Each copy has a fixed cost, so larger micro-batches are cheaper per sample. With
        nn.DataParallel, one process copies the batches of all replicas.
        """
        rate, workload = self.target.host_copy_gb_per_s, self.workload
        if math.isinf(rate):
            return np.zeros(len(self.grid))
        copied = 1e3 * workload.sample_bytes * self.grid.micro_batch / (rate * 1e9)
        copied = copied + 1e-3 * COPY_START_US * workload.batch_tensors
        return copied * self.grid.data_parallel_size if self.engine == "data_parallel" else copied

    def _parameter_bytes(self) -> Floats:
        """Return the bytes of the model's parameters in their communicated format, shape (n,).

        ZeRO 3 and nn.DataParallel send all parameters. Other executions send only the trainable
        parameters. Frozen parameters in a packed format are sent packed.
        """
        w, memory = self.workload, self.form.memory
        all_of_them = (self.grid.zero_stage >= 3) | (self.engine == "data_parallel")
        sent = np.where(all_of_them, w.parameters, w.trainable_parameters)
        wide = sent * np.where(self.half | self.grid.casts_shards, 2.0, 4.0)
        return np.minimum(wide, memory.parameter_bytes) if memory.frozen_bytes else wide

    def _update(self, costs: StageCosts, gradients: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the times of work that is done once per step, each (n, 3), in milliseconds.

        Each rank processes its shard. torch.nn.utils.clip_grad_norm_ reads all gradients for their
        norm, then reads and writes them to scale them. Kernel launches and the scalar all-reduce
        of the norms are ignored.

        Returns:
            Device time of the optimizer and gradient clipping, exposed host overhead of the
            optimizer, and gradient accumulation.
        """
        grid, bandwidth = self.grid, self.cluster.device.memory_bandwidth_gb_per_s
        rate = np.inf if bandwidth is None else bandwidth.value * 1e6 * ACCUMULATE_SHARE
        sharded = (grid.zero_stage >= 2) & ~grid.collects_gradients
        added = gradients / np.where(sharded[:, None], self.shard, 1.0)
        moved = 3 * added * (grid.accumulation - 1)[:, None]  # read both, write one
        shards = (grid.zero_stage >= 1)[:, None]
        norms = 3 * gradients / np.where(shards, self.shard, 1.0) * grid.clip_gradients[:, None]
        optimizer, overhead = self._optimizer(costs)
        return optimizer + norms / rate, overhead, moved / rate

    def _optimizer(self, costs: StageCosts) -> tuple[Floats, Floats]:
        """Return device time and exposed host overhead of the update, each (n, 3), in milliseconds.

        The time is proportional to the bytes of one rank. It doubles if the weights are 16-bit and
        the optimizer states are fp32. The update is on the host if the optimizer is offloaded.
        """
        grid, blocks, operators = self.grid, self.form.blocks, self.form.operators
        sharded = (grid.zero_stage >= 1)[:, None]
        # The matmuls in Muon's update stay in 16 bits.
        moves = ("gemm", "optimizer") not in zip(operators.kind, operators.phase, strict=True)
        wide = (
            self.half & moves & ~grid.pure_16_bit[:, None] & (sharded | grid.is_megatron[:, None])
        )
        device = costs.optimizer_device[:, None] * self.held * np.where(wide, 2.0, 1.0)
        device = np.where(sharded, device / self.shard, device)
        share = np.ones_like(self.held) if blocks is None else self.stages.blocks / blocks.count
        host = costs.optimizer_host[:, None] * share
        overhead = together_ms(device, host) - device if self.on_gpu else host
        ranks = np.where(sharded, self.shard, 1.0)
        updated = self.held * self.workload.trainable_parameters / ranks
        # `grid.unsupported` has already refused optimizers that cannot run on the host.
        moved = host_update_bytes(self.workload.optimizer) or np.nan
        on_host = updated * moved * self.cluster.devices_per_node / (HOST_MEMORY_GB_PER_S * 1e6)
        away = grid.offload_optimizer[:, None] & (self.workload.mode == "train")
        return np.where(away, on_host, device), np.where(away, 0.0, overhead)


def paging_ms(memory: RankMemory, capacity_gib: float, cluster: Cluster) -> Floats:
    """Return the milliseconds of paging optimizer states over PCIe per update, shape (n,).

    States that do not fit on the device move in and out again. bitsandbytes prefetches the states
    of a tensor just before its kernel, so computation does not hide the transfer (Dettmers et al.
    2023, section 3).
    """
    spilled = needed_gib(memory) + memory.paged_gib - usable_gib(capacity_gib)
    spilled = np.clip(spilled, 0.0, memory.paged_gib)
    return np.asarray(2 * spilled * BYTES_PER_GIB / (pcie_gb_per_s(cluster) * PINNED_SHARE * 1e6))
