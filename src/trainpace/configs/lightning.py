"""Lightning CLI YAML (Lightning 2.6): `trainer`, `data`, `optimizer`. Names: pytorch_lightning/trainer/trainer.py."""

import re
from typing import Any

from trainpace.configs.huggingface import is_training_arguments
from trainpace.configs.names import names
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile

TRAINER = frozenset(names("lightning", "trainer"))
LIGHTNING_PRECISIONS = {
    "32": "fp32", "32-true": "fp32", "16": "amp_fp16", "16-mixed": "amp_fp16", "16-true": "fp16", "bf16": "amp_bf16",
    "bf16-mixed": "amp_bf16", "bf16-true": "bf16", "transformer-engine": "fp8",
}  # fmt: skip
_NOT_FORECAST = ("64", "64-true", "transformer-engine-float16")
_PLAIN = r"auto|single_device|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?"


def is_lightning(data: dict[str, Any]) -> bool:
    trainer = data.get("trainer")
    return isinstance(trainer, dict) and bool(trainer.keys() & TRAINER or not is_training_arguments(trainer))


def read_lightning(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a Lightning CLI file. `devices` counts per node."""
    reading = Reading(file, "Lightning CLI")
    trainer = reading.section(data.get("trainer"), "trainer")
    reading.flag_unknown(trainer, TRAINER, "not a Trainer argument; Lightning stops at it", "trainer.")
    _read_devices(reading, trainer.get("devices"))
    reading.count("nnodes", trainer.get("num_nodes"), "trainer.num_nodes")
    if trainer.get("num_nodes") not in (None, 1):
        reading.note("trainer.devices", "devices of each node, not of all nodes together")
    reading.count("accumulation", trainer.get("accumulate_grad_batches"), "trainer.accumulate_grad_batches")
    _read_length(reading, trainer)
    _read_precision(reading, trainer.get("precision"))
    _read_strategy(reading, trainer.get("strategy"))
    _read_data(reading, reading.section(data.get("data"), "data"))
    _read_optimizer(reading, data.get("optimizer"))
    _read_validation(reading, trainer)
    return reading.done()


def _read_devices(reading: Reading, devices: Any) -> None:
    key = "trainer.devices"
    expected = 'a number, a list of different device indices, or "auto"'
    indices = devices
    if isinstance(devices, str) and "," in devices:
        indices = [part.strip() for part in devices.split(",") if part.strip()]
        if not all(re.fullmatch(r"[0-9]{1,6}", part) for part in indices):
            raise reading.fail(key, devices, expected)
        indices = [int(part) for part in indices]
    if isinstance(indices, list):
        whole = [i for i in indices if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
        if not indices or len(set(whole)) != len(indices):
            raise reading.fail(key, devices, expected)
        reading.put("nproc_per_node", len(indices), key)
        if len(indices) == 1:
            reading.note(key, f"a list of one index: the one device {indices[0]}, not {indices[0]} devices")
    elif devices in (-1, "-1", "auto"):
        text = f"{devices}: all devices of the machine that runs it, which is not known here"
        reading.note(key, text, leaves_open="nproc_per_node")
    else:
        reading.count("nproc_per_node", devices, key)


def _read_length(reading: Reading, trainer: dict[str, Any]) -> None:
    for key in ("max_epochs", "max_steps"):
        value = trainer.get(key)
        if isinstance(value, int) and value == -1:  # off
            continue
        reading.count("epochs" if key == "max_epochs" else "max_steps", value, f"trainer.{key}")
    if reading.stated("epochs") and reading.stated("max_steps"):
        reading.note("trainer.max_steps", "with max_epochs beside it; training stops at whichever comes first")
    if trainer.get("max_time") is not None:
        reading.note("trainer.max_time", f"{trainer['max_time']}: may end the training earlier")
    for key in ("limit_train_batches", "overfit_batches", "fast_dev_run"):
        value = trainer.get(key)
        if value is None or _is_off(key, value):
            continue
        if not isinstance(value, int | float) or value < 0 or (isinstance(value, bool) and key != "fast_dev_run"):
            raise reading.fail(f"trainer.{key}", value, "a number from 0")
        reading.warn(f"trainer.{key}", f"{value!r} shortens every epoch, which is not counted here")


def _is_off(key: str, value: Any) -> bool:
    """Whether a limit switches its loop off: 0 does; 1.0 is all batches and 1 is one batch."""
    if key == "limit_train_batches":
        return isinstance(value, float) and value == 1.0
    return isinstance(value, int | float) and value == 0 and (key == "fast_dev_run" or value is not False)


def _read_precision(reading: Reading, value: Any) -> None:
    if value is None:
        return
    key, word = "trainer.precision", str(value)
    if isinstance(value, bool) or word not in (*LIGHTNING_PRECISIONS, *_NOT_FORECAST):
        raise reading.fail(key, value, f"one of {', '.join(LIGHTNING_PRECISIONS)}")
    if word in _NOT_FORECAST:
        reading.note(key, f"{word} is not among the precisions that trainpace forecasts", "warning", "precision")
    else:
        reading.put("precision", LIGHTNING_PRECISIONS[word], key)


def _read_strategy(reading: Reading, value: Any) -> None:
    key = "trainer.strategy"
    nested = value if isinstance(value, dict) else {"class_path": value}
    arguments = reading.section(nested.get("init_args"), f"{key}.init_args")
    name = reading.word(nested.get("class_path"), key if nested is not value else f"{key}.class_path")
    if name is None:
        if value is not None:
            raise reading.fail(key, value, "a name, or a section with class_path")
        return
    last = name.rpartition(".")[2].removesuffix("Strategy").casefold()
    deepspeed = re.fullmatch(r"deepspeed(?:_stage_([123])(_offload(?:_nvme)?)?)?", last)
    if deepspeed:
        stage, offload = deepspeed.groups()
        if arguments.get("stage") is not None:
            reading.count("zero_stage", arguments["stage"], f"{key}.init_args.stage", least=0, most=3)
        elif stage:
            reading.put("zero_stage", int(stage), key)
        else:
            reading.note(key, "DeepSpeed, with its stage not stated; Lightning would use 2", leaves_open="zero_stage")
        if offload:
            reading.put("offload_optimizer", True, key)
        if offload and stage == "3":  # Lightning's name for both
            reading.put("offload_parameters", True, key)
        reading.flag("offload_optimizer", arguments.get("offload_optimizer"), f"{key}.init_args.offload_optimizer")
        reading.flag("offload_parameters", arguments.get("offload_parameters"), f"{key}.init_args.offload_parameters")
        if arguments.get("config") is not None:
            reading.note(f"{key}.init_args.config", "a DeepSpeed configuration of its own; read it too")
    elif last in ("fsdp", "fsdp_cpu_offload", "modelparallel"):
        size = arguments.get("tensor_parallel_size")
        reading.count("tp", None if size == "auto" else size, f"{key}.init_args.tensor_parallel_size")
        reading.put("sharding", "fsdp", key)
    elif not re.fullmatch(_PLAIN, last):
        reading.warn(key, f"{name} is not a strategy that trainpace knows; counted as plain data parallelism")


def _read_data(reading: Reading, section: dict[str, Any]) -> None:
    nested = "init_args" in section
    prefix = "data.init_args" if nested else "data"
    values = reading.section(section.get("init_args"), prefix) if nested else section
    batch = "train_batch_size" if values.get("batch_size") is None else "batch_size"
    reading.count("micro_batch", values.get(batch), f"{prefix}.{batch}")
    reading.count("dataloader_workers", values.get("num_workers"), f"{prefix}.num_workers", least=0)
    reading.flag("drop_last", values.get("drop_last"), f"{prefix}.drop_last")


def _read_optimizer(reading: Reading, value: Any) -> None:
    nested = value if isinstance(value, dict) else {"class_path": value}
    key = "optimizer.class_path" if nested is value else "optimizer"
    name = reading.word(nested.get("class_path"), key)
    if name is None and value is not None:
        raise reading.fail("optimizer", value, "a name, or a section with class_path")
    arguments = reading.section(nested.get("init_args"), "optimizer.init_args")
    reading.number("learning_rate", arguments.get("lr"), "optimizer.init_args.lr")
    if name:
        last = name.rpartition(".")[2].casefold()
        reading.put("optimizer", "sgd_momentum" if last == "sgd" and arguments.get("momentum") else last, key)


def _read_validation(reading: Reading, trainer: dict[str, Any]) -> None:
    """Lightning counts val_check_interval in micro-batches: it becomes steps where the accumulation is stated too."""
    every, accumulation = trainer.get("val_check_interval"), reading.stated("accumulation")
    key = "trainer.val_check_interval"
    if every is None:
        pass
    elif isinstance(every, int) and not isinstance(every, bool) and every > 0:
        if isinstance(accumulation, int) and every % accumulation == 0:
            reading.put("evaluate_every_steps", every // accumulation, key)
            reading.note(key, f"{every} micro-batches, which are {every // accumulation} steps")
        else:
            text = f"{every} micro-batches, which Lightning counts here, not steps"
            reading.note(key, text, leaves_open="evaluate_every_steps")
    elif isinstance(every, float) and 0 <= every <= 1:
        reading.note(key, f"{every} is a share of an epoch, not a number of steps", leaves_open="evaluate_every_steps")
    elif isinstance(every, str | dict) and every:
        reading.note(key, f"{every} is a time, not a number of steps", leaves_open="evaluate_every_steps")
    else:
        raise reading.fail(key, every, "a number of micro-batches, a share of an epoch, or a time")
    epochs = trainer.get("check_val_every_n_epoch")
    if epochs is not None:
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise reading.fail("trainer.check_val_every_n_epoch", epochs, "a whole number from 1")
        text = f"evaluates every {epochs} epochs" if epochs > 1 else "evaluates every epoch"
        reading.note("trainer.check_val_every_n_epoch", f"{text}, which is not turned into steps")
