"""Batch scripts for Slurm: text and nothing else. Source: the manuals of sbatch and srun, 22.05 to 24.11.

Ranks are started by srun, one a task, and not by a torchrun on every node: Slurm then sees every rank, ends all when one
fails, and writes what each says; there is no second rendezvous to hang in, and no agent that swallows an exit code. Only a
user's own command that is a torchrun is started once a node, and finds the others by torchrun's variables (PET_NODE_RANK, ...).
"""

import math
import shlex
from collections.abc import Sequence

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.run.job import Job, Starts, file_name

MARGIN = 0.1
"""Slurm's limit is above ours by this share, and a minute: ours tells which job it was, and has its log."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Below where Linux takes ports for outgoing connections (32768 on)."""


class SlurmOptions(Record):
    """The options that a cluster wants of its users. `extra`: further options of sbatch, such as ``--constraint=a100`` or
    ``--exclusive``. `setup`: lines of shell before the ranks start, such as ``module load cuda``. `at_once`: most tasks of an
    array that run at the same time. `python`: on the nodes; None for the one that runs this."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    at_once: int | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "python"):
            if not (getattr(self, name) or "").isprintable():
                raise TrainpaceError(
                    f"the {name} {getattr(self, name)!r} of [slurm] holds a line break or the like."
                )
        for option in self.extra:
            if not option.startswith("-") or not option.isprintable():
                raise TrainpaceError(
                    f"{option!r} is not an option of sbatch.", "Write it as --constraint=a100."
                )
        if self.at_once is not None and self.at_once < 1:
            raise TrainpaceError(f"{self.at_once} jobs cannot run at once.")


Shape = tuple[int, int, int | None, int, str, str | None]


def shape_of(job: Job) -> Shape:
    """The properties that jobs of one array share: nodes, processes a node, cores a process, GPUs a node, who starts them."""
    return (
        job.nnodes,
        job.nproc_per_node,
        job.cpus_per_process,
        job.gpus_per_node,
        job.starts,
        job.cwd,
    )


def batch_script(job: Job, options: SlurmOptions, python: str) -> str:
    head = _head((job,), options, [f"--output={_pattern(str(job.log))}"])
    own = [] if job.starts == "python" else ["began=$(date +%s.%N)"]
    end = "" if job.starts == "python" else f' && echo "$began" > {shlex.quote(job.result)}'
    words = f"words=({shlex.join(_words(job, python))})"
    return "\n".join(
        [*head, *own, *_exports(job.environment), *_ADDRESS, words, f"{_start(job)}{end}\n"]
    )


def _words(job: Job, python: str) -> Sequence[str]:
    return (python, *job.program) if job.starts == "python" else job.program


def array_script(jobs: Sequence[Job], options: SlurmOptions, python: str) -> str:
    """One array for jobs of one shape: task i runs ``jobs[i]`` and writes its log. Not for whole commands."""
    assert {shape_of(job) for job in jobs} == {shape_of(jobs[0])}
    assert jobs[0].starts == "python"
    at_once = f"%{options.at_once}" if options.at_once else ""
    output = f"{jobs[0].folder}/slurm-"
    array = [f"--array=0-{len(jobs) - 1}{at_once}", f"--output={_pattern(output, '%A_%a.out')}"]
    cases = ["case $SLURM_ARRAY_TASK_ID in"]
    for i, job in enumerate(jobs):
        log, words = shlex.quote(str(job.log)), shlex.join([python, *job.program])
        lines = [f"exec >>{log} 2>&1", *_exports(job.environment), f"words=({words})"]
        cases += [f"{i})", *(f"  {line}" for line in lines), "  ;;"]
    return "\n".join(
        [*_head(jobs, options, array), *cases, "esac", *_ADDRESS, f"{_start(jobs[0])}\n"]
    )


def time_limit(timeout_s: float) -> str:
    """The value of --time, days-hours:minutes:seconds: whole minutes, with a margin."""
    minutes = math.ceil(timeout_s * (1 + MARGIN) / 60) + 1
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"


def _head(jobs: Sequence[Job], options: SlurmOptions, own: Sequence[str]) -> list[str]:
    job = jobs[0]
    if not (job.cwd or "").isprintable():
        raise TrainpaceError(f"a Slurm script cannot name the folder {job.cwd!r}.", "Rename it.")
    wanted = [
        f"--job-name={file_name(job.name)}",
        f"--nodes={job.nnodes}",
        f"--ntasks={job.nnodes * job.tasks_per_node}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--cpus-per-task={_cores_of_a_task(job)}" if job.cpus_per_process else "",
        f"--gres=gpu:{job.gpus_per_node}" if job.gpus_per_node else "",
        f"--time={time_limit(max(job.timeout_s for job in jobs))}",
        "--requeue",
        "--open-mode=append",
        *own,
        f"--chdir={shlex.quote(job.cwd)}" if job.cwd else "",
        *(
            f"--{name}={shlex.quote(value)}"
            for name in ("partition", "account", "qos")
            if (value := getattr(options, name))
        ),
        *options.extra,
    ]
    # srun has not taken --cpus-per-task from sbatch since 22.05
    cores = "${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    threads = [f"export OMP_NUM_THREADS={job.cpus_per_process or cores} PYTHONUNBUFFERED=1"]
    return [
        "#!/bin/bash",
        *(f"#SBATCH {word}" for word in wanted if word),
        "",
        *options.setup,
        *threads,
    ]


_ADDRESS = [
    # where Slurm itself reaches the first node: its name may not be one that resolves
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    (
        'MASTER_ADDR=$(scontrol show node "$first" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p" |'
        " head -n 1)"
    ),
    (
        f"export MASTER_ADDR=${{MASTER_ADDR:-$first}} MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID %"
        f" {PORTS}))"
    ),
    # the script runs on the first node, where rank 0 will listen: a port on which something else does is passed over
    'while (: <>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do ((MASTER_PORT++)); done',
]


def _cores_of_a_task(job: Job) -> int:
    return (job.cpus_per_process or 0) * job.nproc_per_node // job.tasks_per_node


def _start(job: Job) -> str:
    """The srun command. It outlives the loss of a node, so that Slurm finds the job still running there, and requeues it.

    A rank that fails holds its end back for a second. srun stops reading what ranks say as soon as one of the others was
    killed for it, and the line that says what went wrong would be lost (14 of 20 jobs whose other rank waited). Slurm sends its
    signals to every process of a step: the shell lets them pass, for the rank to answer. A whole command has a temporary folder
    of its own on each node: the recorder ends it before it can remove what it left there."""
    cores = f" --cpus-per-task={_cores_of_a_task(job)}" if job.cpus_per_process else ""
    whole = job.starts != "python"
    shell = (
        f"trap : TERM USR1 USR2; export {_RANK_OF[job.starts].format(local=job.nproc_per_node)}; "
    )
    shell += (
        f'{_OWN_FOLDER if whole else ""}"$@"; ended=$?; {_REMOVED if whole else ""}[ $ended = 0 ]'
        " || sleep 1; exit $ended"
    )
    return f"srun --kill-on-bad-exit=1{cores} bash -c '{shell}' rank \"${{words[@]}}\""


_OF_A_RANK = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={local}"
)
_RANK_OF: dict[Starts, str] = {
    "python": _OF_A_RANK,
    "rank": _OF_A_RANK,
    "node": "PET_NODE_RANK=$SLURM_PROCID PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT",
}
_OWN_FOLDER = (
    "export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id"
    " -un)} TMPDIR=$(mktemp -d -t trainpace-trial-XXXXXX); "
)
_REMOVED = 'rm -rf "$TMPDIR"; '


def _exports(environment: dict[str, str]) -> list[str]:
    return [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]


def _pattern(path: str, after: str = "") -> str:
    """A file name as --output takes it, where % has a meaning."""
    return shlex.quote(path.replace("%", "%%") + after)
