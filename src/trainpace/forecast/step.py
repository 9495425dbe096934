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

(Huang et al. 2019; Narayanan et al. 2021). The bubble of DualPipe is

    (pp / 2 - 1) * (FB + B - 3 * W)

(F&B in DeepSeek-V3's report, table 2). FB is the time of an overlapped forward and backward pass,
and B the time of a backward pass. W is the weight-gradient part of the backward pass. It is assumed
to be half of B, as for matmuls.

Forward and backward times are reported for the slowest stage. Work that is done once per step is
reported for the stage where it takes longest.
"""

import math
from typing import NamedTuple

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
from trainpace.forecast.memory import RankMemory, needed_gib, room_gib
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


class _Update(NamedTuple):
    """Times of work that is done once per step, in milliseconds, each of shape (n, 3)."""

    optimizer: Floats
    overhead: Floats
    accumulate: Floats


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
        self.mirrored = (grid.copies > 1)[:, None]

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
        gradients = self.held * self._gradient_bytes[:, None]
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
        bubble = np.where(self.mirrored[:, 0], bubble * self._of_dual_pipe(took), bubble)
        update = self._update(costs, gradients)
        # Work that is done once per step ends when its slowest stage is done.
        tail = once.data_parallel + once.parameters + once.offload
        tail = tail + update.optimizer + update.overhead + update.accumulate
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
            "backward_ms": m * slow(device[:, :, 1]) + update.accumulate[every, last],
            "optimizer_ms": update.optimizer[every, last],
            "communication_ms": sum(exposed_ms.values(), np.zeros(len(m))),
            "data_wait_ms": np.zeros(len(m)),
            "host_to_device_ms": self._host_copy_ms() * m,
            "host_overhead_ms": (
                m * slow(overhead.sum(axis=2)) + update.overhead[every, last] + costs.start
            ),
            "idle_ms": np.maximum(bubble, 0.0),
        }
        return parts, exposed_ms

    def _passes_of(self, costs: StageCosts) -> tuple[Floats, Floats]:
        """Return device time and exposed host overhead per stage and pass, shape (n, 3, 2)."""
        c, grid = costs, self.grid
        device = self._passes(c.block_device, c.first_device, c.last_device, c.repeated_device)
        host = self._passes(c.block_host, c.first_host, c.last_host, c.repeated_host)
        # With DualPipe, each rank computes half of the micro-batches on its own stage, and half on
        # the stage at the other end of the pipeline.
        device, host = (
            np.where(self.mirrored[:, :, None], (ms + ms[:, ::-1]) / 2, ms) for ms in (device, host)
        )
        overhead = together_ms(device, host) - device if self.on_gpu else host.copy()
        if self.engine == "data_parallel":
            # One Python process copies the modules and drives all replicas. It launches their
            # forward passes one after the other.
            ranks = grid.data_parallel_size
            more = np.where(ranks > 1, ranks - 1 + REPLICATION, 0.0)
            overhead[:, :, 0] += host[:, :, 0] * more[:, None]
        return device, overhead

    def _passes(self, block: Floats, first: Floats, last: Floats, repeated: Floats) -> Floats:
        s = self.stages
        times = s.blocks[:, :, None] * block[:, None] + s.has_first[:, :, None] * first[:, None]
        times = times + s.has_last[:, :, None] * last[:, None]
        if self.form.blocks is not None:
            full = np.where(self._recomputes("full")[:, None], block[:, :1], 0.0)
            some = np.where(self._recomputes("selective")[:, None], repeated[:, None], 0.0)
            times[:, :, 1] += s.blocks * (full + some)
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
        all_of = Communication(
            grid, self.groups, stages, self.form, self.engine, self.workload.mode, self.cluster
        )
        each = all_of.micro_batch(self._recomputes("full"), costs.attention_device)
        replicated = None
        if self.engine == "data_parallel":
            once = StepCommunication(*np.zeros((3, *gradients.shape)))
            replicated = all_of.data_parallel_ms(self._gradient_bytes, self._parameter_bytes)
        else:
            parameters = self.held * self._parameter_bytes[:, None]
            once = all_of.step(gradients, parameters, took[:, :, 0], took[:, :, 1])
        interleaved = (grid.virtual_stages[:, None] > 1) & (self.engine == "megatron_core")
        overlapped = (grid.has("expert_exchange", n) for n in ("overlapped", "overlapped_fp8"))
        overlaps = self.mirrored | np.logical_or(*overlapped)[:, None]
        window = took.sum(axis=2)
        # Computation that hides expert communication cannot hide the pipeline's sends as well.
        left = np.where(overlaps, np.maximum(window - each.expert / OVERLAP, 0.0), window)
        expert = exposed(each.expert, np.zeros_like(window), window)
        pipeline = exposed(each.pipeline, np.zeros_like(window), left)
        each = each._replace(
            expert=np.where(overlaps, expert, each.expert),
            pipeline=np.where(self.mirrored | interleaved, pipeline, each.pipeline),
        )
        return each, once, replicated

    def _of_dual_pipe(self, took: Floats) -> Floats:
        """Return the bubble of DualPipe divided by the bubble of 1F1B, shape (n,).

        With F and B for the forward and backward time, the ratio is

            (pp / 2 - 1) * (F + B + B - 3 * B / 2) / ((pp - 1) * (F + B))

        Args:
            took: Times of the passes, shape (n, 3, 2).
        """
        pp, (forward, backward) = self.grid.pp, took.sum(axis=1).T
        share = (forward + backward / 2) / np.maximum(forward + backward, 1e-12)
        return np.asarray(np.maximum(pp / 2 - 1, 0.0) / np.maximum(pp - 1, 1) * share)

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

    @property
    def _gradient_bytes(self) -> Floats:
        """Bytes of all gradients of the model in their communicated format, shape (n,)."""
        trained = 0 if self.workload.mode == "inference" else self.workload.trainable_parameters
        return trained * np.where(self.half & ~self.grid.fp32_gradients, 2.0, 4.0)

    @property
    def _parameter_bytes(self) -> Floats:
        """Bytes of the model's parameters in their communicated format, shape (n,).

        ZeRO 3 and nn.DataParallel send all parameters. Other executions send only the trainable
        parameters. Frozen parameters in a packed format are sent packed.
        """
        w, memory = self.workload, self.form.memory
        all_of_them = (self.grid.zero_stage >= 3) | (self.engine == "data_parallel")
        sent = np.where(all_of_them, w.parameters, w.trainable_parameters)
        wide = sent * np.where(self.half | self.grid.casts_shards, 2.0, 4.0)
        return np.minimum(wide, memory.parameter_bytes) if memory.frozen_bytes else wide

    def _update(self, costs: StageCosts, gradients: Floats) -> _Update:
        """Return the times of the optimizer update, gradient clipping and gradient accumulation.

        Each rank processes its shard. torch.nn.utils.clip_grad_norm_ reads all gradients for their
        norm, then reads and writes them to scale them. Kernel launches and the scalar all-reduce
        of the norms are ignored.
        """
        grid, bandwidth = self.grid, self.cluster.device.memory_bandwidth_gb_per_s
        rate = np.inf if bandwidth is None else bandwidth.value * 1e6 * ACCUMULATE_SHARE
        sharded = (grid.zero_stage >= 2) & ~grid.collects_gradients
        added = gradients / np.where(sharded[:, None], self.shard, 1.0)
        moved = 3 * added * (grid.accumulation / grid.copies - 1)[:, None]  # read both, write one
        shards = (grid.zero_stage >= 1)[:, None]
        norms = 3 * gradients / np.where(shards, self.shard, 1.0) * grid.clip_gradients[:, None]
        optimizer, overhead = self._optimizer(costs)
        return _Update(optimizer + norms / rate, overhead, moved / rate)

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
        # `shapes.unsupported` has already refused optimizers that cannot run on the host.
        moved = host_update_bytes(self.workload.optimizer) or np.nan
        on_host = updated * moved * self.cluster.devices_per_node / (HOST_MEMORY_GB_PER_S * 1e6)
        away = grid.offload_optimizer[:, None] & (self.workload.mode == "train")
        return np.where(away, on_host, device), np.where(away, 0.0, overhead)


def paging_ms(memory: RankMemory, capacity_gib: float | None, cluster: Cluster) -> Floats:
    """Return the milliseconds of paging optimizer states over PCIe per update, shape (n,).

    States that do not fit on the device move in and out again. bitsandbytes prefetches the states
    of a tensor just before its kernel, so computation does not hide the transfer (Dettmers et al.
    2023, section 3).
    """
    if capacity_gib is None:
        return np.zeros_like(memory.paged_gib)
    spilled = needed_gib(memory) + memory.paged_gib - room_gib(capacity_gib)
    spilled = np.clip(spilled, 0.0, memory.paged_gib)
    return np.asarray(2 * spilled * BYTES_PER_GIB / (pcie_gb_per_s(cluster) * PINNED_SHARE * 1e6))
