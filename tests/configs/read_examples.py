"""Example files with all settings and notes that are read from them, each with its key.

A setting under a wrong key sends the user to the wrong line. If a note does not name the setting that
stays open, a default looks like a value from the file.
"""

import json

CASES = {
    "trainer.json": (
        json.dumps(
            {
                "per_device_train_batch_size": 8,
                "max_steps": 100,
                "num_train_epochs": 3,
                "fp16": True,
                "tf32": True,
                "bf16": False,
                "eval_strategy": "steps",
                "save_strategy": "epoch",
                "optim": "adamw_torch_fused",
                "fsdp": "full_shard",
                "fsdp_config": {"activation_checkpointing": True},
                "parallelism_config": {"tp_size": 2, "cp_size": 4},
                "auto_find_batch_size": True,
                "torch_compile_mode": "reduce-overhead",
                "accelerator_config": {"split_batches": True},
                "attn_implementation": "flash_attention_2",
                "use_liger_kernel": True,
                "my_key": 1,
            }
        ),
        """\
Hugging Face TrainingArguments
per_device_train_batch_size: micro_batch = 8
max_steps: max_steps = 100
fp16: precision = 'amp_fp16'
optim: optimizer = 'adamw'
optim: optimizer_implementation = 'fused'
attn_implementation: attention = 'flash2'
use_liger_kernel: cross_entropy = 'chunked'
fsdp: sharding = 'fsdp'
fsdp_config.activation_checkpointing: activation_checkpointing = True
parallelism_config.tp_size: tp = 2
parallelism_config.cp_size: cp = 4
warning my_key
warning num_train_epochs
info tf32
info eval_strategy (evaluate_every_steps stays open)
info save_strategy (checkpoint_every_steps stays open)
info use_liger_kernel
warning auto_find_batch_size
info torch_compile
warning accelerator_config.split_batches
""",
    ),
    "other.json": (
        json.dumps(
            {
                "eval_strategy": "no",
                "eval_steps": 50,
                "save_steps": 0.1,
                "learning_rate": 0.0001,
                "deepspeed": "ds.json",
                "fp16": False,
                "attn_implementation": "mine",
                "use_liger_kernel": True,
                "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": False},
                "torch_compile_backend": "inductor",
                "optim": "adafactor",
                "evaluation_strategy": None,
            }
        ),
        """\
Hugging Face TrainingArguments
learning_rate: learning_rate = 0.0001
optim: optimizer = 'adafactor_transformers'
liger_kernel_config: cross_entropy = 'fused_fp32'
info evaluation_strategy
info fp16
info eval_steps
info save_steps (checkpoint_every_steps stays open)
info attn_implementation
info use_liger_kernel
info deepspeed
info torch_compile
info per_device_train_batch_size
""",
    ),
    "third.json": (
        json.dumps(
            {
                "gradient_accumulation_steps": 2,
                "eval_steps": 50,
                "fp16": False,
                "bf16": False,
                "deepspeed": {"zero_optimization": {}},
                "save_strategy": "best",
                "per_gpu_train_batch_size": 3,
                "fsdp_config": "fsdp.json",
                "max_steps": -1,
                "num_train_epochs": 2,
                "optim": "sgd",
            }
        ),
        """\
Hugging Face TrainingArguments
per_gpu_train_batch_size: micro_batch = 3
gradient_accumulation_steps: accumulation = 2
num_train_epochs: epochs = 2.0
fp16, bf16: precision = 'fp32'
eval_steps: evaluate_every_steps = 50
optim: optimizer = 'sgd'
info per_gpu_train_batch_size
warning eval_steps
info save_strategy (checkpoint_every_steps stays open)
info fsdp_config
warning deepspeed
""",
    ),
    "ds.json": (
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": "auto",
                "bf16": {"enabled": "auto"},
                "fp16": {"enabled": False},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme"},
                    "offload_optimizer": {"device": "none"},
                },
                "optimizer": {"type": "OneBitAdam", "params": {"lr": "auto"}},
                "activation_checkpointing": {"partition_activations": True},
                "gradient_cliping": 1.0,
                "steps_per_print": 5,
            }
        ),
        """\
DeepSpeed
train_batch_size: global_batch = 64
zero_optimization.stage: zero_stage = 3
activation_checkpointing.partition_activations: partition_activations = True
zero_optimization.offload_optimizer.device: offload_optimizer = False
zero_optimization.offload_param.device: offload_parameters = True
optimizer.type: optimizer = 'onebitadam'
warning gradient_cliping
info train_micro_batch_size_per_gpu (micro_batch stays open)
info optimizer.params.lr (learning_rate stays open)
info bf16.enabled (precision stays open)
info fp16.enabled
info activation_checkpointing
""",
    ),
    "ds2.json": (
        json.dumps(
            {
                "gradient_accumulation_steps": 4,
                "zero_optimization": {"stage": 0},
                "fp16": {"enabled": True},
                "amp": {"enabled": False},
                "data_types": {"grad_accum_dtype": "fp32"},
            }
        ),
        """\
DeepSpeed
gradient_accumulation_steps: accumulation = 4
zero_optimization.stage: zero_stage = 0
fp16.enabled: precision = 'fp16'
warning amp
""",
    ),
    "fsdp.yaml": (
        """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 2
num_processes: 16
dynamo_config: {dynamo_backend: INDUCTOR}
fsdp_config: {fsdp_activation_checkpointing: true, fsdp_offload_params: true}
parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_cp_size: 2, parallelism_config_sp_size: 4, parallelism_config_dp_shard_size: 2}
""",
        """\
accelerate
num_processes: world_size = 16
num_machines: nnodes = 2
fsdp_config.fsdp_activation_checkpointing: activation_checkpointing = True
mixed_precision: precision = 'fp32'
distributed_type: sharding = 'fsdp'
parallelism_config.parallelism_config_tp_size: tp = 2
parallelism_config.parallelism_config_cp_size: cp = 2
dynamo_config.dynamo_backend: compile = True
info num_processes
warning parallelism_config.parallelism_config_sp_size
warning parallelism_config
""",
    ),
    "old.yaml": (
        """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
fp16: true
num_machines: 1
num_processes: 8
gradient_accumulation_steps: 2
unknown_key: 3
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none, gradient_accumulation_steps: auto}
""",
        """\
accelerate
num_processes: world_size = 8
num_machines: nnodes = 1
deepspeed_config.zero_stage: zero_stage = 3
gradient_accumulation_steps: accumulation = 2
fp16: precision = 'amp_fp16'
deepspeed_config.offload_optimizer_device: offload_optimizer = True
deepspeed_config.offload_param_device: offload_parameters = False
warning gradient_accumulation_steps
warning unknown_key
info deepspeed_config.gradient_accumulation_steps (accumulation stays open)
info fp16
""",
    ),
    "mesh.yaml": (
        """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2}
parallelism_config: {tp_size: 2, sp_size: 2}
""",
        """\
accelerate
num_processes: world_size = 8
mixed_precision: precision = 'amp_bf16'
parallelism_config.tp_size: tp = 2
warning parallelism_config.sp_size
warning parallelism_config
""",
    ),
    "trainer.yaml": (
        """\
trainer:
  accelerator: gpu
  devices: auto
  num_nodes: 2
  precision: 16-mixed
  max_epochs: -1
  max_steps: 500
  accumulate_grad_batches: 4
  val_check_interval: 0.5
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {activation_checkpointing_policy: null, cpu_offload: true}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 3e-4, fused: true}
data: {batch_size: 2}
""",
        """\
Lightning CLI
trainer.num_nodes: nnodes = 2
trainer.accumulate_grad_batches: accumulation = 4
trainer.max_steps: max_steps = 500
trainer.precision: precision = 'amp_fp16'
trainer.strategy: sharding = 'fsdp'
data.batch_size: micro_batch = 2
optimizer.init_args.lr: learning_rate = 0.0003
optimizer.class_path: optimizer = 'adamw'
info trainer.devices (nproc_per_node stays open)
info trainer.devices
info trainer.val_check_interval (evaluate_every_steps stays open)
""",
    ),
    "tp.yaml": (
        """\
trainer: {devices: "0,2", precision: 32-true, max_epochs: 3, check_val_every_n_epoch: 2, val_check_interval: 100, strategy: deepspeed_stage_3_offload, min_steps: 10}
model: {optimizer: sgd}
""",
        """\
Lightning CLI
trainer.devices: nproc_per_node = 2
trainer.max_epochs: epochs = 3
trainer.precision: precision = 'fp32'
trainer.strategy: zero_stage = 3
trainer.strategy: offload_optimizer = True
trainer.strategy: offload_parameters = True
info trainer.val_check_interval (evaluate_every_steps stays open)
info trainer.check_val_every_n_epoch
""",
    ),
    "job.sbatch": (
        """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=a100:4
#SBATCH --ntasks-per-node=4
#SBATCH --time=0
#SBATCH --exclusive --nodesss=3
#SBATCH --cpus-per-task=8
srun --ntasks=8 python train.py
""",
        """\
Slurm batch script
#SBATCH --nodes: nnodes = 2
#SBATCH --gpus-per-node: gpus_per_node = 4
srun --ntasks: world_size = 8
warning #SBATCH --nodesss
info #SBATCH --time
""",
    ),
    "job2.sbatch": (
        """\
#!/bin/bash
#SBATCH -N 1-4
#SBATCH --gpus=8
#SBATCH --time=UNLIMITED
srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$SLURM_GPUS_PER_NODE train.py --per_device_train_batch_size 4 --bf16
""",
        """\
Slurm batch script
--per_device_train_batch_size: micro_batch = 4
--bf16: precision = 'amp_bf16'
info #SBATCH --nodes (nnodes stays open)
info #SBATCH --gpus
info --nnodes (nnodes stays open)
info --nproc-per-node (nproc_per_node stays open)
info #SBATCH --time
""",
    ),
    "job3.sbatch": (
        """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:4
#SBATCH --ntasks=8
#SBATCH --time=30:00
srun python train.py
""",
        """\
Slurm batch script
#SBATCH --nodes: nnodes = 2
#SBATCH --gres: gpus_per_node = 4
#SBATCH --ntasks: nproc_per_node = 4
#SBATCH --ntasks: world_size = 8
#SBATCH --time: time_limit_s = 1800.0
""",
    ),
    "a.sh": (
        """\
torchrun --nnodes 2 train.py --bf16 --torch_compile --output_dir o
""",
        """\
launch command
--nnodes: nnodes = 2
info --nproc-per-node
""",
    ),
    "b.sh": (
        """\
deepspeed --include worker-1:0,1@worker-2:0,1 train.py --deepspeed ds.json --per_device_train_batch_size 4
""",
        """\
launch command
--include: nproc_per_node = 2
--include: nnodes = 2
--per_device_train_batch_size: micro_batch = 4
info --deepspeed
""",
    ),
    "c.sh": (
        """\
deepspeed train.py --deepspeed_config ds.json --gradient_accumulation_steps 2
""",
        """\
launch command
--gradient_accumulation_steps: accumulation = 2
info --deepspeed_config
info --num_gpus (nproc_per_node stays open)
""",
    ),
    "d.sh": (
        """\
accelerate launch --multi_gpu --num_processes 8 --mixed_precision bf16 --dynamo_backend inductor --use_fsdp --fsdp_activation_checkpointing true --gradient_accumulation_steps 4 --config_file acc.yaml train.py
""",
        """\
launch command
--num-processes: world_size = 8
--mixed-precision: precision = 'amp_bf16'
--dynamo-backend: compile = True
--use-fsdp: sharding = 'fsdp'
--fsdp-activation-checkpointing: activation_checkpointing = True
--gradient-accumulation-steps: accumulation = 4
info --config-file
""",
    ),
    "e.sh": (
        """\
accelerate launch --use_deepspeed --zero_stage 2 --offload_optimizer_device cpu --offload_param_device none --num_processes 4 --num_machines 2 --parallelism_config_tp_size 2 train.py --learning_rate 1e-4
""",
        """\
launch command
--zero-stage: zero_stage = 2
--offload-optimizer-device: offload_optimizer = True
--offload-param-device: offload_parameters = False
--num-processes: world_size = 4
--num-machines: nnodes = 2
--parallelism-config-tp-size: tp = 2
""",
    ),
}
"""File name -> (file text, expected settings and notes)."""
