"""Lightning CLI YAML. What an argument does: Lightning 2.6, trainer/trainer.py and strategies/deepspeed.py."""

import re
from collections.abc import Mapping

from trainpace.configs.draft import ELSEWHERE, Draft
from trainpace.configs.settings import Value

_CANNOT = {
    "pp": "Lightning has no pipeline parallelism",
    "cp": "Lightning has no context parallelism: the model's code does it",
    "activation_checkpointing": "the model's code turns it on; Lightning has no argument for it",
    "compile": "the code compiles the model; Lightning has no argument for it",
}
_PRECISION = {
    "fp32": "32-true", "amp_fp16": "16-mixed", "fp16": "16-true", "amp_bf16": "bf16-mixed", "bf16": "bf16-true",
    "fp8": "transformer-engine",
}  # fmt: skip
_NOT_FP8 = "Lightning's sharded strategies do not take transformer-engine"
_DATA = {"micro_batch": "batch_size", "dataloader_workers": "num_workers"}
_DEEPSPEED_CLASS = "lightning.pytorch.strategies.DeepSpeedStrategy"


def write_lightning(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    draft.leave_all(names, _CANNOT)
    if "nnodes" in names:
        draft.place("nnodes", ("trainer", "num_nodes"), want["nnodes"])
    if "nproc_per_node" in names:
        _write_devices(draft, int(want["nproc_per_node"]))
    if "accumulation" in names:
        _write_accumulation(draft, int(want["accumulation"]))
    if "precision" in names:
        precision = str(want["precision"])
        if precision == "fp8" and (want["zero_stage"] or re.match("deepspeed|fsdp|modelparallel", _strategy(draft))):
            draft.leave("precision", _NOT_FP8)
        elif precision in _PRECISION:
            draft.place("precision", ("trainer", "precision"), _PRECISION[precision])
        else:
            draft.leave("precision", f'Lightning has no {precision}: call torch.set_float32_matmul_precision("high")')
    for name, key in _DATA.items():
        if name in names:
            _write_data(draft, name, key, want[name])
    if "tp" in names:
        path = ("trainer", "strategy", "init_args", "tensor_parallel_size")
        if not draft.place("tp", path, want["tp"], adds=False):
            draft.leave("tp", "Lightning shards products with ModelParallelStrategy alone, and by the model's own plan")
    if names & {"zero_stage", "offload_optimizer", "offload_parameters"}:
        _write_strategy(draft, names & {"zero_stage", "offload_optimizer", "offload_parameters"}, want)


def _strategy(draft: Draft) -> str:
    """The strategy's bare name: "deepspeed" for DeepSpeedStrategy."""
    stated = draft.get(("trainer", "strategy"))
    name = stated.get("class_path") if isinstance(stated, dict) else stated
    return str(name or "auto").rpartition(".")[2].removesuffix("Strategy").casefold()


def _write_devices(draft: Draft, count: int) -> None:
    path = ("trainer", "devices")
    old = draft.get(path)
    if old in (-1, "-1", "auto"):
        draft.leave("nproc_per_node", f"trainer.devices is {old}: as many as the machine has")
    elif isinstance(old, list) or (isinstance(old, str) and "," in old):
        draft.leave("nproc_per_node", f"trainer.devices names {old}: say which {count} by hand")
    else:
        draft.place("nproc_per_node", path, count)


def _write_accumulation(draft: Draft, steps: int) -> None:
    """Lightning counts val_check_interval in micro-batches, so it changes as well: evaluation stays at the same steps."""
    path, every = ("trainer", "accumulate_grad_batches"), draft.get(("trainer", "val_check_interval"))
    old = draft.get(path)
    if draft.place("accumulation", path, steps) and isinstance(every, int) and not isinstance(every, bool):
        before = old if isinstance(old, int) and old > 0 else 1
        if every % before == 0:
            draft.put(("trainer", "val_check_interval"), every // before * steps)


def _write_data(draft: Draft, name: str, key: str, value: Value) -> None:
    """Write only what is there: Lightning stops at an argument that the data module does not have."""
    section = ("data", "init_args") if draft.get(("data", "init_args")) is not None else ("data",)
    keys = (key, "train_batch_size") if name == "micro_batch" else (key,)
    for written in keys:
        if draft.place(name, (*section, written), value, adds=False):
            return
    draft.leave(name, "the data module does not state it here; what its argument is called is not known")


def _write_strategy(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    path = ("trainer", "strategy")
    stage = int(want["zero_stage"])
    offload, parameters = bool(want["offload_optimizer"]), bool(want["offload_parameters"])
    stated = draft.get(path)
    nested = stated if isinstance(stated, dict) else {}
    last = _strategy(draft)
    if last in ("fsdp", "modelparallel", "fsdp_cpu_offload"):
        _keep_fsdp(draft, names, last, stage, offload or parameters)
    elif stage and draft.get(("trainer", "precision")) == _PRECISION["fp8"]:
        draft.leave_all(names, dict.fromkeys(names, _NOT_FP8))
    elif stated is None and "zero_stage" not in draft.may_add:
        draft.leave_all(names, dict.fromkeys(names, ELSEWHERE))
    elif isinstance(stated, dict) and last.startswith("deepspeed"):
        if (nested.get("init_args") or {}).get("config") is not None:
            draft.leave_all(names, dict.fromkeys(names, "the strategy's config is a DeepSpeed file of its own"))
            return
        for name, key, value in (
            ("zero_stage", "stage", stage), ("offload_optimizer", "offload_optimizer", offload),
            ("offload_parameters", "offload_parameters", parameters),
        ):  # fmt: skip
            if name in names:
                if value or draft.get((*path, "init_args", key)) is not None:
                    draft.put((*path, "init_args", key), value)
                draft.wrote.add(name)
    elif isinstance(stated, dict) and (stage or offload or parameters):
        draft.leave_all(names, dict.fromkeys(names, f"the strategy is {last} with arguments of its own"))
    else:
        _write_name(draft, last, stage, offload, parameters)
        draft.wrote |= names


def _write_name(draft: Draft, last: str, stage: int, offload: bool, parameters: bool) -> None:
    """Use Lightning's names where they fit: stage 2 with the optimizer offloaded, stage 3 with the parameters too; else
    write a section."""
    path = ("trainer", "strategy")
    if not stage and not offload and not parameters:
        if re.match("deepspeed", last):
            draft.put(path, "ddp")
    elif stage == 0 or (offload, parameters) not in ((False, False), (True, stage == 3)) or (stage == 1 and offload):
        draft.put((*path, "class_path"), _DEEPSPEED_CLASS)
        for key, value in (("stage", stage), ("offload_optimizer", offload), ("offload_parameters", parameters)):
            if value or key == "stage":
                draft.put((*path, "init_args", key), value)
    else:
        draft.put(path, f"deepspeed_stage_{stage}" + ("_offload" if offload else ""))


def _keep_fsdp(draft: Draft, names: frozenset[str], last: str, stage: int, offload: bool) -> None:
    if stage == 3 or (stage == 0 and last == "fsdp" and isinstance(draft.get(("trainer", "strategy")), str)):
        if stage == 0:
            draft.put(("trainer", "strategy"), "ddp")
        draft.wrote |= names & {"zero_stage"}
    else:
        draft.leave_all(names, {"zero_stage": f"{last} shards here; ZeRO stage {stage} needs another strategy"})
    if offload or last == "fsdp_cpu_offload":
        why = "FSDP offloads parameters, gradients and optimizer together (cpu_offload)"
        draft.leave_all(names, dict.fromkeys(("offload_optimizer", "offload_parameters"), why))
    else:
        draft.wrote |= names & {"offload_optimizer", "offload_parameters"}
