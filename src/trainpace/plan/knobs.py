"""What can be turned, one knob a kind of change: the fields that move together, what they are called, effort and risk."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.forecast import Grid
from trainpace.plan.changes import Choice, Effort, Risk
from trainpace.workload import Workload

Settings = Mapping[str, int | str | bool]


class Knob(NamedTuple):
    """One kind of change. `title` and `settings` speak of the choice after it."""

    name: str
    fields: tuple[str, ...]
    effort: Effort
    title: Callable[[Choice, Choice], str]
    settings: Callable[[Choice], Settings]


def _sharding(e: Execution) -> str:
    gathered = (
        ", parameters kept until the backward pass"
        if e.zero_stage == 3 and not e.reshard_after_forward
        else ""
    )
    return f"ZeRO-{e.zero_stage}{gathered}" if e.zero_stage else "no sharding"


def fleet_in_words(e: Execution) -> str:
    gpus = f"{e.nproc_per_node} GPU{'s' if e.nproc_per_node > 1 else ''}"
    return gpus if e.nnodes == 1 else f"{e.nnodes} nodes of {gpus}"


def _layout(e: Execution) -> str:
    parts = [
        f"{name} {size}"
        for name, size in (("tp", e.tp), ("pp", e.pp), ("cp", e.cp), ("ep", e.ep))
        if size > 1
    ]
    stages = f"{e.virtual_stages} virtual stages" if e.virtual_stages > 1 else ""
    parts += [
        "sequence parallel" if e.sequence_parallel else "",
        "async tp" if e.async_tensor_parallel else "",
        stages,
    ]
    return ", ".join(filter(None, parts)) or "no model parallelism"


def _offload(e: Execution) -> str:
    what = [
        name
        for name, on in (("optimizer", e.offload_optimizer), ("parameters", e.offload_parameters))
        if on
    ]
    return f"offload {' and '.join(what)} to the host" if what else "no offload"


def data_in_words(c: Choice) -> str:
    """Workers and preparation of a data path; nothing where nothing is known."""
    workers = (
        ""
        if c.data.workers is None
        else f"{c.data.workers} loader worker{'' if c.data.workers == 1 else 's'}"
    )
    return (
        "samples prepared offline" + (f", {workers}" if workers else "")
        if c.data.precomputed
        else workers
    )


def _data_title(before: Choice, after: Choice) -> str:
    if before.data.workers == after.data.workers and after.data.precomputed:
        return "samples prepared offline"
    return f"{data_in_words(after)} instead of {data_in_words(before)}"


_PRECISION_KEYS: dict[str, Settings] = {
    "tf32": {"tf32": True},
    "amp_bf16": {"bf16": True},
    "amp_fp16": {"fp16": True},
    "fp8": {"mixed_precision": "fp8"},
}


def _changed(title: Callable[[Execution], str]) -> Callable[[Choice, Choice], str]:
    return lambda before, after: f"{title(after.execution)} instead of {title(before.execution)}"


KNOBS: tuple[Knob, ...] = (
    Knob(
        "precision",
        ("precision",),
        "config key",
        _changed(lambda e: e.precision),
        lambda c: _PRECISION_KEYS.get(c.execution.precision, {}),
    ),
    Knob(
        "micro-batch",
        ("micro_batch",),
        "config key",
        lambda a, b: f"micro-batch {b.execution.micro_batch} instead of {a.execution.micro_batch}",
        lambda c: {
            "per_device_train_batch_size": c.execution.micro_batch,
            "gradient_accumulation_steps": c.execution.accumulation,
        },
    ),
    Knob(
        "compile",
        ("compile",),
        "code change",
        lambda a, b: "torch.compile" if b.execution.compile else "no torch.compile",
        lambda c: {"torch_compile": c.execution.compile},
    ),
    Knob(
        "memory format",
        ("channels_last",),
        "code change",
        lambda a, b: (
            "channels_last (NHWC)" if b.execution.channels_last else "contiguous tensors (NCHW)"
        ),
        lambda c: {"memory_format": "channels_last" if c.execution.channels_last else "contiguous"},
    ),
    Knob(
        "sharding",
        ("zero_stage", "shard_size", "reshard_after_forward"),
        "config key",
        _changed(_sharding),
        # DeepSpeed runs no pipeline over stage 2, and no gathering but its own
        lambda c: (
            (
                {"fully_shard": True}
                if c.execution.zero_stage == 3
                and (c.execution.pp > 1 or not c.execution.reshard_after_forward)
                else {"zero_optimization.stage": c.execution.zero_stage}
            )
            | ({} if c.execution.reshard_after_forward else {"reshard_after_forward": False})
        ),
    ),
    Knob(
        "checkpointing",
        ("activation_checkpointing",),
        "config key",
        _changed(lambda e: f"{e.activation_checkpointing} recomputation"),
        lambda c: {"activation_checkpointing": str(c.execution.activation_checkpointing)},
    ),
    Knob(
        "offload",
        ("offload_optimizer", "offload_parameters"),
        "config key",
        lambda a, b: _offload(b.execution),
        lambda c: {
            "offload_optimizer": c.execution.offload_optimizer,
            "offload_param": c.execution.offload_parameters,
        },
    ),
    Knob(
        "model parallelism",
        (
            "tp",
            "pp",
            "cp",
            "sequence_parallel",
            "async_tensor_parallel",
            "pipeline_schedule",
            "virtual_stages",
            "ep",
            "expert_tp",
        ),
        "code change",
        _changed(_layout),
        lambda c: (
            {
                "tp": c.execution.tp,
                "pp": c.execution.pp,
                "cp": c.execution.cp,
                "sequence_parallel": c.execution.sequence_parallel,
                "virtual_stages": c.execution.virtual_stages,
            }
            | ({"async_tensor_parallel": True} if c.execution.async_tensor_parallel else {})
            | ({"ep": c.execution.ep} if c.execution.ep > 1 else {})
        ),
    ),
    Knob(
        "GPUs",
        ("nnodes", "nproc_per_node"),
        "infrastructure",
        _changed(fleet_in_words),
        lambda c: {"--nnodes": c.execution.nnodes, "--nproc-per-node": c.execution.nproc_per_node},
    ),
    Knob(
        "global batch",
        (),
        "config key",
        lambda a, b: (
            f"global batch {b.execution.global_batch:,} instead of {a.execution.global_batch:,}"
        ),
        lambda c: {"gradient_accumulation_steps": c.execution.accumulation},
    ),
    Knob(
        "data",
        (),
        "config key",
        _data_title,
        lambda c: (
            {"dataloader_num_workers": c.data.workers or 0}
            | ({"precompute": True} if c.data.precomputed else {})
        ),
    ),
)
KNOB_NAMES = tuple(knob.name for knob in KNOBS)


def differing(a: Choice, b: Choice) -> tuple[Knob, ...]:
    """The knobs between two choices. Accumulation is none: it follows from micro-batch, ranks and global batch."""
    return tuple(k for k in KNOBS if _value(k, a) != _value(k, b))


def differing_rows(grid: Grid, other: Execution) -> dict[str, NDArray[np.bool_]]:
    """The knobs between every execution of a grid and another, but for the data: by knob, which rows differ."""
    differ = {
        knob.name: np.any(
            [~grid.has(field, getattr(other, field)) for field in knob.fields], axis=0
        )
        for knob in KNOBS
        if knob.fields
    }
    return differ | {"global batch": np.asarray(grid.global_batch != other.global_batch)}


def _value(knob: Knob, choice: Choice) -> object:
    if knob.name == "data":
        return choice.data
    if knob.name == "global batch":
        return choice.execution.global_batch
    return tuple(getattr(choice.execution, field) for field in knob.fields)


def turned(current: Choice, target: Choice, knobs: Iterable[Knob]) -> Choice | None:
    """`current` with some knobs as `target` has them and accumulation as the global batch asks; None where that is illegal."""
    names = {k.name for k in knobs}
    fields = {field: getattr(target.execution, field) for k in knobs for field in k.fields}
    batch = (target if "global batch" in names else current).execution.global_batch
    try:
        moved = replace(current.execution, accumulation=1, **fields)
        accumulation, rest = divmod(batch, moved.global_batch)
        if rest or not accumulation:
            return None
        moved = replace(moved, accumulation=accumulation)
    except TrainpaceError:
        return None
    return Choice(execution=moved, data=(target if "data" in names else current).data)


def effort_of(knob: Knob, after: Choice) -> Effort:
    return "code change" if knob.name == "data" and after.data.precomputed else knob.effort


def risk_of(knob: Knob, before: Choice, after: Choice, workload: Workload) -> tuple[Risk, str]:
    """(risk to convergence, the reason for it)."""
    e = after.execution
    if knob.name == "precision":
        return {
            "tf32": ("low", "matrix products round their operands to 10 bits of mantissa"),
            "amp_bf16": (
                "low",
                "products in 8 bits of mantissa; weights, sums and the optimizer stay in fp32",
            ),
            "amp_fp16": ("low", "fp16 overflows above 65504: it needs loss scaling (GradScaler)"),
            "fp8": (
                "medium",
                (
                    "products in 3 bits of mantissa need scaling factors; follow the loss beside a"
                    " bf16 run"
                ),
            ),
        }.get(e.precision, ("none", "more precise than before"))  # type: ignore[return-value]
    if knob.name == "global batch":
        return (
            "medium",
            "fewer, larger updates: the learning rate and its warm-up have to be tuned again",
        )
    if knob.name == "data" and after.data.precomputed:
        return "low", "random augmentation has to stay in training, or every epoch sees the same"
    if knob.name in ("micro-batch", "GPUs") and normalises_over_batch(workload):
        if before.execution.micro_batch != e.micro_batch:
            return (
                "low",
                "batch normalisation takes its statistics over one micro-batch, whose size changes",
            )
        return "none", "the same micro-batches"
    return "none", {
        "micro-batch": "the same global batch, added up in other pieces",
        "compile": (
            "the same arithmetic in fused kernels; compiling takes a minute at the start (assumed),"
            " or several"
        ),
        "sharding": "the same numbers, kept elsewhere",
        "checkpointing": "the same numbers, computed twice",
        "offload": "the same numbers, kept elsewhere",
        "model parallelism": "the same numbers, computed elsewhere",
        "GPUs": "the global batch stays",
    }.get(knob.name, "the same numbers")


def normalises_over_batch(workload: Workload) -> bool:
    form = next(iter(workload.forms.values()))
    return any("batch_norm" in function for function in form.operators.function)


def config_line(choice: Choice) -> str:
    """One line that says everything that is not the default."""
    e = choice.execution
    parts = [
        (
            f"micro-batch {e.micro_batch} x accumulation {e.accumulation} x dp"
            f" {e.data_parallel_size} = {e.global_batch:,}"
        ),
        fleet_in_words(e),
        e.precision,
        _sharding(e) if e.data_parallel_size > 1 or e.zero_stage else "",
        _layout(e) if e.tp * e.pp * e.cp * e.ep > 1 else "",
        "torch.compile" if e.compile else "",
        "channels_last" if e.channels_last else "",
        (
            ""
            if e.activation_checkpointing == "none"
            else f"{e.activation_checkpointing} recomputation"
        ),
        _offload(e) if e.offload_optimizer or e.offload_parameters else "",
        data_in_words(choice),
    ]
    return ", ".join(part for part in parts if part)
