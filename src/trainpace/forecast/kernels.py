"""Device time of every operator: a physical form per class, bounded by the device's sustained figures.

    time = (compute^p + memory^p)^(1/p) + launches x latency        p = SMOOTHNESS

Products, convolutions and fused attention compute as the modules of their names say. Everything else moves bytes at a share
of the bandwidth that its class reaches, more where it fits in L2. Every array broadcasts: operators along the last axis, batch
sizes and devices along axes before it.
"""

from typing import NamedTuple

import numpy as np

from trainpace.forecast.attention import AttentionFigures, AttentionTimes, attention_s
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.convolutions import convolution_s, depthwise_s
from trainpace.forecast.products import OperatorSizes, part, products_s
from trainpace.forecast.rates import Rates
from trainpace.kinds import KINDS
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    CONV,
    CONVOLUTION_KINDS,
    GEMM,
    MOST_SIZES,
    OTHER,
    Flags,
    Floats,
    Operators,
    at_batch,
)

SMOOTHNESS = 5.0
"""Exponent p: how sharply compute-bound turns into memory-bound."""


class KernelTimes(NamedTuple):
    """Seconds per row (all of its `count` operators together), and what bounds them."""

    device_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


def host_us(operators: Operators, launch_us: Floats | float, view_us: float, module_us: float) -> Floats:
    """The host's time for every row, all of its operators together, in microseconds."""
    kind, launches = np.asarray(operators.kind), launch_us * operators.launches
    return np.where(kind == "module", module_us, np.where(kind == "view", view_us, launches)) * operators.count


class KernelTable:
    """The operators of a workload, sorted into classes once, evaluated at any batch size, device and set of constants."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._shares: tuple[KernelConstants, Floats, Floats] | None = None
        self._kind = np.array(operators.kind)
        groups = operators.dims[:, CONV.groups].sum(axis=1)
        channels = operators.dims[:, CONV.c_in].sum(axis=1)
        self._is_matrix = operators.is_matrix
        self._is_convolution = np.isin(self._kind, CONVOLUTION_KINDS)
        self.has_attention = bool(np.isin(self._kind, ATTENTION_KINDS).any())
        self._depthwise = self._is_convolution & (groups > 1) & (channels == groups)
        self._grouped = self._is_convolution & (groups > 1) & ~self._depthwise

        calls = zip(operators.kind, operators.function, strict=True)
        self.traffic = [KINDS[kind].functions.get(name) or KINDS[kind].usual_traffic for kind, name in calls]
        """The class of every row's memory traffic: a name of the constants' `traffic_*`."""

    def times(
        self, batch: Floats, rates: Rates, c: KernelConstants, channels_last: Flags | bool = False,
        compiled: Flags | bool = False,
    ) -> KernelTimes:  # fmt: skip
        """Times at `batch`, which broadcasts against the operators in the last axis, as do the rates' arrays and the flags."""
        table, channels_last, compiled = self.operators, np.asarray(channels_last), np.asarray(compiled)
        batch = np.asarray(batch, dtype=np.float64)
        shape = np.broadcast_shapes(batch.shape, rates.sms.shape, (len(table),))
        half = table.half
        tensor = np.where(half, rates.half_on_tensor_cores, rates.full_on_tensor_cores) > 0
        dims = [at_batch(table.dims[:, i], batch) for i in range(MOST_SIZES)]
        # torch.compile turns convolutions to channels-last by itself (torch._inductor.config.layout_optimization)
        turned = channels_last | (self._is_convolution & ((dims[CONV.channels_last] > 0) | compiled))
        sizes = OperatorSizes(shape, dims, np.where(half, rates.half, rates.full), tensor, rates.sms, turned)
        compute = self._compute_s(sizes, dims[OTHER.extent], at_batch(table.flops, batch), rates, c, shape)
        read_bytes = at_batch(table.read_bytes, batch)
        moved = read_bytes + at_batch(table.written_bytes, batch)
        # NCHW convolutions on matrix units are transposed to NHWC and back
        transposed = self._is_convolution & ~self._depthwise & tensor & ~sizes.channels_last
        moved = np.where(transposed, moved * (1.0 + 2.0 * c.transposes), moved)
        cached = 1.0 / (1.0 + (moved / rates.l2_bytes) ** 2)
        nchw, nhwc = self._traffic_shares(c)
        share = np.where(sizes.channels_last, nhwc, nchw)
        memory = moved / (rates.bytes_per_s * share * (1.0 + c.l2_gain * cached))
        fused = compiled & ~self._is_matrix
        memory = np.where(fused & (self._kind != "optimizer"), memory * c.compile_traffic, memory)
        count = table.count
        launches = table.launches * np.where(fused, c.compile_launches, 1.0)
        latency = np.broadcast_to(count * launches * c.latency_us * 1e-6, shape)
        # in 8 bits both operands of a weight's product are cast first, which moves about as much as reading them in 16;
        # compilers and hand-fused kernels cast on the way
        cast = (self._kind == "gemm") & half & (table.dims[:, GEMM.batch, 1] == 0) & (rates.casts > 0) & ~compiled
        cast_s = np.where(cast, read_bytes / (rates.bytes_per_s * c.traffic_elementwise), 0.0)
        if self.has_attention:
            memory, latency = np.broadcast_to(memory, shape).copy(), latency.copy()
            for rows in (self._kind == kind for kind in ATTENTION_KINDS):
                if rows.any():
                    seconds = self._attention_s(rows, dims, moved, rates)
                    compute[..., rows], memory[..., rows] = seconds.compute_s, seconds.memory_s
                    latency[..., rows] = part(count, rows) * seconds.start_s
        busy = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS)
        return KernelTimes(count * (busy + cast_s) + latency, count * compute, count * (memory + cast_s), latency)

    def _compute_s(
        self, sizes: OperatorSizes, extent: Floats, flops: Floats, rates: Rates, c: KernelConstants, shape: tuple[int, ...]
    ) -> Floats:  # fmt: skip
        """Seconds of arithmetic of one operator of every row."""
        compute = np.where(self._is_matrix, np.zeros(shape), flops / (rates.plain * 0.5))
        half = self.operators.half
        for kind in sorted(set(self.operators.kind)):
            rows, own_form = self._kind == kind, KINDS[kind].compute_s
            if kind == "gemm":
                compute[..., rows] = products_s(sizes, rows, half[rows], rates, c)
            elif kind in CONVOLUTION_KINDS:
                dense, depthwise = rows & ~self._depthwise, rows & self._depthwise
                if dense.any():
                    compute[..., dense] = convolution_s(kind, sizes, dense, self._grouped[dense], half[dense], rates, c)
                if depthwise.any():
                    compute[..., depthwise] = depthwise_s(kind, sizes, depthwise, part(flops, depthwise), rates, c)
            elif own_form is not None:
                compute[..., rows] = own_form(part(flops, rows), part(rates.plain, rows), part(extent, rows))
        return compute

    def _attention_s(self, rows: Flags, dims: list[Floats], moved: Floats, rates: Rates) -> AttentionTimes:
        """Fused attention of one kind, whose kernels have a memory traffic and a start of their own."""
        kind, half = str(self._kind[rows][0]), self.operators.half[rows]
        pairs = zip(*rates.attention.of(kind), strict=True)
        figures = AttentionFigures(*(np.where(half, part(in_16, rows), part(in_32, rows)) for in_16, in_32 in pairs))
        sizes = tuple(part(dims[i], rows) for i in ATTENTION)
        return attention_s(kind, sizes, part(moved, rows), figures, part(rates.sms, rows), part(rates.l2_bytes, rows))

    def _traffic_shares(self, c: KernelConstants) -> tuple[Floats, Floats]:
        """Shares of the bandwidth in NCHW and in NHWC; those of the last constants are kept, as sweeps ask for them again and
        again."""
        if self._shares is None or self._shares[0] is not c:
            nchw = [getattr(c, f"traffic_{name}", c.traffic_matrix) for name in self.traffic]
            nhwc = [getattr(c, f"traffic_{name}_nhwc", share) for name, share in zip(self.traffic, nchw, strict=True)]
            self._shares = c, np.array(nchw), np.array(nhwc)
        return self._shares[1:]
