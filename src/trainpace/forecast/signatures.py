"""What a workload computes, in a few numbers: the operators' FLOPs and bytes by class, over the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainpace.core.execution import Precision
from trainpace.workload import ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, GROUPED, Floats, Workload

FLOP_CLASSES = ("convolutions", "grouped convolutions", "matrix products", "products of experts")
BYTE_CLASSES = (
    "matrix operators",
    "norms",
    "elementwise operators",
    "pooling",
    "embeddings",
    "the optimizer",
)
_BYTES_OF = {
    "norm": 1,
    "elementwise": 2,
    "copy": 2,
    "fill": 2,
    "softmax": 2,
    "reduction": 2,
    "view": 2,
    "module": 2,
    "pool": 3,
    "embedding": 4,
    "optimizer": 5,
}
"""The place of a kind's class; all others are matrix operators."""
CLASSES = len(FLOP_CLASSES) + len(BYTE_CLASSES)
DIGITS = 6


def signature_of(workload: Workload, precision: Precision) -> tuple[float, ...]:
    """2 coefficients over the batch (constant, per sample) of the FLOPs in each of FLOP_CLASSES and the bytes in each of
    BYTE_CLASSES; then the number of trained and of all parameters, and the tokens of a sample (0 for none).

    Raises TrainpaceError where the workload was not traced for this precision.
    """
    table = workload.form(precision).operators
    kind, function = np.array(table.kind), np.array(table.function)
    convolution = np.isin(kind, CONVOLUTION_KINDS)
    grouped = convolution & (table.dims[:, CONV.groups, 0] > 1)
    product = np.isin(kind, ("gemm", *ATTENTION_KINDS))
    experts = product & (function == GROUPED)
    of_flops = (convolution & ~grouped, grouped, product & ~experts, experts)
    of_bytes = np.array([_BYTES_OF.get(name, 0) for name in table.kind])
    counts = table.count[:, None]
    flops, moved = table.flops * counts, (table.read_bytes + table.written_bytes) * counts
    rows = [flops[chosen].sum(axis=0) for chosen in of_flops]
    rows += [moved[of_bytes == place].sum(axis=0) for place in range(len(BYTE_CLASSES))]
    tail = (workload.trainable_parameters, workload.parameters, workload.sequence_length or 0)
    return tuple(float(f"{value:.{DIGITS}g}") for value in (*np.concatenate(rows).tolist(), *tail))


def amounts(signatures: Floats, batch: Floats | float) -> tuple[Floats, Floats]:
    """(FLOPs by class, bytes by class) of one micro-batch of each signature (n x its length), at a batch size each."""
    pairs = signatures[:, : 2 * CLASSES].reshape(-1, CLASSES, 2)
    at = np.maximum(pairs[..., 0] + pairs[..., 1] * np.reshape(batch, (-1, 1)), 0.0)
    return at[:, : len(FLOP_CLASSES)], at[:, len(FLOP_CLASSES) :]


def model_kind(workload: Workload) -> str:
    """Convolutions, transformers, experts or other: by what most of its FLOPs are."""
    form = next(iter(workload.forms.values()))
    table = form.operators
    [flops], _ = amounts(np.array([signature_of_form(workload)]), 8.0)
    if flops.sum() <= 0:
        return "other"
    if flops[3] > 0.1 * flops.sum():
        return "experts"
    attends = (
        any(kind in ATTENTION_KINDS for kind in table.kind)
        or _softmaxes(table.function, table.count) > 1
    )
    if flops[:2].sum() > 0.5 * flops.sum():
        return "convolutions"
    return "transformers" if attends else "other"


def signature_of_form(workload: Workload) -> tuple[float, ...]:
    """The signature of the one form that a workload was traced in, or of its first."""
    precisions: dict[str, Precision] = {"fp32": "fp32", "amp": "amp_bf16", "half": "bf16"}
    return signature_of(workload, precisions[next(iter(workload.forms))])


def _softmaxes(functions: Sequence[str], counts: Floats) -> int:
    return sum(
        int(count)
        for name, count in zip(functions, counts.tolist(), strict=True)
        if name in ("_softmax", "_safe_softmax")
    )
