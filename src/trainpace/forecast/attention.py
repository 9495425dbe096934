"""Seconds of arithmetic of fused attention."""

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.operator_sizes import OperatorSizes, part
from trainpace.forecast.rates import Rates
from trainpace.workload import ATTENTION, Flags, Floats

ATTENTION_BLOCK_ROWS = 128.0
"""Query rows of one thread block of fused attention (FlashAttention-2, arXiv:2307.08691)."""


def attention_s(
    kind: str, sizes: OperatorSizes, rows: Flags, flops: Floats, half: Flags, rates: Rates, c: KernelConstants
) -> Floats:
    """Fused attention: a share of the rate, less where its blocks of query rows do not fill the device."""
    b, heads, q, speed, _, sms = sizes.of(rows, ATTENTION.batch, ATTENTION.heads, ATTENTION.queries)
    speed = np.where(half, part(rates.attention, rows), speed)
    waves = b * heads * np.ceil(q / ATTENTION_BLOCK_ROWS) / sms
    fill = waves / np.maximum(1.0, waves + 0.5 * (np.ceil(waves) - waves))
    share = np.where(half, getattr(c, kind), getattr(c, kind.replace("attention", "attention_full")))
    return np.asarray(flops / (speed * share * np.minimum(fill, 1.0)))
