"""A workload whose samples are rows of several documents each, by attention of variable length.

Every operator but attention works on tokens one by one, and does as much in a packed row. Attention goes over each document alone
(flash_attn_varlen_func, to which transformers' padding-free collators and TRL's packing hand position ids that begin anew):
scores are the sum over documents of length squared. As many tokens in sequences of the length that a token's document has in the
mean are as many scores, and move the same queries, keys and values. What differs is how blocks of unequal documents fill the last
wave.
"""

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.workload import ATTENTION, ATTENTION_KINDS, PackedRow, TracedForm, Workload

MASKED = "efficient"
"""Names of functions that take a mask of numbers contain it."""


def packed(workload: Workload, row: PackedRow) -> Workload:
    """The workload with each of its samples a packed row. Raises TrainpaceError where its attention has no kernel for that."""
    forms = {name: _packed(workload.model, form, row) for name, form in workload.forms.items()}
    note = (
        f"A sample is a row of {row.tokens:,} tokens, {100 * row.fill:.0f} % of them documents,"
        f" {row.documents:.1f} a row, packed by best fit ({row.source}); a token attends within its"
        f" own document, of {row.attended:,.0f} tokens in the mean over tokens."
    )
    cut = (
        f" Documents longer than a row are cut, {100 * row.cut:.0f} % of all tokens."
        if row.cut >= 0.005
        else ""
    )
    return replace(workload, forms=forms, notes=(*workload.notes, note + cut))


def _packed(model: str, form: TracedForm, row: PackedRow) -> TracedForm:
    operators = form.operators
    rows = np.flatnonzero(np.isin(operators.kind, ATTENTION_KINDS))
    if not len(rows):
        raise TrainpaceError(
            f"{model} has no attention that is fused, and packed rows need attention of variable"
            " length.",
            "Leave --packed out.",
        )
    if not operators.half[rows].all():
        raise TrainpaceError(
            "attention of variable length takes 16-bit numbers, and this precision computes it in"
            " fp32.",
            "Use --precision bf16 or amp_bf16.",
        )
    if any(MASKED in operators.function[i] for i in rows):
        raise TrainpaceError(
            f"the attention of {model} takes a mask of numbers, which kernels of variable length do"
            " not.",
            "Leave --packed out.",
        )
    dims, flops = operators.dims.astype(np.float64), operators.flops.astype(np.float64)
    lengths = dims[rows][:, [ATTENTION.queries, ATTENTION.keys]]
    if (lengths != [row.tokens, 0]).any():
        raise TrainpaceError(
            f"{model} does not attend from all {row.tokens} tokens to all of them.",
            "Leave --packed out.",
        )
    if (dims[rows][:, ATTENTION.seen] != 0).any():
        raise TrainpaceError(
            f"{model} attends within windows or by a block mask, and what these leave of each"
            " document in a packed row is not known here.",
            "Leave --packed out, or the windows out of the configuration.",
        )
    share = row.attended / row.tokens
    dims[rows, ATTENTION.batch] /= share
    dims[rows, ATTENTION.queries, 0] = dims[rows, ATTENTION.keys, 0] = row.attended
    flops[rows] *= share
    return replace(form, operators=replace(operators, dims=dims, flops=flops))
