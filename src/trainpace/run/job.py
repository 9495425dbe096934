"""Jobs, the interface of all launchers, and the launchers for this machine.

A launcher starts a job, follows its log and reports how it ended. On this machine, a job is one
plain process or several ranks under torchrun.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from trainpace.core.child import Child, ending_of
from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason, shortened
from trainpace.core.host import usable_cores
from trainpace.core.records import Record
from trainpace.core.units import format_duration

POLL_S = 0.05
"""Seconds between two checks of a job."""
GRACE_S = 15.0
"""Seconds that ranks have to exit after the result is written. Some engines hang at shutdown."""
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Environment variables that torchrun would set for a single rank. Port 0 means any free port."""
TAIL_LINES = 20
"""Number of last log lines that a failed job reports."""
MOST_LOG_BYTES = 1 << 30
"""Log size in bytes at which a job is ended. A larger log could fill the disk."""

UNTRACKED = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:{folder}/mlruns",
}
"""Environment variables that stop experiment trackers from recording a trial as a real run."""
READ_BYTES = 1 << 25
"""Number of bytes read from each end of a log to find the reason of a failure."""

_RANK = re.compile(r"^\[rank ?\d+\]:\s?")
"""Pattern of the prefix that torch puts before each line of a rank's stack trace."""
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*(?:: |:?$)")
"""Pattern of the last line of a stack trace: the exception's class and its message.

The class may include its module. Lines of other ranks may appear inside a stack trace.
"""
_RAISED_ELSEWHERE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_STATED = re.compile(
    r"^(?:\S+: )?(?:Error: |error: |Fatal Python error|Segmentation fault|terminate"
    r" called|Killed$|can't open file)"
    r"|No module named|oom[-_ ]kill|Out of memory|command not found|: error: ",
    re.IGNORECASE,
)
_OF_TORCHRUN = ("torch.distributed.elastic", "ChildFailedError")
_OF_A_PEER = (
    "closed by peer",
    "reset by peer",
    "roken pipe",
    "connectFullMesh",
    "imed out waiting",
)
"""Messages of ranks that lost another rank. They do not explain why that rank exited."""
_CHILD_SIGNAL = re.compile(r"exitcode\s*:\s*-(\d+)")
"""Pattern in torchrun's report of a rank that was ended by a signal."""
_TASK_ENDED = re.compile(r"\btasks? [\d,-]+: (?:Killed|Exited with exit code (?P<code>\d+))")
"""Pattern in srun's report of failed ranks. Ranks that srun terminated later do not match."""
_AFTERMATH = re.compile(r"CANCELLED|task [\d,-]+: |Job step aborted|Terminating")

Starts = Literal["python", "rank", "node"]
"""Kind of a job's program, and how often it is started.

- python: the arguments of ``python``, started once per rank.
- rank: a complete command, started once per rank.
- node: a complete command that starts the ranks of its node (torchrun), started once per node.
"""
State = Literal["done", "failed", "timed out", "cancelled"]
"""Final state of a job."""


class Job(Record):
    """Program that runs on `nnodes` x `nproc_per_node` ranks.

    `program` holds the arguments of ``python``: ``("-m", module, ...)``, or a script and its
    arguments. For other values of `starts` it is a complete command, run in `cwd`. Ranks read RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from their environment, as under torchrun.

    Rank 0 writes the file `result` as its last action, in one piece. A job is done if and only if
    this file exists. For a complete command, Slurm's batch script writes the file after success,
    with the start time. `folder` holds the logs and the launcher's own files.
    """

    name: str
    program: tuple[str, ...]
    folder: str
    result: str
    nnodes: int = 1
    nproc_per_node: int = 1
    cpus_per_process: int | None = None
    gpus_per_node: int = 0
    timeout_s: float = 600.0
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    starts: Starts = "python"
    cwd: str | None = None

    def __post_init__(self) -> None:
        if not self.program:
            raise TrainpaceError("a job needs a program.")
        if self.nnodes < 1 or self.nproc_per_node < 1:
            raise TrainpaceError(
                f"a job cannot have {self.nnodes} x {self.nproc_per_node} processes."
            )
        if not 0 < self.timeout_s < float("inf"):
            raise TrainpaceError(f"a job cannot have a time limit of {self.timeout_s} s.")
        for name in self.environment:
            check_variable(name)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def tasks_per_node(self) -> int:
        return 1 if self.starts == "node" else self.nproc_per_node

    @property
    def log(self) -> Path:
        return Path(self.folder, file_name(self.name) + ".log")


class Ended(Record):
    """Outcome of a job.

    Attributes:
        seconds: Time from the start of the processes, without time in a queue.
        log: Path of the log.
        reason: Sentence that says why the job is not done, or "".
        tail: Last lines of the log if the job is not done.
        attempts: Number of starts. It is above 1 after a requeue.
    """

    state: State
    seconds: float
    log: str
    reason: str = ""
    tail: str = ""
    exit_code: int | None = None
    attempts: int = 1


OnLine = Callable[[str], None]
"""Callback for each new line of a log."""


class Launcher(Record):
    """Base class of launchers. `name` is what users call it: process, torchrun or slurm.

    `text` returns the exact command or script that `run` starts.
    """

    name: ClassVar[str]

    def check(self) -> None:
        """Raise TrainpaceError if this launcher is not installed. The hint says what to install."""

    def text(self, job: Job) -> str:
        """Return the command or script that `run` starts for a job."""
        raise NotImplementedError

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        """Start a job, pass each line of its log to `on_line`, and wait for the end.

        Ctrl-C ends all processes of the job, then raises KeyboardInterrupt.
        """
        raise NotImplementedError


def check_variable(name: str) -> None:
    """Raise TrainpaceError if `name` is not a valid name for an environment variable."""
    if not (name.isascii() and name.isidentifier()):
        raise TrainpaceError(f"{name!r} is not a valid name for an environment variable.")


def file_name(name: str) -> str:
    """Return a job's name with only characters that are safe in file names and scripts."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "job"


def prepare(job: Job) -> None:
    """Create the job's folder and an empty log. Remove the result of an earlier run."""
    try:
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        Path(job.result).unlink(missing_ok=True)
        job.log.write_text("")
    except OSError as error:
        raise UnreadableInput(f"cannot write to {job.folder}: {os_reason(error)}.") from None


def ended_job(
    job: Job,
    state: State,
    seconds: float,
    reason: str,
    exit_code: int | None = None,
    attempts: int = 1,
) -> Ended:
    """Return the outcome of a job: done if its result exists, otherwise `state` and `reason`."""
    done = Path(job.result).exists()
    return Ended(
        state="done" if done else state,
        seconds=seconds,
        log=str(job.log),
        reason="" if done else reason,
        tail="" if done else tail_of(job.log),
        exit_code=exit_code,
        attempts=attempts,
    )


class Follower:
    """Reader that reports new complete lines of a growing file. The file may not exist yet."""

    def __init__(self, path: str | Path, on_line: OnLine | None = None) -> None:
        self._path, self._on_line = Path(path), on_line or (lambda _: None)
        self._read, self._rest = 0, b""

    def report(self, at_end: bool = False) -> None:
        """Report the lines completed since the last call. `at_end` includes the unfinished line.

        If a progress bar rewrites a line with carriage returns, only its last state is reported.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            new = b""
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if at_end and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])


def complains_of_a_peer(text: str) -> bool:
    """Return True if the text is only a rank's complaint that another rank exited."""
    return any(word in text for word in _OF_A_PEER)


def tail_of(path: str | Path) -> str:
    """Return the last TAIL_LINES lines of a log."""
    return "\n".join(_lines(path)[-TAIL_LINES:])


def first_error(path: str | Path) -> str:
    """Return the log line that most likely explains why a job failed, or "".

    The first exception has priority. torchrun's own reports and complaints about an exited rank do
    not count as exceptions. Next come errors reported by an interpreter, a shell or Slurm, and last
    the complaints of ranks.
    """
    found: dict[str, str] = {}
    in_traceback = False
    for line in (_RANK.sub("", line).rstrip() for line in _lines(path)):
        raised = (_RAISED if in_traceback else _RAISED_ELSEWHERE).match(line) is not None
        if raised or line.startswith("Traceback (most recent call last)"):
            in_traceback = not raised
        found.setdefault(*_exception(line) if raised else _hint(line))
    best = next((found[kind] for kind in _BY_WEIGHT if kind in found), "")
    return shortened(best)


_BY_WEIGHT = ("raised", "stated", "killed", "peer")
"""Kinds of lines that explain a failure, the most telling first."""


def _exception(line: str) -> tuple[str, str]:
    """Return the kind of an exception's line, and the line. torchrun's own have no kind."""
    if complains_of_a_peer(line):
        return "peer", line
    return "" if any(word in line for word in _OF_TORCHRUN) else "raised", line


def _hint(line: str) -> tuple[str, str]:
    """Return the kind of failure that a line outside a stack trace reports, and a sentence."""
    if child := _CHILD_SIGNAL.search(line):
        return "killed", f"a rank {ending_of(-int(child.group(1)))}"
    if task := _TASK_ENDED.search(line):
        return "killed", f"a rank {ending_of(int(task.group('code') or -9))}"
    is_error = _STATED.search(line) and not _AFTERMATH.search(line)
    return ("stated", line.strip()) if is_error else ("", "")


def _lines(path: str | Path) -> list[str]:
    """Return the lines of a log. For a long log, only its beginning and its end are read."""
    try:
        with open(path, "rb") as file:
            text = file.read(READ_BYTES)
            if os.fstat(file.fileno()).st_size > 2 * READ_BYTES:
                file.seek(-READ_BYTES, os.SEEK_END)
            return (text + file.read(READ_BYTES)).decode(errors="replace").splitlines()
    except OSError:
        return []


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class OnThisMachine(Launcher):
    """Base class of launchers for this machine.

    `threads_given` is True if this process's environment has OMP_NUM_THREADS: the user has chosen
    it.
    """

    python: str = msgspec.field(default_factory=lambda: sys.executable)
    cores: int = msgspec.field(default_factory=usable_cores)
    threads_given: bool = msgspec.field(default_factory=lambda: "OMP_NUM_THREADS" in os.environ)

    def command(self, job: Job) -> tuple[str, ...]:
        """Return the command that starts the job.

        Raises:
            TrainpaceError: If this launcher cannot start the job.
        """
        raise NotImplementedError

    def environment(self, job: Job) -> dict[str, str]:
        """Return the environment variables to add for the job.

        Unless the user has set OMP_NUM_THREADS, each rank gets an even share of the cores. Without
        the variable, a plain process would use one thread per core, and each rank of torchrun only
        one thread.
        """
        added = {"PYTHONUNBUFFERED": "1"}
        if job.cpus_per_process is not None or not self.threads_given:
            added["OMP_NUM_THREADS"] = str(
                job.cpus_per_process or max(1, self.cores // job.nproc_per_node)
            )
        return added | job.environment

    def text(self, job: Job) -> str:
        words = (f"{key}={value}" for key, value in self.environment(job).items())
        return shlex.join(["env", *words, *self.command(job)])

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        return run_here(job, self.command(job), self.environment(job), on_line)


class ThisMachine(OnThisMachine):
    """Launcher for one plain process."""

    name = "process"

    def command(self, job: Job) -> tuple[str, ...]:
        if job.world_size > 1:
            raise TrainpaceError(
                f"one plain process cannot run {job.world_size} ranks.",
                "Launch it with torchrun or Slurm.",
            )
        return (self.python, *job.program)

    def environment(self, job: Job) -> dict[str, str]:
        return ONE_RANK | super().environment(job)


class Torchrun(OnThisMachine):
    """Launcher for `nproc_per_node` ranks on this machine, with torchrun
    (torch.distributed.run)."""

    name = "torchrun"

    def check(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise TrainpaceError(
                "torch is not installed, so torchrun is missing.", "Install it: pip install torch"
            )

    def command(self, job: Job) -> tuple[str, ...]:
        """Return the torchrun command.

        --standalone picks a free port, so two jobs do not collide. --local-addr avoids a lookup of
        the host name, which may not resolve. --log-dir puts torchrun's error files into the job's
        folder, because torchrun does not remove them.
        """
        if job.nnodes > 1:
            raise TrainpaceError(
                f"torchrun on this machine cannot start {job.nnodes} nodes.",
                "Launch it with Slurm.",
            )
        options = (
            f"--standalone --local-addr 127.0.0.1 --nnodes 1 --nproc-per-node {job.nproc_per_node}"
        )
        logs = str(Path(job.folder, "torchrun"))
        return (
            self.python,
            "-m",
            "torch.distributed.run",
            *options.split(),
            "--log-dir",
            logs,
            *job.program,
        )


def run_here(
    job: Job,
    command: Sequence[str],
    environment: dict[str, str],
    on_line: OnLine | None = None,
    cwd: str | None = None,
) -> Ended:
    """Run `command` in its own session and wait for the end.

    A guard process ends the whole session if this process dies. The command is also ended after
    `job.timeout_s`, if its log grows too large, or if it does not exit after the result is written.
    """
    prepare(job)
    follower = Follower(job.log, on_line)
    with (
        job.log.open("ab") as output,
        Child(
            command, {**os.environ, **environment}, cwd, stdout=output, stderr=subprocess.STDOUT
        ) as child,
    ):
        started = time.monotonic()
        too_long = _watch(job, child, follower)
        code, seconds = child.exit_code, time.monotonic() - started
    follower.report(at_end=True)
    limit = f"{job.name} was ended: its log grew beyond {MOST_LOG_BYTES >> 20} MiB."
    if too_long:
        return ended_job(job, "failed", seconds, limit)
    if code is None:
        late = f"{job.name} did not end within {format_duration(job.timeout_s)}."
        return ended_job(job, "timed out", seconds, late)
    gone = "" if job.log.exists() else f"{job.folder} was removed during the run."
    reason = gone or first_error(job.log) or f"{job.name} left no result: it {ending_of(code)}."
    return ended_job(job, "failed", seconds, reason, code)


def _watch(job: Job, child: Child, follower: Follower) -> bool:
    """Wait until a job ends or reaches a limit. Return True if its log is too long."""
    started, done_at = time.monotonic(), float("inf")
    while child.exit_code is None:
        now = time.monotonic()
        if Path(job.result).exists():
            done_at = min(done_at, now)
        if _size_of(job.log) > MOST_LOG_BYTES:
            return True
        if now - started > job.timeout_s or now - done_at > GRACE_S:
            break
        follower.report()
        child.wait(POLL_S)
    return False
