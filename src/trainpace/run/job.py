"""Every launcher's contract, which is the job that is started, its log, and how it ended; and the launchers of this machine: one
plain process, or torchrun with several ranks."""

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
from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.core.host import usable_cores
from trainpace.core.records import Record
from trainpace.core.units import format_duration

POLL_S = 0.05
GRACE_S = 15.0
"""How long ranks may take to exit once the result is there: some engines hang at shutdown, after all work is done."""
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""The variables that torchrun would set. With one rank, port 0 means any that is free."""
TAIL_LINES = 20
LONGEST_REASON = 300
MOST_LOG_BYTES = 1 << 30
"""A job that writes more in the time of a trial would fill the disk."""
READ_BYTES = 1 << 25
"""Of a log, at its beginning and at its end, to say why a job failed."""

_RANK = re.compile(r"^\[rank ?\d+\]:\s?")
"""What torch puts before the lines of a traceback."""
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*(?:: |:?$)")
"""The last line of a traceback: the exception's class, with its module, and its message. Others may write in between."""
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
"""What ranks say when another rank has gone: true, but not why."""
_CHILD_SIGNAL = re.compile(r"exitcode\s*:\s*-(\d+)")
"""What torchrun reports of a rank that a signal ended."""
_TASK_ENDED = re.compile(r"\btasks? [\d,-]+: (?:Killed|Exited with exit code (?P<code>\d+))")
"""What srun reports of ranks; that the others were terminated for it is no news."""
_AFTERMATH = re.compile(r"CANCELLED|task [\d,-]+: |Job step aborted|Terminating")

Starts = Literal["python", "rank", "node"]
"""What a job's program is: what follows ``python``, started once a rank; a whole command, once a rank; or a whole command that
starts the ranks of its node by itself, as torchrun does, once a node."""
State = Literal["done", "failed", "timed out", "cancelled"]


class Job(Record):
    """A program on `nnodes` x `nproc_per_node` processes, one a rank.

    `program` is what follows ``python``: ``("-m", module, ...)`` or a script and its arguments; `starts` says where it is a whole
    command, which runs in `cwd`. Ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, as
    torchrun sets them. Rank 0 writes `result` whole, as its last act: a job is done if and only if that file is there. Of a whole
    command that ended well Slurm's batch script writes it, with the time of its start. `folder` takes logs and what a launcher
    writes.
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
            raise TrainpaceError(f"a job cannot have {self.timeout_s} s.")
        for name in self.environment:
            if not (name.isascii() and name.isidentifier()):
                raise TrainpaceError(f"{name!r} is not a name for an environment variable.")

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
    """How a job ended. `reason`: one sentence where it is not done; `tail`: the last lines of its log, which is at `log`.

    `seconds` count from the start (of the processes, not of waiting in a queue). `attempts`: above 1 after a requeue.
    """

    state: State
    seconds: float
    log: str
    reason: str = ""
    tail: str = ""
    exit_code: int | None = None
    attempts: int = 1


OnLine = Callable[[str], None]


class Launcher(Record):
    """Starts jobs. `name` is what users call it: process, torchrun or slurm. `text` is pure and says just what `run` starts."""

    name: ClassVar[str]

    def check(self) -> None:
        """Raise TrainpaceError with what to install, before anything starts, where this launcher is missing."""

    def text(self, job: Job) -> str:
        raise NotImplementedError

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        """Start, follow the log line by line, and wait. Ctrl-C ends all its processes, then raises KeyboardInterrupt."""
        raise NotImplementedError

    def run_all(self, jobs: Sequence[Job], on_line: OnLine | None = None) -> tuple[Ended, ...]:
        """Run all, and return their ends in the order of `jobs`; one that fails does not keep the others. One after the other,
        since jobs that share a machine slow each other down; Slurm runs as many at once as it has room for.
        """
        return tuple(self.run(job, on_line) for job in jobs)


def file_name(name: str) -> str:
    """A job's name with only the characters that a file name or a script takes."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "job"


def prepare(job: Job) -> None:
    """Make the job's folder and its empty log. The result of an earlier run is removed: it must not pass for this one's."""
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
    """How a job ended: it is done if its result is there, else `state` for `reason`."""
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
    """Tells `on_line` of the new whole lines of a growing file at each call; the file may not be there yet."""

    def __init__(self, path: str | Path, on_line: OnLine | None = None) -> None:
        self._path, self._on_line, self._read, self._rest = (
            Path(path),
            on_line or (lambda _: None),
            0,
            b"",
        )

    def tell(self, at_end: bool = False) -> None:
        """Tell lines that ended since the last call; `at_end` also what is left without one. Of a line rewritten with carriage
        returns (a progress bar), what it showed last."""
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
    """Whether a rank says no more than that another one has gone."""
    return any(word in text for word in _OF_A_PEER)


def tail_of(path: str | Path) -> str:
    return "\n".join(_lines(path)[-TAIL_LINES:])


def first_error(path: str | Path) -> str:
    """The line that most likely says why a job failed, "" where none does: the first exception that is not torchrun's own report
    nor a rank's complaint that another has gone; else what an interpreter, a shell or Slurm called an error; else a complaint.
    """
    of_peers, stated, killed, in_traceback = "", "", "", False
    for line in (_RANK.sub("", line).rstrip() for line in _lines(path)):
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif (_RAISED if in_traceback else _RAISED_ELSEWHERE).match(line):
            in_traceback = False
            if complains_of_a_peer(line):
                of_peers = of_peers or line
            elif not any(word in line for word in _OF_TORCHRUN):
                return line[:LONGEST_REASON]
        elif child := _CHILD_SIGNAL.search(line):
            killed = killed or f"a rank {ending_of(-int(child.group(1)))}"
        elif task := _TASK_ENDED.search(line):
            killed = killed or f"a rank {ending_of(int(task.group('code') or -9))}"
        elif _STATED.search(line) and not _AFTERMATH.search(line):
            stated = stated or line.strip()
    return (stated or killed or of_peers)[:LONGEST_REASON]


def _lines(path: str | Path) -> list[str]:
    """Of a long log its beginning and its end."""
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
    """The launcher of one plain process."""

    name = "process"

    def command(self, job: Job) -> tuple[str, ...]:
        if job.world_size > 1:
            raise TrainpaceError(
                f"one plain process cannot be a job of {job.world_size} ranks.",
                "Launch it with torchrun or Slurm.",
            )
        return (self.python, *job.program)

    def environment(self, job: Job) -> dict[str, str]:
        return ONE_RANK | super().environment(job)


class Torchrun(OnThisMachine):
    """The launcher of `nproc_per_node` ranks on this machine. Source of the options: torch.distributed.run's documentation."""

    name = "torchrun"

    def check(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise TrainpaceError(
                "torchrun is not here: torch is not installed.", "Install it: pip install torch"
            )

    def command(self, job: Job) -> tuple[str, ...]:
        """--standalone takes a port that is free, so that two jobs do not meet; --local-addr spares it to look up a host
        name that may have no address; --log-dir has its error files in the job's folder, for it does not remove them.
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
    """Start `command` in a session of its own, under a guard that ends all of it with us, and wait for it."""
    prepare(job)
    follower = Follower(job.log, on_line)
    with (
        job.log.open("ab") as output,
        Child(
            command, {**os.environ, **environment}, cwd, stdout=output, stderr=subprocess.STDOUT
        ) as child,
    ):
        started, done_at, too_long = time.monotonic(), float("inf"), False
        while child.exit_code is None:
            now = time.monotonic()
            if done_at == float("inf") and Path(job.result).exists():
                done_at = now
            too_long = _size_of(job.log) > MOST_LOG_BYTES
            if now - started > job.timeout_s or now - done_at > GRACE_S or too_long:
                break
            follower.tell()
            child.wait(POLL_S)
        code, seconds = child.exit_code, time.monotonic() - started
    follower.tell(at_end=True)
    if too_long:
        return ended_job(
            job,
            "failed",
            seconds,
            f"{job.name} was ended: it wrote more than {MOST_LOG_BYTES >> 20} MiB to its log.",
        )
    if code is None:
        return ended_job(
            job,
            "timed out",
            seconds,
            f"{job.name} did not end within {format_duration(job.timeout_s)}.",
        )
    gone = "" if job.log.exists() else f"{job.folder} was removed while it ran."
    reason = gone or first_error(job.log) or f"{job.name} left no result: it {ending_of(code)}."
    return ended_job(job, "failed", seconds, reason, code)
