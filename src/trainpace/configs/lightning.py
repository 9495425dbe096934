"""Reader and writer for Lightning CLI YAML: the sections `trainer`, `data` and `optimizer`.

Sources: Lightning 2.6, pytorch_lightning/trainer/trainer.py and strategies/deepspeed.py.
"""

import re
from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, OFFLOADS, SHARDING, Draft
from trainpace.configs.huggingface import is_training_arguments
from trainpace.configs.settings import ConfigFile, Reading, SettingName, names
from trainpace.core.execution import optimizer_called

TRAINER = frozenset(names("lightning", "trainer"))
LIGHTNING_PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "amp_fp16",
    "16-mixed": "amp_fp16",
    "16-true": "fp16",
    "bf16": "amp_bf16",
    "bf16-mixed": "amp_bf16",
    "bf16-true": "bf16",
    "transformer-engine": "fp8",
}
"""Precision for each name that Lightning accepts."""
_WORD_OF = {precision: word for word, precision in LIGHTNING_PRECISIONS.items()}
"""Lightning's name for each precision. If there are several, the last one is the current name."""
_NOT_FORECAST = ("64", "64-true", "transformer-engine-float16")
_PLAIN = r"auto|single_device|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?"
"""Names of strategies for one device or plain data parallelism."""
_KEYS: dict[SettingName, str] = {
    "nnodes": "trainer.num_nodes",
    "accumulation": "trainer.accumulate_grad_batches",
}
_STRATEGY = "trainer.strategy"
LACKS = {
    "pp": "Lightning has no pipeline parallelism",
    "cp": "Lightning has no context parallelism; the model's own code has to implement it",
}
"""Kinds of parallelism that Lightning does not have, with the reason to show."""
NO_TP = (
    "Lightning has tensor parallelism only with ModelParallelStrategy, and the model's code decides"
    " how layers are split"
)
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "activation_checkpointing": "the model's code turns it on; Lightning has no argument for it",
    "compile": "the code compiles the model; Lightning has no argument for it",
}
"""Settings that a Lightning file cannot state, with the reason to show."""
_NOT_FP8 = "Lightning's sharded strategies do not support transformer-engine"
_FSDP = ("fsdp", "fsdp_cpu_offload", "modelparallel")
_DATA = {"micro_batch": ("batch_size", "train_batch_size"), "dataloader_workers": ("num_workers",)}
_SHORTENING = {
    "limit_train_batches": (1.0,),
    "overfit_batches": (0, 0.0),
    "fast_dev_run": (0, 0.0, False),
}
"""Trainer arguments that shorten every epoch, with the values that turn them off.

The float 1.0 means all batches, and the integer 1 means one batch.
"""
_DEEPSPEED_CLASS = "lightning.pytorch.strategies.DeepSpeedStrategy"


def is_lightning(data: dict[str, Any]) -> bool:
    """Return True if the parsed YAML is a Lightning CLI configuration."""
    trainer = data.get("trainer")
    return isinstance(trainer, dict) and bool(
        trainer.keys() & TRAINER or not is_training_arguments(trainer)
    )


def read_lightning(data: dict[str, Any], file: str) -> ConfigFile:
    """Read a Lightning CLI file. Its `devices` is the number per node."""
    reading = Reading(file, "Lightning CLI")
    trainer = reading.section(data.get("trainer"), "trainer")
    reading.warn_unknown(
        trainer, TRAINER, "not an argument of Trainer; Lightning refuses to start", "trainer."
    )
    _read_devices(reading, trainer.get("devices"))
    reading.read_keys(data, _KEYS)
    if trainer.get("num_nodes") not in (None, 1):
        reading.note("trainer.devices", "the number per node, not over all nodes")
    _read_length(reading, trainer)
    for key in _SHORTENING:
        _read_limit(reading, key, trainer.get(key))
    _read_precision(reading, trainer.get("precision"))
    _read_strategy(reading, trainer.get("strategy"))
    _read_data(reading, reading.section(data.get("data"), "data"))
    _read_optimizer(reading, data.get("optimizer"))
    _read_validation(reading, trainer)
    _note_epochs(reading, trainer)
    return reading.done()


def _read_precision(reading: Reading, precision: Any) -> None:
    key, word = "trainer.precision", str(precision)
    if word in _NOT_FORECAST:
        reading.note(key, f"trainpace cannot forecast {precision}", "warning", "precision")
    elif precision is not None:
        if isinstance(precision, bool) or word not in LIGHTNING_PRECISIONS:
            raise reading.fail(key, precision, f"one of {', '.join(LIGHTNING_PRECISIONS)}")
        reading.put("precision", LIGHTNING_PRECISIONS[word], key)


def _read_devices(reading: Reading, devices: Any) -> None:
    key, indices = "trainer.devices", _indices(devices)
    if indices is not None:
        whole = {i for i in indices if type(i) is int and i >= 0}
        if not indices or len(whole) != len(indices):
            expected = 'a number, a list of different device indices, or "auto"'
            raise reading.fail(key, devices, expected)
        reading.put("nproc_per_node", len(indices), key)
        if len(indices) == 1:
            text = f"a list with one index: device {indices[0]} alone, not {indices[0]} devices"
            reading.note(key, text)
    elif devices in (-1, "-1", "auto"):
        text = f"{devices}: all devices of the machine, whose number is unknown here"
        reading.note(key, text, leaves_open="nproc_per_node")
    else:
        reading.read("nproc_per_node", devices, key)


def _indices(devices: Any) -> list[Any] | None:
    """Return the device indices in a list or in text such as "0, 1". None if there are none."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        return [int(part) if re.fullmatch(r"[0-9]{1,6}", part) else part for part in parts]
    return devices if isinstance(devices, list) else None


def _read_length(reading: Reading, trainer: dict[str, Any]) -> None:
    limits: dict[SettingName, str] = {"epochs": "max_epochs", "max_steps": "max_steps"}
    for name, key in limits.items():
        value = None if trainer.get(key) == -1 else trainer.get(key)  # -1 means off.
        if (count := reading.whole(value, f"trainer.{key}")) is not None:
            reading.put(name, count, f"trainer.{key}")
    if reading.stated("epochs") and reading.stated("max_steps"):
        reading.note(
            "trainer.max_steps",
            ("training stops at max_epochs or max_steps, whichever comes first"),
        )
    if trainer.get("max_time") is not None:
        reading.note("trainer.max_time", f"{trainer['max_time']}: may end the training earlier")


def _read_limit(reading: Reading, key: str, value: Any) -> None:
    """Warn about a limit that shortens every epoch."""
    if value is None or any(type(value) is type(off) and value == off for off in _SHORTENING[key]):
        return
    is_flag = isinstance(value, bool) and key != "fast_dev_run"
    if not isinstance(value, int | float) or value < 0 or is_flag:
        raise reading.fail(f"trainer.{key}", value, "a number from 0")
    text = f"{value!r} shortens every epoch, which is not taken into account"
    reading.warn(f"trainer.{key}", text)


def _bare(class_path: str) -> str:
    """Return a strategy's lower-case name without its module: "deepspeed" for DeepSpeedStrategy."""
    return class_path.rpartition(".")[2].removesuffix("Strategy").casefold()


def _class_and_arguments(
    reading: Reading, value: Any, key: str
) -> tuple[str | None, str, dict[str, Any]]:
    """Return the class of a setting, its key and its init_args.

    The setting is a name, or a section with class_path.
    """
    nested = value if isinstance(value, dict) else {"class_path": value}
    name_key = f"{key}.class_path" if nested is value else key
    name = reading.word(nested.get("class_path"), name_key)
    if name is None and value is not None:
        raise reading.fail(key, value, "a name, or a section with class_path")
    return name, name_key, reading.section(nested.get("init_args"), f"{key}.init_args")


def _read_strategy(reading: Reading, value: Any) -> None:
    key = _STRATEGY
    name, _, arguments = _class_and_arguments(reading, value, key)
    if name is None:
        return
    plain = _bare(name)
    if deepspeed := re.fullmatch(r"deepspeed(?:_stage_([123])(_offload(?:_nvme)?)?)?", plain):
        _read_deepspeed(reading, arguments, *deepspeed.groups())
    elif plain in _FSDP:
        size = arguments.get("tensor_parallel_size")
        size_key = f"{key}.init_args.tensor_parallel_size"
        reading.read("tp", None if size == "auto" else size, size_key)
        reading.put("sharding", "fsdp", key)
    elif not re.fullmatch(_PLAIN, plain):
        reading.warn(key, f"{name} is unknown to trainpace; treated as plain data parallelism")


def _read_deepspeed(
    reading: Reading, arguments: dict[str, Any], stage: str | None, offload: str | None
) -> None:
    """Read the strategy deepspeed, deepspeed_stage_N or deepspeed_stage_N_offload."""
    key = _STRATEGY
    if arguments.get("stage") is not None:
        reading.read("zero_stage", arguments["stage"], f"{key}.init_args.stage")
    elif stage:
        reading.put("zero_stage", int(stage), key)
    else:
        text = "DeepSpeed without a stage; Lightning's default is 2"
        reading.note(key, text, leaves_open="zero_stage")
    if offload:
        reading.put("offload_optimizer", True, key)
        if stage == "3":  # deepspeed_stage_3_offload offloads the optimizer and the parameters.
            reading.put("offload_parameters", True, key)
    for name in OFFLOADS:
        reading.read(name, arguments.get(name), f"{key}.init_args.{name}")
    if isinstance(config := arguments.get("config"), str):
        reading.name_file(f"{key}.init_args.config", config)


def _read_data(reading: Reading, section: dict[str, Any]) -> None:
    nested = "init_args" in section
    prefix = "data.init_args" if nested else "data"
    values = reading.section(section.get("init_args"), prefix) if nested else section
    batch = "train_batch_size" if values.get("batch_size") is None else "batch_size"
    reading.read("micro_batch", values.get(batch), f"{prefix}.{batch}")
    reading.read("dataloader_workers", values.get("num_workers"), f"{prefix}.num_workers")
    reading.read("drop_last", values.get("drop_last"), f"{prefix}.drop_last")


def _read_optimizer(reading: Reading, value: Any) -> None:
    name, key, arguments = _class_and_arguments(reading, value, "optimizer")
    reading.read("learning_rate", arguments.get("lr"), "optimizer.init_args.lr")
    if name:
        last = name.rpartition(".")[2].casefold()
        reading.put(
            "optimizer",
            (
                "sgd_momentum"
                if last == "sgd" and arguments.get("momentum")
                else optimizer_called(last)
            ),
            key,
        )


def _read_validation(reading: Reading, trainer: dict[str, Any]) -> None:
    """Read val_check_interval, which Lightning counts in micro-batches."""
    every, key = trainer.get("val_check_interval"), "trainer.val_check_interval"
    if every is None:
        return
    if type(every) is int and every > 0:
        accumulation = reading.stated("accumulation")
        if isinstance(accumulation, int) and every % accumulation == 0:
            steps = every // accumulation
            reading.put("evaluate_every_steps", steps, key)
            reading.note(key, f"{every} micro-batches, which are {steps} steps")
            return
        why = "is in micro-batches, which are not a known whole number of steps"
    elif isinstance(every, float) and 0 <= every <= 1:
        why = "is a share of an epoch, not a number of steps"
    elif every and isinstance(every, str | dict):
        why = "is a time, not a number of steps"
    else:
        raise reading.fail(key, every, "a number of micro-batches, a share of an epoch, or a time")
    reading.note(key, f"{every} {why}", leaves_open="evaluate_every_steps")


def _note_epochs(reading: Reading, trainer: dict[str, Any]) -> None:
    """Add a note on an evaluation every few epochs."""
    key = "trainer.check_val_every_n_epoch"
    if epochs := reading.whole(trainer.get("check_val_every_n_epoch"), key):
        text = f"evaluates every {epochs} epochs" if epochs > 1 else "evaluates every epoch"
        reading.note(key, f"{text}; not converted to steps")


def write_lightning(draft: Draft) -> None:
    """Write the draft's settings into a Lightning CLI configuration."""
    draft.leave_all(_CANNOT)
    draft.place("nnodes", _KEYS["nnodes"])
    _write_devices(draft)
    _write_accumulation(draft)
    _write_precision(draft)
    section = "data.init_args" if draft.get("data.init_args") is not None else "data"
    for name, keys in _DATA.items():
        # Change only keys that exist: Lightning fails for an argument that the data module lacks.
        if not any(draft.place(name, f"{section}.{key}", adds=False) for key in keys):
            why = "the data module does not state it, and the name of its argument is unknown"
            draft.leave(why, name)
    if not draft.place("tp", f"{_STRATEGY}.init_args.tensor_parallel_size", adds=False):
        draft.leave(NO_TP, "tp")
    if draft.names & set(SHARDING):
        _write_strategy(draft)


def _write_precision(draft: Draft) -> None:
    precision = str(draft.want["precision"])
    sharded = draft.want["zero_stage"] or re.match("deepspeed|fsdp|modelparallel", _strategy(draft))
    if precision == "fp8" and sharded:
        draft.leave(_NOT_FP8, "precision")
    elif precision in _WORD_OF:
        draft.place("precision", "trainer.precision", _WORD_OF[precision])
    else:
        why = f'Lightning has no {precision}: call torch.set_float32_matmul_precision("high")'
        draft.leave(why, "precision")


def _strategy(draft: Draft) -> str:
    stated = draft.get(_STRATEGY)
    return _bare(str((stated.get("class_path") if isinstance(stated, dict) else stated) or "auto"))


def _write_devices(draft: Draft) -> None:
    old, count = draft.get("trainer.devices"), draft.want["nproc_per_node"]
    if old in (-1, "-1", "auto"):
        draft.leave(f"trainer.devices is {old}: all devices of the machine", "nproc_per_node")
    elif isinstance(old, list) or (isinstance(old, str) and "," in old):
        draft.leave(f"trainer.devices lists {old}: choose the {count} by hand", "nproc_per_node")
    else:
        draft.place("nproc_per_node", "trainer.devices")


def _write_accumulation(draft: Draft) -> None:
    """Write the accumulation, and adapt val_check_interval, which counts micro-batches."""
    old, every = draft.get(_KEYS["accumulation"]), draft.get("trainer.val_check_interval")
    if (
        draft.place("accumulation", _KEYS["accumulation"])
        and isinstance(every, int)
        and not isinstance(every, bool)
    ):
        before = old if isinstance(old, int) and old > 0 else 1
        if every % before == 0:
            draft.put(
                "trainer.val_check_interval", every // before * int(draft.want["accumulation"])
            )


def _write_strategy(draft: Draft) -> None:
    """Write ZeRO stage and offloading: by the strategy's name, its arguments, or not at all."""
    stated, plain = draft.get(_STRATEGY), _strategy(draft)
    stage, *offloads = draft.sharding
    if plain in _FSDP:
        _write_fsdp_file(draft, plain, int(draft.want["zero_stage"]), any(offloads))
    elif stage and draft.get("trainer.precision") == _WORD_OF["fp8"]:
        draft.leave(_NOT_FP8, *SHARDING)
    elif stated is None and "zero_stage" not in draft.may_add:
        # This file has no strategy, and another file states the sharding.
        draft.leave(ELSEWHERE, *SHARDING)
    elif isinstance(stated, dict) and plain.startswith("deepspeed"):
        _write_deepspeed_arguments(draft)
    elif isinstance(stated, dict) and (stage or any(offloads)):
        draft.leave(f"the strategy is {plain} with arguments of its own", *SHARDING)
    else:
        _write_name(draft, plain)
        draft.keep(*SHARDING)


def _argument_key(name: str) -> str:
    return f"{_STRATEGY}.init_args.{name.removeprefix('zero_')}"


def _write_deepspeed_arguments(draft: Draft) -> None:
    if draft.get(f"{_STRATEGY}.init_args.config") is not None:
        draft.leave("the strategy's config is a separate DeepSpeed file", *SHARDING)
        return
    for name in SHARDING:
        stated = draft.get(_argument_key(name)) is not None
        if name in draft.names and (draft.want[name] or stated):
            draft.put(_argument_key(name), draft.want[name])
        draft.keep(name)


def _write_name(draft: Draft, plain: str) -> None:
    """Write a strategy without arguments, by Lightning's short name if there is one.

    Short names exist for stages 1 to 3, for stage 2 with an offloaded optimizer, and for stage 3
    with offloaded parameters and optimizer. All other strategies need a section.
    """
    stage, *offloads = draft.sharding
    named = {
        (1, False, False),
        (2, False, False),
        (2, True, False),
        (3, False, False),
        (3, True, True),
    }
    if not stage and not any(offloads):
        if plain.startswith("deepspeed"):
            draft.put(_STRATEGY, "ddp")
    elif (stage, *offloads) in named:
        draft.put(_STRATEGY, f"deepspeed_stage_{stage}" + ("_offload" if offloads[0] else ""))
    else:
        draft.put(f"{_STRATEGY}.class_path", _DEEPSPEED_CLASS)
        for name in SHARDING:
            if draft.want[name] or name == "zero_stage":
                draft.put(_argument_key(name), draft.want[name])


def _write_fsdp_file(draft: Draft, plain: str, stage: int, offload: bool) -> None:
    """Write the sharding into a file whose strategy is FSDP.

    Replace the strategy by ddp if sharding is not wanted, or leave it as it is. Otherwise record
    why neither is possible.
    """
    can_switch_to_ddp = stage == 0 and plain == "fsdp" and isinstance(draft.get(_STRATEGY), str)
    if can_switch_to_ddp:
        draft.put(_STRATEGY, "ddp")
    if can_switch_to_ddp or stage == 3:
        draft.keep("zero_stage")
    else:
        why = f"the strategy is {plain}; ZeRO stage {stage} needs another strategy"
        draft.leave(why, "zero_stage")
    if offload or plain == "fsdp_cpu_offload":
        why = "FSDP offloads parameters, gradients and optimizer together (cpu_offload)"
        draft.leave(why, *OFFLOADS)
    else:
        draft.keep(*OFFLOADS)
