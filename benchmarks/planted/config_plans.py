"""Settings files as people keep them, and seeded plans to write into them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace import configs
from trainpace.configs import (
    Changes,
    Rewritten,
    Written,
    combine,
    execution_of,
    parse_config,
    settings_of,
)
from trainpace.configs.changes import UNWRITTEN
from trainpace.configs.files import write_changes
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.plan import PARALLELISM, Limit
from trainpace.verbs.settings import limits_of

HUGGING_FACE = """{
    "output_dir": "out",
    "per_device_train_batch_size": 1,
    "learning_rate": 2e-5,   "num_train_epochs": 3,

    "gradient_accumulation_steps": 1, "fp16": false, "bf16": false,
    "lr_scheduler_type": "cosine",
    "dataloader_num_workers": 0
}
"""
HUGGING_FACE_YAML = """# the run of March
output_dir: out
per_device_train_batch_size: 1   # fits on a T4
num_train_epochs: 3
# do not touch
learning_rate: 2.0e-5
report_to: [none]
"""
HUGGING_FACE_UNDER_A_KEY = """model: {name: gpt2}
training:
    output_dir: "out"
    per_device_train_batch_size: 1
    gradient_checkpointing: False # code has it too
    num_train_epochs: 3
other:
  - 1
"""
DEEPSPEED = """{
  "train_batch_size": 1,
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": false}, "fp16": {"enabled": false, "loss_scale": 0},
  "zero_optimization": {
    "stage": 0,
    "contiguous_gradients": true
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}}
}
"""
DEEPSPEED_BESIDE = DEEPSPEED.replace('3e-4, "betas": [0.9, 0.95]', '"auto"')
DEEPSPEED_SHORT = '{"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10}'
DEEPSPEED_TABS = '{\n\t"train_micro_batch_size_per_gpu": 1,\n\t"zero_optimization": {}\n}\n'
ACCELERATE = """# made by accelerate config
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'   # one machine
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
rdzv_backend: static
use_cpu: false
"""
ACCELERATE_DEEPSPEED = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  # offload later
  offload_optimizer_device: none
  zero_stage: 0
distributed_type: DEEPSPEED
mixed_precision: "no"
num_machines: 1
num_processes: 1
"""
ACCELERATE_FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: 'no'
num_machines: 1
num_processes: 1
parallelism_config:
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
"""
LIGHTNING = """seed_everything: 1
trainer:
  accelerator: gpu
  devices: 1
  num_nodes: 1
  precision: 32-true      # for now
  max_epochs: 90
  logger: false
model:
  lr: 0.1
data:
  batch_size: 1
  num_workers: 0
"""
LIGHTNING_STRATEGY = """trainer: {accelerator: gpu, devices: 1, max_steps: 100, val_check_interval: 64, strategy: ddp}
data:
  class_path: my.Data
  init_args:
    batch_size: 1  # a GPU
"""
LIGHTNING_CLASS = """trainer:
    devices: 1
    accumulate_grad_batches: 1
    strategy:
        class_path: lightning.pytorch.strategies.DeepSpeedStrategy
        init_args:
            stage: 0
            # logging
            allgather_bucket_size: 200000000
    max_epochs: 1
"""
TORCHRUN = """#!/bin/sh
# start
cd /srv && \\
torchrun --nnodes=1 --nproc_per_node=1 \\
    --rdzv_backend=c10d train.py \\
    --per_device_train_batch_size 1 --num_train_epochs=3 --bf16 false --fp16 false > log.txt
echo done
"""
TORCHRUN_SHORT = "torchrun train.py --lr 0.1\n"
ACCELERATE_LAUNCH = """#!/bin/bash
accelerate launch --num_processes 1 --num_machines 1 \\
  --mixed_precision no train.py --epochs 3 # a comment
"""
DEEPSPEED_LAUNCH = "#!/bin/bash\ndeepspeed --num_nodes 1 --num_gpus 1 train.py --deepspeed_config ds.json; echo ok\n"
SBATCH_TORCHRUN = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1          # of 4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:1
#SBATCH --time=24:00:00
module load cuda
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=${SLURM_GPUS_ON_NODE} \\
    --rdzv-backend=c10d train.py
"""
SBATCH_TASKS = """#!/bin/bash
#SBATCH -N 1
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node a100:1 --exclusive
# tasks are ranks
srun --cpu-bind=cores python train.py --nodes 7
"""
SBATCH_TOTAL = """#!/bin/bash
#SBATCH -N1 -n1 --gpus=1

srun python train.py
"""
SBATCH_LITERAL = """#!/bin/bash
#SBATCH --nodes=1
srun --nodes=1 --ntasks-per-node=1 torchrun --nnodes 1 --nproc-per-node 1 train.py
"""
FILES: dict[str, dict[str, str]] = {
    "Hugging Face TrainingArguments": {
        "args.json": HUGGING_FACE,
        "args.yaml": HUGGING_FACE_YAML,
        "training.yaml": HUGGING_FACE_UNDER_A_KEY,
    },
    "DeepSpeed": {"ds.json": DEEPSPEED, "short.json": DEEPSPEED_SHORT, "tabs.json": DEEPSPEED_TABS},
    "accelerate": {
        "accelerate.yaml": ACCELERATE,
        "accelerate_ds.yaml": ACCELERATE_DEEPSPEED,
        "accelerate_fsdp.yaml": ACCELERATE_FSDP,
    },
    "Lightning CLI": {
        "lightning.yaml": LIGHTNING,
        "lightning_ddp.yaml": LIGHTNING_STRATEGY,
        "lightning_class.yaml": LIGHTNING_CLASS,
    },
    "launch command": {
        "torchrun.sh": TORCHRUN,
        "short.sh": TORCHRUN_SHORT,
        "accelerate.sh": ACCELERATE_LAUNCH,
        "deepspeed.sh": DEEPSPEED_LAUNCH,
    },
    "Slurm batch script": {
        "torchrun.sbatch": SBATCH_TORCHRUN,
        "tasks.sbatch": SBATCH_TASKS,
        "total.sbatch": SBATCH_TOTAL,
        "literal.sbatch": SBATCH_LITERAL,
    },
}
"""Format -> file -> text. Each says what `Execution()` is: one sample, one process, fp32."""


PLANS_A_START = 25
MESH = frozenset(("nnodes", "nproc_per_node", "tp", "pp", "cp"))
MAY_BE_SILENT = frozenset(
    ("zero_stage", "offload_optimizer", "offload_parameters", "compile", "tp")
)


class Round(NamedTuple):
    """One plan written into one file: the execution that the file says before and after, and the one that was wanted."""

    file: str
    written: Written
    before: Execution
    wanted: Execution
    workers: int | None

    def wrong(self) -> dict[str, tuple[Any, Any]]:
        """Fields that read back otherwise than they should: {field: (read, expected)}. What the file does not take stays as it
        was, and what it takes by saying nothing is the default."""
        read = parse_config(self.written.text, self.file)
        combined = combine([read])
        silent = replace(
            self.before,
            **{n: getattr(Execution(), n) for n in self.written.wrote if n in MAY_BE_SILENT},
        )
        found = settings_of(execution_of({n: s.value for n, s in combined.values.items()}, silent))
        expected, was = settings_of(self.wanted), settings_of(self.before)
        left = self.written.left
        wrong = {
            name: (found[name], expected[name])
            for name in expected
            if name not in ("gpus_per_node", "world_size", "global_batch")
            and found[name] != (was[name] if name in left else expected[name])
        }
        stated = {s.name: s.value for s in read.settings}
        if (
            stated.get("global_batch") not in (None, found["global_batch"])
            and not left.keys() & MESH
        ):
            wrong["global_batch"] = (stated["global_batch"], found["global_batch"])
        if combined.clashes and not left:
            wrong["clashes"] = (" ".join(c.text for c in combined.clashes), "")
        if (
            self.workers is not None
            and "dataloader_workers" not in left
            and stated["dataloader_workers"] != self.workers
        ):
            wrong["dataloader_workers"] = (stated["dataloader_workers"], self.workers)
        return wrong


def execution(rng: random.Random) -> Execution:
    """Any legal execution on 8 to 64 processes. Meshes of at most 8 divide every one of them."""
    stage: Any = rng.choice((0, 0, 1, 2, 3))
    return Execution(
        micro_batch=rng.choice((1, 2, 3, 8, 24, 64)),
        accumulation=rng.choice((1, 2, 5, 16)),
        nnodes=rng.choice((1, 1, 2, 4)),
        nproc_per_node=rng.choice((8, 16)),
        tp=rng.choice((1, 1, 2)),
        pp=rng.choice((1, 1, 1, 2)),
        cp=rng.choice((1, 1, 1, 2)),
        precision=rng.choice(PRECISIONS),
        zero_stage=stage,
        offload_optimizer=stage > 0 and rng.random() < 0.4,
        offload_parameters=stage == 3 and rng.random() < 0.4,
        activation_checkpointing=rng.choice(("none", "selective", "full")),
        compile=rng.random() < 0.5,
    )


def varied(e: Execution, rng: random.Random) -> Execution:
    """Another execution that differs from `e` in some fields, as plans do."""
    other = execution(rng)
    names = [
        f
        for f in Execution.__struct_fields__
        if f not in (*UNWRITTEN, "optimizer") and rng.random() < 0.5
    ]
    if rng.random() < 0.1:
        names = []
    moved = replace(e, **{name: getattr(other, name) for name in names})
    if moved.zero_stage < 3 or not moved.offload_optimizer:
        moved = replace(
            moved, offload_parameters=moved.offload_parameters and moved.zero_stage == 3
        )
    return replace(moved, offload_optimizer=moved.offload_optimizer and moved.zero_stage > 0)


def said(text: str, file: str, base: Execution) -> Execution:
    """The execution that a file says, laid over `base`."""
    values: Mapping[str, Any] = {
        n: s.value for n, s in combine([parse_config(text, file)]).values.items()
    }
    return execution_of(values, base)


def rounds(kind: str, count: int, seed: int = 0) -> Iterator[Round]:
    """`count` plans for a format: the file is brought to one execution, read, and then to another one."""
    rng = random.Random(f"{kind} {seed}")
    for i in range(count):
        file, text = list(FILES[kind].items())[i % len(FILES[kind])]
        first = execution(rng)
        start = write_changes(text, file, Changes(before=Execution(), after=first))
        before = said(start.text, file, first)
        wanted = varied(before, rng)
        workers = (
            rng.choice((None, 1, 4))
            if kind in ("Hugging Face TrainingArguments", "Lightning CLI")
            else None
        )
        changes = Changes(before=before, after=wanted, workers=workers)
        yield Round(file, write_changes(start.text, file, changes), before, wanted, workers)


def planned(kind: str, count: int, seed: int = 0) -> Iterator[tuple[Round, str]]:
    """`count` plans for a format as `trainpace plan --write` makes them: random changes, but for those that the file cannot hold,
    each with what the writer would refuse it for ("" for nothing)."""
    rng = random.Random(f"{kind} planned {seed}")
    for i in range(count):
        if i % PLANS_A_START == 0:
            file, text = list(FILES[kind].items())[i // PLANS_A_START % len(FILES[kind])]
            first = execution(rng)
            start = write_changes(text, file, Changes(before=Execution(), after=first))
            undivided = dict.fromkeys(start.left.keys() & PARALLELISM.keys(), 1)
            first = replace(first, **undivided)
            start = write_changes(text, file, Changes(before=Execution(), after=first))
            before = said(start.text, file, first)
            limits, _ = limits_of({file: start.text}, {}, before, write=True)
        wanted = _within(limits, before, varied(before, rng))
        done = configs.rewrite({file: start.text}, Changes(before=before, after=wanted))
        yield (
            Round(file, done.files[0], before, wanted, None),
            "; ".join(f"{n}: {why}" for n, why in done.left.items()),
        )


def _within(limits: Sequence[Limit], before: Execution, wanted: Execution) -> Execution:
    """`wanted` with what the limits do not allow as it was."""
    kept = {
        limit.field: getattr(before, limit.field)
        for limit in limits
        if getattr(wanted, limit.field) not in limit.values
    }
    if kept.keys() & MESH:
        kept |= {name: getattr(before, name) for name in MESH}
    return replace(wanted, **kept)


SETS: dict[str, dict[str, str]] = {
    "Trainer, DeepSpeed, Slurm": {
        "args.yaml": HUGGING_FACE_YAML,
        "ds.json": DEEPSPEED_BESIDE,
        "torchrun.sbatch": SBATCH_TORCHRUN,
    },
    "Trainer, accelerate": {"args.json": HUGGING_FACE, "accelerate.yaml": ACCELERATE},
    "Trainer, accelerate with DeepSpeed": {
        "args.json": HUGGING_FACE,
        "accelerate_ds.yaml": ACCELERATE_DEEPSPEED,
    },
    "Lightning, Slurm": {"lightning.yaml": LIGHTNING, "tasks.sbatch": SBATCH_TASKS},
    "command, DeepSpeed": {"torchrun.sh": TORCHRUN, "ds.json": DEEPSPEED_SHORT},
}
"""Files of one training."""


def texts_of(files: Rewritten) -> dict[str, str]:
    """File -> its new text."""
    return {f.file: f.text for f in files.files}


def together(texts: Mapping[str, str], base: Execution) -> tuple[Execution | None, str]:
    """(the execution that several files say, how they clash)."""
    combined = combine([parse_config(text, file) for file, text in texts.items()])
    if combined.clashes:
        return None, " ".join(clash.text for clash in combined.clashes)
    return execution_of({n: s.value for n, s in combined.values.items()}, base), ""
