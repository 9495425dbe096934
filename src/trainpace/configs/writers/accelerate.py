"""accelerate YAML. What a key does: accelerate 1.15, commands/config/config_args.py and commands/launch.py."""

from collections.abc import Mapping
from typing import Any

from trainpace.configs.draft import ELSEWHERE, Draft
from trainpace.configs.settings import Value

_CANNOT = {
    "pp": "accelerate's file has no pipeline stages for PyTorch models",
    "micro_batch": "accelerate's file has no batch size: the script or TrainingArguments state it",
    "dataloader_workers": "accelerate's file has no loader workers: the script or TrainingArguments state them",
}
PRECISION = {"fp32": "no", "amp_fp16": "fp16", "amp_bf16": "bf16", "fp8": "fp8"}
MEETING = "on several machines accelerate also needs main_process_ip, and each machine its machine_rank"
OTHER_FILE = "deepspeed_config_file"


def write_accelerate(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    draft.leave_all(names, _CANNOT)
    if names & {"nnodes", "nproc_per_node", "world_size"}:
        _write_world(draft, names, want)
    if names & {"tp", "cp"} or draft.get(("parallelism_config",)):
        _write_mesh(draft, names, want)
    if "precision" in names:
        word, why = precision_word(str(want["precision"]), draft.beside)
        if why:
            draft.leave("precision", why)
        else:
            draft.place("precision", ("mixed_precision",), word)
    if names & {"zero_stage", "offload_optimizer", "offload_parameters"}:
        _write_sharding(draft, names, want)
    if "accumulation" in names:
        if kind_of(draft) != "DEEPSPEED":
            draft.leave(
                "accumulation", "accelerate's file counts micro-batches for DeepSpeed alone: the script states it"
            )
        elif _free(draft, "accumulation"):
            draft.place("accumulation", ("deepspeed_config", "gradient_accumulation_steps"), want["accumulation"])
    if "activation_checkpointing" in names:
        _write_checkpointing(draft, str(want["activation_checkpointing"]))
    if "compile" in names:
        _write_compile(draft, bool(want["compile"]))


def precision_word(precision: str, beside: frozenset[str]) -> tuple[str, str]:
    """accelerate's word for a precision, and the reason where it has none."""
    if "DeepSpeed" in beside:
        precision = {"bf16": "amp_bf16", "fp16": "amp_fp16"}.get(precision, precision)
    if precision not in PRECISION:
        return "", f"accelerate's mixed_precision is autocast, and {precision} is none of it: the code states it"
    return PRECISION[precision], ""


def kind_of(draft: Draft) -> str:
    """The distributed_type; YAML reads an unquoted NO as false."""
    kind: Any = draft.get(("distributed_type",))
    return "NO" if kind in (None, False) else str(kind).upper()


def _write_world(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    if draft.place("world_size", ("num_processes",), want["world_size"]):
        draft.wrote |= names & {"nproc_per_node"}
        if "nnodes" in names and (want["nnodes"] != 1 or draft.get(("num_machines",)) is not None):
            draft.put(("num_machines",), want["nnodes"])
        draft.wrote |= names & {"nnodes"}
        kind = kind_of(draft)
        if kind == "NO" and int(want["world_size"]) > 1:
            draft.put(("distributed_type",), "MULTI_GPU")
        elif kind == "MULTI_GPU" and want["world_size"] == 1:
            draft.put(("distributed_type",), "NO")
        if "nnodes" in names and want["nnodes"] != 1 and draft.get(("main_process_ip",)) is None:
            draft.note(MEETING)
    else:
        for name in names & {"nnodes", "nproc_per_node"}:
            draft.leave(name, ELSEWHERE)


def _write_mesh(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    """Write tp and cp, and dp_shard where it is stated, since the sizes must multiply to the number of processes."""
    stated = draft.get(("parallelism_config",))
    section = stated if isinstance(stated, dict) else {}
    if not section and kind_of(draft) != "FSDP":
        for name in names & {"tp", "cp"}:
            draft.leave(name, "accelerate builds a device mesh for FSDP alone (distributed_type: FSDP)")
        return

    def key(name: str) -> str:
        short = f"{name}_size"
        return short if section.get(short) is not None else f"parallelism_config_{short}"

    for name in sorted(names & {"tp", "cp"}):
        draft.place(name, ("parallelism_config", key(name)), want[name])
    ranks = int(want["world_size"]) // (int(want["tp"]) * int(want["cp"]))
    replicas, shards = section.get(key("dp_replicate"), 1), section.get(key("dp_shard"))
    if (
        shards is not None
        and isinstance(replicas, int)
        and replicas
        and ranks % replicas == 0
        and ranks // replicas != shards
    ):
        draft.put(("parallelism_config", key("dp_shard")), ranks // replicas)


def _free(draft: Draft, *names: str) -> bool:
    """Whether DeepSpeed's settings stand in this file. accelerate refuses them beside a DeepSpeed file of its own."""
    other = draft.get(("deepspeed_config", OTHER_FILE))
    if other:
        for name in names:
            draft.leave(name, f"it is stated in {other}, and accelerate refuses it in both files")
    return not other


def _write_sharding(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    stage, kind = int(want["zero_stage"]), kind_of(draft)
    offloads = sorted(names & {"offload_optimizer", "offload_parameters"})
    if kind == "FSDP":
        if "zero_stage" in names and stage in (1, 2):
            draft.leave("zero_stage", f"FSDP shards here; ZeRO stage {stage} needs distributed_type: DEEPSPEED")
        elif "zero_stage" in names:
            if stage == 0:
                draft.put(("distributed_type",), "MULTI_GPU")
            draft.wrote.add("zero_stage")
        for name in offloads:
            draft.leave(name, "FSDP offloads parameters, gradients and optimizer together (fsdp_offload_params)")
        return
    if kind != "DEEPSPEED" and (stage or any(want[name] for name in offloads)):
        if "zero_stage" not in draft.may_add:
            draft.leave_all(names, dict.fromkeys(("zero_stage", *offloads), ELSEWHERE))
            return
        if draft.get(("dynamo_config", "dynamo_backend")) not in (None, False, "NO", "no"):
            draft.leave_all(names, dict.fromkeys(names, COMPILED))
            return
        draft.put(("distributed_type",), "DEEPSPEED")
        if draft.get(("deepspeed_config", "zero_stage")) is None and _free(draft):
            draft.put(("deepspeed_config", "zero_stage"), stage)
    elif kind != "DEEPSPEED" and not draft.get(("deepspeed_config",)):  # as it is where nothing is said
        draft.wrote |= names & {"zero_stage", *offloads}
        return
    if not _free(draft, *(names & {"zero_stage", *offloads})):
        return
    if "zero_stage" in names:
        draft.place("zero_stage", ("deepspeed_config", "zero_stage"), stage)
    for name in offloads:
        path = (
            "deepspeed_config",
            "offload_optimizer_device" if name == "offload_optimizer" else "offload_param_device",
        )
        old = draft.get(path)
        if (old is None and not want[name]) or (old == "nvme" and want[name]):
            draft.wrote.add(name)
        else:
            draft.place(name, path, "cpu" if want[name] else "none")


def _write_checkpointing(draft: Draft, kind: str) -> None:
    if kind == "selective" or kind_of(draft) != "FSDP":
        why = "all or nothing is recomputed" if kind == "selective" else "the script or the model turns it on"
        draft.leave("activation_checkpointing", f"accelerate's file has it for FSDP alone: {why}")
    else:
        draft.place("activation_checkpointing", ("fsdp_config", "fsdp_activation_checkpointing"), kind == "full")


COMPILED = "torch.compile is on here, which accelerate loses with DeepSpeed"
NO_DYNAMO = "accelerate does not pass it on where it starts DeepSpeed: the code compiles the model"


def _write_compile(draft: Draft, on: bool) -> None:
    if kind_of(draft) == "DEEPSPEED":
        draft.leave("compile", NO_DYNAMO)
        return
    path = ("dynamo_config", "dynamo_backend")
    old = draft.get(path)
    is_on = old not in (None, False) and str(old).upper() != "NO"
    if (old is not None and is_on == on) or (old is None and not on and "compile" in draft.may_add):
        draft.wrote.add("compile")
    else:
        draft.place("compile", path, "INDUCTOR" if on else "NO")
