"""The planted scripts: what slows each down, what `trainpace diagnose` should say, and how to run it with the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from trainpace.core.records import Record

SCRIPTS = Path(__file__).parent / "scripts"

Engine = Literal["plain", "lightning", "hf", "accelerate", "ddp", "fsdp2", "deepspeed"]
Verdict = Literal[
    "data",
    "host_to_device",
    "launch",
    "compute",
    "contention",
    "threads",
    "optimizer",
    "communication",
    "straggler",
    "synchronisation",
    "checkpoint",
    "evaluation",
    "own_code",
]
Part = Literal["data", "forward", "logging", "none"]


SAYS = {"synchronisation": "logging"}
"""Causes that the diagnosis calls by the name of a wider one."""


class Case(Record, kw_only=True):
    """One script and the truth about it.

    `fix` is None where nothing can be gained. `planted_ms` is what is planted per optimizer step in the training process
    of `planted_rank`, to be found in `part`; None where the cause is real work whose time is not known beforehand.
    `micro_steps` is the number of micro-batches in an optimizer step. `also_accepted` names verdicts that are as true.
    `gpu`: for a machine with one.
    """

    name: str
    script: str
    engine: Engine
    expected: Verdict
    also_accepted: tuple[Verdict, ...] = ()
    args: tuple[str, ...] = ()
    fix: tuple[str, ...] | None
    ranks: int = 1
    link_mbit_per_s: float | None = None
    micro_steps: int = 1
    planted_ms: float | None = None
    part: Part = "none"
    planted_rank: int = 0
    gpu: bool = False

    @property
    def accepted(self) -> frozenset[str]:
        """The verdicts of the diagnosis that are right."""
        return frozenset(SAYS.get(v, v) for v in (self.expected, *self.also_accepted))

    @property
    def timeout_s(self) -> float:
        """Longer where kernels are compiled first."""
        return 120.0 if self.gpu else 60.0

    def argv(self, *, fixed: bool = False) -> tuple[str, ...]:
        """The script and its arguments, without python or torchrun."""
        if fixed and self.fix is None:
            raise ValueError(f"{self.name} has no fix")
        return (
            str(SCRIPTS / f"{self.script}.py"),
            *self.args,
            *((self.fix or ()) if fixed else ()),
        )


def _case(
    name: str,
    engine: Engine,
    expected: Verdict,
    fix: str | None,
    script: str = "",
    args: str = "",
    **more: object,
) -> Case:
    fields: dict[str, object] = {
        "name": name,
        "script": script or name,
        "engine": engine,
        "expected": expected,
        "args": tuple(args.split()),
        "fix": None if fix is None else tuple(fix.split()),
        **more,
    }
    return Case(**fields)  # type: ignore[arg-type]


CASES = (
    _case("slow_decode", "plain", "data", "--cache"),
    _case("slow_augment", "plain", "data", "--augment flip", planted_ms=16.0, part="data"),
    _case(
        "too_few_workers", "plain", "data", "--workers 4", "slow_storage", "--workers 1 --read-ms 3"
    ),
    _case("slow_storage", "plain", "data", "--workers 8"),
    _case("slow_collate", "plain", "data", "--fast-collate", planted_ms=15.0, part="data"),
    _case("lists_in_samples", "plain", "data", "--arrays"),
    _case("lightning_storage", "lightning", "data", "--workers 4", planted_ms=24.0, part="data"),
    _case("hf_tokenise", "hf", "data", "--pretokenise"),
    _case("accelerate_compressed", "accelerate", "data", "--format npy"),
    _case(
        "accumulation_storage",
        "plain",
        "data",
        "--read-ms 0",
        micro_steps=4,
        planted_ms=20.0,
        part="data",
    ),
    _case("loader_recreated", "plain", "data", "--persistent"),
    _case("host_to_device", "plain", "host_to_device", "--store float32"),
    _case("launch_samples", "plain", "launch", "--vectorised"),
    _case("lightning_launch", "lightning", "launch", "--cell library"),
    _case("compute_plain", "plain", "compute", None),
    _case(
        "busy_workers",
        "plain",
        "contention",
        "--augment-ms 0",
        also_accepted=("compute", "threads"),
    ),
    _case("many_threads", "plain", "threads", "--threads 1"),
    _case("hf_compute", "hf", "compute", None),
    _case("ddp_compute", "ddp", "compute", None, ranks=2),
    _case("optimizer_embedding", "plain", "optimizer", "--fused"),
    _case("hf_optimizer", "hf", "optimizer", "--optim adamw_torch_fused"),
    _case("ddp_slow_link", "ddp", "communication", "--compress", ranks=2, link_mbit_per_s=200.0),
    _case("ddp_accumulation", "ddp", "communication", "--no-sync", ranks=2, micro_steps=4),
    _case("ddp_embedding", "ddp", "communication", "--average-every 8", ranks=2),
    _case("fsdp2_gather", "fsdp2", "communication", "--keep-gathered", ranks=2),
    _case("deepspeed_zero2", "deepspeed", "communication", "--stage 1", ranks=2, micro_steps=4),
    _case(
        "ddp_straggler",
        "ddp",
        "straggler",
        "--slow-rank -1",
        ranks=2,
        planted_ms=15.0,
        part="forward",
        planted_rank=1,
    ),
    _case("ddp_lengths", "ddp", "straggler", "--interleave", ranks=2),
    _case(
        "log_remote", "plain", "synchronisation", "--log-every 50", planted_ms=10.0, part="logging"
    ),
    _case("log_items", "plain", "synchronisation", "--log-every 50", also_accepted=("own_code",)),
    _case("collect_garbage", "plain", "own_code", "--leave-garbage"),
    _case("checkpoint_often", "plain", "checkpoint", "--save-every 50"),
    _case("lightning_checkpoint", "lightning", "checkpoint", "--save-every 45"),
    _case("evaluate_often", "plain", "evaluation", "--evaluate-every 50"),
    _case("hf_evaluate", "hf", "evaluation", "--eval-steps 40"),
    _case("evaluate_epochs", "plain", "evaluation", "--evaluate-every 4"),
    _case("collect_rollouts", "plain", "own_code", "--fast-environment"),
    _case("collect_seldom", "plain", "own_code", "--collect-ms 0"),
)

_GPU: dict[str, Any] = {"gpu": True}
_SMALL = "--layers 24 --width 256 --batch 4 --tokens 128"

GPU_CASES = (
    _case("gpu_compute", "plain", "compute", "--compile", "gpu_language", **_GPU),
    _case(
        "gpu_fp32",
        "plain",
        "compute",
        "--precision bf16",
        "gpu_language",
        "--precision fp32",
        **_GPU,
    ),
    _case(
        "gpu_loss_each_step",
        "plain",
        "compute",
        "--log-every 50",
        "gpu_language",
        "--log-every 1",
        **_GPU,
    ),
    _case("gpu_launch", "plain", "launch", "--graph", "gpu_language", _SMALL, **_GPU),
    # reading the norms takes 26 of 59 ms on an H200, and launching the model 27 of the others
    _case(
        "gpu_norms",
        "plain",
        "synchronisation",
        "--norms-every 50",
        "gpu_language",
        f"{_SMALL} --norms-every 1",
        also_accepted=("own_code", "launch"),
        **_GPU,
    ),
    _case(
        "gpu_adamw",
        "plain",
        "optimizer",
        "--adamw fused",
        "gpu_language",
        "--layers 2 --batch 2 --tokens 128 --vocabulary 500000 --adamw loop",
        **_GPU,
    ),
    _case(
        "gpu_checkpoint",
        "plain",
        "checkpoint",
        "--save-every 50",
        "gpu_language",
        "--save-every 10",
        **_GPU,
    ),
    _case(
        "gpu_evaluate",
        "plain",
        "evaluation",
        "--evaluate-every 50",
        "gpu_language",
        "--evaluate-every 5",
        **_GPU,
    ),
    _case(
        "gpu_clean",
        "plain",
        "own_code",
        "--clean-every 0",
        "gpu_language",
        f"{_SMALL} --clean-every 1",
        **_GPU,
    ),
    _case("gpu_files", "plain", "data", "--workers 8", "gpu_images", "--workers 0", **_GPU),
    _case(
        "gpu_few_workers",
        "plain",
        "data",
        "--workers 12",
        "gpu_images",
        "--workers 2 --pin",
        **_GPU,
    ),
    _case(
        "gpu_images_compute",
        "plain",
        "compute",
        "--compile",
        "gpu_images",
        "--data memory --batch 256 --store uint8 --pin",
        **_GPU,
    ),
    _case(
        "gpu_pageable",
        "plain",
        "host_to_device",
        "--store uint8 --pin",
        "gpu_images",
        "--small --data memory --batch 256 --store float64",
        **_GPU,
    ),
    _case("gpu_trainer", "hf", "compute", "--compile", "gpu_trainer", "--batch 64", **_GPU),
    _case("gpu_trainer_tokens", "hf", "data", "--workers 8", "gpu_trainer", "--tokenise", **_GPU),
    _case("gpu_lightning", "lightning", "launch", "--cell library", "gpu_lightning", **_GPU),
)
"""Planted scripts for a machine with a GPU; `benchmarks/diagnose_gpu.py` runs them."""
