"""Jobs on this machine: the process that runs one, followed to its end; one plain process, or torchrun with several ranks."""

import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.launch.job import Ended, Follower, Job, Launcher, OnLine, ended_job, first_error, prepare
from trainpace.process import Child, ending_of, usable_cores
from trainpace.units import format_duration

POLL_S = 0.05
GRACE_S = 15.0
"""How long ranks may take to exit once the result is there: some engines hang at shutdown, after all work is done."""
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The variables that torchrun would set. With one rank, port 0 means any that is free."""


class OnThisMachine(Launcher):
    """What the launchers of this machine share. `threads_given`: OMP_NUM_THREADS stands in our own environment, so that the
    user has chosen it."""

    python: str = msgspec.field(default_factory=lambda: sys.executable)
    cores: int = msgspec.field(default_factory=usable_cores)
    threads_given: bool = msgspec.field(default_factory=lambda: "OMP_NUM_THREADS" in os.environ)

    def command(self, job: Job) -> tuple[str, ...]:
        """The command that is started. Raises TrainpaceError for a job that this launcher cannot start."""
        raise NotImplementedError

    def environment(self, job: Job) -> dict[str, str]:
        """The variables that are added to this process's environment. Unless the user chose, a rank takes an even share of the
        cores: each would start a thread for every core, and under torchrun a single one."""
        added = {"PYTHONUNBUFFERED": "1"}
        if job.cpus_per_process is not None or not self.threads_given:
            added["OMP_NUM_THREADS"] = str(job.cpus_per_process or max(1, self.cores // job.nproc_per_node))
        return added | job.environment

    def text(self, job: Job) -> str:
        words = (f"{key}={value}" for key, value in self.environment(job).items())
        return shlex.join(["env", *words, *self.command(job)])

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        return run_here(job, self.command(job), self.environment(job), on_line)


class ThisMachine(OnThisMachine):
    """The launcher of one plain process."""

    name = "process"

    def command(self, job: Job) -> tuple[str, ...]:
        if job.world_size > 1:
            raise TrainpaceError(
                f"one plain process cannot be a job of {job.world_size} ranks.", "Launch it with torchrun or Slurm."
            )
        return (self.python, *job.program)

    def environment(self, job: Job) -> dict[str, str]:
        return ONE_RANK | super().environment(job)


class Torchrun(OnThisMachine):
    """The launcher of `nproc_per_node` ranks on this machine. Source of the options: torch.distributed.run's documentation."""

    name = "torchrun"

    def check(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise TrainpaceError("torchrun is not here: torch is not installed.", "Install it: pip install torch")

    def command(self, job: Job) -> tuple[str, ...]:
        """--standalone takes a port that is free, so that two jobs do not meet; --local-addr spares it to look up a host
        name that may have no address; --log-dir has its error files in the job's folder, for it does not remove them."""
        if job.nnodes > 1:
            raise TrainpaceError(f"torchrun on this machine cannot start {job.nnodes} nodes.", "Launch it with Slurm.")
        options = f"--standalone --local-addr 127.0.0.1 --nnodes 1 --nproc-per-node {job.nproc_per_node}"
        logs = str(Path(job.folder, "torchrun"))
        return (self.python, "-m", "torch.distributed.run", *options.split(), "--log-dir", logs, *job.program)


def run_here(
    job: Job, command: Sequence[str], environment: dict[str, str], on_line: OnLine | None = None, cwd: str | None = None
) -> Ended:
    """Start `command` in a session of its own, under a guard that ends all of it with us, and wait for it."""
    prepare(job)
    follower = Follower(job.log, on_line)
    with (
        job.log.open("ab") as output,
        Child(command, {**os.environ, **environment}, cwd, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        started, done_at = time.monotonic(), float("inf")
        while child.exit_code is None:
            now = time.monotonic()
            if done_at == float("inf") and Path(job.result).exists():
                done_at = now
            if now - started > job.timeout_s or now - done_at > GRACE_S:
                break
            follower.tell()
            child.wait(POLL_S)
        code, seconds = child.exit_code, time.monotonic() - started
    follower.tell(at_end=True)
    if code is None:
        return ended_job(job, "timed out", seconds, f"{job.name} did not end within {format_duration(job.timeout_s)}.")
    reason = first_error(job.log) or f"{job.name} left no result: it {ending_of(code)}."
    return ended_job(job, "failed", seconds, reason, code)
