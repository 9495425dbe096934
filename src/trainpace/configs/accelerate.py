"""Reader and writer for accelerate's YAML files.

Sources: accelerate 1.15, commands/config/config_args.py and commands/launch.py. `num_processes` is
the total over all machines.
"""

import math
from typing import Any

from trainpace.configs.changes import DEEPSPEEDS_OWN, ELSEWHERE, OFFLOADS, SHARDING, WORLD, Draft
from trainpace.configs.settings import ConfigFile, Reading, SettingName, names

NAMES = frozenset(names("accelerate", "keys"))
_OLD = frozenset(names("accelerate", "old_keys"))
KINDS = names("accelerate", "distributed_types")
DYNAMO = {word: word != "NO" for word in names("accelerate", "dynamo_backends")}
"""Map of torch.compile backends to the setting `compile`. Every backend except NO enables it."""
_KEYS: dict[SettingName, str] = {
    "world_size": "num_processes",
    "nnodes": "num_machines",
    "accumulation": "deepspeed_config.gradient_accumulation_steps",
    "zero_stage": "deepspeed_config.zero_stage",
    "activation_checkpointing": "fsdp_config.fsdp_activation_checkpointing",
    "offload_optimizer": "deepspeed_config.offload_optimizer_device",
    "offload_parameters": "deepspeed_config.offload_param_device",
}
_MESH = "parallelism_config"
_OTHER_FILE = "deepspeed_config.deepspeed_config_file"
_BACKEND = "dynamo_config.dynamo_backend"
PRECISION = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}
LACKS = {"pp": "accelerate has no pipeline stages for PyTorch models"}
_CANNOT = LACKS | {
    "partition_activations": DEEPSPEEDS_OWN,
    "micro_batch": "accelerate has no batch size: the script or TrainingArguments state it",
    "dataloader_workers": (
        "accelerate has no loader workers: the script or TrainingArguments state them"
    ),
}
MEETING = (
    "on several machines accelerate also needs main_process_ip, and each machine its machine_rank"
)
NO_DYNAMO = "accelerate does not pass it on to DeepSpeed: compile the model in the training's code"


def is_accelerate(data: dict[str, Any]) -> bool:
    """Return True if the parsed YAML is an accelerate configuration."""
    return bool(
        data.keys() & {"compute_environment", "distributed_type", "num_machines", "num_processes"}
    )


def read_accelerate(data: dict[str, Any], file: str) -> ConfigFile:
    """Read an accelerate configuration."""
    reading = Reading(file, "accelerate", understands_auto=True)
    reading.warn_unknown(data, NAMES | _OLD, "not a key of accelerate, which stops at it")
    reading.read_keys(data, _KEYS)
    old_key = "gradient_accumulation_steps"
    reading.read("accumulation", data.get(old_key), old_key)
    if data.get("num_machines") not in (None, 1):
        reading.note("num_processes", "the total over all machines, not per machine")
    _read_precision(reading, data)
    if file_name := reading.word(reading.at(data, _OTHER_FILE), _OTHER_FILE):
        reading.name_file(_OTHER_FILE, file_name)
    kind = reading.word(_capitals(data.get("distributed_type")), "distributed_type", KINDS)
    if kind == "FSDP":
        reading.put("sharding", "fsdp", "distributed_type")
    elif kind is None and data.get("fsdp_config"):  # Other types ignore fsdp_config.
        reading.put("sharding", "fsdp", "fsdp_config")
    processes = reading.stated("world_size")
    if kind == "NO" and isinstance(processes, int) and processes > 1:
        reading.warn("distributed_type", f"NO, but num_processes is {processes}: one process runs")
    _read_mesh(reading, reading.section(data.get(_MESH), _MESH))
    read_dynamo(reading, reading.at(data, _BACKEND), _BACKEND, kind == "DEEPSPEED")
    return reading.done()


def read_dynamo(reading: Reading, backend: Any, key: str, with_deepspeed: bool) -> None:
    """Read the backend of torch.compile."""
    if with_deepspeed and backend is not None:
        reading.note(key, "without effect: accelerate does not pass it on to DeepSpeed")
    else:
        reading.read_word("compile", _capitals(backend), key, DYNAMO)


def _capitals(value: Any) -> Any:
    """Return a string in upper case, and "NO" for False. YAML reads an unquoted NO as false."""
    return "NO" if value is False else value.upper() if isinstance(value, str) else value


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    key, word = "mixed_precision", data.get("mixed_precision")
    if word is None:
        if reading.truth(data.get("fp16"), "fp16", "precision") is not None:
            reading.note("fp16", "the old name of mixed_precision")
            reading.put("precision", "amp_fp16" if data["fp16"] else "fp32", "fp16")
        return
    if word is False:
        text = "an unquoted no, which YAML reads as false and accelerate stops at; write 'no'"
        reading.warn(key, text)
        word = "no"
    word = word.casefold() if isinstance(word, str) else word
    reading.read_word("precision", word, key, PRECISION)


def _size_key(section: dict[str, Any], name: str) -> str:
    """Return the key of a mesh size. accelerate also accepts it without its prefix."""
    short = f"{name}_size"
    return short if section.get(short) is not None else f"{_MESH}_{short}"


def _read_mesh(reading: Reading, section: dict[str, Any]) -> None:
    sizes: dict[str, int] = {}
    shards: dict[str, SettingName] = {"tp": "tp", "cp": "cp"}
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        key = _size_key(section, name)
        size = reading.whole(section.get(key), f"{_MESH}.{key}")
        if size is None:
            continue
        sizes[name] = size
        if name in shards:
            reading.put(shards[name], size, f"{_MESH}.{key}")
        elif name == "sp" and size > 1:
            text = f"{size}: sequence parallelism is not taken into account"
            reading.warn(f"{_MESH}.{key}", text)
    mesh = math.prod(sizes.values())
    total = reading.stated("world_size")
    if sizes and total is not None and mesh != total:
        reading.warn(_MESH, f"its sizes multiply to {mesh}, but num_processes is {total}")


def write_accelerate(draft: Draft) -> None:
    """Write the draft's settings into an accelerate configuration."""
    draft.leave_all(_CANNOT)
    if draft.names & WORLD:
        _write_world(draft)
    if draft.names & {"tp", "cp"} or draft.get(_MESH):
        _write_mesh(draft)
    deepspeed_has_it = "precision" in draft.names and not _states_deepspeed(draft, "precision")
    if not deepspeed_has_it and (word := precision_word(draft)):
        draft.place("precision", "mixed_precision", word)
    if draft.names & set(SHARDING):
        _write_sharding(draft)
    kind = _kind_of(draft)
    if kind != "DEEPSPEED":
        why = "accelerate's file counts micro-batches only for DeepSpeed: set it in the script"
        draft.leave(why, "accumulation")
        _write_compile(draft)
    else:
        if _states_deepspeed(draft, "accumulation"):
            draft.place("accumulation", _KEYS["accumulation"])
        draft.leave(NO_DYNAMO, "compile")
    _write_checkpointing(draft, kind)


def _write_checkpointing(draft: Draft, kind: str) -> None:
    name, wanted = "activation_checkpointing", draft.want["activation_checkpointing"]
    why = "accelerate's file has it only for FSDP"
    if wanted == "selective":
        draft.leave(f"{why}: everything or nothing is recomputed", name)
    elif kind != "FSDP":
        draft.leave(f"{why}: turn it on in the script or the model", name)
    else:
        draft.place(name, _KEYS["activation_checkpointing"], wanted == "full")


def _write_compile(draft: Draft) -> None:
    old, on = _capitals(draft.get(_BACKEND)), bool(draft.want["compile"])
    absent_is_right = old is None and not on and "compile" in draft.may_add
    if absent_is_right or (old is not None and (old != "NO") == on):
        draft.keep("compile")
    else:
        draft.place("compile", _BACKEND, "INDUCTOR" if on else "NO")


def precision_word(draft: Draft) -> str:
    """Return accelerate's value for mixed_precision, or "" if it has none.

    If it has none, the draft records the reason.
    """
    precision = draft.trainer_precision
    word = next((word for word, meaning in PRECISION.items() if meaning == precision), "")
    if not word:
        why = f"accelerate's mixed_precision is autocast and has no {precision}: set it in the code"
        draft.leave(why, "precision")
    return word


def _kind_of(draft: Draft) -> str:
    return str(_capitals(draft.get("distributed_type")) or "NO")


def _write_world(draft: Draft) -> None:
    draft.names |= {"world_size"}
    if not draft.place("world_size", _KEYS["world_size"]):
        draft.leave(ELSEWHERE, "nnodes", "nproc_per_node")
        return
    draft.keep("nnodes", "nproc_per_node")
    wanted, kind = int(draft.want["world_size"]), _kind_of(draft)
    if kind in ("NO", "MULTI_GPU"):
        right = "MULTI_GPU" if wanted > 1 else "NO"
        if kind != right:
            draft.put("distributed_type", right)
    nodes = draft.want["nnodes"]
    if "nnodes" not in draft.names:
        return
    if nodes != 1 or draft.get("num_machines") is not None:
        draft.put("num_machines", nodes)
    if nodes != 1 and draft.get("main_process_ip") is None:
        draft.note(MEETING)


def _write_mesh(draft: Draft) -> None:
    """Write tp and cp, and dp_shard if the file has it.

    Their product must equal the number of processes.
    """
    stated = draft.get(_MESH)
    section = stated if isinstance(stated, dict) else {}
    if not section and _kind_of(draft) != "FSDP":
        why = "accelerate builds a device mesh only for FSDP (distributed_type: FSDP)"
        draft.leave(why, "tp", "cp")
        return
    for name in ("cp", "tp"):
        draft.place(name, f"{_MESH}.{_size_key(section, name)}")
    ranks = int(draft.want["world_size"]) // (int(draft.want["tp"]) * int(draft.want["cp"]))
    shard_key = _size_key(section, "dp_shard")
    replicas = section.get(_size_key(section, "dp_replicate"), 1)
    if section.get(shard_key) is not None and isinstance(replicas, int) and not ranks % replicas:
        draft.put(f"{_MESH}.{shard_key}", ranks // replicas)


def _states_deepspeed(draft: Draft, *names: str) -> bool:
    """Return True if this file states DeepSpeed's settings itself and names no DeepSpeed file."""
    other = draft.get(_OTHER_FILE)
    if other:
        draft.leave(f"{other} states it, and accelerate does not accept it in both files", *names)
    return not other


def may_start_deepspeed(draft: Draft, backend: Any) -> bool:
    """Return True if DeepSpeed is needed and may be enabled in a file or command without it.

    `backend` is the configured backend of torch.compile.
    """
    if not any(draft.sharding):
        draft.keep(*SHARDING)
    elif "zero_stage" not in draft.may_add:
        draft.leave(ELSEWHERE, *SHARDING)
    elif _capitals(backend) not in (None, "NO"):
        draft.leave(
            "torch.compile is on, which accelerate does not support with DeepSpeed", *SHARDING
        )
    else:
        return True
    return False


def _write_sharding(draft: Draft) -> None:
    stage, kind = int(draft.want["zero_stage"]), _kind_of(draft)
    if kind == "FSDP":
        _write_fsdp(draft, stage)
        return
    if kind != "DEEPSPEED" and (any(draft.sharding) or not draft.get("deepspeed_config")):
        if not may_start_deepspeed(draft, draft.get(_BACKEND)):
            return
        draft.put("distributed_type", "DEEPSPEED")
        if draft.get(_KEYS["zero_stage"]) is None and _states_deepspeed(draft):
            draft.put(_KEYS["zero_stage"], stage)
    if _states_deepspeed(draft, *SHARDING):
        draft.place_keys(_KEYS, SHARDING)


def _write_fsdp(draft: Draft, stage: int) -> None:
    why = "FSDP offloads parameters, gradients and optimizer together (fsdp_offload_params)"
    draft.leave(why, *OFFLOADS)
    if stage in (1, 2):
        why = f"FSDP shards here; ZeRO stage {stage} needs distributed_type: DEEPSPEED"
        draft.leave(why, "zero_stage")
        return
    if stage == 0 and "zero_stage" in draft.names:
        draft.put("distributed_type", "MULTI_GPU")
    draft.keep("zero_stage")
