"""DeepSpeed JSON. Keys: DeepSpeed 0.19.8, runtime/config.py, runtime/constants.py, runtime/zero/config.py.

DeepSpeed silently ignores an unknown top-level key; an unknown key inside zero_optimization stops it.
"""

from typing import Any

from trainpace.configs.names import names
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName

TOP_LEVEL = frozenset(names("deepspeed", "keys"))
REMOVED = frozenset(names("deepspeed", "removed_keys"))
ZERO = frozenset(names("deepspeed", "zero_keys"))
DEVICES = ("none", "cpu", "nvme")
_COUNTS: dict[str, SettingName] = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
}


def is_deepspeed(data: dict[str, Any]) -> bool:
    return bool(data.keys() & {"train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"})


def read_deepspeed(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a DeepSpeed file; a value "auto" leaves its setting to the other files, with a note."""
    reading = Reading(file, "DeepSpeed", understands_auto=True)
    for key in sorted(data.keys() & REMOVED):
        reading.warn(key, "removed; DeepSpeed 0.19 stops at this key")
    reading.flag_unknown(data, TOP_LEVEL | REMOVED, "unknown to DeepSpeed, which ignores it silently")
    for key, name in _COUNTS.items():
        reading.count(name, data.get(key), key)
    reading.flag("drop_last", data.get("dataloader_drop_last"), "dataloader_drop_last")
    _read_precision(reading, data)
    _read_zero(reading, data.get("zero_optimization"))
    _read_optimizer(reading, reading.section(data.get("optimizer"), "optimizer"))
    parallel = reading.section(data.get("tensor_parallel"), "tensor_parallel")
    if parallel.get("autotp_size") != 0 or isinstance(parallel.get("autotp_size"), bool):  # 0 is off
        reading.count("tp", parallel.get("autotp_size"), "tensor_parallel.autotp_size")
    # DeepSpeed divides the world by it before it checks the batch sizes, as it does with context parallelism
    reading.count("cp", data.get("sequence_parallel_size"), "sequence_parallel_size")
    compiled = reading.section(data.get("compile"), "compile")
    reading.flag("compile", compiled.get("deepcompile"), "compile.deepcompile")
    if data.get("activation_checkpointing") is not None:
        reading.note("activation_checkpointing", "how, not whether: the model's code turns it on")
    return reading.done()


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    on: dict[str, bool | None] = {}
    for key in ("fp16", "bf16", "bfloat16", "torch_autocast", "amp"):
        section = reading.section(data.get(key), key)
        on[key] = reading.truth(section.get("enabled"), f"{key}.enabled", "precision")
    half = [key for key in ("fp16", "bf16", "bfloat16") if on[key]]
    if len(half) > 1 and half[0] == "fp16":
        raise reading.fail("fp16.enabled", True, f"false where {half[1]}.enabled is true")
    if half:
        reading.put("precision", "fp16" if half[0] == "fp16" else "bf16", f"{half[0]}.enabled")
    elif on["torch_autocast"]:
        _read_autocast(reading, data["torch_autocast"].get("dtype"))
    elif on["amp"]:
        reading.put("precision", "amp_fp16", "amp.enabled")
    elif on["fp16"] is False and (on["bf16"] is False or on["bfloat16"] is False):
        reading.put("precision", "fp32", "fp16.enabled, bf16.enabled")
    else:
        for key in (key for key, state in on.items() if state is False):
            reading.note(f"{key}.enabled", "off; the precision itself is not stated")


def _read_autocast(reading: Reading, dtype: Any) -> None:
    key = "torch_autocast.dtype"
    words = {"bf16": "amp_bf16", "bfloat16": "amp_bf16", "fp16": "amp_fp16", "float16": "amp_fp16", "half": "amp_fp16"}
    bare = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    word = reading.word(bare, key, words)
    if word is None:
        reading.note("torch_autocast.enabled", "on, without a dtype", leaves_open="precision")
    else:
        reading.put("precision", words[word], key)


def _read_zero(reading: Reading, value: Any) -> None:
    if isinstance(value, bool):
        reading.note("zero_optimization", f"the old way to write stage {int(value)}")
        reading.put("zero_stage", int(value), "zero_optimization")
        return
    zero = reading.section(value, "zero_optimization")
    reading.flag_unknown(zero, ZERO, "DeepSpeed stops with a validation error at this key", "zero_optimization.")
    reading.count("zero_stage", zero.get("stage"), "zero_optimization.stage", least=0, most=3)
    offloads: tuple[tuple[str, SettingName], ...] = (
        ("offload_optimizer", "offload_optimizer"),
        ("offload_param", "offload_parameters"),
    )
    for key, name in offloads:
        path = f"zero_optimization.{key}"
        section = reading.section(zero.get(key), path)
        device = reading.word(section.get("device"), f"{path}.device", DEVICES)
        if device is not None:
            reading.put(name, device != "none", f"{path}.device")
    if zero.get("cpu_offload") is not None:
        reading.note("zero_optimization.cpu_offload", "the old name of offload_optimizer")
        reading.flag("offload_optimizer", zero["cpu_offload"], "zero_optimization.cpu_offload")


def _read_optimizer(reading: Reading, optimizer: dict[str, Any]) -> None:
    name = reading.word(optimizer.get("type"), "optimizer.type")
    parameters = reading.section(optimizer.get("params"), "optimizer.params")
    reading.number("learning_rate", parameters.get("lr"), "optimizer.params.lr")
    if not name:
        return
    if name.casefold() == "adam" and parameters.get("adam_w_mode") is not False:
        reading.note("optimizer.type", "Adam runs as AdamW in DeepSpeed unless adam_w_mode is false")
        name = "adamw"
    reading.put("optimizer", name.casefold(), "optimizer.type")
