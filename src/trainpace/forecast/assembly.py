"""Steps of many executions at once: kernel times of a stage, exchanges, the pipeline's bubble, the optimizer.

A pipeline of pp stages takes m times its slowest stage, and the time of one micro-batch on all other stages as a bubble, which v
virtual stages cut to 1/v: (pp - 1) / (m + pp - 1) of the time for equal stages (Huang et al. 2019; Narayanan et al. 2021).
DualPipe has (pp / 2 - 1) (F&B + B - 3 W) instead (DeepSeek-V3's report, table 2): F&B is a forward and a backward pass together,
W the weights' part of the backward pass, which is taken to be half of it, as it is of products. The
passes of a step are those of a rank of the slowest stage; work that is done once a step counts on the stage where it takes
longest.
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
from trainpace.forecast.exchanges import OVERLAP, REPLICATION, Exchanges, StepExchanges, exposed
from trainpace.forecast.grid import Grid, groups_of, stages_of
from trainpace.forecast.ranks import StageCosts
from trainpace.forecast.target import Target, together_ms
from trainpace.workload import Flags, Floats, TracedForm, Workload

OVERLAPPED = ("overlapped", "overlapped_fp8")
ACCUMULATE_SHARE = 0.8
"""Share of the memory bandwidth at which gradients are added up, and clipped."""
COPY_START_US = 6.0
"""What one copy to the device costs before its first byte, whatever its size: 5 to 7 microseconds a cudaMemcpyAsync (Wu et al.
2026, "DualPath", arXiv:2602.21548, section 5.2). A lower bound from pageable memory, which the driver copies first."""
HOST_MEMORY_GB_PER_S = 250.0
"""Memory bandwidth of a node's host that Adam on its CPUs reaches: two sockets of eight channels of DDR4-3200 have 410 GB/s, of
which STREAM reaches about 80 %, and updates that read and write in turn about 60. A cluster's record does not describe hosts."""


class Assembly:
    """The steps of executions of one precision and engine, whose sizes all go together."""

    def __init__(self, workload: Workload, form: TracedForm, grid: Grid, target: Target) -> None:
        self.workload, self.form, self.grid, self.target, self.cluster = (
            workload,
            form,
            grid,
            target,
            target.cluster,
        )
        self.half = NUMBER_FORMATS[PRECISIONS[int(grid.precision[0])]].form == "half"
        self.engine: Engine = EXECUTION_FIELDS["engine"].decode(int(grid.engine[0]))
        self.groups = groups_of(grid, self.cluster.devices_per_domain)
        self.stages, total = stages_of(grid, form.blocks)
        self.held = self.stages.parameters / total
        self.shard = self.stages.shard(self.groups)

    def _passes(self, block: Floats, first: Floats, last: Floats, repeated: Floats) -> Floats:
        """Times of a micro-batch's two passes on each kind of stage (n x 3 x 2), on the device or on the host."""
        s = self.stages
        times = s.blocks[:, :, None] * block[:, None] + s.has_first[:, :, None] * first[:, None]
        times = times + s.has_last[:, :, None] * last[:, None]
        if self.form.blocks is not None:
            full, selective = (
                self._recomputes("full")[:, None],
                self._recomputes("selective")[:, None],
            )
            again = np.where(full, block[:, :1], 0.0) + np.where(selective, repeated[:, None], 0.0)
            times[:, :, 1] += s.blocks * again
        return times

    def _recomputes(self, checkpointing: Checkpointing) -> Flags:
        """Executions that compute blocks again in the backward pass, where the trace does not do so itself."""
        plain = self.workload.mode != "inference" and not self.workload.checkpointed
        return self.grid.has("activation_checkpointing", checkpointing) & plain

    def steps(self, costs: StageCosts) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """(parts of the step, exposed exchanges by kind). Raises `MissingLink` where a link's figure is not known."""
        grid, cluster, stages, m = (
            self.grid,
            self.cluster,
            self.stages,
            self.grid.accumulation.astype(np.float64),
        )
        on_gpu = cluster.device.kind == "gpu"
        device = self._passes(
            costs.block_device, costs.first_device, costs.last_device, costs.repeated_device
        )
        host = self._passes(
            costs.block_host, costs.first_host, costs.last_host, costs.repeated_host
        )
        # DualPipe's ranks compute half of the micro-batches on their own stage, and half on that at the other end
        mirrored = (grid.copies > 1)[:, None]
        device, host = (
            np.where(mirrored[:, :, None], (ms + ms[:, ::-1]) / 2, ms) for ms in (device, host)
        )
        overhead = together_ms(device, host) - device if on_gpu else host.copy()
        if self.engine == "data_parallel":
            # one Python process copies the modules and drives all replicas: their forward passes launch one after the other
            more = np.where(
                grid.data_parallel_size > 1, grid.data_parallel_size - 1 + REPLICATION, 0.0
            )
            overhead[:, :, 0] += host[:, :, 0] * more[:, None]
        took = device + overhead
        gradients, parameters = (
            self.held * self._gradient_bytes[:, None],
            self.held * self._parameter_bytes[:, None],
        )
        exchanges = Exchanges(
            grid, self.groups, stages, self.form, self.engine, self.workload.mode, cluster
        )
        each = exchanges.micro_batch(self._recomputes("full"), costs.attention_device)
        if self.engine == "data_parallel":
            once = StepExchanges(*np.zeros((3, *gradients.shape)))
        else:
            once = exchanges.step(gradients, parameters, took[:, :, 0], took[:, :, 1])
        interleaved = (grid.virtual_stages[:, None] > 1) & (self.engine == "megatron_core")
        overlaps = (
            mirrored | np.logical_or(*(grid.has("expert_exchange", n) for n in OVERLAPPED))[:, None]
        )
        window = took.sum(axis=2)
        # what computation hides of the expert exchange, it cannot hide of the pipeline's sends
        left = np.where(overlaps, np.maximum(window - each.expert / OVERLAP, 0.0), window)
        expert, pipeline = (
            exposed(ms, np.zeros_like(ms), under)
            for ms, under in ((each.expert, window), (each.pipeline, left))
        )
        each = each._replace(
            expert=np.where(overlaps, expert, each.expert),
            pipeline=np.where(mirrored | interleaved, pipeline, each.pipeline),
        )
        busy = took.sum(axis=2) + each.tensor + each.context + each.expert + each.pipeline
        exists = stages.number > 0
        slowest = np.where(exists, busy, -1.0).argmax(axis=1)
        every = np.arange(len(slowest))

        def slow(values: Floats) -> Floats:
            return values[every, slowest]

        turn = each.pipeline + (busy - each.pipeline) * stages.mean_share
        bubble = ((stages.number * turn * exists).sum(axis=1) - slow(busy)) / grid.virtual_stages
        bubble = np.where(mirrored[:, 0], bubble * self._of_dual_pipe(took), bubble)
        optimizer, optimizer_overhead = self._optimizer(costs, on_gpu)
        bandwidth = cluster.device.memory_bandwidth_gb_per_s
        sharded = (grid.zero_stage >= 2) & ~grid.collects_gradients
        added = gradients / np.where(sharded[:, None], self.shard, 1.0)
        moved = 3 * added * (m / grid.copies - 1)[:, None]  # read both, write one
        rate = np.inf if bandwidth is None else bandwidth.value * 1e6 * ACCUMULATE_SHARE
        accumulate = moved / rate
        # torch.nn.utils.clip_grad_norm_: all gradients are read for their norm, then read and written; each rank its shard.
        # Launches and the sum of the ranks' norms, one number, are not counted
        norms = (
            3
            * gradients
            / np.where((grid.zero_stage >= 1)[:, None], self.shard, 1.0)
            * grid.clip_gradients[:, None]
        )
        optimizer = optimizer + norms / rate
        # the work besides the passes ends when the stage where it takes longest has done it
        tail = (
            once.data_parallel
            + once.parameters
            + once.offload
            + optimizer
            + optimizer_overhead
            + accumulate
        )
        last = np.where(exists, tail, -1.0).argmax(axis=1)
        exposed_ms = {
            "data_parallel": once.data_parallel[every, last],
            "parameters": once.parameters[every, last],
            "tensor_parallel": m * slow(each.tensor),
            "context_parallel": m * slow(each.context),
            "expert_parallel": m * slow(each.expert),
            "pipeline": m * slow(each.pipeline),
            "offload": once.offload[every, last],
        }
        if self.engine == "data_parallel":
            exposed_ms["data_parallel"] = exchanges.data_parallel_ms(
                self._gradient_bytes, self._parameter_bytes
            )
        parts = {
            "forward_ms": m * slow(device[:, :, 0]),
            "backward_ms": m * slow(device[:, :, 1]) + accumulate[every, last],
            "optimizer_ms": optimizer[every, last],
            "communication_ms": sum(exposed_ms.values(), np.zeros(len(m))),
            "data_wait_ms": np.zeros(len(m)),
            "host_to_device_ms": self._host_copy_ms() * m,
            "host_overhead_ms": (
                m * slow(overhead.sum(axis=2)) + optimizer_overhead[every, last] + costs.start
            ),
            "idle_ms": np.maximum(bubble, 0.0),
        }
        return parts, exposed_ms

    def _of_dual_pipe(self, took: Floats) -> Floats:
        """DualPipe's bubble as a share of 1F1B's, (pp / 2 - 1) (F + B + B - 3 B / 2) of (pp - 1) (F + B). `took`: n x 3 x 2."""
        pp, (forward, backward) = self.grid.pp, took.sum(axis=1).T
        share = (forward + backward / 2) / np.maximum(forward + backward, 1e-12)
        return np.asarray(np.maximum(pp / 2 - 1, 0.0) / np.maximum(pp - 1, 1) * share)

    def _host_copy_ms(self) -> Floats:
        """Copying one micro-batch to the device, a tensor at a time: fewer and larger micro-batches start fewer copies.
        nn.DataParallel's one process copies those of all replicas."""
        if math.isinf(self.target.host_copy_gb_per_s):
            return np.zeros(len(self.grid))
        copied = (
            1e3
            * self.workload.sample_bytes
            * self.grid.micro_batch
            / (self.target.host_copy_gb_per_s * 1e9)
        )
        copied = copied + 1e-3 * COPY_START_US * self.workload.batch_tensors
        return copied * self.grid.data_parallel_size if self.engine == "data_parallel" else copied

    @property
    def _gradient_bytes(self) -> Floats:
        """The whole model's gradients in bytes, in the format in which they are exchanged (n)."""
        trained = 0 if self.workload.mode == "inference" else self.workload.trainable_parameters
        return trained * np.where(self.half & ~self.grid.fp32_gradients, 2.0, 4.0)

    @property
    def _parameter_bytes(self) -> Floats:
        """The whole model's parameters in bytes, in the format in which they are exchanged (n): below ZeRO 3 those that an update
        changes, and packed ones as they are."""
        w, memory = self.workload, self.form.memory
        exchanged = np.where(
            (self.grid.zero_stage >= 3) | (self.engine == "data_parallel"),
            w.parameters,
            w.trainable_parameters,
        )
        wide = exchanged * np.where(self.half | self.grid.casts_shards, 2.0, 4.0)
        return np.minimum(wide, memory.parameter_bytes) if memory.frozen_bytes else wide

    def _optimizer(self, costs: StageCosts, on_gpu: bool) -> tuple[Floats, Floats]:
        """(device milliseconds, milliseconds that the host adds) of the update on each kind of stage (n x 3). It moves the bytes
        that a rank holds, with 16-bit weights twice as many where its states are in fp32."""
        grid, blocks, operators = self.grid, self.form.blocks, self.form.operators
        sharded = (grid.zero_stage >= 1)[:, None]
        # products of an update (Muon's) stay in 16 bits
        moves = ("gemm", "optimizer") not in zip(operators.kind, operators.phase, strict=True)
        wide = (
            self.half & moves & ~grid.pure_16_bit[:, None] & (sharded | grid.is_megatron[:, None])
        )
        device = costs.optimizer_device[:, None] * self.held * np.where(wide, 2.0, 1.0)
        device = np.where(sharded, device / self.shard, device)
        share = np.ones_like(self.held) if blocks is None else self.stages.blocks / blocks.count
        host = costs.optimizer_host[:, None] * share
        overhead = together_ms(device, host) - device if on_gpu else host
        ranks = np.where(sharded, self.shard, 1.0)
        updated = self.held * self.workload.trainable_parameters / ranks
        moved = host_update_bytes(self.workload.optimizer) or np.nan  # refused before it comes here
        on_host = updated * moved * self.cluster.devices_per_node / (HOST_MEMORY_GB_PER_S * 1e6)
        away = grid.offload_optimizer[:, None] & (self.workload.mode == "train")
        return np.where(away, on_host, device), np.where(away, 0.0, overhead)
