"""Rewrite a traced workload for the software of a target, in all forms that were traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Precision
from trainpace.core.hardware import Device
from trainpace.core.software import (
    ATTENTION_IN_WORDS,
    FP8_IN_WORDS,
    OPTIMIZERS_IN_WORDS,
    TODAY,
    CrossEntropy,
    Fp8Recipe,
    OptimizerImplementation,
    Rewrites,
    Software,
)
from trainpace.forecast.attention import implementation_on
from trainpace.forecast.rewrites import (
    can_be,
    eager,
    has_vocabulary_loss,
    traced_implementations,
    updated,
    with_loss,
)
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    Operators,
    PackedRow,
    TracedForm,
    Workload,
)

MASKED = "efficient"
"""Part of the function name of attention operators with a mask tensor."""


def as_run(workload: Workload, rewrites: Rewrites) -> Workload:
    """Return the workload with the operators of this software.

    If nothing differs, the result is the same object.
    """
    forms = dict(workload.forms)
    for name, form in workload.forms.items():
        if rewrites.eager_attention:
            form = eager(form, name, workload.checkpointed)
        if rewrites.cross_entropy:
            form = with_loss(form, rewrites.cross_entropy, name)
        if rewrites.half_router and name == "half":
            form = with_half_router(form)
        if rewrites.optimizer and can_be(workload, rewrites.optimizer):
            form = updated(workload, form, rewrites.optimizer)
        forms[name] = form
    same = all(forms[name] is form for name, form in workload.forms.items())
    return workload if same else replace(workload, forms=forms)


def with_half_router(form: TracedForm) -> TracedForm:
    """Return the form with 16-bit routers.

    The only fp32 matmuls in the blocks of a 16-bit form are those of routers.
    """
    blocks, operators = form.blocks, form.operators
    if blocks is None:
        return form
    rows = (np.array(operators.kind) == "gemm") & ~operators.half & (blocks.operator_counts > 0)
    rows &= np.array(operators.phase) != "optimizer"
    if not rows.any():
        return form
    share = np.where(rows, 0.5, 1.0)[:, None]
    narrower = replace(
        operators,
        half=operators.half | rows,
        read_bytes=operators.read_bytes * share,
        written_bytes=operators.written_bytes * share,
    )
    return replace(form, operators=narrower)


class RunningSoftware(NamedTuple):
    """Description of the software of a forecast.

    Attributes:
        words: The software in words.
        is_assumed: True if all of it is assumed.
        idle: Settings without effect on this forecast, with the reason.
    """

    words: str
    is_assumed: bool
    idle: tuple[str, ...]


NO_SOFTWARE = RunningSoftware("", False, ())
Effect = tuple[str, str]
"""Software that runs, and a setting without effect with its reason. Either may be ""."""


def running_software(
    workload: Workload,
    software: Software,
    device: Device,
    precision: Precision,
    compiles: bool = False,
) -> RunningSoftware:
    """Describe the software that runs a workload on a device.

    Args:
        workload: Workload as traced.
        software: Software of the target.
        device: The device.
        precision: Precision of the training.
        compiles: True if torch.compile is used.
    """
    operators, s = workload.form(precision).operators, software
    effects = [(s.name, ""), _attention(operators, s, device)]
    if s.optimizer is not None:
        effects.append(_optimizer(workload, operators, s.optimizer))
    if s.cross_entropy is not None:
        effects.append(_loss(operators, s.cross_entropy, compiles))
    if s.fp8_recipe is not None:
        effects.append(("", _fp8(s.fp8_recipe, precision)))
    if s.router == "16_bit":
        effects.append(("routers in 16 bits", ""))
    if s.framework == "jax":
        effects.append(("", "JAX: forecast as PyTorch under torch.compile"))
    words, idle = (tuple(filter(None, texts)) for texts in zip(*effects, strict=True))
    return RunningSoftware(", ".join(words), software == TODAY, idle)


def _attention(operators: Operators, software: Software, device: Device) -> Effect:
    wanted = software.attention
    rows = np.isin(operators.kind, ATTENTION_KINDS)
    if not rows.any():
        if wanted in (None, "eager"):
            return "", ""
        return "", f"{ATTENTION_IN_WORDS[wanted]}: the model has no fused attention"
    if software.rewrites.eager_attention:
        return ATTENTION_IN_WORDS["eager"], ""
    half = bool(operators.half[rows].any())
    kernels = implementation_on(device, software.fused_attention) if half else "efficient"
    runs = ATTENTION_IN_WORDS[kernels]
    if wanted in (None, kernels):
        return runs, ""
    return runs, f"{ATTENTION_IN_WORDS[wanted]}: {device.name if half else 'fp32'} uses {runs}"


def _optimizer(workload: Workload, operators: Operators, wanted: OptimizerImplementation) -> Effect:
    words = OPTIMIZERS_IN_WORDS[wanted]
    if "optimizer" not in operators.phase:
        return "", f"{words}: nothing is updated"
    traced = traced_implementations(workload) or {"for_loop"}
    if can_be(workload, wanted) or traced == {wanted}:
        return words, ""
    return "", f"{words}: unknown for {workload.optimizer}"


def _loss(operators: Operators, wanted: CrossEntropy, compiles: bool) -> Effect:
    words = f"{wanted} cross-entropy"
    if wanted == "uncompiled" and not compiles:
        return "", f"{words}: nothing is compiled"
    if not has_vocabulary_loss(operators):
        return "", f"{words}: the model has no loss over a vocabulary"
    return words, ""


def _fp8(recipe: Fp8Recipe, precision: Precision) -> str:
    if precision != "fp8":
        return f"{FP8_IN_WORDS[recipe]}: the precision is {precision}"
    if recipe == "per_tensor":
        return ""
    return f"{FP8_IN_WORDS[recipe]}: it is forecast as one scale per tensor"


# ---- rows of several documents each


def packed(workload: Workload, row: PackedRow) -> Workload:
    """Return the workload with samples that are packed rows of several documents.

    All operators except attention process each token separately, so packing does not change them.
    Attention processes each document separately. This is flash_attn_varlen_func, which
    transformers' padding-free collators and TRL's packing call with position ids that restart. The
    number of scores is the sum of squared document lengths. Sequences of equal length have as many
    scores if their length is the mean over tokens of the document length. They also move the same
    queries, keys and values. Only the last wave differs, because documents have unequal lengths.

    Raises:
        TrainpaceError: If the attention of the model has no kernel for packed rows.
    """
    forms = {name: _packed(workload.model, form, row) for name, form in workload.forms.items()}
    note = (
        f"A sample is a row of {row.tokens:,} tokens, {100 * row.fill:.0f}% of them documents,"
        f" {row.documents:.1f} per row, packed by best fit ({row.source}); a token attends within"
        f" its own document, which has {row.attended:,.0f} tokens on average over tokens."
    )
    if row.cut >= 0.005:
        note += f" Documents longer than a row are cut ({100 * row.cut:.0f}% of all tokens)."
    return replace(workload, forms=forms, notes=(*workload.notes, note))


def _packed(model: str, form: TracedForm, row: PackedRow) -> TracedForm:
    operators = form.operators
    rows = np.flatnonzero(np.isin(operators.kind, ATTENTION_KINDS))
    problem = next(_problems(model, operators, rows, row), None)
    if problem is not None:
        raise TrainpaceError(*problem)
    dims, flops = operators.dims.astype(np.float64), operators.flops.astype(np.float64)
    share = row.attended / row.tokens
    dims[rows, ATTENTION.batch] /= share
    dims[rows, ATTENTION.queries, 0] = dims[rows, ATTENTION.keys, 0] = row.attended
    flops[rows] *= share
    return replace(form, operators=replace(operators, dims=dims, flops=flops))


def _problems(
    model: str, operators: Operators, rows: np.ndarray, row: PackedRow
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why attention has no kernel for packed rows, each with a hint."""
    dims, hint = operators.dims[rows], "Leave --packed out."
    if not len(rows):
        yield f"{model} has no fused attention, and packed rows need its variable length.", hint
        return
    if not operators.half[rows].all():
        yield (
            "attention of variable length takes 16-bit numbers, and this precision computes it in"
            " fp32.",
            "Use --precision bf16 or amp_bf16.",
        )
    if any(MASKED in operators.function[i] for i in rows):
        yield (
            f"the attention of {model} takes a mask of numbers, which kernels of variable length"
            " do not take.",
            hint,
        )
    if (dims[:, [ATTENTION.queries, ATTENTION.keys]] != [row.tokens, 0]).any():
        yield f"{model} does not attend from all {row.tokens} tokens to all of them.", hint
    if (dims[:, ATTENTION.seen] != 0).any():
        yield (
            f"{model} attends within windows or by a block mask. What these leave of each document"
            " in a packed row is unknown.",
            "Leave --packed out, or remove the windows from the configuration.",
        )
