"""A workload under the software of a target: every rewrite that the software asks for, in each number format that was traced."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import FORMS, Precision
from trainpace.core.hardware import Device
from trainpace.core.software import (
    ATTENTION_IN_WORDS,
    FP8_IN_WORDS,
    OPTIMIZERS_IN_WORDS,
    TODAY,
    Rewrites,
    Software,
)
from trainpace.forecast.attention import implementation_on
from trainpace.forecast.eager_attention import eager
from trainpace.forecast.losses import has_vocabulary_loss, is_in_16_bits, with_loss
from trainpace.forecast.updates import can_be, is_traced_as, updated
from trainpace.workload import ATTENTION_KINDS, Operators, TracedForm, Workload


def as_run(workload: Workload, rewrites: Rewrites) -> Workload:
    """The workload with the operators that such software runs; itself where nothing differs from the trace."""
    forms: dict[str, TracedForm] = {}
    optimizer = (
        rewrites.optimizer if rewrites.optimizer and can_be(workload, rewrites.optimizer) else None
    )
    for name in FORMS:
        form = workload.forms.get(name)
        if form is None:
            continue
        if rewrites.eager_attention:
            form = eager(form, name, workload.checkpointed)
        if rewrites.cross_entropy:
            form = with_loss(form, rewrites.cross_entropy, name)
        if rewrites.half_router and name == "half":
            form = with_half_router(form)
        if optimizer:
            form = updated(workload, form, optimizer)
        forms[name] = form
    same = all(forms[name] is form for name, form in workload.forms.items())
    return workload if same else replace(workload, forms=forms)


def with_half_router(form: TracedForm) -> TracedForm:
    """The form with the products that its blocks leave in fp32, those of routers, in 16 bits."""
    blocks, operators = form.blocks, form.operators
    if blocks is None:
        return form
    rows = (np.array(operators.kind) == "gemm") & ~operators.half & (blocks.operator_counts > 0)
    rows &= np.array(operators.phase) != "optimizer"
    if not rows.any():
        return form
    share = np.where(rows, 0.5, 1.0)[:, None]
    return replace(
        form,
        operators=replace(
            operators,
            half=operators.half | rows,
            read_bytes=operators.read_bytes * share,
            written_bytes=operators.written_bytes * share,
        ),
    )


class RunningSoftware(NamedTuple):
    """What a forecast took: in words, what nobody said among it, and what was said but changes nothing here, with the reason."""

    words: str
    is_assumed: bool
    idle: tuple[str, ...]


NO_SOFTWARE = RunningSoftware("", False, ())


def running_software(
    workload: Workload,
    software: Software,
    device: Device,
    precision: Precision,
    compiles: bool = False,
) -> RunningSoftware:
    """The software under which a workload runs on a device. `workload` is as traced; `compiles`: by torch.compile."""
    operators = workload.form(precision).operators
    words, idle = [software.name], []
    for part, without_effect in (
        _attention(operators, software, device),
        _optimizer(workload, operators, software),
        _loss(operators, software, compiles),
        ("", _fp8(software, precision)),
        ("routers in 16 bits" if software.router == "16_bit" else "", ""),
    ):
        words += [part] if part else []
        idle += [without_effect] if without_effect else []
    if software.framework == "jax":
        idle.append("JAX: it is forecast as PyTorch under torch.compile")
    return RunningSoftware(", ".join(words), software == TODAY, tuple(idle))


Said = tuple[str, str]
"""(what is taken, what changes nothing and why); either may be empty."""


def _attention(operators: Operators, software: Software, device: Device) -> Said:
    said = software.attention
    rows = np.isin(operators.kind, ATTENTION_KINDS)
    if not rows.any():
        nothing = "the model has no attention that is fused, or none at all"
        return "", f"{ATTENTION_IN_WORDS[said]}: {nothing}" if said not in (None, "eager") else ""
    if software.rewrites.eager_attention:
        return ATTENTION_IN_WORDS["eager"], ""
    half = bool(operators.half[rows].any())
    kernels = implementation_on(device, software.fused_attention) if half else "efficient"
    if said in (None, kernels):
        return ATTENTION_IN_WORDS[kernels], ""
    where = f"{device.name} takes" if half else "fp32 takes"
    return (
        ATTENTION_IN_WORDS[kernels],
        f"{ATTENTION_IN_WORDS[said]}: {where} {ATTENTION_IN_WORDS[kernels]}",
    )


def _optimizer(workload: Workload, operators: Operators, software: Software) -> Said:
    said = software.optimizer
    if said is None:
        return "", ""
    if "optimizer" not in operators.phase:
        return "", f"{OPTIMIZERS_IN_WORDS[said]}: nothing is updated"
    if can_be(workload, said) or is_traced_as(workload, said):
        return OPTIMIZERS_IN_WORDS[said], ""
    return "", f"{OPTIMIZERS_IN_WORDS[said]}: that of {workload.optimizer} is not known"


def _loss(operators: Operators, software: Software, compiles: bool) -> Said:
    said = software.cross_entropy
    if said == "uncompiled" and not compiles:
        return "", "uncompiled cross-entropy: nothing is compiled"
    if said == "cut" and has_vocabulary_loss(operators) and not is_in_16_bits(operators):
        return "", "cut cross-entropy: its kernels take 16-bit numbers"
    if said is None or has_vocabulary_loss(operators):
        return f"{said} cross-entropy" if said else "", ""
    return "", f"{said} cross-entropy: the model has no loss over a vocabulary"


def _fp8(software: Software, precision: Precision) -> str:
    said = software.fp8_recipe
    if said is None or (said == "per_tensor" and precision == "fp8"):
        return ""
    why = (
        "it is forecast as a scale a tensor is"
        if precision == "fp8"
        else f"the precision is {precision}"
    )
    return f"{FP8_IN_WORDS[said]}: {why}"
