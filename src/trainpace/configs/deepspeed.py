"""Reader and writer for DeepSpeed's JSON files.

DeepSpeed ignores an unknown top-level key without a message. An unknown key inside
zero_optimization is an error there.

Sources: DeepSpeed 0.19.8, runtime/config.py, constants.py and zero/config.py.
"""

from typing import Any

from trainpace.configs.changes import ELSEWHERE, OFFLOADS, Draft
from trainpace.configs.settings import ConfigFile, Reading, SettingName, names
from trainpace.core.execution import optimizer_called

TOP_LEVEL = frozenset(names("deepspeed", "keys"))
REMOVED = frozenset(names("deepspeed", "removed_keys"))
ZERO = frozenset(names("deepspeed", "zero_keys"))
TRAINERS = frozenset(("Hugging Face TrainingArguments", "accelerate"))
"""Trainers that compare their own precision with DeepSpeed's. They call their autocast bf16."""
_KEYS: dict[SettingName, str] = {
    "global_batch": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "drop_last": "dataloader_drop_last",
    # Before DeepSpeed checks batch sizes, it divides the world size by this value, as for cp.
    "cp": "sequence_parallel_size",
    "compile": "compile.deepcompile",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_parameters": "zero_optimization.offload_param.device",
    "partition_activations": "activation_checkpointing.partition_activations",
    "learning_rate": "optimizer.params.lr",
}
_TP = "tensor_parallel.autotp_size"
_SECTIONS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch_autocast": "",
    "amp": "amp_fp16",
}
"""Precision of each section.

A section applies if its key `enabled` is true. The first section that applies counts.
"""
_AUTOCAST = {
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "half": "amp_fp16",
}
_HOW_NOT_WHETHER = "it only configures checkpointing; the model's code turns it on"
_CANNOT = {
    "nnodes": "DeepSpeed takes the number of nodes from the launch command",
    "nproc_per_node": "DeepSpeed takes the processes per node from the launch command",
    "pp": "pipeline stages are defined in code (PipelineModule), not by a key",
    "activation_checkpointing": f"DeepSpeed has a section, but {_HOW_NOT_WHETHER}",
    "dataloader_workers": "DeepSpeed has no key for loader workers",
}


def is_deepspeed(data: dict[str, Any]) -> bool:
    """Return True if the parsed JSON is a DeepSpeed configuration."""
    return bool(
        data.keys() & {"train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"}
    )


def read_deepspeed(data: dict[str, Any], file: str) -> ConfigFile:
    """Read a DeepSpeed file. For "auto", a note is added; the other files state the value."""
    reading = Reading(file, "DeepSpeed", understands_auto=True)
    for key in sorted(data.keys() & REMOVED):
        reading.warn(key, "removed; DeepSpeed 0.19 stops at this key")
    reading.warn_unknown(
        data, TOP_LEVEL | REMOVED, "unknown to DeepSpeed, which ignores it silently"
    )
    if isinstance(stage := data.get("zero_optimization"), bool):
        reading.note("zero_optimization", f"the old way to write stage {int(stage)}")
        reading.put("zero_stage", int(stage), "zero_optimization")
        data = {**data, "zero_optimization": None}
    reading.read_keys(data, _KEYS)
    _read_precision(reading, data)
    zero = reading.section(data.get("zero_optimization"), "zero_optimization")
    reading.warn_unknown(
        zero, ZERO, "DeepSpeed stops with a validation error at this key", "zero_optimization."
    )
    if zero.get("cpu_offload") is not None:
        reading.note("zero_optimization.cpu_offload", "the old name of offload_optimizer")
        reading.read("offload_optimizer", zero["cpu_offload"], "zero_optimization.cpu_offload")
    tp = reading.at(data, _TP)
    if tp != 0 or isinstance(tp, bool):  # 0 means off.
        reading.read("tp", tp, _TP)
    _read_optimizer(reading, data)
    if data.get("activation_checkpointing") is not None:
        reading.note("activation_checkpointing", _HOW_NOT_WHETHER)
    return reading.done()


def _read_optimizer(reading: Reading, data: dict[str, Any]) -> None:
    word = (reading.word(reading.at(data, "optimizer.type"), "optimizer.type") or "").casefold()
    if word == "adam" and reading.at(data, "optimizer.params.adam_w_mode") is not False:
        reading.note(
            "optimizer.type", "Adam runs as AdamW in DeepSpeed unless adam_w_mode is false"
        )
        word = "adamw"
    if word:
        reading.put("optimizer", optimizer_called(word), "optimizer.type")


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    keys = {f"{section}.enabled": section for section in _SECTIONS}
    on = reading.precisions_on({key: reading.at(data, key) for key in keys})
    if not on:
        return
    section = keys[on[0]]
    if section == "torch_autocast":
        _read_autocast(reading, data[section].get("dtype"))
    else:
        reading.put("precision", _SECTIONS[section], on[0])


def _read_autocast(reading: Reading, dtype: Any) -> None:
    if dtype is None:
        reading.note("torch_autocast.enabled", "on, without a dtype", leaves_open="precision")
    bare = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    reading.read_word("precision", bare, "torch_autocast.dtype", _AUTOCAST)


def write_deepspeed(draft: Draft) -> None:
    """Write the draft's settings into a DeepSpeed configuration."""
    draft.leave_all(_CANNOT)
    draft.place_keys(_KEYS, ("micro_batch", "accumulation", "cp", "partition_activations"))
    draft.place("global_batch", _KEYS["global_batch"], adds=False)
    draft.place("tp", _TP, draft.want["tp"] if draft.want["tp"] != 1 else 0)
    if "precision" in draft.names:
        _write_precision(draft)
    zero = draft.get("zero_optimization")
    if isinstance(zero, bool):
        why = "zero_optimization is true or false, the old way to write a stage; make it a section"
        draft.leave(why, "zero_stage")
    else:
        draft.place("zero_stage", _KEYS["zero_stage"])
    if isinstance(zero, bool) or (isinstance(zero, dict) and "cpu_offload" in zero):
        why = "zero_optimization is in the old style; offload_optimizer is a section now"
        draft.leave(why, *OFFLOADS)
    else:
        draft.place_keys(_KEYS, OFFLOADS)
    if not draft.place("compile", _KEYS["compile"], adds=False):
        why = "the code compiles the model; DeepSpeed's key only adds passes to that"
        draft.leave(why, "compile")


def _write_precision(draft: Draft) -> None:
    precision = str(draft.want["precision"])
    if draft.beside & TRAINERS:
        precision = precision.removeprefix("amp_")
    states = {key: state for key in _SECTIONS if (state := draft.get(f"{key}.enabled")) is not None}
    if precision in ("tf32", "fp8"):
        draft.leave(f"DeepSpeed has no key for {precision}: set it in the code", "precision")
    elif "auto" in states.values():
        draft.leave('fp16 or bf16 is "auto": another file or the run decides', "precision")
    elif not states and "precision" not in draft.may_add:
        draft.leave(ELSEWHERE, "precision")
    else:
        for key, state in states.items():
            if state:
                draft.put(f"{key}.enabled", False)
        _switch_on(draft, precision, states)
        draft.keep("precision")


def _switch_on(draft: Draft, precision: str, states: dict[str, Any]) -> None:
    if precision == "fp32":  # A file states fp32 by turning both half precisions off.
        for key in ("fp16", "bf16"):
            if key not in states:
                draft.put(f"{key}.enabled", False)
    elif precision.startswith("amp_"):
        draft.put("torch_autocast.enabled", True)
        draft.put("torch_autocast.dtype", "bfloat16" if precision == "amp_bf16" else "float16")
    else:
        old_name = precision == "bf16" and draft.get("bfloat16") is not None
        draft.put(f"{'bfloat16' if old_name else precision}.enabled", True)
