"""accelerate YAML (accelerate 1.15). `num_processes` is the total over all machines."""

from __future__ import annotations

from typing import Any

from trainpace.configs.settings import ConfigFile, Reading

_PRECISION = {"no": "fp32", "false": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}


def is_accelerate(data: dict[str, Any]) -> bool:
    """A key of `accelerate config`."""
    return bool(data.keys() & {"compute_environment", "distributed_type", "num_machines", "num_processes"})


def read_accelerate(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of an accelerate file."""
    reading = Reading(file, "accelerate")
    reading.count("world_size", data.get("num_processes"), "num_processes")
    if data.get("num_machines") not in (None, 1):
        reading.note("num_processes", "the total over all machines, not per machine")
    reading.count("nnodes", data.get("num_machines"), "num_machines")
    if "mixed_precision" in data and data["mixed_precision"] is not None:
        word = str(data["mixed_precision"]).casefold()  # YAML reads an unquoted `no` as false
        if word not in _PRECISION:
            raise reading.fail("mixed_precision", data["mixed_precision"], "no, fp16, bf16 or fp8")
        reading.put("precision", _PRECISION[word], "mixed_precision")
    reading.count("accumulation", data.get("gradient_accumulation_steps"), "gradient_accumulation_steps")
    deepspeed = reading.section(data.get("deepspeed_config"), "deepspeed_config")
    key = "deepspeed_config.gradient_accumulation_steps"
    reading.count("accumulation", deepspeed.get("gradient_accumulation_steps"), key)
    reading.count("zero_stage", deepspeed.get("zero_stage"), "deepspeed_config.zero_stage", least=0)
    where = deepspeed.get("offload_optimizer_device")
    if where is not None:
        if where not in ("none", "cpu", "nvme"):
            raise reading.fail("deepspeed_config.offload_optimizer_device", where, "none, cpu or nvme")
        reading.put("offload_optimizer", where != "none", "deepspeed_config.offload_optimizer_device")
    if deepspeed.get("deepspeed_config_file"):
        reading.note("deepspeed_config.deepspeed_config_file", "read that file too, with another --config")
    kind = reading.text(data.get("distributed_type"), "distributed_type")
    if data.get("fsdp_config") or kind == "FSDP":
        reading.put("sharding", "fsdp", "distributed_type" if kind == "FSDP" else "fsdp_config")
    parallel = reading.section(data.get("parallelism_config"), "parallelism_config")
    for name in ("tp", "cp"):
        value = parallel.get(f"parallelism_config_{name}_size", parallel.get(f"{name}_size"))
        reading.count(name, value, f"parallelism_config.{name}_size")
    if kind == "NO" and isinstance(data.get("num_processes"), int) and data["num_processes"] > 1:
        reading.note(
            "distributed_type", f"NO, and num_processes is {data['num_processes']}: one process runs", "warning"
        )
    return reading.done()
