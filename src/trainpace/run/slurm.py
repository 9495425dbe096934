"""Launcher for Slurm: writes batch scripts, submits jobs, follows them and cancels them.

Only Slurm's own commands are used. `sbatch --wait` polls too rarely (42 s for a job of 12 s), so
squeue is polled instead. ``--states=all`` shows an ended job for MinJobAge (five minutes by
default). squeue then shows the same as ``scontrol show job``. A job is done if its result file
exists. The file must be visible both here and on the nodes.

srun starts one task per rank, instead of one torchrun per node. Slurm then sees every rank, ends
all ranks when one fails, and logs each one's output. There is no second rendezvous that could hang,
and no agent that hides an exit code. Only a user's own torchrun command is started once per node.
There, torchrun finds the other nodes by its own variables (PET_NODE_RANK, ...).

Sources: the manuals of sbatch, srun and squeue, 22.05 to 24.11.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainpace.configs import slurm_seconds
from trainpace.core.child import ending_of
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, write_whole
from trainpace.core.units import format_duration
from trainpace.run.job import (
    GRACE_S,
    Ended,
    Follower,
    Job,
    Launcher,
    OnLine,
    Starts,
    State,
    ended_job,
    file_name,
    first_error,
    prepare,
)

MARGIN = 0.1
"""Relative margin, besides one minute, by which Slurm's time limit exceeds Trainpace's.

Trainpace's limit should act first, because it reports the job and its log.
"""
FIRST_PORT, PORTS = 20_000, 10_000
"""First rendezvous port, and number of ports.

Linux uses ports from 32768 for outgoing connections, so these lie below.
"""


class SlurmOptions(Record):
    """Options that a cluster requires.

    Attributes:
        extra: More options for sbatch, such as ``--constraint=a100`` or ``--exclusive``.
        setup: Shell lines to run before the ranks start, such as ``module load cuda``.
        python: Python interpreter on the nodes. None means the interpreter of this process.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str | None = None

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "python"):
            if not (getattr(self, name) or "").isprintable():
                raise TrainpaceError(
                    f"the {name} {getattr(self, name)!r} of [slurm] contains unprintable "
                    "characters."
                )
        for option in self.extra:
            if not option.startswith("-") or not option.isprintable():
                raise TrainpaceError(
                    f"{option!r} is not an option of sbatch.", "Write it as --constraint=a100."
                )


def batch_script(job: Job, options: SlurmOptions, python: str) -> str:
    """Return the batch script for one job."""
    head = _head(job, options, [f"--output={shlex.quote(str(job.log).replace('%', '%%'))}"])
    # A complete command writes no result file. The script writes its start time as the result.
    begin = [] if job.starts == "python" else ["began=$(date +%s.%N)"]
    end = "" if job.starts == "python" else f' && echo "$began" > {shlex.quote(job.result)}'
    words = f"words=({shlex.join(_words(job, python))})"
    exports = [f"export {key}={shlex.quote(value)}" for key, value in job.environment.items()]
    return "\n".join([*head, *begin, *exports, *_ADDRESS, words, f"{_start(job)}{end}\n"])


def _words(job: Job, python: str) -> Sequence[str]:
    return (python, *job.program) if job.starts == "python" else job.program


def time_limit(timeout_s: float) -> str:
    """Return the value of --time (days-hours:minutes:seconds) in whole minutes, with a margin."""
    minutes = math.ceil(timeout_s * (1 + MARGIN) / 60) + 1
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"


_RESTARTS = ("--requeue", "--open-mode=append")


def _head(job: Job, options: SlurmOptions, own: Sequence[str]) -> list[str]:
    """Return the first lines of a batch script: options, setup and threads."""
    if not (job.cwd or "").isprintable():
        raise TrainpaceError(f"a Slurm script cannot name the folder {job.cwd!r}.", "Rename it.")
    wanted = {
        "job-name": file_name(job.name),
        "nodes": job.nnodes,
        "ntasks": job.nnodes * job.tasks_per_node,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": _cores_of_a_task(job),
        "gres": job.gpus_per_node and f"gpu:{job.gpus_per_node}",
        "time": time_limit(job.timeout_s),
        "chdir": job.cwd and shlex.quote(job.cwd),
    }
    for name in ("partition", "account", "qos"):
        value = getattr(options, name)
        wanted[name] = value and shlex.quote(value)
    words = [f"--{name}={value}" for name, value in wanted.items() if value]
    threads = job.cpus_per_process or "${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    return [
        "#!/bin/bash",
        *(f"#SBATCH {word}" for word in (*words, *_RESTARTS, *own, *options.extra)),
        "",
        *options.setup,
        f"export OMP_NUM_THREADS={threads} PYTHONUNBUFFERED=1",
    ]


_ADDRESS = [
    # Use the address by which Slurm reaches the first node, because its name may not resolve.
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    (
        'MASTER_ADDR=$(scontrol show node "$first" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p" |'
        " head -n 1)"
    ),
    (
        f"export MASTER_ADDR=${{MASTER_ADDR:-$first}} MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID %"
        f" {PORTS}))"
    ),
    # This runs on the first node, where rank 0 will listen. Skip ports that are in use.
    'while (: <>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do ((MASTER_PORT++)); done',
]


def _cores_of_a_task(job: Job) -> int:
    return (job.cpus_per_process or 0) * job.nproc_per_node // job.tasks_per_node


def _start(job: Job) -> str:
    """Return the srun command, with a shell around each rank.

    If a node is lost, srun keeps waiting, so that Slurm finds the job still running and requeues
    it. If a rank fails, its shell waits one second before it exits. Otherwise srun would kill the
    other ranks and stop reading output at once, and the line that explains the failure would be
    lost (in 14 of 20 jobs). Slurm sends its signals to every process of a step. The shell ignores
    the signals, so that the rank handles them. A complete command (not a Python program of
    Trainpace) gets its own TMPDIR, which is removed afterwards, because Trainpace's recorder may
    end the command before it cleans up.
    """
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
    cores = f" --cpus-per-task={_cores_of_a_task(job)}" if job.cpus_per_process else ""
    make, remove = ("", "") if job.starts == "python" else (_MAKE_TMPDIR, _REMOVE_TMPDIR)
    variables = _RANK_VARIABLES[job.starts].format(local=job.nproc_per_node)
    shell = (
        f"trap : TERM USR1 USR2; export {variables}; "
        f'{make}"$@"; ended=$?; {remove}[ $ended = 0 ] || sleep 1; exit $ended'
    )
    return f"srun --kill-on-bad-exit=1{cores} bash -c '{shell}' rank \"${{words[@]}}\""


_VARIABLES_OF_A_RANK = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={local}"
)
_RANK_VARIABLES: dict[Starts, str] = {
    "python": _VARIABLES_OF_A_RANK,
    "rank": _VARIABLES_OF_A_RANK,
    "node": "PET_NODE_RANK=$SLURM_PROCID PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT",
}
"""Variables that tell each task its rank, or torchrun its node."""
_MAKE_TMPDIR = (
    "export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id"
    " -un)} TMPDIR=$(mktemp -d -t trainpace-trial-XXXXXX); "
)
_REMOVE_TMPDIR = 'rm -rf "$TMPDIR"; '


COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
"""Slurm commands that must be on the PATH."""
ANSWER_S = 60.0
"""Seconds to wait for the answer of a Slurm command."""
PATIENCE_S = {"COMPLETED": 5.0} | dict.fromkeys(
    "NODE_FAIL PREEMPTED BOOT_FAIL LAUNCH_FAILED GONE".split(), 10.0
)
"""Seconds to wait for a lost or completed job without a result, by its state.

Slurm may requeue a lost job. A network file system may show the result of a completed job late.
"""
CANCEL_S = 60.0
"""Seconds to wait until a cancelled job has ended.

Slurm gives its ranks KillWait (30 s by default).
"""
CONTROLLER_S = 600.0
"""Seconds without an answer from Slurm's controller before an error is raised.

The jobs keep running meanwhile.
"""
FIELDS = "JobArrayID:|,State:|,Reason:|,RestartCnt:|,TimeUsed:|,exit_code:|"
"""Fields for squeue --Format. Each field is printed in full and followed by "|"."""

_WAITING = (
    "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split()
)
_ENDED = (
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED"
    " REVOKED TIMEOUT".split()
)
_WILL_NEVER_START = {
    "BadConstraints": "no node has the requested resources",
    "InvalidAccount": "unknown account",
    "InvalidQOS": "unknown QOS",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "PartitionTimeLimit": "the partition does not allow such a long job",
    "JobHeldAdmin": "an administrator has put it on hold",
    "launch_failed_requeued_held": "it could not be started on its nodes",
}
"""Slurm's reasons for which a job will never start, in words."""


class Slurm(Launcher):
    """Launcher for jobs on a Slurm cluster. It queries Slurm every `poll_s` seconds."""

    name = "slurm"
    options: SlurmOptions = SlurmOptions()
    poll_s: float = 2.0

    def check(self) -> None:
        absent = [name for name in COMMANDS if shutil.which(name) is None]
        if absent:
            raise TrainpaceError(
                f"Slurm commands not found: {', '.join(absent)}.",
                (
                    "Run this on a login node of the cluster, where sbatch works, or launch with"
                    " torchrun."
                ),
            )

    def text(self, job: Job) -> str:
        return batch_script(job, self.options, self.options.python or sys.executable)

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        """Run one job. Time in the queue does not count.

        `timeout_s` and `Ended.seconds` cover one attempt. Slurm's clock counts them in whole
        seconds.

        Raises:
            TrainpaceError: If Slurm rejects the job, or does not answer for `CONTROLLER_S`.
        """
        self.check()
        followed = self._submit(job, on_line or (lambda _: None))
        try:
            return _follow(followed, self.poll_s)
        except BaseException:
            _cancel_and_wait(followed)
            raise

    def _submit(self, job: Job, on_line: OnLine) -> _Followed:
        prepare(job)
        script = Path(job.folder, f"{file_name(job.name)}.sbatch")
        write_whole(script, self.text(job))
        answer = _ask_to_start(script)
        number = parse_submitted(answer.stdout)
        if answer.returncode or not number:
            raise TrainpaceError(f"Slurm rejected {job.name}: {_refusal(answer)}.")
        return _Followed(job, number, on_line)


def _refusal(answer: subprocess.CompletedProcess[str]) -> str:
    said = answer.stderr.strip() or answer.stdout.strip() or "it returned no job number"
    line = said.splitlines()[-1]
    for prefix in ("sbatch: ", "error: ", "Batch job submission failed: "):
        line = line.removeprefix(prefix)
    return line.strip().rstrip(".")


class _Followed:
    """A submitted job that is followed until it ends."""

    def __init__(self, job: Job, number: str, on_line: OnLine) -> None:
        self.job, self.number = job, number
        self.ended: Ended | None = None
        self.tell, self._log = on_line, Follower(job.log, on_line)
        self._last = JobStatus(state="PENDING")
        self._news, self._state, self._reason = "", "", ""
        self._state_of_cancelled: State = "failed"
        self._changed_at = self._result_at = self._cancelled_at = float("inf")

    def update(self, status: JobStatus, now: float) -> None:
        """Update the job from its status in squeue at time `now` (monotonic clock, seconds)."""
        if status.state != self._state:
            self._state, self._changed_at = status.state, now
        if status is not GONE:
            self._tell_news(status)
            self._last = status
        self._log.report()
        if Path(self.job.result).exists():
            self._result_at = min(self._result_at, now)
        if self._cancelled_at < float("inf"):
            if status.has_ended or now - self._cancelled_at > CANCEL_S:
                self._end(self._state_of_cancelled, self._reason)
        elif status.has_ended:
            self._look_at_end(status, now)
        else:
            self._look_at_limits(status, now)

    def _look_at_limits(self, status: JobStatus, now: float) -> None:
        """Cancel a job that will never start, takes too long, or does not exit after its result."""
        name = self.job.name
        if status.hopeless:
            why = f"{status.hopeless} ({status.reason})"
            self._cancel(now, f"Slurm will not start {name}: {why}.")
        elif not status.waits and status.seconds > self.job.timeout_s:
            limit = format_duration(self.job.timeout_s)
            self._cancel(now, f"{name} did not end within {limit}.")
            self._state_of_cancelled = "timed out"
        elif now - self._result_at > GRACE_S:
            self._cancel(now, "")

    def _look_at_end(self, status: JobStatus, now: float) -> None:
        """End a job that left the queue, after some patience for a late result."""
        patience_s = PATIENCE_S.get(status.state, 0.0)
        if self._result_at == float("inf") and now - self._changed_at < patience_s:
            with contextlib.suppress(OSError):  # Refresh a network file system.
                os.listdir(Path(self.job.result).parent)
            return
        # If the result exists, the job is done, and this state and reason are ignored.
        self._end(
            state_of(status),
            sentence_of(status, self.job.name, first_error(self.job.log)),
            status.exit_code,
        )

    def _end(self, state: State, reason: str, exit_code: int | None = None) -> None:
        self._log.report(at_end=True)
        self.ended = ended_job(
            self.job, state, self._last.seconds, reason, exit_code, self._last.restarts + 1
        )

    def _cancel(self, now: float, reason: str) -> None:
        self._cancelled_at, self._reason = now, reason
        _ask("scancel", self.number)

    def _tell_news(self, status: JobStatus) -> None:
        """Report when a job starts to wait or to run."""
        news = f"waits in the queue ({status.reason})" if status.waits and status.reason else ""
        # While a job is COMPLETING, its old attempt is still ending, but RestartCnt already
        # includes the next.
        if not (status.waits or status.has_ended or status.state == "COMPLETING"):
            news = f"runs, attempt {status.restarts + 1}" if status.restarts else "runs"
        if news and news != self._news:
            self._news = news
            self.tell(f"slurm: job {self.number}, {self.job.name}, {news}")


def _follow(followed: _Followed, poll_s: float) -> Ended:
    """Poll the queue until the job has ended."""
    heard_at = time.monotonic()
    while True:
        status, now = _status(followed.number), time.monotonic()
        if status is not None:
            heard_at = now
            followed.update(status, now)
        elif now - heard_at > CONTROLLER_S:
            raise TrainpaceError(
                f"Slurm's controller has not answered for {format_duration(CONTROLLER_S)}."
            )
        if followed.ended is not None:
            return followed.ended
        time.sleep(poll_s)


def _ask_to_start(script: Path) -> subprocess.CompletedProcess[str]:
    """Run sbatch in a thread. Ctrl-C then cannot interrupt it before the job number is known."""
    with ThreadPoolExecutor(1) as pool:
        submission = pool.submit(_ask, "sbatch", "--parsable", str(script))
        try:
            return submission.result()
        except BaseException:
            if number := parse_submitted(submission.result().stdout):
                _ask("scancel", number)
            raise


def _status(number: str) -> JobStatus | None:
    """Return the status of a job in Slurm's queue, or None if Slurm does not answer."""
    answer = _ask("squeue", "--noheader", "--states=all", f"--jobs={number}", f"--Format={FIELDS}")
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    return parse_queue(answer.stdout).get(number, GONE)


def _cancel_and_wait(followed: _Followed) -> None:
    """Cancel a job, and wait until it holds no node. Stop waiting if Slurm does not answer."""
    if followed.ended is not None:
        return
    if _ask("scancel", followed.number).returncode:
        followed.tell(
            "slurm: not cancelled, because Slurm does not answer; run later: scancel "
            f"{followed.number}"
        )
        return
    end = time.monotonic() + CANCEL_S
    while time.monotonic() < end:
        status = _status(followed.number)
        if status is None or status.has_ended:
            return
        time.sleep(0.2)


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. A command that hangs counts as failed.

    The command runs in its own session, so that Ctrl-C cannot interrupt a cancellation. The user's
    defaults for squeue are ignored, because they may hide jobs.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            stdin=subprocess.DEVNULL,
            env=environment,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} did not answer: {error}")


class JobStatus(Record):
    """Status of a job in squeue.

    `seconds` counts only the current attempt. `exit_code` is None until the job has ended.
    """

    state: str
    reason: str = ""
    restarts: int = 0
    seconds: float = 0.0
    exit_code: int | None = None

    @property
    def waits(self) -> bool:
        """True if the job is waiting in the queue."""
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        """True if the job holds no node. GONE means that Slurm no longer knows the job."""
        return self.state in _ENDED or self.state == "GONE"

    @property
    def hopeless(self) -> str:
        """Reason why the job will never start, or ""."""
        if not self.waits:
            return ""
        return _WILL_NEVER_START.get(
            self.reason,
            _WILL_NEVER_START["launch_failed_requeued_held"]
            if self.state == "REQUEUE_HOLD"
            else "",
        )


GONE = JobStatus(state="GONE")
"""Status of a job that Slurm no longer knows."""


def parse_submitted(text: str) -> str:
    """Parse the job number in the output of sbatch --parsable (``123`` or ``123;cluster``).

    Return "" if there is none.
    """
    match = re.match(r"\s*(\d+)(?:;\S*)?\s*$", text)
    return match.group(1) if match else ""


def parse_queue(text: str) -> dict[str, JobStatus]:
    """Parse squeue's lines of FIELDS. The keys are job numbers."""
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) >= 6:
            number, state, reason, restarts, used, code = words[:6]
            state = state.partition(" ")[0]  # "CANCELLED by 0" in some versions
            jobs[number] = JobStatus(
                state=state,
                reason="" if reason == "None" else reason,
                restarts=int(restarts) if restarts.isdigit() else 0,
                seconds=slurm_seconds(used) or 0.0,
                exit_code=_exit_code(code) if state in _ENDED else None,
            )
    return jobs


def state_of(status: JobStatus) -> State:
    """Return the outcome of a job that left no result."""
    if status.state in ("CANCELLED", "REVOKED"):
        return "cancelled"
    return "timed out" if status.state in ("TIMEOUT", "DEADLINE") else "failed"


def sentence_of(status: JobStatus, name: str, error: str) -> str:
    """Return a sentence on why the job `name` is not done.

    `error` is the first error in its log, or "".
    """
    if status.state in ("FAILED", "COMPLETED", "GONE") and error:
        return error
    ending = f"{name} left no result: it {ending_of(status.exit_code or 0)}."
    sentences = {
        "FAILED": ending,
        "COMPLETED": ending,
        "CANCELLED": f"{name} was cancelled by someone else.",
        "REVOKED": f"{name} was taken over by another cluster.",
        "TIMEOUT": f"{name} ran into Slurm's time limit.",
        "DEADLINE": f"{name} could not end before its deadline.",
        "OUT_OF_MEMORY": (f"{name} used more memory than it had requested, so Slurm ended it."),
        "NODE_FAIL": f"a node of {name} failed, and Slurm did not restart the job.",
        "BOOT_FAIL": f"a node of {name} could not be started.",
        "LAUNCH_FAILED": f"{name} could not be started on its nodes.",
        "PREEMPTED": f"{name} was preempted by another job, and Slurm did not restart it.",
        "GONE": f"Slurm no longer knows {name}, which left no result.",
    }
    return sentences.get(
        status.state, f"{name} left no result; Slurm reports {status.state.lower()}."
    )


def _exit_code(text: str) -> int | None:
    """Parse an exit code from ``3:0`` (code and signal) or from wait(2)'s status.

    Signal N becomes 128 + N, as in shells.
    """
    code, colon, number = text.partition(":")
    if not code.isdigit():
        return None
    status, signal_ = (int(code), int(number or 0)) if colon else divmod(int(code), 256)
    return 128 + (signal_ & 0x7F) if signal_ & 0x7F else status
