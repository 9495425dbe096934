"""A job's log: followed line by line while it grows, and read for the reason of a failure."""

import re
from pathlib import Path

from trainpace.launch.job import OnLine
from trainpace.process import ending_of

TAIL_LINES = 20
LONGEST_REASON = 300

_RANK = re.compile(r"^\[rank ?\d+\]:\s?")
"""What torch puts before the lines of a traceback."""
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*(?:: |:?$)")
"""The last line of a traceback: the exception's class, with its module, and its message. Others may write in between."""
_RAISED_ELSEWHERE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_STATED = re.compile(
    r"^(?:\S+: )?(?:Error: |error: |Fatal Python error|Segmentation fault|terminate called|Killed$|can't open file)"
    r"|No module named|oom[-_ ]kill|Out of memory|command not found|: error: ",
    re.IGNORECASE,
)
_OF_TORCHRUN = ("torch.distributed.elastic", "ChildFailedError")
_OF_A_PEER = ("closed by peer", "reset by peer", "roken pipe", "connectFullMesh", "imed out waiting")
"""What ranks say when another rank has gone: true, but not why."""
_CHILD_SIGNAL = re.compile(r"exitcode\s*:\s*-(\d+)")
"""What torchrun reports of a rank that a signal ended."""
_TASK_ENDED = re.compile(r"\btasks? [\d,-]+: (?:Killed|Exited with exit code (?P<code>\d+))")
"""What srun reports of ranks; that the others were terminated for it is no news."""
_AFTERMATH = re.compile(r"CANCELLED|task [\d,-]+: |Job step aborted|Terminating")


class Follower:
    """Tells `on_line` of the new whole lines of a growing file at each call; the file may not be there yet."""

    def __init__(self, path: str | Path, on_line: OnLine | None = None) -> None:
        self._path, self._on_line, self._read, self._rest = Path(path), on_line or (lambda _: None), 0, b""

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
    nor a rank's complaint that another has gone; else what an interpreter, a shell or Slurm called an error; else a complaint."""
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
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
