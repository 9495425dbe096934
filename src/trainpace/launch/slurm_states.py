"""Slurm's texts about its jobs, read into records. Source: squeue's manual, job state and reason codes.

One command answers for all of a launcher's jobs, running or ended: ``squeue --states=all`` shows an ended job for MinJobAge
(five minutes by default), from the same memory that ``scontrol show job`` reads.
"""

import re

from trainpace.launch.job import State
from trainpace.process import name_of_signal
from trainpace.records import Record

FIELDS = "JobArrayID:|,State:|,Reason:|,RestartCnt:|,TimeUsed:|,exit_code:|"
"""For squeue --Format: each field in full, then a bar."""

_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
MAY_BE_REQUEUED = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "LAUNCH_FAILED", "GONE"})
"""States that a job may show for a moment before Slurm puts it back into the queue."""
_NEVER = {
    "BadConstraints": "no node has what it asks for", "InvalidAccount": "the account is not known",
    "InvalidQOS": "the QOS is not known", "DependencyNeverSatisfied": "what it depends on has failed",
    "PartitionTimeLimit": "the partition does not allow jobs of that time",
    "JobHeldAdmin": "an administrator holds it",
    "launch_failed_requeued_held": "it could not be started on its nodes",
}  # fmt: skip


class Seen(Record):
    """A job, or a task of an array, as squeue shows it. `seconds`: of this attempt; `exit_code`: None until it has ended."""

    state: str
    reason: str = ""
    restarts: int = 0
    seconds: float = 0.0
    exit_code: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in the queue, or back in it."""
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        """Whether it holds no node any more. GONE: Slurm has forgotten it."""
        return self.state in _ENDED or self.state == "GONE"

    @property
    def hopeless(self) -> str:
        """The reason why it will never start; "" where it may."""
        if not self.waits:
            return ""
        return _NEVER.get(self.reason, _NEVER["launch_failed_requeued_held"] if self.state == "REQUEUE_HOLD" else "")


GONE = Seen(state="GONE")


def parse_submitted(text: str) -> str:
    """The job's number from sbatch --parsable: ``123`` or ``123;cluster``. "" for anything else."""
    match = re.match(r"\s*(\d+)(?:;\S*)?\s*$", text)
    return match.group(1) if match else ""


def parse_queue(text: str) -> dict[str, Seen]:
    """The jobs in lines of FIELDS, by their number (``12``, ``12_3``)."""
    jobs = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) >= 6:
            number, state, reason, restarts, used, code = words[:6]
            state = state.partition(" ")[0]  # "CANCELLED by 0" in some versions
            jobs[number] = Seen(
                state=state, reason="" if reason == "None" else reason, restarts=int(restarts) if restarts.isdigit() else 0,
                seconds=_seconds(used), exit_code=_exit_code(code) if state in _ENDED else None,
            )  # fmt: skip
    return jobs


def state_of(seen: Seen) -> State:
    """The contract's state of a job that left no result."""
    if seen.state in ("CANCELLED", "REVOKED"):
        return "cancelled"
    return "timed out" if seen.state in ("TIMEOUT", "DEADLINE") else "failed"


def sentence_of(seen: Seen, name: str, error: str) -> str:
    """One sentence of why `name` is not done; `error` is the first error of its log, where it has one."""
    if seen.state in ("FAILED", "COMPLETED", "GONE") and error:
        return error
    if seen.state == "FAILED" and (seen.exit_code or 0) > 128:
        return f"{name} died of {name_of_signal((seen.exit_code or 0) - 128)}."
    sentences = {
        "FAILED": f"{name} ended with exit code {seen.exit_code} and no result.",
        "COMPLETED": f"{name} ended with exit code 0 and no result.",
        "CANCELLED": f"{name} was cancelled by somebody else.",
        "REVOKED": f"{name} was taken over by another cluster.",
        "TIMEOUT": f"{name} ran into Slurm's time limit.",
        "DEADLINE": f"{name} could not end before its deadline.",
        "OUT_OF_MEMORY": f"{name} was given less memory than it needs, and Slurm ended it.",
        "NODE_FAIL": f"a node of {name} failed, and Slurm did not start it again.",
        "BOOT_FAIL": f"a node of {name} could not be started.",
        "LAUNCH_FAILED": f"{name} could not be started on its nodes.",
        "PREEMPTED": f"{name} had to make way for another job, and Slurm did not start it again.",
        "GONE": f"Slurm no longer knows {name}, which left no result.",
    }
    return sentences.get(seen.state, f"{name} is {seen.state.lower()}, says Slurm, and left no result.")


def _seconds(used: str) -> float:
    """The seconds of ``1-02:03:04``, ``2:03:04`` or ``0:05``; 0 for INVALID."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", used)
    if not match:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds


def _exit_code(text: str) -> int | None:
    """The exit code in ``3:0`` (code and signal) or in wait(2)'s status; 128 + N for signal N, as shells have it."""
    code, colon, number = text.partition(":")
    if not code.isdigit():
        return None
    status, signal_ = (int(code), int(number or 0)) if colon else divmod(int(code), 256)
    return 128 + (signal_ & 0x7F) if signal_ & 0x7F else status
