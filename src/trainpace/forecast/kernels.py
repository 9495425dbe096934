"""Device time of every operator, from its arithmetic, memory traffic and kernel launches.

    time = (compute^p + memory^p)^(1/p) + launches x latency        p = SMOOTHNESS

The modules `matmul` and `attention` give the arithmetic time of matmuls, convolutions and fused
attention. All other operators either move bytes or work on elements, whichever takes longer. Each
class of operators reaches its own share of the memory bandwidth, and more if the data fits in L2.

Shapes: arrays broadcast. The last axis has the operators of the table. Axes before it have batch
sizes and devices. A batch size is therefore an array of shape (batches, 1).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from trainpace.forecast.attention import AttentionFigures, AttentionTimes, attention_s
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.fusion import Fused, fused
from trainpace.forecast.matmul import (
    MatmulFigures,
    MatmulModel,
    MatmulTimes,
    OperatorSizes,
    Tiling,
    alignment,
    convolved,
    depthwise_s,
    form_times,
    matmul_times,
    part,
    shared_matmul_s,
)
from trainpace.forecast.rates import Rates
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    CONV,
    CONVOLUTION_KINDS,
    GATHERS,
    GEMM,
    GROUPED,
    KINDS,
    MOST_SIZES,
    OTHER,
    Flags,
    Floats,
    Operators,
    at_batch,
)

SMOOTHNESS = 5.0
"""Exponent p of the smooth maximum of compute and memory time. Larger is sharper."""

SUMMED_US = 0.15
"""Extra microseconds of a sum, mean or norm, times the square root of the inputs per result.

torch's reduction divides the inputs among threads and blocks. The block that ends last makes a
second pass (ATen/native/cuda/Reduce.cuh). Fitted on profiled sums and means of an H100 (n 1360).
The bias on an H200 (n 286) is then -6%, and -57% without this term.
"""
MOST_SUMMED = 160_000.0
"""Largest number of inputs per result that adds to the time of a reduction.

Above it, torch uses more blocks. Sums of 590,000 inputs into each of 16 to 64 results do not start
later (n 7).
"""
UPDATES_MOVED = {
    "_foreach_mul_": 2.0,
    "_foreach_div_": 2.0,
    "_foreach_sqrt": 2.0,
    "_foreach_lerp_": 1.5,
    "_foreach_add_": 1.5,
    "_foreach_addcmul_": 1.0,
    "_foreach_addcdiv_": 4 / 3,
    "_fused_adam_": 7 / 4,
    "_fused_adamw_": 7 / 4,
    "_fused_sgd_": 5 / 3,
}
"""Bytes that a multi-tensor update moves, per byte that its trace says it reads.

An update writes one of the lists that it reads. A fused update writes all of them except the
gradients. The trace instead counts a fourth of the read bytes as written. Adam's addcmul_ gets the
gradient twice and reads it once. add_ is assumed to read one other list, as SGD's does. With these
factors, all seven calls of AdamW move 2.6 to 2.8 TB/s on an H100 and 3.4 to 3.9 TB/s on an H200
(medians of 60 and 19 steps of models above 50 million parameters). SGD's calls move 2.7 TB/s.
"""

PADDED_ROWS = 16
"""Multiple to which the rows (tokens) of an expert are padded.

The gradient of an expert's weight sums over these rows. Grouped matmuls need 16-byte strides
(torch._grouped_mm). In FP8, rows are padded to 16 or 32 (Megatron-Core's
moe_router_padding_for_quantization, torchao's pad_token_groups).
"""


class KernelTimes(NamedTuple):
    """Seconds of each row, with all of its `count` operators together.

    device_s is the total. compute_s, memory_s and latency_s are the terms of the formula in the
    module's docstring.
    """

    device_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


def host_us(
    operators: Operators, launch_us: Floats | float, view_us: float, module_us: float
) -> Floats:
    """Return the host time of every row in microseconds, shape (rows,).

    Args:
        operators: Table of operators.
        launch_us: Time per kernel launch, as a number or per row.
        view_us: Time of a view, which launches no kernel.
        module_us: Time to enter a module.
    """
    kind, launches = np.asarray(operators.kind), launch_us * operators.launches
    each = np.where(kind == "module", module_us, np.where(kind == "view", view_us, launches))
    return each * operators.count


class _ClassConstants(NamedTuple):
    """Constants of each row's class of memory traffic, as pairs for NCHW and NHWC.

    Attributes:
        share: Share of the memory bandwidth that the class reaches.
        work: Relative arithmetic per element.
        row_work: Relative arithmetic per normalized row.
    """

    share: tuple[Floats, Floats]
    work: tuple[Floats, Floats]
    row_work: tuple[Floats, Floats]


class KernelTable:
    """Table of the operators of a workload, which computes their times on any device.

    `batch`, the arrays of `Rates` and the flags `channels_last` and `compiled` broadcast against
    the operators on the last axis.
    """

    def __init__(
        self,
        operators: Operators,
        compiled_to: Fused | None = None,
        like: KernelTable | None = None,
    ) -> None:
        """Sort the operators into classes.

        Args:
            operators: Operators of the table.
            compiled_to: Effect of torch.compile on the rows. Required if the rows are not those of
                one workload in their order. By default, `fusion.fused` computes it.
            like: Table with the same rows, whose effect of torch.compile is reused.
        """
        self.operators, self._compiled_to, self._like = operators, compiled_to, like
        self._classes: tuple[KernelConstants, _ClassConstants] | None = None
        self._kind = np.array(operators.kind)
        groups = operators.dims[:, CONV.groups].sum(axis=1)
        channels = operators.dims[:, CONV.c_in].sum(axis=1)
        self._rows_of_kind = {kind: self._kind == kind for kind in sorted(set(operators.kind))}
        self._is_convolution = np.isin(self._kind, CONVOLUTION_KINDS)
        self._attention_kinds = [kind for kind in ATTENTION_KINDS if kind in self._rows_of_kind]
        self.has_attention = bool(self._attention_kinds)
        self._uneven = np.isin(self._kind, ATTENTION_KINDS) & (
            operators.dims[:, ATTENTION.value_size].sum(axis=1) > 0
        )
        self._masked = np.char.find(np.array(operators.function), "efficient") >= 0
        self._depthwise = self._is_convolution & (groups > 1) & (channels == groups)
        self._grouped = self._is_convolution & (groups > 1) & ~self._depthwise
        self._updates = np.array([UPDATES_MOVED.get(name, 0.0) for name in operators.function])
        self._gathers = np.isin(operators.function, list(GATHERS))
        self._sums = (self._kind == "reduction") & ~self._gathers
        self._matmuls = (self._kind == "gemm") & operators.half
        self._grouped_matmuls = np.array(operators.function)[self._matmuls] == GROUPED
        self._has_weights = operators.dims[:, GEMM.batch, 1] == 0
        calls = zip(operators.kind, operators.function, strict=True)
        self.traffic = [
            KINDS[kind].functions.get(name) or KINDS[kind].usual_traffic for kind, name in calls
        ]
        """Class of every row's memory traffic. The constants `traffic_*` have these names."""
        self._class_names, self._class_of_row = np.unique(self.traffic, return_inverse=True)
        sizes = (*np.moveaxis(operators.dims, 1, 0), operators.flops)
        affine = [
            np.array(size.T, dtype=np.float64)
            for size in (*sizes, operators.read_bytes, operators.written_bytes)
        ]
        self._affine = [(constant, slope, bool(slope.any())) for constant, slope in affine]

    @cached_property
    def fused(self) -> Fused:
        """Shares of bytes and kernels that remain of every row under torch.compile."""
        if self._like is not None:
            return self._like.fused
        return fused(self.operators) if self._compiled_to is None else self._compiled_to

    def _at(self, batch: Floats) -> list[Floats]:
        """Return the sizes, FLOPs, read bytes and written bytes of one operator of every row.

        Columns that do not depend on the batch are returned without arithmetic, shape (rows,).
        """
        return [
            constant + slope * batch if grows else constant
            for constant, slope, grows in self._affine
        ]

    def times(
        self,
        batch: Floats,
        rates: Rates,
        c: KernelConstants,
        channels_last: Flags | bool = False,
        compiled: Flags | bool = False,
        matmuls: MatmulTimes | None = None,
    ) -> KernelTimes:
        """Return the times of every row.

        Args:
            batch: Micro-batch sizes.
            rates: Rates of the devices.
            c: Fitted constants.
            channels_last: True for the NHWC layout.
            compiled: True for torch.compile.
            matmuls: Result of `matmul_times` for the same batch and rates, to avoid computing it
                again.
        """
        table, compiled = self.operators, np.asarray(compiled)
        batch = np.asarray(batch, dtype=np.float64)
        *dims, flops, read_bytes, written_bytes = self._at(batch)
        sizes, count = self._sizes(dims, batch, rates, channels_last, compiled), table.count
        classes = self._constants_of_classes(c)
        compute = self._compute_s(sizes, flops, classes, rates, c)
        # A lookup reads only the rows that it writes. The trace counts the whole embedding table.
        read_bytes = np.where(self._gathers, np.minimum(read_bytes, written_bytes), read_bytes)
        moved = np.where(self._updates > 0, read_bytes * self._updates, read_bytes + written_bytes)
        # Matrix units need NHWC, so NCHW convolutions are transposed to NHWC and back.
        dense = self._is_convolution & ~self._depthwise
        transposed = dense & sizes.tensor & ~sizes.channels_last
        moved = np.where(transposed, moved * (1.0 + 2.0 * c.transposes), moved)
        in_l2 = 1.0 + c.l2_gain * (1.0 / (1.0 + (moved / rates.l2_bytes) ** 2))
        share = np.where(sizes.channels_last, classes.share[1], classes.share[0])
        memory = moved / (rates.bytes_per_s * share * in_l2)
        launches = table.launches
        if compiled.any():
            joined = compiled & self.fused.joined
            # Fused kernels of Inductor only stream data. The arithmetic per element was fitted for
            # the norms and the softmax of ATen, so it does not apply to them.
            left = self.fused.traffic * c.compile_traffic
            streamed = moved * left / (rates.bytes_per_s * c.traffic_elementwise * in_l2)
            memory = np.where(joined, np.minimum(streamed, memory), memory)
            compute = np.where(joined, 0.0, compute)
            launches = launches * np.where(joined, self.fused.launches * c.compile_launches, 1.0)
        # Each of the two transposes is a separate kernel.
        launches = launches + 2.0 * transposed
        summed = np.maximum(dims[OTHER.elements_in], 1.0) / np.maximum(
            dims[OTHER.elements_out], 1.0
        )
        summing_us = SUMMED_US * np.sqrt(np.minimum(summed, MOST_SUMMED))
        start_us = c.latency_us + np.where(self._sums & ~compiled, summing_us, 0.0)
        latency = np.broadcast_to(count * launches * start_us * 1e-6, sizes.shape)
        # Both operands of an 8-bit matmul with a weight are cast first. This moves about as many
        # bytes as reading them in 16 bits. torch.compile fuses the cast into other kernels.
        cast = self._matmuls & self._has_weights & (rates.casts > 0) & ~compiled
        cast_s = np.where(cast, read_bytes / (rates.bytes_per_s * c.traffic_elementwise), 0.0)
        if self.has_attention:
            memory, latency = np.broadcast_to(memory, sizes.shape).copy(), latency.copy()
            for kind in self._attention_kinds:
                rows = self._rows_of_kind[kind]
                attention = self._attention_s(kind, rows, dims, moved, rates)
                compute[..., rows], memory[..., rows] = attention.compute_s, attention.memory_s
                latency[..., rows] = count[rows] * attention.start_s
        busy = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS)
        if self._matmuls.any():
            matmuls = self.matmul_times(batch, rates) if matmuls is None else matmuls
            columns = (busy, compute, memory, latency)
            busy, compute, memory, latency = self._with_matmuls(columns, matmuls, rates, sizes, c)
        return KernelTimes(
            count * (busy + cast_s) + latency, count * compute, count * (memory + cast_s), latency
        )

    def _sizes(
        self,
        dims: list[Floats],
        batch: Floats,
        rates: Rates,
        channels_last: Flags | bool,
        compiled: Flags | bool,
    ) -> OperatorSizes:
        half, convolves = self.operators.half, self._is_convolution
        shape = np.broadcast_shapes(batch.shape, rates.sms.shape, (len(self.operators),))
        full = np.where(convolves, rates.convolutions, rates.full)
        full_on_tensor_cores = np.where(
            convolves, rates.convolutions_on_tensor_cores, rates.full_on_tensor_cores
        )
        tensor = np.where(half, rates.half_on_tensor_cores, full_on_tensor_cores) > 0
        # torch.compile changes convolutions to channels-last, except for grouped convolutions
        # (torch._inductor.graph, GraphLowering.decide_layout_opt).
        by_itself = (dims[CONV.channels_last] > 0) | (np.asarray(compiled) & ~self._grouped)
        turned = np.broadcast_to(np.asarray(channels_last) | (convolves & by_itself), shape)
        return OperatorSizes(
            shape, dims, np.where(half, rates.half, full), tensor, rates.sms, turned
        )

    def tiling(
        self,
        batch: Floats,
        rates: Rates,
        c: KernelConstants,
        channels_last: Flags | bool = False,
        compiled: Flags | bool = False,
    ) -> Tiling:
        """Return the division of matmuls and convolutions into tiles and waves, for all rows.

        Arguments are those of `times`.
        """
        batch = np.asarray(batch, dtype=np.float64)
        dims, half = self._at(batch)[:MOST_SIZES], self.operators.half
        sizes = self._sizes(dims, batch, rates, channels_last, compiled)
        tiling = Tiling(*(np.zeros(sizes.shape) for _ in Tiling._fields))
        tiling.aligned[...] = 8.0
        for kind, rows in self._rows_of_kind.items():
            dense = rows & ~self._depthwise
            if kind == "gemm":
                tiling.waves[..., rows] = shared_matmul_s(sizes, rows, half[rows], rates, c)[1]
            elif kind in CONVOLUTION_KINDS and dense.any():
                grouped = self._grouped[dense]
                some = convolved(kind, sizes, dense, grouped, half[dense], rates, c)[1]
                for whole, values in zip(tiling, some, strict=True):
                    whole[..., dense] = values
        rows = self._matmuls
        if rows.any():
            b, m, n, k, figures = self._matmul_sizes(batch, rates)
            waves = form_times(b, m, n, k, figures).waves
            tiling.waves[..., rows] = np.where(figures.known > 0, waves, tiling.waves[..., rows])
            in_pieces = part(rates.half_on_tensor_cores, rows) > 0
            aligned = alignment(n, k, 8.0, 4.0, 2.0, 1.0)
            tiling.aligned[..., rows] = np.where(in_pieces, aligned, 8.0)
        return tiling

    def _matmul_sizes(
        self, batch: Floats, rates: Rates
    ) -> tuple[Floats, Floats, Floats, Floats, MatmulFigures]:
        """Return b, m, n, k and the device's figures for the rows of 16-bit and 8-bit matmuls."""
        rows, at = self._matmuls, part(batch, self._matmuls)
        b, m, n, k = (at_batch(self.operators.dims[rows, i], at) for i in GEMM)
        k = np.where(self._grouped_matmuls, np.ceil(k / PADDED_ROWS) * PADDED_ROWS, k)
        has_weights = self._has_weights[rows]
        pairs = zip(rates.weights, rates.batched, strict=True)
        figures = (np.where(has_weights, part(w, rows), part(a, rows)) for w, a in pairs)
        return b, m, n, k, MatmulFigures(*figures)

    def matmul_times(
        self, batch: Floats, rates: Rates, model: MatmulModel | None = None
    ) -> MatmulTimes:
        """Return the time of one matmul for each row of 16-bit or 8-bit matmuls.

        The times depend on the fitted matmul model, but not on the kernel constants.
        """
        sizes = self._matmul_sizes(np.asarray(batch, dtype=np.float64), rates)
        return matmul_times(*sizes, model, self._grouped_matmuls)

    def _with_matmuls(
        self,
        columns: tuple[Floats, ...],
        matmuls: MatmulTimes,
        rates: Rates,
        sizes: OperatorSizes,
        c: KernelConstants,
    ) -> list[Floats]:
        """Return the columns with the times of the matmul model, if it covers the device.

        The columns are seconds of every row. The first is the smooth maximum of the second and the
        third, compute and memory time of one operator. The last is the latency of all operators.
        """
        rows = self._matmuls
        b, n, k = (part(sizes.dims[i], rows) for i in (GEMM.batch, GEMM.n, GEMM.k))
        of_weights, of_batches = part(rates.weights.known, rows), part(rates.batched.known, rows)
        known = np.where(self._has_weights[rows], of_weights, of_batches) > 0
        known = known & ~(
            (part(rates.aligned_only, rows) > 0) & (b > 1) & ((n % 8 > 0) | (k % 8 > 0))
        )
        work = matmuls.seconds - matmuls.latency_s
        bound = matmuls.compute_s**SMOOTHNESS
        bound = bound / (bound + matmuls.memory_s**SMOOTHNESS)
        # Long steps heat the card, which lowers its clock. The matmuls of the fit were short
        # bursts.
        steady = c.products_sustained * part(rates.products_boost, rows)
        work = work * (1.0 + (1.0 / steady - 1.0) * bound)
        latency_s = matmuls.latency_s * self.operators.count[rows]
        measured = work, matmuls.compute_s / steady, matmuls.memory_s, latency_s
        replaced = []
        for column, values in zip(columns, measured, strict=True):
            whole = np.array(np.broadcast_to(column, sizes.shape))
            whole[..., rows] = np.where(known, values, whole[..., rows])
            replaced.append(whole)
        return replaced

    def _compute_s(
        self,
        sizes: OperatorSizes,
        flops: Floats,
        classes: _ClassConstants,
        rates: Rates,
        c: KernelConstants,
    ) -> Floats:
        """Return the arithmetic seconds of one operator of every row.

        For operators other than matmuls, the trace counts one FLOP per two elements.
        """
        work, row_work = (
            np.where(sizes.channels_last, nhwc, nchw)
            for nchw, nhwc in (classes.work, classes.row_work)
        )
        length, half = sizes.dims[OTHER.extent], self.operators.half
        normalised = sizes.dims[OTHER.elements_out] / np.maximum(length, 1.0)
        rows_s = np.where(length > 0, normalised, 0.0) * row_work
        elements_s = (2.0 * flops * work + rows_s) / rates.issue
        compute = np.where(self.operators.is_matrix, 0.0, elements_s)
        for kind, rows in self._rows_of_kind.items():
            if kind == "gemm":
                compute[..., rows] = shared_matmul_s(sizes, rows, half[rows], rates, c)[0]
            elif kind in CONVOLUTION_KINDS:
                dense, depthwise = rows & ~self._depthwise, rows & self._depthwise
                if dense.any():
                    grouped = self._grouped[dense]
                    seconds, _ = convolved(kind, sizes, dense, grouped, half[dense], rates, c)
                    compute[..., dense] = seconds
                if depthwise.any():
                    own_flops = part(flops, depthwise)
                    compute[..., depthwise] = depthwise_s(
                        kind, sizes, depthwise, own_flops, rates, c
                    )
        return compute

    def _attention_s(
        self, kind: str, rows: Flags, dims: list[Floats], moved: Floats, rates: Rates
    ) -> AttentionTimes:
        """Return the times of fused attention, with its own memory traffic and start latency."""
        half = self.operators.half[rows]
        which = np.select([~half, self._masked[rows], self._uneven[rows]], [2, 1, 3], 0)
        of_kind = zip(*rates.attention.of(kind), strict=True)
        figures = AttentionFigures(
            *(np.choose(which, [part(figure, rows) for figure in each]) for each in of_kind)
        )
        sizes = tuple(part(dims[i], rows) for i in ATTENTION)
        device = part(rates.sms, rows), part(rates.l2_bytes, rows)
        return attention_s(kind, sizes, part(moved, rows), figures, *device)

    def _constants_of_classes(self, c: KernelConstants) -> _ClassConstants:
        """Return the constants of each row's class. The last result is cached for sweeps."""
        if self._classes is None or self._classes[0] is not c:
            defaults = {"traffic": c.traffic_matrix, "work": 1.0, "row_work": 0.0}
            by_row = []
            for prefix, default in defaults.items():
                pairs = []
                for name in self._class_names:
                    nchw = getattr(c, f"{prefix}_{name}", default)
                    pairs.append((nchw, getattr(c, f"{prefix}_{name}_nhwc", nchw)))
                by_row.append(tuple(np.array(pairs).T[:, self._class_of_row]))
            self._classes = c, _ClassConstants(*by_row)
        return self._classes[1]
