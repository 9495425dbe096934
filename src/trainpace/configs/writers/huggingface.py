"""Hugging Face TrainingArguments, in JSON or YAML. What a name does: transformers 5.23, training_args.py."""

from collections.abc import Mapping

from trainpace.configs.draft import Draft
from trainpace.configs.settings import Value

_CANNOT = {
    "nnodes": "TrainingArguments take the number of nodes from the launch command",
    "nproc_per_node": "TrainingArguments take the processes of a node from the launch command",
    "tp": "TrainingArguments take the device mesh from the code or from accelerate's file",
    "pp": "the Trainer has no pipeline parallelism",
    "cp": "TrainingArguments take the device mesh from the code or from accelerate's file",
    "offload_optimizer": "TrainingArguments take it from a DeepSpeed file",
    "offload_parameters": "TrainingArguments take it from a DeepSpeed file",
}
NAMES_OF = {
    "micro_batch": ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    "accumulation": ("gradient_accumulation_steps",),
    "activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "compile": ("torch_compile",),
    "dataloader_workers": ("dataloader_num_workers",),
}
"""The arguments for a setting; the last one, which transformers 4 and 5 both know, is added where the file has none."""
_ON = {"amp_bf16": "bf16", "amp_fp16": "fp16", "tf32": "tf32"}


def write_training_arguments(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    draft.leave_all(names, _CANNOT)
    for name in sorted(names & NAMES_OF.keys()):
        value, why = argument(name, want[name])
        if why:
            draft.leave(name, why)
        else:
            keys = NAMES_OF[name]
            key = next((key for key in keys if draft.get((key,)) is not None), keys[-1])
            draft.place(name, (key,), value)
    if "precision" in names:
        _write_precision(draft, str(want["precision"]))
    if "zero_stage" in names:
        _write_sharding(draft, int(want["zero_stage"]))


def argument(name: str, value: Value) -> tuple[Value, str]:
    """The setting as a TrainingArguments value, and the reason where it cannot be stated."""
    if name != "activation_checkpointing":
        return value, ""
    return value == "full", "the Trainer recomputes all or nothing" if value == "selective" else ""


def formats_on(precision: str, beside: frozenset[str]) -> tuple[dict[str, bool], str]:
    """The values of bf16, fp16 and tf32, and the reason where no argument states the precision."""
    if "DeepSpeed" in beside:
        precision = {"bf16": "amp_bf16", "fp16": "amp_fp16"}.get(precision, precision)
    if precision not in ("fp32", *_ON):
        return {}, f"TrainingArguments have autocast only, and {precision} is none of it: the code loads the model so"
    return {key: key == _ON.get(precision) for key in ("bf16", "fp16", "tf32")}, ""


def _write_precision(draft: Draft, precision: str) -> None:
    on, why = formats_on(precision, draft.beside)
    stated = [key for key in on if draft.get((key,)) is not None]
    if why or not (stated or "precision" in draft.may_add):
        draft.leave("precision", why or "another file states it")
        return
    for key, state in on.items():
        # fp32 is said only by both of the others being off
        needed = key in stated or state or (precision == "fp32" and key != "tf32")
        if needed and draft.get((key,)) is not state:
            draft.put((key,), state)
    draft.wrote.add("precision")


def _write_sharding(draft: Draft, stage: int) -> None:
    fsdp = draft.get(("fsdp",))
    if draft.get(("deepspeed",)) or draft.beside & {"DeepSpeed", "accelerate"}:
        draft.leave("zero_stage", "the DeepSpeed or accelerate file states it")
    elif stage in (1, 2):
        draft.leave("zero_stage", f"ZeRO stage {stage} needs a DeepSpeed file, named under deepspeed")
    elif fsdp or (stage == 3 and "zero_stage" in draft.may_add):
        if bool(fsdp) != (stage == 3):
            draft.put(("fsdp",), "full_shard" if stage == 3 else "")
        draft.wrote.add("zero_stage")
    elif stage == 0:  # as it is where nothing is said
        draft.wrote.add("zero_stage")
    else:
        draft.leave("zero_stage", "another file states it")
