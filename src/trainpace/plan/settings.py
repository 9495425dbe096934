"""Everything that a plan can change, one row per setting.

Each row has the fields that change together, their title, the keys of settings files, the PyTorch
code, the effort, and the smallest difference that forecasts can distinguish.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.forecast import Grid
from trainpace.job import DataPath
from trainpace.plan import snippets
from trainpace.plan.changes import NOISE, Choice, Effort, Risk
from trainpace.workload import Floats, Workload

Keys = Mapping[str, int | str | bool]


class Setting(NamedTuple):
    """One kind of change.

    Attributes:
        fields: Fields of `Execution` that change together.
        resolution: Log ratio that the errors of 80% of forecast ratios stay below. If a change is
            forecast to save more, it saves something in 90% of cases.
        title: Function that describes the change from the first choice to the second.
        keys: Function that returns the keys of settings files for a choice.
        code: Function that returns the PyTorch code of the change.
        same: Reason why the change is no risk to convergence, if it is none.
    """

    name: str
    fields: tuple[str, ...]
    effort: Effort
    resolution: float
    title: Callable[[Choice, Choice], str]
    keys: Callable[[Choice], Keys]
    code: Callable[[Choice, Choice, Workload], str]
    same: str = "the same numbers"


def _from_to(title: Callable[[Execution], str]) -> Callable[[Choice, Choice], str]:
    return lambda before, after: f"{title(after.execution)} instead of {title(before.execution)}"


def _to(title: Callable[[Execution], str]) -> Callable[[Choice, Choice], str]:
    return lambda before, after: title(after.execution)


def _fields(**names: str) -> Callable[[Choice], Keys]:
    """Return a function from a choice to settings keys. Each value is a field of the execution."""
    return lambda choice: {key: getattr(choice.execution, name) for key, name in names.items()}


def _sharding(e: Execution) -> str:
    gathered = ", parameters kept until the backward pass"
    kept = e.zero_stage == 3 and not e.reshard_after_forward
    return f"ZeRO-{e.zero_stage}{gathered * kept}" if e.zero_stage else "no sharding"


def _sharding_keys(c: Choice) -> Keys:
    e = c.execution
    kept: Keys = {} if e.reshard_after_forward else {"reshard_after_forward": False}
    # DeepSpeed has no pipeline above ZeRO stage 2, and its stage 3 always gathers parameters again.
    if e.zero_stage == 3 and (e.pp > 1 or kept):
        return {"fully_shard": True} | dict(kept)
    return {"zero_optimization.stage": e.zero_stage} | dict(kept)


def gpus_in_words(e: Execution) -> str:
    """Return the number of GPUs, such as "2 nodes of 8 GPUs"."""
    gpus = f"{e.nproc_per_node} GPU{'s' if e.nproc_per_node > 1 else ''}"
    return gpus if e.nnodes == 1 else f"{e.nnodes} nodes of {gpus}"


def _layout(e: Execution) -> str:
    parts = [f"{name} {getattr(e, name)}" for name in LAYOUT_SIZES if getattr(e, name) > 1]
    parts += ["sequence parallel"] * e.sequence_parallel + ["async tp"] * e.async_tensor_parallel
    parts += [f"{e.virtual_stages} virtual stages"] * (e.virtual_stages > 1)
    return ", ".join(parts) or "no model parallelism"


LAYOUT_SIZES = ("tp", "pp", "cp", "ep")


def _layout_keys(c: Choice) -> Keys:
    e = c.execution
    always = ("tp", "pp", "cp", "sequence_parallel", "virtual_stages")
    keys = {name: getattr(e, name) for name in always}
    keys |= {"async_tensor_parallel": True} if e.async_tensor_parallel else {}
    return keys | ({"ep": e.ep} if e.ep > 1 else {})


def _offload(e: Execution) -> str:
    moved = ["optimizer"] * e.offload_optimizer + ["parameters"] * e.offload_parameters
    return f"offload {' and '.join(moved)} to the host" if moved else "no offload"


def data_in_words(c: Choice) -> str:
    """Describe the workers and offline preparation of a data path. Returns "" if unknown."""
    n = c.data.workers
    parts = ["samples prepared offline"] * c.data.precomputed
    parts += [] if n is None else [f"{n} loader worker{'' if n == 1 else 's'}"]
    return ", ".join(parts)


def _data_title(before: Choice, after: Choice) -> str:
    if before.data.workers == after.data.workers and after.data.precomputed:
        return "samples prepared offline"
    return f"{data_in_words(after)} instead of {data_in_words(before)}"


_PRECISION_KEYS: dict[str, Keys] = {
    "tf32": {"tf32": True},
    "amp_bf16": {"bf16": True},
    "amp_fp16": {"fp16": True},
    "fp8": {"mixed_precision": "fp8"},
}
# Resolutions: fitting/differences.py compares ratios of packaged measurements with forecast ratios.
# Both executions share most of their errors (card, model, host), so a ratio is forecast better than
# a time. The values come from 12 pairs (checkpointing) to 1,659 pairs (micro-batch) of 2026-11-24.
# No pair differs in the sharding stage on the same GPUs or in offload; these use the value of model
# parallelism. No pair differs in the global batch or the data; these use the value of the
# micro-batch. No value is below NOISE, by which repeated measurements differ.
SETTINGS: tuple[Setting, ...] = (
    Setting(
        "precision",
        ("precision",),
        "config key",
        0.16,
        _from_to(lambda e: e.precision),
        lambda c: _PRECISION_KEYS.get(c.execution.precision, {}),
        lambda a, b, w: snippets.PRECISIONS[b.execution.precision],
    ),
    Setting(
        "micro-batch",
        ("micro_batch",),
        "config key",
        0.11,
        lambda a, b: f"micro-batch {b.execution.micro_batch} instead of {a.execution.micro_batch}",
        _fields(
            per_device_train_batch_size="micro_batch", gradient_accumulation_steps="accumulation"
        ),
        lambda a, b, w: snippets.loop(b.execution),
        "the same global batch, accumulated in other parts",
    ),
    Setting(
        "compile",
        ("compile",),
        "code change",
        0.26,
        _to(lambda e: "torch.compile" if e.compile else "no torch.compile"),
        _fields(torch_compile="compile"),
        lambda a, b, w: (
            "model = torch.compile(model)"
            if b.execution.compile
            else "# without torch.compile(model)"
        ),
        "the same arithmetic in fused kernels; compiling takes a minute at the start (assumed)"
        " or several",
    ),
    Setting(
        "memory format",
        ("channels_last",),
        "code change",
        0.15,
        _to(lambda e: "channels_last (NHWC)" if e.channels_last else "contiguous tensors (NCHW)"),
        lambda c: {"memory_format": "channels_last" if c.execution.channels_last else "contiguous"},
        lambda a, b, w: snippets.memory_format(b.execution),
    ),
    Setting(
        "sharding",
        ("zero_stage", "shard_size", "reshard_after_forward"),
        "config key",
        0.16,
        _from_to(_sharding),
        _sharding_keys,
        lambda a, b, w: snippets.sharding(b.execution, w),
        "the same numbers, stored elsewhere",
    ),
    Setting(
        "checkpointing",
        ("activation_checkpointing",),
        "config key",
        0.14,
        _from_to(lambda e: f"{e.activation_checkpointing} recomputation"),
        _fields(activation_checkpointing="activation_checkpointing"),
        lambda a, b, w: snippets.checkpointing(b.execution),
        "the same numbers, computed twice",
    ),
    Setting(
        "offload",
        ("offload_optimizer", "offload_parameters"),
        "config key",
        0.16,
        _to(_offload),
        _fields(offload_optimizer="offload_optimizer", offload_param="offload_parameters"),
        lambda a, b, w: snippets.offload(b.execution),
        "the same numbers, stored elsewhere",
    ),
    Setting(
        "model parallelism",
        (
            *LAYOUT_SIZES,
            "sequence_parallel",
            "async_tensor_parallel",
            "pipeline_schedule",
            "virtual_stages",
            "expert_tp",
        ),
        "code change",
        0.16,
        _from_to(_layout),
        _layout_keys,
        lambda a, b, w: snippets.model_parallelism(b.execution),
        "the same numbers, computed elsewhere",
    ),
    Setting(
        "GPUs",
        ("nnodes", "nproc_per_node"),
        "infrastructure",
        NOISE,
        _from_to(gpus_in_words),
        _fields(**{"--nnodes": "nnodes", "--nproc-per-node": "nproc_per_node"}),
        lambda a, b, w: snippets.launch(b.execution),
        "the same global batch",
    ),
    Setting(
        "global batch",
        (),
        "config key",
        0.11,
        _from_to(lambda e: f"global batch {e.global_batch:,}"),
        _fields(gradient_accumulation_steps="accumulation"),
        lambda a, b, w: snippets.loop(b.execution),
    ),
    Setting(
        "data",
        (),
        "config key",
        0.11,
        _data_title,
        lambda c: (
            {"dataloader_num_workers": c.data.workers or 0}
            | ({"precompute": True} if c.data.precomputed else {})
        ),
        lambda a, b, w: snippets.data(a, b),
    ),
)
SETTING_NAMES = tuple(setting.name for setting in SETTINGS)
RESOLUTION = {setting.name: setting.resolution for setting in SETTINGS}


# ---- how two choices differ


def differing(a: Choice, b: Choice) -> tuple[Setting, ...]:
    """Return the settings in which two choices differ.

    Accumulation does not count, because it follows from micro-batch, ranks and global batch.
    """
    return tuple(s for s in SETTINGS if _value(s, a) != _value(s, b))


def differing_rows(grid: Grid, other: Execution) -> dict[str, NDArray[np.bool_]]:
    """Return for each setting a mask of executions that differ from `other`. Ignores data paths."""
    differ = {
        s.name: np.any([~grid.has(field, getattr(other, field)) for field in s.fields], axis=0)
        for s in SETTINGS
        if s.fields
    }
    return differ | {"global batch": np.asarray(grid.global_batch != other.global_batch)}


def _value(setting: Setting, choice: Choice) -> object:
    if setting.name == "data":
        return choice.data
    if setting.name == "global batch":
        return choice.execution.global_batch
    return tuple(getattr(choice.execution, field) for field in setting.fields)


def changed(current: Choice, target: Choice, settings: Iterable[Setting]) -> Choice | None:
    """Return `current` with some settings of `target`, or None if the combination is impossible.

    Accumulation is recomputed from the global batch.
    """
    names = {s.name for s in settings}
    fields = {field: getattr(target.execution, field) for s in settings for field in s.fields}
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


def resolution(names: Iterable[str]) -> float:
    """Return the smallest log ratio that forecasts can distinguish if these settings differ.

    This is the largest resolution of the settings. Measured pairs that differ in several settings
    have errors of 0.6 to 1.2 times this value (1.34 in one group of ten pairs). Independent errors
    would be larger.
    """
    return max((RESOLUTION[name] for name in names), default=0.0)


def resolutions(differ: Mapping[str, NDArray[np.bool_]]) -> Floats:
    """Return `resolution` for many executions. `differ` maps settings to masks of executions."""
    each = [RESOLUTION[name] * flags for name, flags in differ.items()]
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*each)), dtype=np.float64)


def code_of(settings: Iterable[Setting], before: Choice, after: Choice, workload: Workload) -> str:
    """Return the PyTorch code for some settings. If no code can set them, return a comment."""
    parts = {s.name: s.code(before, after, workload) for s in settings}
    counted = parts.keys() & {"micro-batch", "global batch"}
    if before.execution.accumulation != after.execution.accumulation and not counted:
        parts["accumulation"] = snippets.loop(after.execution)
    return "\n\n".join(parts.values())


# ---- effort, risk and simplicity

_PRECISION_RISKS: dict[str, tuple[Risk, str]] = {
    "tf32": ("low", "matmuls round their operands to 10 bits of mantissa"),
    "amp_bf16": (
        "low",
        "matmuls use 8 bits of mantissa; weights, sums and the optimizer stay in fp32",
    ),
    "amp_fp16": ("low", "fp16 overflows above 65504: it needs loss scaling (GradScaler)"),
    "fp8": (
        "medium",
        "matmuls use 3 bits of mantissa and scaling factors; compare the loss with a bf16 run",
    ),
}


def effort_of(setting: Setting, after: Choice) -> Effort:
    precomputes = setting.name == "data" and after.data.precomputed
    return "code change" if precomputes else setting.effort


def risk_of(
    setting: Setting, before: Choice, after: Choice, workload: Workload
) -> tuple[Risk, str]:
    """Return (risk to convergence, reason) of one setting's change."""
    e = after.execution
    if setting.name == "precision":
        return _PRECISION_RISKS.get(e.precision, ("none", "more precise than before"))
    if setting.name == "global batch":
        return "medium", "fewer, larger updates: tune the learning rate and its warm-up again"
    if setting.name == "data" and after.data.precomputed:
        return "low", "keep random augmentation in training, or every epoch sees the same samples"
    if setting.name in ("micro-batch", "GPUs") and _normalizes_over_batch(workload):
        if before.execution.micro_batch == e.micro_batch:
            return "none", "the same micro-batches"
        return "low", "batch normalization uses statistics of one micro-batch, whose size changes"
    return "none", setting.same


def _normalizes_over_batch(workload: Workload) -> bool:
    form = next(iter(workload.forms.values()))
    return any("batch_norm" in function for function in form.operators.function)


DATA_POINTS, OFFLINE_POINTS = 1.0, 3.0


def points(grid: Grid, start: Execution) -> Floats:
    """Return a complexity score for every execution of a grid.

    The points are an ordering and not a measurement. Plain data parallelism comes before sharding,
    then tensor parallelism, then pipelines. No recomputation comes before recomputation, and fewer
    changes before more. Features that the training already uses cost nothing.
    """
    differ = differing_rows(grid, start)
    total = np.zeros(len(grid))
    for name, cost in _points_by_setting(grid).items():
        total += np.where(differ[name], cost, 0.0)
    return total


def data_points(path: DataPath, now: DataPath) -> float:
    """Return the points of a data path if it differs from the current one."""
    return 0.0 if path == now else OFFLINE_POINTS if path.precomputed else DATA_POINTS


def _points_by_setting(e: Grid) -> Mapping[str, Floats | float]:
    """Return the points of each setting for every execution of a grid."""
    parallel = (
        6.0 * (e.tp > 1)
        + 6.5 * (e.cp > 1)
        + 5.0 * (e.ep > 1)
        + 10.0 * (e.pp > 1)
        + 2.0 * (e.virtual_stages > 1)
        + 0.5 * e.sequence_parallel
        + 1.0 * e.async_tensor_parallel
    )
    # fp16 needs a GradScaler. fp8 needs scaling factors and monitoring of the loss.
    asks = {"amp_fp16": 1.5, "fp16": 1.5, "fp8": 3.0}
    precision = np.ones(len(e))
    for name, cost in asks.items():
        precision[e.precision == EXECUTION_FIELDS["precision"].encode(name)] = cost
    return {
        "precision": precision,
        "micro-batch": 1.0,
        "compile": 1.0 + 0.5 * e.compile,
        "memory format": 1.0 + 0.5 * e.channels_last,
        "sharding": 1.0 + e.zero_stage + 0.5 * ((e.zero_stage == 3) & ~e.reshard_after_forward),
        "checkpointing": 1.0 + 1.0 * ~e.has("activation_checkpointing", "none"),
        "offload": 1.0 + 2.0 * e.offload_optimizer + 2.0 * e.offload_parameters,
        "model parallelism": 1.0 + parallel,
        "GPUs": 1.0,
        "global batch": 5.0,
    }


def config_line(choice: Choice) -> str:
    """Return one line with batch, GPUs, precision and all features in use."""
    e = choice.execution
    batch = f"micro-batch {e.micro_batch} x accumulation {e.accumulation}"
    recomputes = e.activation_checkpointing != "none"
    parts = [
        f"{batch} x dp {e.data_parallel_size} = {e.global_batch:,}",
        gpus_in_words(e),
        e.precision,
        _sharding(e) if e.data_parallel_size > 1 or e.zero_stage else "",
        _layout(e) if e.ranks_per_copy * e.ep > 1 else "",
        "torch.compile" * e.compile,
        "channels_last" * e.channels_last,
        f"{e.activation_checkpointing} recomputation" * recomputes,
        _offload(e) if e.offload_optimizer or e.offload_parameters else "",
        data_in_words(choice),
    ]
    return ", ".join(part for part in parts if part)
