"""A saved workload with another optimizer: the update alone is traced again, over parameters of the shapes that it keeps.

What the passes compute does not depend on the optimizer, so neither the model nor its code is needed.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Form, find_optimizer
from trainpace.workload.recorder import Recorder
from trainpace.workload.stepping import launch_together, step_once
from trainpace.workload.task_optimizers import make_optimizer
from trainpace.workload.traced_rows import numbers_of, recording_of
from trainpace.workload.workload import (
    PHASES,
    MemoryProfile,
    Operators,
    TracedForm,
    TrainedShape,
    Workload,
)

OPTIMIZER = float(PHASES.index("optimizer"))


def trained_shapes(model: nn.Module) -> tuple[TrainedShape, ...]:
    """The shapes of a model's trainable parameters, each with how many there are."""
    tables = {
        id(m.weight): m.weight.shape[0] for m in model.modules() if isinstance(m, nn.Embedding)
    }
    vocabularies = set(tables.values())
    counts = Counter(
        (
            tuple(p.shape),
            id(p) in tables or (p.dim() == 2 and p.shape[0] in vocabularies),
            hasattr(p, "keeps_dtype"),
        )
        for p in model.parameters()
        if p.requires_grad
    )
    return tuple(
        TrainedShape(sizes=sizes, is_vocabulary=table, is_fp32=wide, count=n)
        for (sizes, table, wide), n in counts.items()
    )


def with_optimizer(workload: Workload, name: str) -> Workload:
    """The workload, updated by another optimizer. Raises UnknownName, and TrainpaceError where its shapes were not kept."""
    name, _ = find_optimizer(name)
    if workload.mode != "train":
        raise TrainpaceError(
            f"this workload of {workload.model} was traced without an update.",
            "Trace it again, from the model.",
        )
    if not workload.trained:
        raise TrainpaceError(
            f"this workload of {workload.model} was saved without the shapes of its parameters,"
            f" which {name} needs.",
            "Trace it again, from the model.",
        )
    forms = {
        key: _updated(form, key, workload.trained, name) for key, form in workload.forms.items()
    }
    return replace(workload, optimizer=name, assumes_optimizer=False, forms=forms)


class _Parameters(nn.Module):
    """Parameters of given shapes, with gradients, on the meta device."""

    def __init__(self, shapes: tuple[TrainedShape, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.tables, self.others = nn.ModuleList(), nn.ParameterList()
        for shape in shapes:
            for _ in range(shape.count):
                parameter = nn.Parameter(
                    torch.empty(
                        shape.sizes, dtype=torch.float32 if shape.is_fp32 else dtype, device="meta"
                    )
                )
                parameter.grad = torch.empty_like(parameter)
                if shape.is_vocabulary:
                    table = nn.Embedding(1, 1, device="meta")
                    table.weight = parameter
                    self.tables.append(table)
                else:
                    self.others.append(parameter)


def _updated(
    form: TracedForm, name: Form, shapes: tuple[TrainedShape, ...], optimizer: str
) -> TracedForm:
    model = _Parameters(shapes, torch.bfloat16 if name == "half" else torch.float32)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    recorder = Recorder(dict(model.named_parameters()))
    recorder.keep_alive([*model.parameters(), *gradients])
    stepper = make_optimizer(optimizer, model)
    launch_together(
        stepper, any(name.startswith(("_foreach_", "_fused_")) for name in form.operators.function)
    )
    with recorder:
        step_once(stepper, recorder)
    numbers = np.array([numbers_of(recorded) for recorded in recorder.recorded])
    update, _ = recording_of(recorder.recorded, numbers, np.zeros_like(numbers)).operators()
    old, memory = form.operators, form.memory
    passes = np.flatnonzero(np.array(old.phase) != "optimizer")
    columns: dict[str, Any] = {
        field: np.concatenate([getattr(old, field)[passes], getattr(update, field)])
        for field in ("half", "count", "launches", "flops", "read_bytes", "written_bytes", "dims")
    }
    words: dict[str, Any] = {
        field: (*(getattr(old, field)[i] for i in passes), *getattr(update, field))
        for field in ("kind", "function", "phase", "module")
    }
    blocks = form.blocks and replace(
        form.blocks,
        roles=(*(form.blocks.roles[i] for i in passes), *[""] * len(update)),
        operator_counts=np.concatenate(
            [form.blocks.operator_counts[passes], np.zeros(len(update), dtype=np.int64)]
        ),
    )
    return TracedForm(
        operators=Operators(**words, **columns),
        memory=_remembered(memory, recorder, numbers[:, -1]),
        blocks=blocks,
    )


def _remembered(memory: MemoryProfile, recorder: Recorder, temporary: np.ndarray) -> MemoryProfile:
    """The profile with the states of the update that was recorded, and the most of its temporaries."""
    gradients = float(memory.peaks[:, 0].max())
    most = float(temporary.max(initial=0.0))
    peaks = np.concatenate([memory.peaks[memory.peaks[:, 2] != 0], [[gradients, most, 0.0]]])
    moments = memory.moments
    if moments.size:
        at = moments[:, 0] == OPTIMIZER
        moments = moments.astype(np.float64)
        moments[at, 3] = most
    return replace(
        memory,
        optimizer_bytes=recorder.optimizer_bytes - recorder.paged_bytes,
        paged_bytes=recorder.paged_bytes,
        peaks=peaks,
        moments=moments,
    )
