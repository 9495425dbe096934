"""Hugging Face `TrainingArguments`, as JSON, YAML or flags. Names: transformers 5.23, training_args.py."""

from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, Draft
from trainpace.configs.settings import AUTOCAST_OF, TOOLS, ConfigFile, Reading, SettingName, names
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import optimizer_called
from trainpace.core.software import parse_attention

NAMES = frozenset(names("huggingface", "arguments"))
_RENAMED: dict[str, str] = TOOLS["huggingface"]["renamed"]
_REMOVED: dict[str, str] = TOOLS["huggingface"]["removed"]
_KNOWN = NAMES | _RENAMED.keys() | _REMOVED.keys()
# arguments that scripts and trainers beside TrainingArguments keep in the same file
_BESIDE = frozenset(names("huggingface", "beside"))
_KEYS: dict[str, SettingName] = {
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
_INTERVALS: dict[SettingName, tuple[str, str]] = {
    "evaluate_every_steps": ("eval_strategy", "eval_steps"),
    "checkpoint_every_steps": ("save_strategy", "save_steps"),
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
PRECISION = {"bf16": "amp_bf16", "fp16": "amp_fp16", "tf32": "tf32"}
NAMES_OF = {
    "micro_batch": ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    "accumulation": ("gradient_accumulation_steps",),
    "activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "compile": ("torch_compile",),
    "dataloader_workers": ("dataloader_num_workers",),
}
"""The arguments for a setting; the last one, which transformers 4 and 5 both know, is added where the file has none."""
_MESH = "TrainingArguments take the device mesh from the code or from accelerate's file"
_OFFLOAD = "TrainingArguments take it from a DeepSpeed file"
LACKS = {"pp": "the Trainer has no pipeline parallelism"}
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "nnodes": "TrainingArguments take the number of nodes from the launch command",
    "nproc_per_node": "TrainingArguments take the processes of a node from the launch command",
    "tp": _MESH,
    "cp": _MESH,
    "offload_optimizer": _OFFLOAD,
    "offload_parameters": _OFFLOAD,
}


def is_training_arguments(data: dict[str, Any]) -> bool:
    return len(data.keys() & _KNOWN) >= 2 or bool(data.keys() & DISTINCTIVE)


def sections_with_arguments(data: dict[str, Any]) -> list[str]:
    """The keys of the user's own, such as `training:`, under which TrainingArguments stand."""
    return [
        key for key, part in data.items() if isinstance(part, dict) and is_training_arguments(part)
    ]


def read_training_arguments(data: dict[str, Any], file: str, prefix: str = "") -> ConfigFile:
    """Settings that a TrainingArguments file states; defaults are not filled in."""
    reading = Reading(file, "Hugging Face TrainingArguments", prefix)
    reading.flag_unknown(
        {k: v for k, v in data.items() if k not in _BESIDE},
        _KNOWN,
        "not a TrainingArguments name, so it is not read",
    )
    put_training_arguments(reading, data)
    if not data.keys() & {"per_device_train_batch_size", "per_gpu_train_batch_size"}:
        reading.note("per_device_train_batch_size", "not stated; Hugging Face would use 8")
    return reading.done()


def put_training_arguments(reading: Reading, data: dict[str, Any], dashes: str = "") -> None:
    """Record the settings in `data`. `dashes`: "--" where they were written as flags."""
    keys: dict[str, str] = {}  # a name of today -> the key as written
    for key in data:
        if key in _REMOVED:
            reading.warn(dashes + key, _REMOVED[key])
        new = _RENAMED.get(key, key)
        if new != key:
            if data[key] is not None and data.get(new) is not None:
                raise reading.fail(
                    dashes + key, data[key], f"left out, since {new}, its new name, is given too"
                )
            reading.note(dashes + key, f"the old name of {new}")
        if new == key or data[key] is not None:
            keys[new] = key
    values = {new: data[key] for new, key in keys.items()}
    for key, name in _KEYS.items():
        reading.read(name, values.get(key), dashes + keys.get(key, key))
    _read_length(reading, values, dashes)
    _read_precision(reading, values, dashes)
    for name, (strategy, steps) in _INTERVALS.items():
        _read_interval(
            reading,
            name,
            values,
            strategy,
            dashes + keys.get(strategy, strategy),
            steps,
            dashes + steps,
        )
    optimizer = reading.word(values.get("optim"), f"{dashes}optim")
    if optimizer:
        own = optimizer == "adafactor"  # the Trainer takes transformers' for it, not torch's
        reading.put(
            "optimizer",
            "adafactor_transformers" if own else optimizer_called(optimizer),
            f"{dashes}optim",
        )
    if optimizer in _FUSED_OPTIMIZERS:
        reading.put("optimizer_implementation", "fused", f"{dashes}optim")
    _read_kernels(reading, values, dashes)
    _read_engines(reading, values, dashes)


def _read_length(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    key, steps, epochs = (
        f"{dashes}max_steps",
        values.get("max_steps"),
        values.get("num_train_epochs"),
    )
    if isinstance(steps, bool) or steps not in (None, -1, 0):  # -1 and 0 are off
        reading.read("max_steps", steps, key)
        if epochs is not None:
            reading.warn(
                f"{dashes}num_train_epochs", "ignored by Hugging Face, since max_steps is given"
            )
    else:
        reading.read("epochs", epochs, f"{dashes}num_train_epochs")


def _read_precision(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    on = {key: reading.truth(values.get(key), dashes + key, "precision") for key in PRECISION}
    if on["bf16"] and on["fp16"]:
        raise reading.fail(f"{dashes}fp16", True, "false where bf16 is true")
    chosen = next((key for key in on if on[key]), None)
    if chosen:
        reading.put("precision", PRECISION[chosen], dashes + chosen)
        if on["tf32"] and chosen != "tf32":
            reading.note(f"{dashes}tf32", f"concerns only what {chosen} leaves in fp32")
    elif on["bf16"] is False and on["fp16"] is False:
        reading.put("precision", "fp32", f"{dashes}fp16, {dashes}bf16")
    else:
        for key in (key for key in on if on[key] is False):
            reading.note(dashes + key, "off; the precision itself is not stated")


def _read_kernels(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    """Attention's kernels, and Liger's, which takes head and loss together by default (its transformers/monkey_patch.py)."""
    key = f"{dashes}attn_implementation"
    attention = reading.word(values.get("attn_implementation"), key)
    if attention not in (None, "sdpa"):  # which is torch's own choice
        try:
            reading.put("attention", parse_attention(str(attention)), key)
        except TrainpaceError:
            reading.note(
                key, f"{attention} is not forecast; torch's own choice of attention is taken"
            )
    key = f"{dashes}use_liger_kernel"
    config = values.get("liger_kernel_config")
    chosen = config if isinstance(config, dict) else {}
    if not reading.truth(values.get("use_liger_kernel"), key):
        return
    if chosen.get("fused_linear_cross_entropy", not chosen.get("cross_entropy")):
        reading.put("cross_entropy", "chunked", key)
    elif chosen.get("cross_entropy"):
        reading.put("cross_entropy", "fused_fp32", f"{dashes}liger_kernel_config")
    reading.note(
        key,
        "of its kernels the loss's are forecast; its norms, activations and rotary embeddings count"
        " as torch's",
    )


def _read_interval(
    reading: Reading,
    name: SettingName,
    values: dict[str, Any],
    when: str,
    when_key: str,
    steps: str,
    key: str,
) -> None:
    value, strategy = values.get(steps), values.get(when)
    if strategy is False:  # YAML reads an unquoted `no` as false
        strategy = "no"
    strategy = reading.word(strategy, when_key, ("no", "steps", "epoch", "best"))
    if value is None:
        if strategy == "steps" and steps == "eval_steps":
            reading.note(
                when_key,
                "steps, without eval_steps: Hugging Face would take logging_steps",
                leaves_open=name,
            )
        elif strategy in ("epoch", "best"):
            reading.note(when_key, f"{strategy}: not a number of steps", leaves_open=name)
    elif strategy not in (None, "steps"):
        reading.note(key, f"without effect, since {when} is {strategy!r}")
    elif isinstance(value, float) and 0 < value < 1:
        reading.note(
            key,
            f"{value} is a share of the run's steps, which is not resolved here",
            leaves_open=name,
        )
    else:
        reading.read(name, value, key)
        if strategy is None and steps == "eval_steps":
            reading.warn(
                key, "eval_strategy is not stated; Hugging Face would not evaluate while it trains"
            )


def _read_engines(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    fsdp = values.get("fsdp")
    if fsdp is not None and not isinstance(fsdp, bool | str | list):
        raise reading.fail(f"{dashes}fsdp", fsdp, "options such as full_shard")
    if fsdp:
        reading.put("sharding", "fsdp", f"{dashes}fsdp")
    sections = {}
    for key in ("fsdp_config", "parallelism_config", "deepspeed"):
        section = values.get(key)
        if isinstance(section, str):
            reading.note_file(dashes + key, section)
        elif section is not None and not isinstance(section, dict):
            raise reading.fail(dashes + key, section, "a section, or the name of a file")
        sections[key] = section if isinstance(section, dict) else {}
    nested: dict[str, SettingName] = {
        "fsdp_config.activation_checkpointing": "activation_checkpointing",
        "fsdp_config.fsdp_activation_checkpointing": "activation_checkpointing",
        "parallelism_config.tp_size": "tp",
        "parallelism_config.cp_size": "cp",
    }
    for key, name in nested.items():
        reading.read(name, reading.at(sections, key), key)
    if isinstance(values.get("deepspeed"), dict):
        reading.warn(
            "deepspeed", "the settings inside are not read; give them as a file of their own"
        )
    if reading.truth(values.get("auto_find_batch_size"), f"{dashes}auto_find_batch_size"):
        reading.warn(f"{dashes}auto_find_batch_size", "the batch shrinks where memory runs out")
    compiles = values.get("torch_compile_backend") or values.get("torch_compile_mode")
    if compiles and values.get("torch_compile") is None:
        reading.note(
            f"{dashes}torch_compile", "on, since a backend or mode is given; not stated itself"
        )
    accelerator = values.get("accelerator_config")
    if isinstance(accelerator, dict) and accelerator.get("split_batches"):
        reading.warn(
            "accelerator_config.split_batches",
            "the batch is split over all processes, not one for each",
        )


def write_training_arguments(draft: Draft) -> None:
    draft.leave_all(_CANNOT)
    write_arguments(draft)
    if "zero_stage" in draft.names:
        _write_sharding(draft, int(draft.want["zero_stage"]))


def write_arguments(draft: Draft) -> None:
    """Write the arguments in `NAMES_OF` and those of the precision, into a file or a command."""
    for name in sorted(draft.names & NAMES_OF.keys()):
        keys, value = NAMES_OF[name], draft.want[name]
        key = next((key for key in keys if draft.get(key) is not None), keys[-1])
        if value == "selective":
            draft.leave("the Trainer recomputes all or nothing", name)
        else:
            draft.place(name, key, value == "full" if name == "activation_checkpointing" else value)
    precision = str(draft.want["precision"])
    stated = [key for key in PRECISION if draft.get(key) is not None]
    if "DeepSpeed" in draft.beside:
        precision = AUTOCAST_OF.get(precision, precision)
    if precision not in ("fp32", *PRECISION.values()):
        why = (
            f"TrainingArguments have autocast only, and {precision} is none of it: the code loads"
            " the model so"
        )
        draft.leave(why, "precision")
    elif not stated and "precision" not in draft.may_add:
        draft.leave(ELSEWHERE, "precision")
    elif "precision" in draft.names:
        draft.may_add |= {"precision"}  # all of the arguments belong together
        # fp32 is said only by both of the others being off
        needed = [
            key for key in PRECISION if key in stated or (precision == "fp32" and key != "tf32")
        ]
        for key, meaning in PRECISION.items():
            if key in needed or meaning == precision:
                draft.place("precision", key, meaning == precision)


def _write_sharding(draft: Draft, stage: int) -> None:
    fsdp = draft.get("fsdp")
    if draft.get("deepspeed") or draft.beside & {"DeepSpeed", "accelerate"}:
        draft.leave("the DeepSpeed or accelerate file states it", "zero_stage")
    elif stage in (1, 2):
        draft.leave(
            f"ZeRO stage {stage} needs a DeepSpeed file, named under deepspeed", "zero_stage"
        )
    elif stage == 3 and not fsdp and "zero_stage" not in draft.may_add:
        draft.leave(ELSEWHERE, "zero_stage")
    else:
        if bool(fsdp) != (stage == 3):
            draft.put("fsdp", "full_shard" if stage == 3 else "")
        draft.keep("zero_stage")
