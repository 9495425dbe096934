"""Reader and writer for Hugging Face `TrainingArguments` as JSON, YAML or flags.

Source: transformers 5.23, training_args.py.
"""

from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, Draft
from trainpace.configs.settings import TOOLS, ConfigFile, Reading, SettingName, names
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import optimizer_called
from trainpace.core.software import parse_attention

NAMES = frozenset(names("huggingface", "arguments"))
_RENAMED: dict[str, str] = TOOLS["huggingface"]["renamed"]
_REMOVED: dict[str, str] = TOOLS["huggingface"]["removed"]
_KNOWN = NAMES | _RENAMED.keys() | _REMOVED.keys()
_BESIDE = frozenset(names("huggingface", "beside"))
"""Arguments of scripts and other trainers that often stand in the same file."""
KEYS: dict[str, SettingName] = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
    "dataloader_num_workers": "dataloader_workers",
    "learning_rate": "learning_rate",
    "dataloader_drop_last": "drop_last",
    "activation_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
}
_NESTED: dict[str, SettingName] = {
    "fsdp_config.activation_checkpointing": "activation_checkpointing",
    "fsdp_config.fsdp_activation_checkpointing": "activation_checkpointing",
    "parallelism_config.tp_size": "tp",
    "parallelism_config.cp_size": "cp",
}
_FUSED_OPTIMIZERS = frozenset(("adamw_torch_fused", "adamw_apex_fused"))
DISTINCTIVE = frozenset(
    (
        "per_device_train_batch_size",
        "per_gpu_train_batch_size",
        "num_train_epochs",
        "gradient_accumulation_steps",
    )
)
"""Arguments of which one is enough to recognize TrainingArguments."""
PRECISION = {"bf16": "amp_bf16", "fp16": "amp_fp16", "tf32": "tf32"}
NAMES_OF = {
    "micro_batch": ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    "accumulation": ("gradient_accumulation_steps",),
    "activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "compile": ("torch_compile",),
    "dataloader_workers": ("dataloader_num_workers",),
}
"""Arguments for each setting.

If a file has none of them, the last one is added, which all versions of transformers know.
"""
_MESH = "TrainingArguments take the device mesh from the code or from accelerate's file"
_OFFLOAD = "TrainingArguments take it from a DeepSpeed file"
LACKS = {"pp": "the Trainer has no pipeline parallelism"}
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "nnodes": "TrainingArguments take the number of nodes from the launch command",
    "nproc_per_node": "TrainingArguments take the processes per node from the launch command",
    "tp": _MESH,
    "cp": _MESH,
    "offload_optimizer": _OFFLOAD,
    "offload_parameters": _OFFLOAD,
}


def is_training_arguments(data: dict[str, Any]) -> bool:
    """Return True if a table holds Hugging Face TrainingArguments."""
    return len(data.keys() & _KNOWN) >= 2 or bool(data.keys() & DISTINCTIVE)


def sections_with_arguments(data: dict[str, Any]) -> list[str]:
    """Return the user's own keys, such as `training:`, that contain TrainingArguments."""
    return [
        key for key, part in data.items() if isinstance(part, dict) and is_training_arguments(part)
    ]


def prefix_of(data: dict[str, Any]) -> tuple[str, ...]:
    """Return the user's own key that contains the arguments, if there is one."""
    return () if is_training_arguments(data) else (sections_with_arguments(data)[0],)


def read_training_arguments(data: dict[str, Any], file: str, prefix: str = "") -> ConfigFile:
    """Read the settings that a file states. Default values are not filled in."""
    reading = Reading(file, "Hugging Face TrainingArguments", prefix)
    own = [key for key in data if key not in _BESIDE]
    reading.warn_unknown(own, _KNOWN, "not a TrainingArguments name, so it is ignored")
    put_training_arguments(reading, data)
    if not data.keys() & {"per_device_train_batch_size", "per_gpu_train_batch_size"}:
        reading.note("per_device_train_batch_size", "missing; Hugging Face's default is 8")
    return reading.done()


def put_training_arguments(reading: Reading, data: dict[str, Any], dashes: str = "") -> None:
    """Record the settings in `data`. `dashes` is "--" if they were written as flags."""
    arguments = _Arguments(reading, data, dashes)
    for key, name in KEYS.items():
        reading.read(name, arguments.values.get(key), arguments.written(key))
    for read in (_read_length, _read_precision, _read_intervals, _read_optimizer, _read_kernels):
        read(reading, arguments)
    _read_engines(reading, arguments)


class _Arguments:
    """Arguments of one file under their current names.

    Attributes:
        values: Value of each argument.
        dashes: "--" if the arguments were written as flags.
    """

    def __init__(self, reading: Reading, data: dict[str, Any], dashes: str) -> None:
        self._keys: dict[str, str] = {}
        self.dashes = dashes
        for key in data:
            if key in _REMOVED:
                reading.warn(dashes + key, _REMOVED[key])
            new = _RENAMED.get(key, key)
            if new != key:
                if data[key] is not None and data.get(new) is not None:
                    expected = f"left out, because its new name, {new}, is given too"
                    raise reading.fail(dashes + key, data[key], expected)
                reading.note(dashes + key, f"the old name of {new}")
            if new == key or data[key] is not None:
                self._keys[new] = key
        self.values = {new: data[key] for new, key in self._keys.items()}

    def written(self, key: str) -> str:
        """Return a key as the user wrote it."""
        return self.dashes + self._keys.get(key, key)


def _read_length(reading: Reading, arguments: _Arguments) -> None:
    steps, epochs = map(arguments.values.get, ("max_steps", "num_train_epochs"))
    key = f"{arguments.dashes}num_train_epochs"
    if isinstance(steps, bool) or steps not in (None, -1, 0):  # -1 and 0 mean off.
        reading.read("max_steps", steps, f"{arguments.dashes}max_steps")
        if epochs is not None:
            reading.warn(key, "ignored by Hugging Face, because max_steps is given")
    else:
        reading.read("epochs", epochs, key)


def _read_precision(reading: Reading, arguments: _Arguments) -> None:
    keys = {arguments.dashes + key: key for key in PRECISION}
    on = reading.precisions_on({key: arguments.values.get(keys[key]) for key in keys})
    if on:
        reading.put("precision", PRECISION[keys[on[0]]], on[0])
    for key in on[1:]:
        reading.note(key, f"applies only to what {keys[on[0]]} leaves in fp32")


def _read_optimizer(reading: Reading, arguments: _Arguments) -> None:
    key = f"{arguments.dashes}optim"
    optimizer = reading.word(arguments.values.get("optim"), key)
    if optimizer:
        # The Trainer uses transformers' Adafactor, not torch's.
        own = optimizer == "adafactor"
        name = "adafactor_transformers" if own else optimizer_called(optimizer)
        reading.put("optimizer", name, key)
    if optimizer in _FUSED_OPTIMIZERS:
        reading.put("optimizer_implementation", "fused", key)


def _read_kernels(reading: Reading, arguments: _Arguments) -> None:
    """Read the attention kernels and Liger's kernels.

    By default Liger fuses the last layer with the loss (its transformers/monkey_patch.py).
    """
    values, key = arguments.values, f"{arguments.dashes}attn_implementation"
    attention = reading.word(values.get("attn_implementation"), key)
    if attention not in (None, "sdpa"):  # sdpa is torch's default.
        try:
            reading.put("attention", parse_attention(str(attention)), key)
        except TrainpaceError:
            reading.note(key, f"{attention} cannot be forecast; torch's own attention is assumed")
    key = f"{arguments.dashes}use_liger_kernel"
    if not reading.truth(values.get("use_liger_kernel"), key):
        return
    config = values.get("liger_kernel_config")
    chosen = config if isinstance(config, dict) else {}
    if chosen.get("fused_linear_cross_entropy", not chosen.get("cross_entropy")):
        reading.put("cross_entropy", "chunked", key)
    elif chosen.get("cross_entropy"):
        reading.put("cross_entropy", "fused_fp32", f"{arguments.dashes}liger_kernel_config")
    reading.note(
        key,
        "only its loss kernels are forecast; its norms, activations and rotary embeddings count as"
        " torch's",
    )


_WITHOUT_STEPS = {
    (when, word): f"{word}: not a number of steps"
    for when in ("eval_strategy", "save_strategy")
    for word in ("epoch", "best")
} | {
    ("eval_strategy", "steps"): ("steps, without eval_steps: Hugging Face would use logging_steps")
}
"""Notes for a strategy without a number of steps."""


def _read_intervals(reading: Reading, arguments: _Arguments) -> None:
    _read_interval(reading, arguments, "evaluate_every_steps", "eval_strategy", "eval_steps")
    _read_interval(reading, arguments, "checkpoint_every_steps", "save_strategy", "save_steps")


def _read_interval(
    reading: Reading, arguments: _Arguments, name: SettingName, when: str, steps: str
) -> None:
    value, strategy = arguments.values.get(steps), arguments.values.get(when)
    key, when_key = arguments.dashes + steps, arguments.written(when)
    # YAML reads an unquoted `no` as false.
    strategy = "no" if strategy is False else strategy
    strategy = reading.word(strategy, when_key, ("no", "steps", "epoch", "best"))
    if value is None:
        if text := _WITHOUT_STEPS.get((when, strategy or "")):
            reading.note(when_key, text, leaves_open=name)
    elif strategy not in (None, "steps"):
        reading.note(key, f"without effect, because {when} is {strategy!r}")
    elif isinstance(value, float) and 0 < value < 1:
        text = f"{value} is a share of all steps, which is not converted to steps"
        reading.note(key, text, leaves_open=name)
    else:
        reading.read(name, value, key)
        if strategy is None and when == "eval_strategy":
            reading.warn(key, "without eval_strategy, Hugging Face does not evaluate in training")


def _read_engines(reading: Reading, arguments: _Arguments) -> None:
    _read_fsdp(reading, arguments)
    values, dashes = arguments.values, arguments.dashes
    sections = _sections(reading, arguments)
    for key, name in _NESTED.items():
        reading.read(name, reading.at(sections, key), key)
    if isinstance(values.get("deepspeed"), dict):
        reading.warn("deepspeed", "these settings are not read; pass them as a separate file")
    key = f"{dashes}auto_find_batch_size"
    if reading.truth(values.get("auto_find_batch_size"), key):
        reading.warn(key, "the batch shrinks if the GPU runs out of memory")
    compiles = values.get("torch_compile_backend") or values.get("torch_compile_mode")
    if compiles and values.get("torch_compile") is None:
        text = "on, because a backend or mode is given; not stated itself"
        reading.note(f"{dashes}torch_compile", text)
    accelerator = values.get("accelerator_config")
    if isinstance(accelerator, dict) and accelerator.get("split_batches"):
        text = "the batch is split over all processes, not one batch per process"
        reading.warn("accelerator_config.split_batches", text)


def _read_fsdp(reading: Reading, arguments: _Arguments) -> None:
    fsdp, key = arguments.values.get("fsdp"), f"{arguments.dashes}fsdp"
    if fsdp is not None and not isinstance(fsdp, bool | str | list):
        raise reading.fail(key, fsdp, "options such as full_shard")
    if fsdp:
        reading.put("sharding", "fsdp", key)


def _sections(reading: Reading, arguments: _Arguments) -> dict[str, dict[str, Any]]:
    """Return the nested sections of settings. A string in place of a section names a file."""
    sections = {}
    for key in ("fsdp_config", "parallelism_config", "deepspeed"):
        section = arguments.values.get(key)
        if isinstance(section, str):
            reading.name_file(arguments.dashes + key, section)
        elif section is not None and not isinstance(section, dict):
            raise reading.fail(arguments.dashes + key, section, "a section, or the name of a file")
        sections[key] = section if isinstance(section, dict) else {}
    return sections


def write_training_arguments(draft: Draft) -> None:
    """Write the draft's settings into a TrainingArguments file."""
    draft.leave_all(_CANNOT)
    write_arguments(draft)
    if "zero_stage" in draft.names:
        _write_sharding(draft, int(draft.want["zero_stage"]))


def write_arguments(draft: Draft) -> None:
    """Write the arguments in `NAMES_OF` and the precision into a file or a command."""
    for name in sorted(draft.names & NAMES_OF.keys()):
        keys, value = NAMES_OF[name], draft.want[name]
        key = next((key for key in keys if draft.get(key) is not None), keys[-1])
        if value == "selective":
            draft.leave("the Trainer recomputes everything or nothing", name)
        else:
            draft.place(name, key, value == "full" if name == "activation_checkpointing" else value)
    _write_precision(draft)


def _write_precision(draft: Draft) -> None:
    precision = draft.trainer_precision
    stated = [key for key in PRECISION if draft.get(key) is not None]
    if precision not in ("fp32", *PRECISION.values()):
        why = f"TrainingArguments have only autocast, not {precision}: load the model in it"
        draft.leave(why, "precision")
    elif not stated and "precision" not in draft.may_add:
        draft.leave(ELSEWHERE, "precision")
    elif "precision" in draft.names:
        draft.may_add |= {"precision"}  # These arguments must agree.
        # A file states fp32 by turning both half precisions off.
        written = {"fp32": ["bf16", "fp16"]}.get(precision, [])
        written += [key for key in PRECISION if PRECISION[key] == precision]
        for key in dict.fromkeys((*stated, *written)):
            draft.place("precision", key, PRECISION[key] == precision)


def _write_sharding(draft: Draft, stage: int) -> None:
    fsdp = draft.get("fsdp")
    if draft.get("deepspeed") or draft.beside & {"DeepSpeed", "accelerate"}:
        draft.leave("the DeepSpeed or accelerate file states it", "zero_stage")
    elif stage in (1, 2):
        why = f"ZeRO stage {stage} needs a DeepSpeed file, named under deepspeed"
        draft.leave(why, "zero_stage")
    elif stage == 3 and not fsdp and "zero_stage" not in draft.may_add:
        draft.leave(ELSEWHERE, "zero_stage")
    else:
        if bool(fsdp) != (stage == 3):
            draft.put("fsdp", "full_shard" if stage == 3 else "")
        draft.keep("zero_stage")
