"""Lightning CLI YAML (Lightning 2.6): `trainer`, `data`, `model`."""

from __future__ import annotations

from typing import Any

from trainpace.configs.settings import ConfigFile, Reading

_PRECISION = {
    "32": "fp32", "32-true": "fp32", "16": "amp_fp16", "16-mixed": "amp_fp16", "16-true": "fp16", "bf16": "amp_bf16",
    "bf16-mixed": "amp_bf16", "bf16-true": "bf16", "transformer-engine": "fp8",
}  # fmt: skip
_NOT_RESOLVED = ("64", "64-true", "transformer-engine-float16")


def is_lightning(data: dict[str, Any]) -> bool:
    """A `trainer` section."""
    return isinstance(data.get("trainer"), dict)


def read_lightning(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a Lightning CLI file. `devices` counts per node."""
    reading = Reading(file, "Lightning CLI")
    trainer = reading.section(data.get("trainer"), "trainer")
    _read_devices(reading, trainer.get("devices"))
    reading.count("nnodes", trainer.get("num_nodes"), "trainer.num_nodes")
    reading.count("accumulation", trainer.get("accumulate_grad_batches"), "trainer.accumulate_grad_batches")
    if trainer.get("max_epochs") not in (None, -1):
        reading.number("epochs", trainer["max_epochs"], "trainer.max_epochs")
    if trainer.get("max_steps") not in (None, -1):
        reading.count("max_steps", trainer["max_steps"], "trainer.max_steps")
    every = trainer.get("val_check_interval")
    if isinstance(every, int) and not isinstance(every, bool):
        reading.note("trainer.val_check_interval", "counted in micro-batches by Lightning, not in steps")
    _read_precision(reading, trainer.get("precision"))
    _read_strategy(reading, trainer.get("strategy"))
    _read_data(reading, data.get("data"))
    for key in ("limit_train_batches", "overfit_batches", "fast_dev_run"):
        if trainer.get(key) not in (None, False, 0, 1.0):
            reading.note(
                f"trainer.{key}", f"{trainer[key]!r} shortens every epoch, which is not counted here", "warning"
            )
    return reading.done()


def _read_devices(reading: Reading, devices: Any) -> None:
    key = "trainer.devices"
    if isinstance(devices, str) and "," in devices:
        parts = [part for part in devices.split(",") if part.strip()]
        if not all(part.strip().isdigit() for part in parts):
            raise reading.fail(key, devices, 'a number, a list of indices, or "auto"')
        devices = [int(part) for part in parts]
    if isinstance(devices, list):
        if not devices or len(set(map(str, devices))) != len(devices):
            raise reading.fail(key, devices, "a list of different device indices")
        for index in devices:
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise reading.fail(key, devices, "a list of device indices from 0")
        reading.put("nproc_per_node", len(devices), key)
    elif devices in (-1, "-1"):
        reading.note(key, "all devices of the machine that runs it: the number is not known here")
    else:
        reading.count("nproc_per_node", devices, key)


def _read_precision(reading: Reading, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or str(value) not in (*_PRECISION, *_NOT_RESOLVED):
        raise reading.fail("trainer.precision", value, f"one of {', '.join(_PRECISION)}")
    if str(value) in _NOT_RESOLVED:
        reading.note("trainer.precision", f"{value} is not among the precisions that trainpace forecasts", "warning")
    else:
        reading.put("precision", _PRECISION[str(value)], "trainer.precision")


def _read_strategy(reading: Reading, value: Any) -> None:
    name = value.get("class_path") if isinstance(value, dict) else value
    if name is None:
        return
    if not isinstance(name, str):
        raise reading.fail("trainer.strategy", value, "the name of a strategy")
    folded = name.casefold()
    if "deepspeed" in folded:
        stage = next((int(c) for c in "123" if f"stage_{c}" in folded), None)
        arguments = (
            reading.section(value.get("init_args"), "trainer.strategy.init_args") if isinstance(value, dict) else {}
        )
        reading.count("zero_stage", arguments.get("stage", stage), "trainer.strategy", least=0)
    elif "fsdp" in folded or "modelparallel" in folded:
        reading.put("sharding", "fsdp", "trainer.strategy")


def _read_data(reading: Reading, data: Any) -> None:
    section = reading.section(data, "data")
    nested = "init_args" in section
    values = reading.section(section.get("init_args"), "data.init_args") if nested else section
    prefix = "data.init_args" if nested else "data"
    reading.count("micro_batch", values.get("batch_size"), f"{prefix}.batch_size")
    reading.count("dataloader_workers", values.get("num_workers"), f"{prefix}.num_workers", least=0)
    drop_last = reading.flag(values.get("drop_last"), f"{prefix}.drop_last")
    if drop_last is not None:
        reading.put("drop_last", drop_last, f"{prefix}.drop_last")
