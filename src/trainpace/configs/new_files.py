"""New settings files made from an Execution alone."""

from msgspec.structs import replace

from trainpace.configs.changes import Changes
from trainpace.configs.write import Written, write_changes
from trainpace.execution import Execution


def new_deepspeed(execution: Execution, file: str = "ds.json") -> Written:
    """A DeepSpeed JSON file with the batch sizes, the precision and the ZeRO stage."""
    text = (
        '{\n  "train_micro_batch_size_per_gpu": 1,\n  "gradient_accumulation_steps": 1,\n  "train_batch_size": 1\n}\n'
    )
    return _new(text, file, execution)


def new_accelerate(execution: Execution, file: str = "accelerate.yaml") -> Written:
    """An accelerate YAML file with the processes and the precision, and with DeepSpeed where states are sharded."""
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nnum_machines: 1\n"
        "num_processes: 1\nuse_cpu: false\n"
    )
    if execution.nnodes > 1:
        text += "# each node's own: accelerate launch --main_process_ip ADDRESS --machine_rank NUMBER\n"
    return _new(text, file, execution)


def new_torchrun(execution: Execution, script: str = "train.py", file: str = "launch.sh") -> Written:
    """A torchrun command; on several nodes it has a rendezvous endpoint, where $HEAD_NODE names one of the nodes."""
    several = " --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500" if execution.nnodes > 1 else ""
    return _new(f"torchrun --nnodes=1 --nproc-per-node=1{several} {script}\n", file, execution)


def new_sbatch(
    execution: Execution, script: str = "train.py", file: str = "job.sbatch", time_limit_s: float | None = None
) -> Written:
    """A batch script that starts torchrun once per node, with a rendezvous on the first node and one GPU per process."""
    text = (
        "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=1\n\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)\n'
        "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --rdzv-id=$SLURM_JOB_ID \\\n"
        f"    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 {script}\n"
    )
    return _new(text, file, execution, time_limit_s)


def _new(text: str, file: str, execution: Execution, time_limit_s: float | None = None) -> Written:
    changes = Changes(before=Execution(), after=execution, time_limit_s=time_limit_s)  # what these texts say
    written = write_changes(text, file, changes)
    return replace(written, before="")
