"""DeepSpeed JSON. What a key does: DeepSpeed 0.19.8, runtime/config.py and runtime/zero/config.py."""

from collections.abc import Mapping

from trainpace.configs.draft import Draft
from trainpace.configs.settings import Value

TRAINERS = frozenset(("Hugging Face TrainingArguments", "accelerate"))
"""Trainers that check DeepSpeed's precision against their own, and call bf16 autocast what DeepSpeed calls bf16."""
_CANNOT = {
    "nnodes": "DeepSpeed takes the number of nodes from the launch command",
    "nproc_per_node": "DeepSpeed takes the processes of a node from the launch command",
    "pp": "pipeline stages are made in the code (PipelineModule), not by a key",
    "activation_checkpointing": "DeepSpeed's section says how, not whether: the model's code turns it on",
    "dataloader_workers": "DeepSpeed has no key for the loader's workers",
}
_BATCH = {
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
}


def write_deepspeed(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    draft.leave_all(names, _CANNOT)
    for name, key in _BATCH.items():
        if name in names:
            draft.place(name, (key,), want[name], adds=name != "global_batch")
    if "precision" in names:
        _write_precision(draft, str(want["precision"]))
    if "zero_stage" in names:
        _write_stage(draft, int(want["zero_stage"]))
    for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
        if name in names:
            _write_offload(draft, name, key, bool(want[name]))
    if "tp" in names:
        draft.place("tp", ("tensor_parallel", "autotp_size"), want["tp"] if want["tp"] != 1 else 0)
    if "cp" in names:
        draft.place("cp", ("sequence_parallel_size",), want["cp"])
    if "compile" in names and not draft.place("compile", ("compile", "deepcompile"), want["compile"], adds=False):
        draft.leave("compile", "the code compiles the model or the engine; DeepSpeed's key only adds passes to that")


def _write_precision(draft: Draft, precision: str) -> None:
    if draft.beside & TRAINERS:
        precision = {"amp_bf16": "bf16", "amp_fp16": "fp16"}.get(precision, precision)
    if precision in ("tf32", "fp8"):
        draft.leave("precision", f"DeepSpeed's file has no key for {precision}; the code turns it on")
        return
    sections = ("fp16", "bf16", "bfloat16", "torch_autocast", "amp")
    stated = [key for key in sections if draft.get((key, "enabled")) is not None]
    if "auto" in (draft.get((key, "enabled")) for key in stated):
        draft.leave("precision", 'fp16 or bf16 is "auto": another file or the run decides')
        return
    if not stated and "precision" not in draft.may_add:
        draft.leave("precision", "another file states it")
        return
    for key in stated:
        if draft.get((key, "enabled")):
            draft.put((key, "enabled"), False)
    if precision.startswith("amp_"):
        draft.put(("torch_autocast", "enabled"), True)
        draft.put(("torch_autocast", "dtype"), "bfloat16" if precision == "amp_bf16" else "float16")
    elif precision == "fp32":
        for key in ("fp16", "bf16"):
            if draft.get((key, "enabled")) is None:
                draft.put((key, "enabled"), False)
    else:
        old_name = precision == "bf16" and draft.get(("bfloat16",)) is not None
        draft.put(("bfloat16" if old_name else precision, "enabled"), True)
    draft.wrote.add("precision")


def _write_stage(draft: Draft, stage: int) -> None:
    if isinstance(draft.get(("zero_optimization",)), bool):
        draft.leave("zero_stage", "zero_optimization is true or false, the old way to write a stage; make it a section")
    else:
        draft.place("zero_stage", ("zero_optimization", "stage"), stage)


def _write_offload(draft: Draft, name: str, key: str, on: bool) -> None:
    zero = draft.get(("zero_optimization",))
    if isinstance(zero, bool) or (isinstance(zero, dict) and "cpu_offload" in zero):
        draft.leave(
            name, "zero_optimization is written in the old way; offload_optimizer is a section with a device now"
        )
        return
    old = draft.get(("zero_optimization", key, "device"))
    if old is None and not on:  # as it is where nothing is said
        draft.wrote.add(name)
    elif not (on and old == "nvme"):
        draft.place(name, ("zero_optimization", key, "device"), "cpu" if on else "none")
    else:
        draft.wrote.add(name)
