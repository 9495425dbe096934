"""accelerate YAML (accelerate 1.15, commands/config/config_args.py and commands/launch.py). `num_processes` is the total
over all machines."""

import math
from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, SHARDING, Draft
from trainpace.configs.settings import AUTOCAST_OF, ConfigFile, Reading, SettingName, names

NAMES = frozenset(names("accelerate", "keys"))
_OLD = frozenset(names("accelerate", "old_keys"))
KINDS = names("accelerate", "distributed_types")
DYNAMO = names("accelerate", "dynamo_backends")
_KEYS: dict[SettingName, str] = {
    "world_size": "num_processes",
    "nnodes": "num_machines",
    "accumulation": "deepspeed_config.gradient_accumulation_steps",
    "zero_stage": "deepspeed_config.zero_stage",
    "activation_checkpointing": "fsdp_config.fsdp_activation_checkpointing",
}
_OFFLOADS: dict[SettingName, str] = {
    "offload_optimizer": "deepspeed_config.offload_optimizer_device",
    "offload_parameters": "deepspeed_config.offload_param_device",
}
_OTHER_FILE = "deepspeed_config.deepspeed_config_file"
_BACKEND = "dynamo_config.dynamo_backend"
PRECISION = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}
LACKS = {"pp": "accelerate has no pipeline stages for PyTorch models"}
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "micro_batch": "accelerate's file has no batch size: the script or TrainingArguments state it",
    "dataloader_workers": (
        "accelerate's file has no loader workers: the script or TrainingArguments state them"
    ),
}
MEETING = (
    "on several machines accelerate also needs main_process_ip, and each machine its machine_rank"
)
NO_DYNAMO = "accelerate does not pass it on where it starts DeepSpeed: the code compiles the model"


def is_accelerate(data: dict[str, Any]) -> bool:
    return bool(
        data.keys() & {"compute_environment", "distributed_type", "num_machines", "num_processes"}
    )


def read_accelerate(data: dict[str, Any], file: str) -> ConfigFile:
    reading = Reading(file, "accelerate", understands_auto=True)
    reading.flag_unknown(data, NAMES | _OLD, "not a name of accelerate's, which stops at it")
    reading.read_keys(data, _KEYS)
    reading.read(
        "accumulation", data.get("gradient_accumulation_steps"), "gradient_accumulation_steps"
    )
    if data.get("num_machines") not in (None, 1):
        reading.note("num_processes", "the total over all machines, not per machine")
    _read_precision(reading, data)
    for name, key in _OFFLOADS.items():
        reading.read_device(name, reading.at(data, key), key)
    file_name = reading.word(reading.at(data, _OTHER_FILE), _OTHER_FILE)
    if file_name:
        reading.note_file(_OTHER_FILE, file_name)
    kind = reading.word(_kind(data.get("distributed_type")), "distributed_type", KINDS)
    if kind == "FSDP" or (
        data.get("fsdp_config") and kind is None
    ):  # under another type, accelerate passes it by
        reading.put("sharding", "fsdp", "distributed_type" if kind == "FSDP" else "fsdp_config")
    processes = reading.stated("world_size")
    if kind == "NO" and isinstance(processes, int) and processes > 1:
        reading.warn("distributed_type", f"NO, and num_processes is {processes}: one process runs")
    _read_mesh(reading, reading.section(data.get("parallelism_config"), "parallelism_config"))
    backend = reading.at(data, _BACKEND)
    if kind == "DEEPSPEED" and backend is not None:
        reading.note(
            _BACKEND, "without effect: accelerate does not pass it on where it starts DeepSpeed"
        )
    else:
        read_dynamo(reading, backend, _BACKEND)
    return reading.done()


def read_dynamo(reading: Reading, backend: Any, key: str) -> None:
    word = reading.word(_kind(backend), key, DYNAMO)
    if word:
        reading.put("compile", word != "NO", key)


def _kind(value: Any) -> Any:
    """A word in capitals; YAML reads an unquoted NO as false."""
    return "NO" if value is False else value.upper() if isinstance(value, str) else value


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    word = data.get("mixed_precision")
    if word is None:
        if reading.truth(data.get("fp16"), "fp16", "precision") is not None:
            reading.note("fp16", "the old name of mixed_precision")
            reading.put("precision", "amp_fp16" if data["fp16"] else "fp32", "fp16")
        return
    if word is False:
        reading.warn(
            "mixed_precision",
            "an unquoted no, which YAML reads as false and accelerate stops at; write 'no'",
        )
        word = "no"
    word = reading.word(
        word.casefold() if isinstance(word, str) else word, "mixed_precision", PRECISION
    )
    if word:
        reading.put("precision", PRECISION[word], "mixed_precision")


def _size_key(section: dict[str, Any], name: str) -> str:
    """accelerate itself writes parallelism_config_tp_size inside parallelism_config; tp_size is read as well."""
    short = f"{name}_size"
    return short if section.get(short) is not None else f"parallelism_config_{short}"


def _read_mesh(reading: Reading, section: dict[str, Any]) -> None:
    sizes: dict[str, int] = {}
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        key = _size_key(section, name)
        size = reading.whole(section.get(key), f"parallelism_config.{key}")
        if size is None:
            continue
        sizes[name] = size
        if name in ("tp", "cp"):
            reading.put("tp" if name == "tp" else "cp", size, f"parallelism_config.{key}")
        elif name == "sp" and size > 1:
            reading.warn(
                f"parallelism_config.{key}", f"{size}: sequence parallelism is not counted here"
            )
    mesh = math.prod(sizes.values())
    total = reading.stated("world_size")
    if sizes and total is not None and mesh != total:
        reading.warn(
            "parallelism_config", f"its sizes multiply to {mesh}, and num_processes is {total}"
        )


def write_accelerate(draft: Draft) -> None:
    draft.leave_all(_CANNOT)
    if draft.names & {"nnodes", "nproc_per_node", "world_size"}:
        _write_world(draft)
    if draft.names & {"tp", "cp"} or draft.get("parallelism_config"):
        _write_mesh(draft)
    deepspeed_has_it = "precision" in draft.names and not _states_deepspeed(draft, "precision")
    if not deepspeed_has_it and (word := precision_word(draft)):
        draft.place("precision", "mixed_precision", word)
    if draft.names & set(SHARDING):
        _write_sharding(draft)
    kind = _kind_of(draft)
    if kind != "DEEPSPEED":
        why = "accelerate's file counts micro-batches for DeepSpeed alone: the script states it"
        draft.leave(why, "accumulation")
    elif _states_deepspeed(draft, "accumulation"):
        draft.place("accumulation", _KEYS["accumulation"])
    checkpointing = str(draft.want["activation_checkpointing"])
    if checkpointing == "selective" or kind != "FSDP":
        why = (
            "all or nothing is recomputed"
            if checkpointing == "selective"
            else "the script or the model turns it on"
        )
        draft.leave(f"accelerate's file has it for FSDP alone: {why}", "activation_checkpointing")
    else:
        draft.place(
            "activation_checkpointing", _KEYS["activation_checkpointing"], checkpointing == "full"
        )
    if kind == "DEEPSPEED":
        draft.leave(NO_DYNAMO, "compile")
    elif "compile" in draft.names:
        old, on = _kind(draft.get(_BACKEND)), bool(draft.want["compile"])
        if (old is not None and (old != "NO") == on) or (
            old is None and not on and "compile" in draft.may_add
        ):
            draft.keep("compile")
        else:
            draft.place("compile", _BACKEND, "INDUCTOR" if on else "NO")


def precision_word(draft: Draft) -> str:
    """accelerate's word for the precision; "" where it has none, with the reason in the draft."""
    precision = str(draft.want["precision"])
    if "DeepSpeed" in draft.beside:
        precision = AUTOCAST_OF.get(precision, precision)
    word = next((word for word, meaning in PRECISION.items() if meaning == precision), "")
    if not word:
        why = (
            f"accelerate's mixed_precision is autocast, and {precision} is none of it: the code"
            " states it"
        )
        draft.leave(why, "precision")
    return word


def _kind_of(draft: Draft) -> str:
    return str(_kind(draft.get("distributed_type")) or "NO")


def _write_world(draft: Draft) -> None:
    draft.names |= {"world_size"}
    if not draft.place("world_size", "num_processes"):
        draft.leave(ELSEWHERE, "nnodes", "nproc_per_node")
        return
    nodes, kind = draft.want["nnodes"], _kind_of(draft)
    draft.keep("nnodes", "nproc_per_node")
    if "nnodes" in draft.names and (nodes != 1 or draft.get("num_machines") is not None):
        draft.put("num_machines", nodes)
    if kind == "NO" and int(draft.want["world_size"]) > 1:
        draft.put("distributed_type", "MULTI_GPU")
    elif kind == "MULTI_GPU" and draft.want["world_size"] == 1:
        draft.put("distributed_type", "NO")
    if "nnodes" in draft.names and nodes != 1 and draft.get("main_process_ip") is None:
        draft.note(MEETING)


def _write_mesh(draft: Draft) -> None:
    """Write tp and cp, and dp_shard where it is stated, since the sizes must multiply to the number of processes."""
    stated = draft.get("parallelism_config")
    section = stated if isinstance(stated, dict) else {}
    if not section and _kind_of(draft) != "FSDP":
        draft.leave(
            "accelerate builds a device mesh for FSDP alone (distributed_type: FSDP)", "tp", "cp"
        )
        return
    for name in ("cp", "tp"):
        draft.place(name, f"parallelism_config.{_size_key(section, name)}")
    ranks = int(draft.want["world_size"]) // (int(draft.want["tp"]) * int(draft.want["cp"]))
    replicas, shards = (
        section.get(_size_key(section, "dp_replicate"), 1),
        section.get(_size_key(section, "dp_shard")),
    )
    if shards is not None and isinstance(replicas, int) and replicas and ranks % replicas == 0:
        wanted = ranks // replicas
        if shards != wanted:
            draft.put(f"parallelism_config.{_size_key(section, 'dp_shard')}", wanted)


def _states_deepspeed(draft: Draft, *names: str) -> bool:
    """Whether DeepSpeed's settings stand in this file. accelerate refuses them beside a DeepSpeed file of its own."""
    other = draft.get(_OTHER_FILE)
    if other:
        draft.leave(f"it is stated in {other}, and accelerate refuses it in both files", *names)
    return not other


def may_start_deepspeed(draft: Draft, backend: Any) -> bool:
    """Whether a file or command that does not start DeepSpeed, and compiles by `backend`, must and may start it."""
    if not any(draft.want[name] for name in SHARDING):
        draft.keep(*SHARDING)
    elif "zero_stage" not in draft.may_add:
        draft.leave(ELSEWHERE, *SHARDING)
    elif _kind(backend) not in (None, "NO"):
        draft.leave("torch.compile is on here, which accelerate loses with DeepSpeed", *SHARDING)
    else:
        return True
    return False


def _write_sharding(draft: Draft) -> None:
    stage, kind = int(draft.want["zero_stage"]), _kind_of(draft)
    if kind == "FSDP":
        draft.leave(
            "FSDP offloads parameters, gradients and optimizer together (fsdp_offload_params)",
            *_OFFLOADS,
        )
        if stage in (1, 2):
            draft.leave(
                f"FSDP shards here; ZeRO stage {stage} needs distributed_type: DEEPSPEED",
                "zero_stage",
            )
        elif stage == 0 and "zero_stage" in draft.names:
            draft.put("distributed_type", "MULTI_GPU")
        if stage in (0, 3):
            draft.keep("zero_stage")
        return
    if kind != "DEEPSPEED" and (
        any(draft.want[name] for name in SHARDING) or not draft.get("deepspeed_config")
    ):
        if not may_start_deepspeed(draft, draft.get(_BACKEND)):
            return
        draft.put("distributed_type", "DEEPSPEED")
        if draft.get(_KEYS["zero_stage"]) is None and _states_deepspeed(draft):
            draft.put(_KEYS["zero_stage"], stage)
    if _states_deepspeed(draft, *SHARDING):
        draft.place("zero_stage", _KEYS["zero_stage"])
        for name, key in _OFFLOADS.items():
            draft.place_device(name, key)
