"""Device time of every operator: a physical form per class, bounded by the device's sustained figures.

    time = (compute^p + memory^p)^(1/p) + launches x latency        p = SMOOTHNESS

Matrix products and convolutions compute in tiles (`tiles`); convolutions choose between implicit GEMM and Winograd, grouped ones
run as many small products, depthwise ones on CUDA cores. Everything else moves bytes at a share of the bandwidth that
its class reaches, more where it fits in L2. Every array broadcasts: operators along the last axis, batch sizes and devices along
axes before it.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.convolutions import convolution_s, depthwise_s
from trainpace.forecast.rates import Rates
from trainpace.forecast.rows import Pick, alignment, part, tile_model
from trainpace.forecast.tiles import product_s
from trainpace.kinds import KINDS
from trainpace.workload import ATTENTION, ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, GEMM, MOST_SIZES, OTHER, Operators

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SMOOTHNESS = 5.0
"""Exponent p: how sharply compute-bound turns into memory-bound."""
ATTENTION_BLOCK_ROWS = 128.0
"""Query rows of one thread block of fused attention (FlashAttention-2, arXiv:2307.08691)."""


_OWN_FORMS = {name: kind.compute_s for name, kind in KINDS.items() if kind.compute_s is not None}


class KernelTimes(NamedTuple):
    """Seconds per row (all of its `count` operators together), and what bounds them."""

    device_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


class KernelTable:
    """The operators of a workload, sorted into classes once, evaluated at any batch size, device and set of constants."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._shares: tuple[KernelConstants, Floats, Floats] | None = None
        self._kind = np.array(operators.kind)
        self._groups = operators.dims[:, CONV.groups].sum(axis=1)
        channels = operators.dims[:, CONV.c_in].sum(axis=1)
        self._is_convolution = np.isin(self._kind, CONVOLUTION_KINDS)
        self._depthwise = self._is_convolution & (self._groups > 1) & (channels == self._groups)
        self._grouped = self._is_convolution & (self._groups > 1) & ~self._depthwise

    @cached_property
    def traffic(self) -> NDArray[np.str_]:
        """The class of every row's memory traffic: a name of the constants' `traffic_*`."""
        calls = zip(self.operators.kind, self.operators.function, strict=True)
        return np.array([KINDS[kind].functions.get(name) or KINDS[kind].usual_traffic for kind, name in calls])

    def times(
        self,
        batch: Floats,
        rates: Rates,
        c: KernelConstants,
        channels_last: Flags | bool = False,
        compiled: Flags | bool = False,
    ) -> KernelTimes:
        """Times at `batch`, which broadcasts against the operators in the last axis, as do the rates' arrays and the flags."""
        table = self.operators
        batch = np.asarray(batch, dtype=np.float64)

        def at(coefficients: Floats) -> Floats:
            value: Floats = coefficients[..., 0] + coefficients[..., 1] * batch
            return value

        shape = np.broadcast_shapes(batch.shape, rates.sms.shape, self._groups.shape)
        half = table.half
        bytes_moved = at(table.read_bytes) + at(table.written_bytes)
        compute = np.zeros(shape)
        rate = np.where(half, rates.half, rates.full)
        tensor = np.where(half, rates.half_on_tensor_cores, rates.full_on_tensor_cores) > 0
        dims = [at(table.dims[:, i]) for i in range(MOST_SIZES)]
        # torch.compile turns convolutions to channels-last by itself (torch._inductor.config.layout_optimization)
        turned: Flags = np.asarray(channels_last) | (
            self._is_convolution & ((dims[CONV.channels_last] > 0) | np.asarray(compiled))
        )
        pick = Pick(shape, dims, rate, tensor, rates.sms, turned)

        products = self._kind == "gemm"
        if products.any():
            compute[..., products] = _products_s(pick, products, half[products], rates, c)
        flops = at(table.flops)
        for kind in CONVOLUTION_KINDS:
            dense = (self._kind == kind) & ~self._depthwise
            if dense.any():
                compute[..., dense] = convolution_s(kind, pick, dense, self._grouped[dense], half[dense], rates, c)
            thin = (self._kind == kind) & self._depthwise
            if thin.any():
                compute[..., thin] = depthwise_s(kind, pick, thin, part(flops, thin), rates, c)
        for kind in ATTENTION_KINDS:
            rows = self._kind == kind
            if rows.any():
                compute[..., rows] = _attention_s(kind, pick, rows, part(flops, rows), half[rows], rates, c)
        share = self._traffic_shares(pick.channels_last, c)
        # NCHW convolutions on matrix units are transposed to NHWC and back
        transposed = self._is_convolution & ~self._depthwise & tensor & ~pick.channels_last
        bytes_moved = np.where(transposed, bytes_moved * (1.0 + 2.0 * c.transposes), bytes_moved)
        cached = 1.0 / (1.0 + (bytes_moved / rates.l2_bytes) ** 2)
        memory = bytes_moved / (rates.bytes_per_s * share * (1.0 + c.l2_gain * cached))
        other = ~np.isin(self._kind, ("gemm", *ATTENTION_KINDS, *CONVOLUTION_KINDS))
        compute = np.where(other, flops / (rates.plain * 0.5), compute)
        for name, form in _OWN_FORMS.items():
            rows = self._kind == name
            if rows.any():
                extent = part(dims[OTHER.extent], rows)
                compute[..., rows] = form(part(flops, rows), part(rates.plain, rows), extent)
        fused = np.asarray(compiled) & other
        memory = np.where(fused & (self._kind != "optimizer"), memory * c.compile_traffic, memory)
        count = table.count
        launches = table.launches * np.where(fused, c.compile_launches, 1.0)
        latency = np.broadcast_to(count * launches * c.latency_us * 1e-6, shape)
        # in 8 bits both operands of a weight's product are cast first, which moves about as much as reading them in 16;
        # compilers and hand-fused kernels cast on the way
        cast = (
            products
            & half
            & (table.dims[:, GEMM.batch, 1] == 0)
            & (np.asarray(rates.casts) > 0)
            & ~np.asarray(compiled)
        )
        cast_s = np.where(cast, at(table.read_bytes) / (rates.bytes_per_s * c.traffic_elementwise), 0.0)
        busy = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS)
        return KernelTimes(count * (busy + cast_s) + latency, count * compute, count * (memory + cast_s), latency)

    def _traffic_shares(self, channels_last: Flags, c: KernelConstants) -> Floats:
        """Shares of the bandwidth; those of the last constants are kept, as sweeps ask for them again and again."""
        cached = self._shares
        if cached is None or cached[0] is not c:
            cached = self._shares = (c, *self._shares_of(c))
        result: Floats = np.where(channels_last, cached[2], cached[1])
        return result

    def _shares_of(self, c: KernelConstants) -> tuple[Floats, Floats]:
        """In NCHW, and in NHWC."""
        shares = np.array([getattr(c, f"traffic_{name}", c.traffic_matrix) for name in self.traffic])
        nhwc = np.array(
            [getattr(c, f"traffic_{name}_nhwc", share) for name, share in zip(self.traffic, shares, strict=True)]
        )
        return shares, nhwc


MISALIGNED = 0.7
"""Share of the fp32 rate that batched 16-bit products get out of an A100's CUDA cores where rows are no multiples of 16 bytes:
cuBLAS 11 seems to have no kernels on matrix units for them, in fp16 as in bf16. Set so that bigscience's runs with heads of 150
numbers err as aligned ones do; those with 108 then do too (docs/log.md). Later cuBLAS: unknown."""


def _products_s(pick: Pick, rows: Flags, half: Flags, rates: Rates, c: KernelConstants) -> Floats:
    b, m, n, k, speed, units, sms = pick(rows, *GEMM)
    scalar = half & units & (b > 1) & (part(rates.aligned_only, rows) > 0) & ((n % 8 > 0) | (k % 8 > 0))
    speed, units = np.where(scalar, MISALIGNED * part(rates.plain, rows), speed), units & ~scalar
    tensor_share = np.where(half, c.gemm_tensor, c.gemm_tf32)
    share = np.where(units, np.where(b > 1, c.batched_tensor * tensor_share, tensor_share), c.gemm_plain)
    share = share * alignment(n, k, units, c)
    return product_s(b, m, n, k, speed, sms, tile_model(share, units, c))


def _attention_s(
    kind: str, pick: Pick, rows: Flags, flops: Floats, half: Flags, rates: Rates, c: KernelConstants
) -> Floats:
    """Fused attention: a share of the rate, less where its blocks of query rows do not fill the device."""
    b, heads, q, speed, _, sms = pick(rows, ATTENTION.batch, ATTENTION.heads, ATTENTION.queries)
    speed = np.where(half, part(rates.attention, rows), speed)
    waves = b * heads * np.ceil(q / ATTENTION_BLOCK_ROWS) / sms
    fill = waves / np.maximum(1.0, waves + 0.5 * (np.ceil(waves) - waves))
    share = np.where(half, getattr(c, kind), getattr(c, kind.replace("attention", "attention_full")))
    result: Floats = flops / (speed * share * np.minimum(fill, 1.0))
    return result
