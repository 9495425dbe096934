"""Hugging Face `TrainingArguments`, as JSON, YAML or flags. Names: transformers 5.23, training_args.py."""

from typing import Any

from trainpace.configs.names import TOOLS, names
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName

NAMES = frozenset(names("huggingface", "arguments"))
_RENAMED: dict[str, str] = TOOLS["huggingface"]["renamed"]
_REMOVED: dict[str, str] = TOOLS["huggingface"]["removed"]
_KNOWN = NAMES | _RENAMED.keys() | _REMOVED.keys()
# arguments that scripts and trainers beside TrainingArguments keep in the same file
_BESIDE = frozenset(names("huggingface", "beside"))
_COUNTS: dict[str, SettingName] = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
}
_FLAGS: dict[str, SettingName] = {
    "dataloader_drop_last": "drop_last",
    "activation_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
}
_INTERVALS: tuple[tuple[str, str, SettingName], ...] = (
    ("eval_strategy", "eval_steps", "evaluate_every_steps"),
    ("save_strategy", "save_steps", "checkpoint_every_steps"),
)
# one algorithm, several implementations
_SAME_OPTIMIZER = dict.fromkeys(
    "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw_apex_fused".split(), "adamw"
)
DISTINCTIVE = frozenset(
    ("per_device_train_batch_size", "per_gpu_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")
)


def is_training_arguments(data: dict[str, Any]) -> bool:
    return len(data.keys() & _KNOWN) >= 2 or bool(data.keys() & DISTINCTIVE)


def read_training_arguments(data: dict[str, Any], file: str, prefix: str = "") -> ConfigFile:
    """Settings that a TrainingArguments file states; defaults are not filled in."""
    reading = Reading(file, "Hugging Face TrainingArguments", prefix)
    reading.flag_unknown(
        {k: v for k, v in data.items() if k not in _BESIDE}, _KNOWN, "not a TrainingArguments name, so it is not read"
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
                raise reading.fail(dashes + key, data[key], f"left out, since {new}, its new name, is given too")
            reading.note(dashes + key, f"the old name of {new}")
        if new == key or data[key] is not None:
            keys[new] = key
    values = {new: data[key] for new, key in keys.items()}
    written = {new: dashes + key for new, key in keys.items()}
    for key, name in _COUNTS.items():
        reading.count(name, values.get(key), written.get(key, key))
    reading.count(
        "dataloader_workers", values.get("dataloader_num_workers"), f"{dashes}dataloader_num_workers", least=0
    )
    reading.number("learning_rate", values.get("learning_rate"), f"{dashes}learning_rate")
    for key, name in _FLAGS.items():
        reading.flag(name, values.get(key), written.get(key, key))
    _read_length(reading, values, dashes)
    _read_precision(reading, values, dashes)
    for strategy, steps, name in _INTERVALS:
        _read_interval(reading, values, written.get(strategy, strategy), strategy, dashes + steps, steps, name)
    optimizer = reading.word(values.get("optim"), f"{dashes}optim")
    if optimizer:
        reading.put("optimizer", _SAME_OPTIMIZER.get(optimizer, optimizer), f"{dashes}optim")
    _read_engines(reading, values, dashes)


def _read_length(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    key, steps, epochs = f"{dashes}max_steps", values.get("max_steps"), values.get("num_train_epochs")
    if isinstance(steps, bool) or steps not in (None, -1, 0):  # -1 and 0 are off
        reading.count("max_steps", steps, key)
        if epochs is not None:
            reading.warn(f"{dashes}num_train_epochs", "ignored by Hugging Face, since max_steps is given")
    else:
        reading.number("epochs", epochs, f"{dashes}num_train_epochs")


def _read_precision(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    on = {key: reading.truth(values.get(key), dashes + key, "precision") for key in ("bf16", "fp16", "tf32")}
    if on["bf16"] and on["fp16"]:
        raise reading.fail(f"{dashes}fp16", True, "false where bf16 is true")
    chosen = next((key for key in on if on[key]), None)
    if chosen:
        words = {"bf16": "amp_bf16", "fp16": "amp_fp16", "tf32": "tf32"}
        reading.put("precision", words[chosen], dashes + chosen)
        if on["tf32"] and chosen != "tf32":
            reading.note(f"{dashes}tf32", f"concerns only what {chosen} leaves in fp32")
    elif on["bf16"] is False and on["fp16"] is False:
        reading.put("precision", "fp32", f"{dashes}fp16, {dashes}bf16")
    else:
        for key in (key for key in on if on[key] is False):
            reading.note(dashes + key, "off; the precision itself is not stated")


def _read_interval(
    reading: Reading, values: dict[str, Any], when_key: str, when: str, key: str, steps: str, name: SettingName
) -> None:
    value, strategy = values.get(steps), values.get(when)
    if strategy is False:  # YAML reads an unquoted `no` as false
        strategy = "no"
    strategy = reading.word(strategy, when_key, ("no", "steps", "epoch", "best"))
    if value is None:
        if strategy == "steps" and steps == "eval_steps":
            reading.note(when_key, "steps, without eval_steps: Hugging Face would take logging_steps", leaves_open=name)
        elif strategy in ("epoch", "best"):
            reading.note(when_key, f"{strategy}: not a number of steps", leaves_open=name)
    elif strategy not in (None, "steps"):
        reading.note(key, f"without effect, since {when} is {strategy!r}")
    elif isinstance(value, float) and 0 < value < 1:
        reading.note(key, f"{value} is a share of the run's steps, which is not resolved here", leaves_open=name)
    else:
        reading.count(name, value, key)
        if strategy is None and steps == "eval_steps":
            reading.warn(key, "eval_strategy is not stated; Hugging Face would not evaluate while it trains")


def _read_engines(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    fsdp = values.get("fsdp")
    if fsdp is not None and not isinstance(fsdp, bool | str | list):
        raise reading.fail(f"{dashes}fsdp", fsdp, "options such as full_shard")
    if fsdp:
        reading.put("sharding", "fsdp", f"{dashes}fsdp")
    nested = values.get("fsdp_config")
    if isinstance(nested, dict):
        for key in ("activation_checkpointing", "fsdp_activation_checkpointing"):
            reading.flag("activation_checkpointing", nested.get(key), f"fsdp_config.{key}")
    sizes = values.get("parallelism_config")
    if isinstance(sizes, dict):
        reading.count("tp", sizes.get("tp_size"), "parallelism_config.tp_size")
        reading.count("cp", sizes.get("cp_size"), "parallelism_config.cp_size")
    for key, other in (("fsdp_config", nested), ("parallelism_config", sizes), ("deepspeed", values.get("deepspeed"))):
        if isinstance(other, str):
            reading.note(dashes + key, f"{other} is a file of its own; read it too")
        elif other is not None and not isinstance(other, dict):
            raise reading.fail(dashes + key, other, "a section, or the name of a file")
    if isinstance(values.get("deepspeed"), dict):
        reading.warn("deepspeed", "the settings inside are not read; give them as a file of their own")
    if reading.truth(values.get("auto_find_batch_size"), f"{dashes}auto_find_batch_size"):
        reading.warn(f"{dashes}auto_find_batch_size", "the batch shrinks where memory runs out")
    if values.get("torch_compile") is None and (
        values.get("torch_compile_backend") or values.get("torch_compile_mode")
    ):
        reading.note(f"{dashes}torch_compile", "on, since a backend or mode is given; not stated itself")
    accelerator = values.get("accelerator_config")
    if isinstance(accelerator, dict) and accelerator.get("split_batches"):
        reading.warn("accelerator_config.split_batches", "the batch is split over all processes, not one for each")
