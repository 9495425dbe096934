"""accelerate YAML (accelerate 1.15, commands/config/config_args.py). `num_processes` is the total over all machines."""

import math
from typing import Any

from trainpace.configs.deepspeed import DEVICES
from trainpace.configs.names import names
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName

NAMES = frozenset(names("accelerate", "keys"))
_OLD = frozenset(names("accelerate", "old_keys"))
KINDS = names("accelerate", "distributed_types")
DYNAMO = names("accelerate", "dynamo_backends")
_OFFLOADS: tuple[tuple[SettingName, str], ...] = (
    ("offload_optimizer", "offload_optimizer_device"),
    ("offload_parameters", "offload_param_device"),
)
PRECISION = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}


def is_accelerate(data: dict[str, Any]) -> bool:
    return bool(data.keys() & {"compute_environment", "distributed_type", "num_machines", "num_processes"})


def read_accelerate(data: dict[str, Any], file: str) -> ConfigFile:
    reading = Reading(file, "accelerate", understands_auto=True)
    reading.flag_unknown(data, NAMES | _OLD, "not a name of accelerate's, which stops at it")
    reading.count("world_size", data.get("num_processes"), "num_processes")
    if data.get("num_machines") not in (None, 1):
        reading.note("num_processes", "the total over all machines, not per machine")
    reading.count("nnodes", data.get("num_machines"), "num_machines")
    _read_precision(reading, data)
    reading.count("accumulation", data.get("gradient_accumulation_steps"), "gradient_accumulation_steps")
    _read_deepspeed(reading, reading.section(data.get("deepspeed_config"), "deepspeed_config"))
    _read_kind(reading, data)
    _read_parallelism(reading, reading.section(data.get("parallelism_config"), "parallelism_config"))
    dynamo = reading.section(data.get("dynamo_config"), "dynamo_config")
    key = "dynamo_config.dynamo_backend"
    if str(data.get("distributed_type")).upper() == "DEEPSPEED" and dynamo.get("dynamo_backend") is not None:
        reading.note(key, "without effect: accelerate does not pass it on where it starts DeepSpeed")
    else:
        put_dynamo(reading, dynamo.get("dynamo_backend"), key)
    return reading.done()


def put_dynamo(reading: Reading, backend: Any, key: str) -> None:
    if backend is False:  # YAML reads an unquoted `NO` as false
        backend = "NO"
    word = reading.word(backend.upper() if isinstance(backend, str) else backend, key, DYNAMO)
    if word:
        reading.put("compile", word != "NO", key)


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    word = data.get("mixed_precision")
    if word is None:
        if reading.truth(data.get("fp16"), "fp16", "precision") is not None:
            reading.note("fp16", "the old name of mixed_precision")
            reading.put("precision", "amp_fp16" if data["fp16"] else "fp32", "fp16")
        return
    if word is False:
        reading.warn("mixed_precision", "an unquoted no, which YAML reads as false and accelerate stops at; write 'no'")
        word = "no"
    word = reading.word(word.casefold() if isinstance(word, str) else word, "mixed_precision", PRECISION)
    if word:
        reading.put("precision", PRECISION[word], "mixed_precision")


def _read_deepspeed(reading: Reading, section: dict[str, Any]) -> None:
    key = "deepspeed_config"
    steps = section.get("gradient_accumulation_steps")
    reading.count("accumulation", steps, f"{key}.gradient_accumulation_steps")
    reading.count("zero_stage", section.get("zero_stage"), f"{key}.zero_stage", least=0, most=3)
    for name, device_key in _OFFLOADS:
        device = reading.word(section.get(device_key), f"{key}.{device_key}", DEVICES)
        if device:
            reading.put(name, device != "none", f"{key}.{device_key}")
    file = reading.word(section.get("deepspeed_config_file"), f"{key}.deepspeed_config_file")
    if file:
        reading.note(f"{key}.deepspeed_config_file", f"{file} is a file of its own; read it too")


def _read_kind(reading: Reading, data: dict[str, Any]) -> None:
    kind = data.get("distributed_type")
    if kind is False:  # YAML reads an unquoted `NO` as false
        kind = "NO"
    kind = reading.word(kind.upper() if isinstance(kind, str) else kind, "distributed_type", KINDS)
    fsdp = reading.section(data.get("fsdp_config"), "fsdp_config")
    if kind == "FSDP" or (fsdp and kind is None):  # under another type, accelerate passes fsdp_config by
        reading.put("sharding", "fsdp", "distributed_type" if kind == "FSDP" else "fsdp_config")
    checkpointing = fsdp.get("fsdp_activation_checkpointing")
    reading.flag("activation_checkpointing", checkpointing, "fsdp_config.fsdp_activation_checkpointing")
    processes = reading.stated("world_size")
    if kind == "NO" and isinstance(processes, int) and processes > 1:
        reading.warn("distributed_type", f"NO, and num_processes is {processes}: one process runs")


def _read_parallelism(reading: Reading, section: dict[str, Any]) -> None:
    """Mesh sizes. accelerate itself writes parallelism_config_tp_size inside parallelism_config; tp_size is read as well."""
    sizes: dict[str, int] = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        short, long = f"{name}_size", f"parallelism_config_{name}_size"
        key = short if section.get(short) is not None else long
        size = reading.whole(section.get(key), f"parallelism_config.{key}")
        if size is None:
            continue
        sizes[name] = size
        if name in ("tp", "cp"):
            reading.put("tp" if name == "tp" else "cp", size, f"parallelism_config.{key}")
        elif name == "sp" and size > 1:
            reading.warn(f"parallelism_config.{key}", f"{size}: sequence parallelism is not counted here")
    mesh = math.prod(sizes.values())
    total = reading.stated("world_size")
    if sizes and total is not None and mesh != total:
        reading.warn("parallelism_config", f"its sizes multiply to {mesh}, and num_processes is {total}")
