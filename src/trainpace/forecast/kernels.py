"""Device time of every operator: a physical form per class, bounded by what the device achieves.

    time = (compute^p + memory^p)^(1/p) + launches x latency        p = SMOOTHNESS

Matmuls, convolutions and fused attention compute as the modules of their names say. Everything else
moves bytes at a share of the bandwidth that its class reaches, more if it fits in L2, or works on
every element for longer than that takes. Every array broadcasts: operators along the last axis,
batch sizes and devices along axes before it.
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
"""Exponent p: how sharply compute-bound turns into memory-bound."""

SUMMED_US = 0.15
"""Microseconds that a sum, mean or norm takes for the square root of the numbers that go into each
result, besides moving them: torch's reduction shares them among threads, blocks and a second pass
of whichever block ends last (ATen/native/cuda/Reduce.cuh). Fitted on the lent H100's profiled sums
and means (n 1360); the H200's (286) it then forecasts with a bias of -6%, of -57% without."""
MOST_SUMMED = 160_000.0
"""Above this, more numbers take more blocks instead: sums of 590,000 into each of 16 to 64 results
start no later (n 7)."""
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
"""Bytes that an update of many tensors moves for each byte that its trace says it reads. It writes
one of the lists that it reads (fused, all but the gradients), while the trace counts a fourth of
what is read. Adam's addcmul_ is given the gradient twice and reads it once; add_ is assumed to read
a list besides its own, as SGD's does. Counted in this way, all seven calls of AdamW move 2.6 to 2.8
TB/s on the lent H100 and 3.4 to 3.9 on the H200 (medians of 60 and 19 steps of models above 50
million parameters), SGD's 2.7."""

PADDED_ROWS = 16
"""An expert's rows, over which its weight's gradient sums, are padded to a multiple of this number:
for 16-byte strides of grouped matmuls (torch._grouped_mm), in FP8 to 16 or 32 (Megatron-Core's
moe_router_padding_for_quantization, torchao's pad_token_groups)."""


class KernelTimes(NamedTuple):
    """Seconds per row (all of its `count` operators together), and what bounds them."""

    device_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


def host_us(
    operators: Operators, launch_us: Floats | float, view_us: float, module_us: float
) -> Floats:
    """Return the host's microseconds for every row, all of its operators together."""
    kind, launches = np.asarray(operators.kind), launch_us * operators.launches
    each = np.where(kind == "module", module_us, np.where(kind == "view", view_us, launches))
    return each * operators.count


class _Affine:
    """A column of coefficients over the batch size, stored so that evaluating it is cheap."""

    def __init__(self, coefficients: Floats) -> None:
        self._constant, self._slope = (
            np.array(coefficients[:, i], dtype=np.float64) for i in range(2)
        )
        self._is_constant = not self._slope.any()

    def at(self, batch: Floats) -> Floats:
        return self._constant if self._is_constant else self._constant + self._slope * batch


class _ClassConstants(NamedTuple):
    """Constants of the classes of memory traffic, by row: in NCHW, and in NHWC."""

    share: tuple[Floats, Floats]
    work: tuple[Floats, Floats]
    row_work: tuple[Floats, Floats]


class _Columns(NamedTuple):
    """Seconds of one operator of every row, before what bounds it is known.

    latency_s is that of all `count` operators of a row together.
    """

    busy_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


class KernelTable:
    """The operators of a workload, sorted into classes once, and their times on any device.

    Every method takes a `batch` that broadcasts against the operators in the last axis, as do the
    arrays of `Rates` and the flags `channels_last` and `compiled`.
    """

    def __init__(
        self,
        operators: Operators,
        compiled_to: Fused | None = None,
        like: KernelTable | None = None,
    ) -> None:
        """`compiled_to` is what torch.compile leaves of the rows, if they are not those of one
        workload in their order; `like` is a table for which it leaves the same."""
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
        """The class of every row's memory traffic: a name of the constants' `traffic_*`."""
        self._class_names, self._class_of_row = np.unique(self.traffic, return_inverse=True)
        self._dims = [_Affine(operators.dims[:, i]) for i in range(MOST_SIZES)]
        self._flops, self._read, self._written = map(
            _Affine, (operators.flops, operators.read_bytes, operators.written_bytes)
        )

    @cached_property
    def fused(self) -> Fused:
        """Remaining bytes and kernels of every row under torch.compile."""
        if self._like is not None:
            return self._like.fused
        return fused(self.operators) if self._compiled_to is None else self._compiled_to

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

        `matmuls` is what `matmul_times` returns for the same batch and rates, if it is known.
        """
        table, compiled = self.operators, np.asarray(compiled)
        batch = np.asarray(batch, dtype=np.float64)
        sizes, count = self._sizes(batch, rates, channels_last, compiled), table.count
        classes = self._constants_of_classes(c)
        compute = self._compute_s(sizes, self._flops.at(batch), classes, rates, c)
        read_bytes, written_bytes = self._read.at(batch), self._written.at(batch)
        # traces count the whole table; only the rows that are written have been read
        read_bytes = np.where(self._gathers, np.minimum(read_bytes, written_bytes), read_bytes)
        moved = np.where(self._updates > 0, read_bytes * self._updates, read_bytes + written_bytes)
        # NCHW convolutions on matrix units are transposed to NHWC and back
        dense = self._is_convolution & ~self._depthwise
        transposed = dense & sizes.tensor & ~sizes.channels_last
        moved = np.where(transposed, moved * (1.0 + 2.0 * c.transposes), moved)
        in_l2 = 1.0 + c.l2_gain * (1.0 / (1.0 + (moved / rates.l2_bytes) ** 2))
        share = np.where(sizes.channels_last, classes.share[1], classes.share[0])
        memory = moved / (rates.bytes_per_s * share * in_l2)
        launches = table.launches
        if compiled.any():
            joined = compiled & self.fused.joined
            # whatever Inductor fuses, it writes kernels that stream; the work per element is that
            # of ATen's norms and softmax
            left = self.fused.traffic * c.compile_traffic
            streamed = moved * left / (rates.bytes_per_s * c.traffic_elementwise * in_l2)
            memory = np.where(joined, np.minimum(streamed, memory), memory)
            compute = np.where(joined, 0.0, compute)
            launches = launches * np.where(joined, self.fused.launches * c.compile_launches, 1.0)
        # the two transposes are kernels of their own
        launches = launches + 2.0 * transposed
        dims = sizes.dims
        summed = np.maximum(dims[OTHER.elements_in], 1.0) / np.maximum(
            dims[OTHER.elements_out], 1.0
        )
        summing_us = SUMMED_US * np.sqrt(np.minimum(summed, MOST_SUMMED))
        start_us = c.latency_us + np.where(self._sums & ~compiled, summing_us, 0.0)
        latency = np.broadcast_to(count * launches * start_us * 1e-6, sizes.shape)
        # in 8 bits both operands of a weight's matmul are cast first, which moves about as much as
        # reading them in 16; compilers and hand-fused kernels cast on the way
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
        columns = _Columns(busy, compute, memory, latency)
        if self._matmuls.any():
            matmuls = self.matmul_times(batch, rates) if matmuls is None else matmuls
            columns = self._with_matmuls(columns, matmuls, rates, sizes, c)
        busy, compute, memory, latency = columns
        return KernelTimes(
            count * (busy + cast_s) + latency, count * compute, count * (memory + cast_s), latency
        )

    def _sizes(
        self, batch: Floats, rates: Rates, channels_last: Flags | bool, compiled: Flags | bool
    ) -> OperatorSizes:
        half, convolves = self.operators.half, self._is_convolution
        shape = np.broadcast_shapes(batch.shape, rates.sms.shape, (len(self.operators),))
        full = np.where(convolves, rates.convolutions, rates.full)
        full_on_tensor_cores = np.where(
            convolves, rates.convolutions_on_tensor_cores, rates.full_on_tensor_cores
        )
        tensor = np.where(half, rates.half_on_tensor_cores, full_on_tensor_cores) > 0
        dims = [size.at(batch) for size in self._dims]
        # torch.compile turns convolutions to channels-last by itself, except for grouped ones
        # (torch._inductor.graph, GraphLowering.decide_layout_opt)
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
        """Return how matmuls and convolutions are divided into tiles and waves, for all rows."""
        batch = np.asarray(batch, dtype=np.float64)
        sizes, half = self._sizes(batch, rates, channels_last, compiled), self.operators.half
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
        """Return sizes and figures of the rows that multiply in 16 or 8 bits."""
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
        """Return the times of one matmul of every row that multiplies in 16 or 8 bits.

        They do not depend on the kernel constants.
        """
        sizes = self._matmul_sizes(np.asarray(batch, dtype=np.float64), rates)
        return matmul_times(*sizes, model, self._grouped_matmuls)

    def _with_matmuls(
        self,
        columns: _Columns,
        matmuls: MatmulTimes,
        rates: Rates,
        sizes: OperatorSizes,
        c: KernelConstants,
    ) -> _Columns:
        """Return the columns with measured matmuls in them, if the device's are known."""
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
        # long steps heat a card; short bursts of kernels do not
        steady = c.products_sustained * part(rates.products_boost, rows)
        work = work * (1.0 + (1.0 / steady - 1.0) * bound)
        latency_s = matmuls.latency_s * self.operators.count[rows]
        measured = work, matmuls.compute_s / steady, matmuls.memory_s, latency_s
        replaced = []
        for column, values in zip(columns, measured, strict=True):
            whole = np.array(np.broadcast_to(column, sizes.shape))
            whole[..., rows] = np.where(known, values, whole[..., rows])
            replaced.append(whole)
        return _Columns(*replaced)

    def _compute_s(
        self,
        sizes: OperatorSizes,
        flops: Floats,
        classes: _ClassConstants,
        rates: Rates,
        c: KernelConstants,
    ) -> Floats:
        """Return the seconds of arithmetic of one operator of every row.

        The FLOPs of a traced row without matmuls are one for two elements.
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
        """Return the times of fused attention, which has its own memory traffic and start."""
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
        """Return the classes' constants by row. The latest are cached for sweeps."""
        if self._classes is None or self._classes[0] is not c:

            def by_row(prefix: str, default: float) -> tuple[Floats, Floats]:
                nchw = [getattr(c, f"{prefix}_{name}", default) for name in self._class_names]
                nhwc = [
                    getattr(c, f"{prefix}_{name}_nhwc", value)
                    for name, value in zip(self._class_names, nchw, strict=True)
                ]
                return np.array(nchw)[self._class_of_row], np.array(nhwc)[self._class_of_row]

            shares = by_row("traffic", c.traffic_matrix)
            own = _ClassConstants(shares, by_row("work", 1.0), by_row("row_work", 0.0))
            self._classes = c, own
        return self._classes[1]
