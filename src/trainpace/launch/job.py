"""The contract of every launcher: the job that is started, and how it ended."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.records import Record

State = Literal["done", "failed", "timed out", "cancelled"]


class Job(Record):
    """A program on `nnodes` x `nproc_per_node` processes, one a rank.

    `program` is what follows ``python``: ``("-m", module, ...)`` or a script and its arguments. Ranks find RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, as torchrun sets them. Rank 0 writes `result` whole, as its
    last act: a job is done if and only if that file is there. `folder` takes logs and what a launcher writes.
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

    def __post_init__(self) -> None:
        if not self.program:
            raise TrainpaceError("a job needs a program.")
        if self.nnodes < 1 or self.nproc_per_node < 1:
            raise TrainpaceError(f"a job cannot have {self.nnodes} x {self.nproc_per_node} processes.")
        if not 0 < self.timeout_s < float("inf"):
            raise TrainpaceError(f"a job cannot have {self.timeout_s} s.")
        for name in self.environment:
            if not (name.isascii() and name.isidentifier()):
                raise TrainpaceError(f"{name!r} is not a name for an environment variable.")

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


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
        since jobs that share a machine slow each other down; Slurm runs as many at once as it has room for."""
        return tuple(self.run(job, on_line) for job in jobs)
