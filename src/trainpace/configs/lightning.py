"""Lightning CLI YAML (Lightning 2.6): `trainer`, `data`, `optimizer`. Names: pytorch_lightning/trainer/trainer.py and
strategies/deepspeed.py."""

import re
from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, SHARDING, Draft
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
_WORD_OF = {
    precision: word for word, precision in LIGHTNING_PRECISIONS.items()
}  # the last, which is today's
_NOT_FORECAST = ("64", "64-true", "transformer-engine-float16")
_PLAIN = r"auto|single_device|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?"
_KEYS: dict[SettingName, str] = {
    "nnodes": "trainer.num_nodes",
    "accumulation": "trainer.accumulate_grad_batches",
}
_STRATEGY = "trainer.strategy"
LACKS = {
    "pp": "Lightning has no pipeline parallelism",
    "cp": "Lightning has no context parallelism: the model's code does it",
}
NO_TP = "Lightning shards products with ModelParallelStrategy alone, and by the model's own plan"
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "activation_checkpointing": "the model's code turns it on; Lightning has no argument for it",
    "compile": "the code compiles the model; Lightning has no argument for it",
}
_NOT_FP8 = "Lightning's sharded strategies do not take transformer-engine"
_DATA = {"micro_batch": ("batch_size", "train_batch_size"), "dataloader_workers": ("num_workers",)}
_DEEPSPEED_CLASS = "lightning.pytorch.strategies.DeepSpeedStrategy"


def is_lightning(data: dict[str, Any]) -> bool:
    trainer = data.get("trainer")
    return isinstance(trainer, dict) and bool(
        trainer.keys() & TRAINER or not is_training_arguments(trainer)
    )


def read_lightning(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a Lightning CLI file. `devices` counts per node."""
    reading = Reading(file, "Lightning CLI")
    trainer = reading.section(data.get("trainer"), "trainer")
    reading.flag_unknown(
        trainer, TRAINER, "not a Trainer argument; Lightning stops at it", "trainer."
    )
    _read_devices(reading, trainer.get("devices"))
    reading.read_keys(data, _KEYS)
    if trainer.get("num_nodes") not in (None, 1):
        reading.note("trainer.devices", "devices of each node, not of all nodes together")
    _read_length(reading, trainer)
    precision = trainer.get("precision")
    words = (None, *LIGHTNING_PRECISIONS, *_NOT_FORECAST)
    if isinstance(precision, bool) or (precision is not None and str(precision) not in words):
        raise reading.fail(
            "trainer.precision", precision, f"one of {', '.join(LIGHTNING_PRECISIONS)}"
        )
    if str(precision) in _NOT_FORECAST:
        text = f"{precision} is not among the precisions that trainpace forecasts"
        reading.note("trainer.precision", text, "warning", "precision")
    elif precision is not None:
        reading.put("precision", LIGHTNING_PRECISIONS[str(precision)], "trainer.precision")
    _read_strategy(reading, trainer.get("strategy"))
    _read_data(reading, reading.section(data.get("data"), "data"))
    _read_optimizer(reading, data.get("optimizer"))
    _read_validation(reading, trainer)
    return reading.done()


def _read_devices(reading: Reading, devices: Any) -> None:
    key, indices = "trainer.devices", devices
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        indices = [int(part) if re.fullmatch(r"[0-9]{1,6}", part) else part for part in parts]
    if isinstance(indices, list):
        whole = {i for i in indices if isinstance(i, int) and not isinstance(i, bool) and i >= 0}
        if not indices or len(whole) != len(indices):
            raise reading.fail(
                key, devices, 'a number, a list of different device indices, or "auto"'
            )
        reading.put("nproc_per_node", len(indices), key)
        if len(indices) == 1:
            reading.note(
                key, f"a list of one index: the one device {indices[0]}, not {indices[0]} devices"
            )
    elif devices in (-1, "-1", "auto"):
        text = f"{devices}: all devices of the machine that runs it, which is not known here"
        reading.note(key, text, leaves_open="nproc_per_node")
    else:
        reading.read("nproc_per_node", devices, key)


def _read_length(reading: Reading, trainer: dict[str, Any]) -> None:
    limits: dict[SettingName, str] = {"epochs": "max_epochs", "max_steps": "max_steps"}
    for name, key in limits.items():
        count = (
            None if trainer.get(key) == -1 else reading.whole(trainer.get(key), f"trainer.{key}")
        )  # -1 is off
        if count is not None:
            reading.put(name, count, f"trainer.{key}")
    if reading.stated("epochs") and reading.stated("max_steps"):
        reading.note(
            "trainer.max_steps",
            "with max_epochs beside it; training stops at whichever comes first",
        )
    if trainer.get("max_time") is not None:
        reading.note("trainer.max_time", f"{trainer['max_time']}: may end the training earlier")
    for key in ("limit_train_batches", "overfit_batches", "fast_dev_run"):
        value = trainer.get(key)
        if value is None or _is_off(key, value):
            continue
        if (
            not isinstance(value, int | float)
            or value < 0
            or (isinstance(value, bool) and key != "fast_dev_run")
        ):
            raise reading.fail(f"trainer.{key}", value, "a number from 0")
        reading.warn(f"trainer.{key}", f"{value!r} shortens every epoch, which is not counted here")


def _is_off(key: str, value: Any) -> bool:
    """Whether a limit switches its loop off: 0 does; 1.0 is all batches and 1 is one batch."""
    if key == "limit_train_batches":
        return isinstance(value, float) and value == 1.0
    return (
        isinstance(value, int | float)
        and value == 0
        and (key == "fast_dev_run" or value is not False)
    )


def _bare(class_path: str) -> str:
    """A strategy's or optimizer's bare name: "deepspeed" for DeepSpeedStrategy."""
    return class_path.rpartition(".")[2].removesuffix("Strategy").casefold()


def _class_and_arguments(
    reading: Reading, value: Any, key: str
) -> tuple[str | None, str, dict[str, Any]]:
    """The class that a name, or a section with class_path, states; the key that states it; and its init_args."""
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
    deepspeed = re.fullmatch(r"deepspeed(?:_stage_([123])(_offload(?:_nvme)?)?)?", _bare(name))
    if deepspeed:
        stage, offload = deepspeed.groups()
        if arguments.get("stage") is not None:
            reading.read("zero_stage", arguments["stage"], f"{key}.init_args.stage")
        elif stage:
            reading.put("zero_stage", int(stage), key)
        else:
            reading.note(
                key,
                "DeepSpeed, with its stage not stated; Lightning would use 2",
                leaves_open="zero_stage",
            )
        if offload:
            reading.put("offload_optimizer", True, key)
        if offload and stage == "3":  # Lightning's name for both
            reading.put("offload_parameters", True, key)
        reading.read(
            "offload_optimizer",
            arguments.get("offload_optimizer"),
            f"{key}.init_args.offload_optimizer",
        )
        reading.read(
            "offload_parameters",
            arguments.get("offload_parameters"),
            f"{key}.init_args.offload_parameters",
        )
        if arguments.get("config") is not None:
            reading.note(
                f"{key}.init_args.config", "a DeepSpeed configuration of its own; read it too"
            )
    elif _bare(name) in ("fsdp", "fsdp_cpu_offload", "modelparallel"):
        size = arguments.get("tensor_parallel_size")
        reading.read(
            "tp", None if size == "auto" else size, f"{key}.init_args.tensor_parallel_size"
        )
        reading.put("sharding", "fsdp", key)
    elif not re.fullmatch(_PLAIN, _bare(name)):
        reading.warn(
            key, f"{name} is not a strategy that trainpace knows; counted as plain data parallelism"
        )


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
    """Lightning counts val_check_interval in micro-batches: it becomes steps where the accumulation is stated too."""
    every, accumulation = trainer.get("val_check_interval"), reading.stated("accumulation")
    key, why = "trainer.val_check_interval", ""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        if isinstance(accumulation, int) and every % accumulation == 0:
            reading.put("evaluate_every_steps", every // accumulation, key)
            reading.note(key, f"{every} micro-batches, which are {every // accumulation} steps")
        else:
            why = "micro-batches, which Lightning counts here, not steps"
    elif isinstance(every, float) and 0 <= every <= 1:
        why = "is a share of an epoch, not a number of steps"
    elif isinstance(every, str | dict) and every:
        why = "is a time, not a number of steps"
    elif every is not None:
        raise reading.fail(key, every, "a number of micro-batches, a share of an epoch, or a time")
    if why:
        reading.note(key, f"{every} {why}", leaves_open="evaluate_every_steps")
    epochs = reading.whole(
        trainer.get("check_val_every_n_epoch"), "trainer.check_val_every_n_epoch"
    )
    if epochs is not None:
        text = f"evaluates every {epochs} epochs" if epochs > 1 else "evaluates every epoch"
        reading.note("trainer.check_val_every_n_epoch", f"{text}, which is not turned into steps")


def write_lightning(draft: Draft) -> None:
    draft.leave_all(_CANNOT)
    draft.place("nnodes", _KEYS["nnodes"])
    _write_devices(draft)
    _write_accumulation(draft)
    precision = str(draft.want["precision"])
    sharded = draft.want["zero_stage"] or re.match("deepspeed|fsdp|modelparallel", _strategy(draft))
    if precision == "fp8" and sharded:
        draft.leave(_NOT_FP8, "precision")
    elif precision in _WORD_OF:
        draft.place("precision", "trainer.precision", _WORD_OF[precision])
    else:
        draft.leave(
            f'Lightning has no {precision}: call torch.set_float32_matmul_precision("high")',
            "precision",
        )
    section = "data.init_args" if draft.get("data.init_args") is not None else "data"
    for (
        name,
        keys,
    ) in (
        _DATA.items()
    ):  # only what is there: Lightning stops at an argument that the data module lacks
        if not any(draft.place(name, f"{section}.{key}", adds=False) for key in keys):
            draft.leave(
                "the data module does not state it here; what its argument is called is not known",
                name,
            )
    if not draft.place("tp", f"{_STRATEGY}.init_args.tensor_parallel_size", adds=False):
        draft.leave(NO_TP, "tp")
    if draft.names & set(SHARDING):
        _write_strategy(draft)


def _strategy(draft: Draft) -> str:
    stated = draft.get(_STRATEGY)
    return _bare(str((stated.get("class_path") if isinstance(stated, dict) else stated) or "auto"))


def _write_devices(draft: Draft) -> None:
    old, count = draft.get("trainer.devices"), draft.want["nproc_per_node"]
    if old in (-1, "-1", "auto"):
        draft.leave(f"trainer.devices is {old}: as many as the machine has", "nproc_per_node")
    elif isinstance(old, list) or (isinstance(old, str) and "," in old):
        draft.leave(f"trainer.devices names {old}: say which {count} by hand", "nproc_per_node")
    else:
        draft.place("nproc_per_node", "trainer.devices")


def _write_accumulation(draft: Draft) -> None:
    """Lightning counts val_check_interval in micro-batches, so it changes as well: evaluation stays at the same steps."""
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
    stage, offload, parameters = (draft.want[name] for name in SHARDING)
    stated, last = draft.get(_STRATEGY), _strategy(draft)
    if last in ("fsdp", "modelparallel", "fsdp_cpu_offload"):
        _keep_fsdp(draft, last, int(stage), bool(offload or parameters))
    elif stage and draft.get("trainer.precision") == _WORD_OF["fp8"]:
        draft.leave(_NOT_FP8, *SHARDING)
    elif stated is None and "zero_stage" not in draft.may_add:
        draft.leave(ELSEWHERE, *SHARDING)
    elif isinstance(stated, dict) and last.startswith("deepspeed"):
        if draft.get(f"{_STRATEGY}.init_args.config") is not None:
            draft.leave("the strategy's config is a DeepSpeed file of its own", *SHARDING)
            return
        for name in SHARDING:
            key = f"{_STRATEGY}.init_args.{name.removeprefix('zero_')}"
            if name in draft.names and (draft.want[name] or draft.get(key) is not None):
                draft.put(key, draft.want[name])
            draft.keep(name)
    elif isinstance(stated, dict) and (stage or offload or parameters):
        draft.leave(f"the strategy is {last} with arguments of its own", *SHARDING)
    else:
        _write_name(draft, last)
        draft.keep(*SHARDING)


def _write_name(draft: Draft, last: str) -> None:
    """Use Lightning's names where they fit: stage 2 with the optimizer offloaded, stage 3 with the parameters too; else
    write a section."""
    stage, offload, parameters = (draft.want[name] for name in SHARDING)
    if not stage and not offload and not parameters:
        if last.startswith("deepspeed"):
            draft.put(_STRATEGY, "ddp")
    elif (
        stage == 0
        or (offload, parameters) not in ((False, False), (True, stage == 3))
        or (stage == 1 and offload)
    ):
        draft.put(f"{_STRATEGY}.class_path", _DEEPSPEED_CLASS)
        for name in SHARDING:
            if draft.want[name] or name == "zero_stage":
                draft.put(f"{_STRATEGY}.init_args.{name.removeprefix('zero_')}", draft.want[name])
    else:
        draft.put(_STRATEGY, f"deepspeed_stage_{stage}" + ("_offload" if offload else ""))


def _keep_fsdp(draft: Draft, last: str, stage: int, offload: bool) -> None:
    if stage == 3 or (stage == 0 and last == "fsdp" and isinstance(draft.get(_STRATEGY), str)):
        if stage == 0:
            draft.put(_STRATEGY, "ddp")
        draft.keep("zero_stage")
    else:
        draft.leave(f"{last} shards here; ZeRO stage {stage} needs another strategy", "zero_stage")
    if offload or last == "fsdp_cpu_offload":
        why = "FSDP offloads parameters, gradients and optimizer together (cpu_offload)"
        draft.leave(why, "offload_optimizer", "offload_parameters")
    else:
        draft.keep("offload_optimizer", "offload_parameters")
