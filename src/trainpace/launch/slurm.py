"""Slurm: jobs are submitted, followed in the queue and in their logs, and cancelled where nobody waits for them any more.

Slurm's own commands do all of it. `sbatch --wait` polls too coarsely (42 s for a job of 12 s), so squeue is asked, one
question for all jobs. Jobs are judged by their result files, which must lie where this machine and the nodes see them alike.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainpace.errors import TrainpaceError
from trainpace.launch.job import Ended, Job, OnLine, State
from trainpace.launch.logs import Follower, first_error, tail_of
from trainpace.launch.processes import GRACE_S, file_name, log_of, prepare
from trainpace.launch.slurm_script import Shape, SlurmOptions, array_script, batch_script, shape_of
from trainpace.launch.slurm_states import (
    FIELDS,
    GONE,
    MAY_BE_REQUEUED,
    Seen,
    parse_queue,
    parse_submitted,
    sentence_of,
    state_of,
)
from trainpace.records import Record, write_whole
from trainpace.units import format_duration

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
ANSWER_S = 60.0
SETTLE_S = 10.0
"""How long a job may look lost before Slurm puts it back into the queue."""
SHARED_FILES_S = 5.0
"""How long a result may take to be seen from here: network file systems remember for a while what is not there."""
CANCEL_S = 60.0
"""Slurm gives cancelled ranks KillWait (30 s by default) to end by themselves."""
CONTROLLER_S = 600.0
"""Jobs go on while Slurm's controller is away; it is asked again for so long."""


class Slurm(Record):
    """Jobs in a Slurm cluster. `poll_s`: seconds between two questions to its controller."""

    options: SlurmOptions = SlurmOptions()
    poll_s: float = 2.0

    @property
    def name(self) -> str:
        return "slurm"

    def check(self) -> None:
        absent = [name for name in COMMANDS if shutil.which(name) is None]
        if absent:
            raise TrainpaceError(
                f"Slurm is not here: {', '.join(absent)} not found.",
                "Run this on a machine of the cluster from which jobs are submitted, or launch with torchrun.",
            )

    @property
    def _python(self) -> str:
        return self.options.python or sys.executable

    def text(self, job: Job) -> str:
        return batch_script(job, self.options, self._python)

    def run(self, job: Job, on_line: OnLine | None = None) -> Ended:
        """Time in the queue does not count; `timeout_s` and `Ended.seconds` are those of one attempt, by Slurm's clock of whole
        seconds."""
        return self.run_all((job,), on_line)[0]

    def run_all(self, jobs: Sequence[Job], on_line: OnLine | None = None) -> tuple[Ended, ...]:
        """One array for all jobs of the same shape. Raises TrainpaceError where Slurm refuses them, or is gone for long."""
        self.check()
        if len({log_of(job) for job in jobs}) < len(jobs) or len({job.result for job in jobs}) < len(jobs):
            raise TrainpaceError("two jobs that run at the same time need logs and results of their own.")
        shapes: dict[Shape, list[Job]] = {}
        for job in jobs:
            shapes.setdefault(shape_of(job), []).append(job)
        followed: list[_Followed] = []
        try:
            for alike in shapes.values():
                followed += self._submit(alike, on_line or (lambda _: None))
            _follow(followed, self.poll_s)
        except BaseException:
            _cancel_all(followed)
            raise
        ended = {f.job.result: f.ended for f in followed}
        return tuple(end for job in jobs if (end := ended[job.result]) is not None)

    def _submit(self, jobs: Sequence[Job], on_line: OnLine) -> list[_Followed]:
        for job in jobs:
            prepare(job)
        alone = len(jobs) == 1
        script = Path(jobs[0].folder, file_name(jobs[0].name) + (".sbatch" if alone else "-array.sbatch"))
        write_whole(script, self.text(jobs[0]) if alone else array_script(jobs, self.options, self._python))
        answer = _ask_to_start(script)
        number = parse_submitted(answer.stdout)
        if answer.returncode or not number:
            refusal = (answer.stderr.strip() or answer.stdout.strip() or "it gave no job number").splitlines()[-1]
            refusal = (
                refusal.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("Batch job submission failed: ")
            )
            raise TrainpaceError(f"Slurm did not take {jobs[0].name}: {refusal.strip().rstrip('.')}.")
        return [_Followed(job, number if alone else f"{number}_{i}", on_line) for i, job in enumerate(jobs)]


class _Followed:
    """A job that was submitted, followed until it has ended."""

    def __init__(self, job: Job, number: str, on_line: OnLine) -> None:
        self.job, self.number = job, number
        self.ended: Ended | None = None
        self.tell, self._lines = on_line, Follower(log_of(job))
        self._last = Seen(state="PENDING")
        self._told, self._state, self._reason = "", "", ""
        self._changed_at = self._result_at = self._cancelled_at = float("inf")

    def look(self, seen: Seen, now: float) -> None:
        """Take in what squeue says at `now` (seconds of a monotonic clock), and act on it."""
        if seen.state != self._state:
            self._state, self._changed_at = seen.state, now
        if seen is not GONE:
            self._tell_news(seen)
            self._last = seen
        for line in self._lines.new_lines():
            self.tell(line)
        if self._result_at == float("inf") and Path(self.job.result).exists():
            self._result_at = now
        if self._cancelled_at < float("inf"):
            if seen.has_ended or now - self._cancelled_at > CANCEL_S:
                self._end(self._state_of_cancelled, self._reason)
        elif seen.has_ended:
            self._look_at_end(seen, now)
        elif seen.hopeless:
            self._cancel(now, f"Slurm will not start {self.job.name}: {seen.hopeless} ({seen.reason}).")
        elif not seen.waits and seen.seconds > self.job.timeout_s:
            self._cancel(now, f"{self.job.name} did not end within {format_duration(self.job.timeout_s)}.")
            self._state_of_cancelled = "timed out"
        elif now - self._result_at > GRACE_S:
            self._cancel(now, "")

    _state_of_cancelled: State = "failed"

    def _look_at_end(self, seen: Seen, now: float) -> None:
        patience = SETTLE_S if seen.state in MAY_BE_REQUEUED else SHARED_FILES_S if seen.state == "COMPLETED" else 0.0
        if self._result_at == float("inf") and now - self._changed_at < patience:
            with contextlib.suppress(OSError):  # has a network file system look again
                os.listdir(Path(self.job.result).parent)
            return
        self._end(state_of(seen), sentence_of(seen, self.job.name, first_error(log_of(self.job))), seen.exit_code)

    def _end(self, state: State, reason: str, exit_code: int | None = None) -> None:
        for line in self._lines.new_lines(at_end=True):
            self.tell(line)
        if Path(self.job.result).exists():
            state, reason = "done", ""
        log = log_of(self.job)
        self.ended = Ended(
            state=state, seconds=self._last.seconds, log=str(log), reason=reason, exit_code=exit_code,
            tail="" if state == "done" else tail_of(log), attempts=self._last.restarts + 1,
        )  # fmt: skip

    def _cancel(self, now: float, reason: str) -> None:
        self._cancelled_at, self._reason = now, reason
        _ask("scancel", self.number)

    def _tell_news(self, seen: Seen) -> None:
        news = f"waits in the queue ({seen.reason})" if seen.waits and seen.reason else ""
        clearing_up = seen.state == "COMPLETING"  # of the attempt before, though counted as the next already
        if not (seen.waits or seen.has_ended or clearing_up):
            news = f"runs, attempt {seen.restarts + 1}" if seen.restarts else "runs"
        if news and news != self._told:
            self._told = news
            self.tell(f"slurm: job {self.number}, {self.job.name}, {news}")


def _follow(followed: Sequence[_Followed], poll_s: float) -> None:
    heard_at = time.monotonic()
    while open_ := [f for f in followed if f.ended is None]:
        queue, now = _queue(open_), time.monotonic()
        if queue is not None:
            heard_at = now
            for one in open_:
                one.look(queue.get(one.number, GONE), now)
        elif now - heard_at > CONTROLLER_S:
            raise TrainpaceError(f"Slurm's controller has not answered for {format_duration(CONTROLLER_S)}.")
        if any(f.ended is None for f in open_):
            time.sleep(poll_s)


def _ask_to_start(script: Path) -> subprocess.CompletedProcess[str]:
    """Run sbatch in a thread, so that Ctrl-C cannot interrupt it after the job was taken and before its number is known."""
    with ThreadPoolExecutor(1) as pool:
        submission = pool.submit(_ask, "sbatch", "--parsable", str(script))
        try:
            return submission.result()
        except BaseException:
            if number := parse_submitted(submission.result().stdout):
                _ask("scancel", number)
            raise


def _queue(followed: Sequence[_Followed]) -> dict[str, Seen] | None:
    """The state of these jobs in Slurm's queue; None where it does not answer."""
    numbers = sorted({f.number.partition("_")[0] for f in followed})
    answer = _ask(
        "squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(numbers)}", f"--Format={FIELDS}"
    )
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    return parse_queue(answer.stdout)


def _cancel_all(followed: Sequence[_Followed]) -> None:
    """Cancel the jobs, and wait until they hold no node any more, or Slurm does not answer."""
    open_ = [f for f in followed if f.ended is None]
    if not open_:
        return
    numbers = [f.number for f in open_]
    if _ask("scancel", *numbers).returncode:
        open_[0].tell(f"slurm: not cancelled, for Slurm does not answer; do it later: scancel {' '.join(numbers)}")
        return
    end = time.monotonic() + CANCEL_S
    while time.monotonic() < end:
        queue = _queue(open_)
        if queue is None or all(queue.get(f.number, GONE).has_ended for f in open_):
            return
        time.sleep(0.2)


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands, in a session of its own, so that Ctrl-C does not end a cancellation half-way.

    The user's defaults for squeue, which may hide jobs, are left out. A command that hangs counts as one that failed.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, stdin=subprocess.DEVNULL,
            env=environment, check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} did not answer: {error}")
