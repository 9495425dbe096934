"""The optimizer's update by another implementation than the one that was traced (torch.optim: foreach, fused, tensor by tensor).

One algorithm makes the same passes over parameters, gradients and states whether it launches them for many tensors at once
(foreach) or for each (for_loop); fused, it reads all of them once. For an update of many tensors the tracer counts a fourth of
what is read as written; so is it counted here, and `kernels.UPDATES_MOVED` says what is moved. AdamW on an H100 then updates 383
million bytes of parameters a millisecond fused, 134 with foreach; measured are 356 and 131 (n 4, 2; fitting/data).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from trainpace.core.software import OptimizerImplementation
from trainpace.forecast.rewriting import Part, exchanged, fixed
from trainpace.workload import GEMM, Operators, OtherSizes, TracedForm, Workload

ALGORITHMS: dict[str, tuple[tuple[str, int], ...]] = {
    "sgd": (("add_", 2),),
    "sgd_momentum": (("mul_", 1), ("add_", 2), ("add_", 2)),
    "adam": (
        ("lerp_", 2),
        ("mul_", 1),
        ("addcmul_", 3),
        ("sqrt", 1),
        ("div_", 1),
        ("add_", 1),
        ("addcdiv_", 3),
    ),
}
ALGORITHMS["adamw"] = (("mul_", 1), *ALGORITHMS["adam"])
"""What torch.optim calls for each algorithm, and how many numbers each call reads for every parameter; it writes one."""
FUSED_NAMES = {
    "sgd": "_fused_sgd_",
    "sgd_momentum": "_fused_sgd_",
    "adam": "_fused_adam_",
    "adamw": "_fused_adamw_",
}

TENSORS_PER_LAUNCH = 36
ELEMENTS_PER_LAUNCH = 320 * 65536
"""What one launch for many tensors takes at most (ATen/native/cuda/MultiTensorApply.cuh, with four lists)."""
GRADIENTS = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 2,
    "native_batch_norm_backward": 2,
    "_fused_rms_norm_backward": 1,
    "embedding_dense_backward": 1,
    "conv_bias_backward": 1,
    "sum": 1,
}
"""Parameters whose gradients a call of the backward pass makes."""


def can_be(workload: Workload, implementation: OptimizerImplementation) -> bool:
    """Whether the update is one that has this implementation, and is not traced as it already."""
    now = _traced(workload)
    return workload.optimizer in ALGORITHMS and bool(now) and now != {implementation}


def is_traced_as(workload: Workload, implementation: OptimizerImplementation) -> bool:
    """Whether the trace holds this implementation already."""
    return (_traced(workload) or {"for_loop"}) == {implementation}


def _traced(workload: Workload) -> set[str]:
    rows = [
        name
        for form in workload.forms.values()
        for name, phase in zip(form.operators.function, form.operators.phase, strict=True)
        if phase == "optimizer" and name.startswith(("_foreach_", "_fused_"))
    ]
    return {"fused" if name.startswith("_fused_") else "foreach" for name in rows}


def updated(
    workload: Workload, form: TracedForm, implementation: OptimizerImplementation
) -> TracedForm:
    """The form with its update made by `implementation`."""
    operators = form.operators
    phase = np.array(operators.phase) == "optimizer"
    rows = [i for i in np.flatnonzero(phase).tolist() if operators.kind[i] == "optimizer"]
    numbers = float(workload.trainable_parameters)
    if not rows:
        return form
    width = 2.0 if operators.half[rows].any() else 4.0
    once = min(
        rows, key=lambda i: operators.count[i]
    )  # every algorithm has a call that it makes once
    parts: dict[int, Sequence[Part]] = dict.fromkeys(rows, ())
    result = exchanged(
        form, parts | {once: _parts(workload.optimizer, implementation, numbers, width, operators)}
    )
    if "_foreach_sqrt" not in operators.function or implementation == "foreach":
        return result
    # roots of all parameters at once are alive in a foreach update alone
    peaks = form.memory.peaks.astype(np.float64)
    updates = peaks[:, 2] == 0
    peaks[updates, 1] = np.maximum(peaks[updates, 1] - numbers * width, 0.0)
    return replace(result, memory=replace(form.memory, peaks=peaks))


def _parts(
    optimizer: str,
    implementation: OptimizerImplementation,
    numbers: float,
    width: float,
    operators: Operators,
) -> Sequence[Part]:
    tensors = tensors_of(operators)
    launches = max(
        math.ceil(tensors / TENSORS_PER_LAUNCH), math.ceil(numbers / ELEMENTS_PER_LAUNCH)
    )
    half = width < 4
    if implementation == "fused":
        reads = {"sgd": 2, "sgd_momentum": 3}.get(optimizer, 4)
        return [
            _part(
                "optimizer",
                FUSED_NAMES[optimizer],
                half,
                numbers,
                width,
                reads,
                reads / 4,
                launches,
            )
        ]
    calls = ALGORITHMS[optimizer]
    if implementation == "foreach":
        return [
            _part("optimizer", f"_foreach_{name}", half, numbers, width, n, n / 4, launches)
            for name, n in calls
        ]
    return [_part("elementwise", name, half, numbers, width, n, 1.0, tensors) for name, n in calls]


def _part(
    kind: str,
    name: str,
    half: bool,
    numbers: float,
    width: float,
    reads: int,
    writes: float,
    launches: int,
) -> Part:
    sizes = OtherSizes(int(numbers * reads), int(numbers * writes))
    read, written = fixed(numbers * width * reads), fixed(numbers * width * writes)
    return Part(
        kind,
        name,
        half,
        fixed(numbers * reads),
        read,
        written,
        tuple(map(fixed, sizes)),
        launches=launches,
    )


def tensors_of(operators: Operators) -> int:
    """How many parameters a model has, about: the table does not say it, but each has a gradient in the backward pass."""
    backward, dims = np.array(operators.phase) == "backward", operators.dims
    # a weight's gradient sums over what grows with the batch
    weights = (
        (np.array(operators.kind) == "gemm") & (dims[:, GEMM.k, 1] > 0) & (dims[:, GEMM.m, 1] == 0)
    )
    weights &= dims[:, GEMM.batch, 1] == 0
    weights |= np.array(operators.kind) == "conv_wgrad"
    each = weights + np.array([GRADIENTS.get(name, 0) for name in operators.function])
    return max(1, int((operators.count * each)[backward].sum()))
