"""Load settings files with the libraries that they are for, and say what each library then runs.

`python benchmarks/config_libraries.py LIBRARY MANIFEST`: the manifest is a list of {path, data_parallel_size, pick}; a JSON
list of what the library reports stands on the last line. Where a library asks for CUDA, it is told that there are enough.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

Report = dict[str, Any]


def deepspeed_file(case: dict[str, Any]) -> Report:
    from deepspeed.runtime import config as module

    group = SimpleNamespace(get_data_parallel_world_size=lambda: case["data_parallel_size"])
    with mock.patch.object(module.dist, "get_rank", return_value=0):
        found = module.DeepSpeedConfig(case["path"], mpu=group)
    zero = found.zero_config
    precision = (
        "fp16"
        if found.float16_config.enabled
        else "bf16"
        if found.bfloat16_config.enabled
        else "fp32"
    )
    if found.torch_autocast_enabled:
        precision = f"amp_{'bf16' if 'bfloat16' in str(found.torch_autocast_dtype) else 'fp16'}"
    return {
        "global_batch": found.train_batch_size,
        "micro_batch": found.train_micro_batch_size_per_gpu,
        "accumulation": found.gradient_accumulation_steps,
        "zero_stage": int(found.zero_optimization_stage),
        "offload_optimizer": _device(zero.offload_optimizer) != "none",
        "offload_parameters": _device(zero.offload_param) != "none",
        "precision": precision,
    }


def _device(section: Any) -> str:
    device = "none" if section is None else section.device
    return str(getattr(device, "value", device))


def accelerate_arguments(words: list[str]) -> Report:
    """What `accelerate launch` puts into the environment of the processes."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    args = launch.launch_command_parser().parse_args(words)
    args.machine_rank = args.machine_rank or 0  # each machine's own, given where it is started
    enough = (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=16),
    )
    with enough[0], enough[1]:
        args, _, _ = launch._validate_launch_command(args)
    with mock.patch.object(prepare, "is_fp8_available", return_value=True):
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ""
            with mock.patch(
                "os.path.isfile", return_value=True
            ):  # a list of hosts, where there are several
                _, env = prepare.prepare_deepspeed_cmd_env(args)
        elif args.multi_gpu or args.use_fsdp:
            env = prepare.prepare_multi_gpu_env(args)
        else:
            _, env = prepare.prepare_simple_launcher_cmd_env(args)
    words_of = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}
    stage = (
        3
        if args.use_fsdp
        else int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
        if args.use_deepspeed
        else 0
    )
    report = {
        "world_size": int(args.num_processes),
        "nnodes": int(args.num_machines or 1),
        "zero_stage": stage,
        "precision": words_of[env["ACCELERATE_MIXED_PRECISION"]],
        "compile": env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO",
        "offload_optimizer": env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
        != "none",
        "offload_parameters": env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
        != "none",
    }
    if args.use_fsdp:
        report["activation_checkpointing"] = env.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
        for name in ("tp", "cp"):
            report[name] = int(env.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1))
    if args.use_deepspeed and "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in env:
        report["accumulation"] = int(env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"])
    return report


def accelerate_file(case: dict[str, Any]) -> Report:
    return accelerate_arguments(["--config_file", case["path"], "train.py"])


def training_arguments(found: Any) -> Report:
    precision = (
        "amp_bf16" if found.bf16 else "amp_fp16" if found.fp16 else "tf32" if found.tf32 else "fp32"
    )
    return {
        "micro_batch": found.per_device_train_batch_size,
        "accumulation": found.gradient_accumulation_steps,
        "precision": precision,
        "compile": bool(found.torch_compile),
        "dataloader_workers": found.dataloader_num_workers,
        "activation_checkpointing": bool(
            found.gradient_checkpointing or found.activation_checkpointing
        ),
        "zero_stage": 3 if found.fsdp else 0,
    }


@contextlib.contextmanager
def _as_on_ampere() -> Any:
    from transformers import training_args

    with (
        mock.patch.object(training_args, "is_torch_tf32_available", return_value=True),
        mock.patch.object(training_args, "enable_tf32", return_value=None),
        mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True),
    ):
        yield


def _parser() -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    kind: Any = TrainingArguments
    return HfArgumentParser(kind)


def transformers_file(case: dict[str, Any]) -> Report:
    import yaml

    parser, path = _parser(), case["path"]
    with _as_on_ampere():
        if path.endswith(".json"):
            (found,) = parser.parse_json_file(path)
        elif path.endswith("training.yaml"):
            (found,) = parser.parse_dict(yaml.safe_load(Path(path).read_text())["training"])
        else:
            (found,) = parser.parse_yaml_file(path)
    return training_arguments(found)


def trainer_with_deepspeed(case: dict[str, Any]) -> Report:
    """What the Trainer finds to differ between its arguments and the ds.json beside them, before it starts."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with _as_on_ampere():
        (found,) = _parser().parse_yaml_file(case["path"])
    config = HfTrainerDeepSpeedConfig(str(Path(case["path"]).with_name("ds.json")))
    with mock.patch.object(TrainingArguments, "world_size", case["data_parallel_size"]):
        config.trainer_config_process(found)
    return {"mismatches": config.mismatches} | training_arguments(found)


class _Enough:
    """Lightning's and torch's view of a machine with 16 GPUs."""

    def __enter__(self) -> None:
        self.stack = contextlib.ExitStack()
        for module in ("lightning.fabric.accelerators.cuda", "lightning.pytorch.accelerators.cuda"):
            self.stack.enter_context(mock.patch(f"{module}.num_cuda_devices", return_value=16))
        cuda = "lightning.pytorch.accelerators.cuda"
        self.stack.enter_context(
            mock.patch(f"{cuda}._check_cuda_matmul_precision", return_value=None)
        )
        engine = "lightning.fabric.plugins.precision.transformer_engine"
        self.stack.enter_context(mock.patch(f"{engine}._TRANSFORMER_ENGINE_AVAILABLE", True))
        names = (
            "transformer_engine",
            "transformer_engine.common",
            "transformer_engine.common.recipe",
        )
        self.stack.enter_context(
            mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names})
        )
        self.stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
        self.stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


def lightning_file(case: dict[str, Any]) -> Report:
    """`Trainer` with the arguments that the file gives it: LightningCLI passes them on as they are."""
    import importlib

    import deepspeed  # noqa: F401  # what a strategy imports is forgotten with the modules that are patched, file by file
    import yaml
    from lightning.pytorch import Trainer

    section = dict(yaml.safe_load(Path(case["path"]).read_text())["trainer"])
    with _Enough():
        strategy = section.get("strategy")
        if isinstance(strategy, dict):
            module, _, name = strategy["class_path"].rpartition(".")
            section["strategy"] = getattr(importlib.import_module(module), name)(
                **strategy.get("init_args", {})
            )
        section["precision"] = section.get("precision", "32-true")
        trainer = Trainer(
            **{**section, "accelerator": "cuda", "logger": False, "enable_checkpointing": False}
        )
        config = getattr(trainer.strategy, "config", None) or {}
        zero = config.get("zero_optimization", {})
        words = {
            "32-true": "fp32",
            "16-mixed": "amp_fp16",
            "16-true": "fp16",
            "bf16-mixed": "amp_bf16",
            "bf16-true": "bf16",
            "transformer-engine": "fp8",
        }
        return {
            "nproc_per_node": trainer.num_devices,
            "nnodes": trainer.num_nodes,
            "accumulation": trainer.accumulate_grad_batches,
            "precision": words[str(trainer.precision)],
            "zero_stage": int(zero.get("stage", 0)),
            "offload_optimizer": bool(zero.get("offload_optimizer")),
            "offload_parameters": bool(zero.get("offload_param")),
        }


def _words(case: dict[str, Any]) -> list[str]:
    """The launch command of a script, as the shell gives it."""
    text = Path(case["path"]).read_text().replace("\\\n", " ")
    line = next(
        line for line in text.splitlines() if "train.py" in line and not line.startswith("#")
    )
    words = shlex.split(line.replace(";", " ;"), comments=True)
    start = next(
        i for i, word in enumerate(words) if word in ("torchrun", "accelerate", "deepspeed")
    )
    stop = next(
        (i for i, word in enumerate(words) if i > start and word in (">", ";", "&&")), len(words)
    )
    return words[start:stop]


def command(case: dict[str, Any]) -> Report:
    name, *words = _words(case)
    if name == "accelerate":
        return accelerate_arguments(words[1:])
    if name == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        found = parse_args(words)
        return {"nnodes": found.num_nodes, "nproc_per_node": found.num_gpus}
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words)
    report = {
        "nnodes": int(str(found.nnodes).partition(":")[0]),
        "nproc_per_node": int(found.nproc_per_node),
    }
    if any("per_device" in word for word in words):
        with _as_on_ampere():
            (arguments,) = _parser().parse_args_into_dataclasses(found.training_script_args)
        report |= {
            k: v
            for k, v in training_arguments(arguments).items()
            if k not in ("zero_stage", "dataloader_workers")
        }
    return report


LIBRARIES: dict[str, Callable[[dict[str, Any]], Report]] = {
    "Hugging Face TrainingArguments": transformers_file,
    "DeepSpeed": deepspeed_file,
    "accelerate": accelerate_file,
    "Lightning CLI": lightning_file,
    "launch command": command,
    "Trainer beside DeepSpeed": trainer_with_deepspeed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("manifest", type=Path)
    o = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    reports = []
    for case in json.loads(o.manifest.read_text()):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                reports.append(LIBRARIES[o.library](case))
        except (Exception, SystemExit) as error:
            reports.append({"error": f"{type(error).__name__}: {error} {said.getvalue()[-300:]}"})
    sys.stdout.write("\n" + json.dumps(reports) + "\n")


if __name__ == "__main__":
    main()
