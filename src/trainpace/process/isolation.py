"""Run a worker module in a process of its own, so that users' code can crash, hang or exit without harm to ours.

The worker reads a JSON request from a file and writes a JSON answer to another (`trainpace.process.serve`). Success is read from
the answer, never from the exit code alone. What the user's code prints goes to stderr.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainpace.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.process.child import Child, cause_of

_POLL_S = 0.02


class DiskFull(TrainpaceError):
    """No room for another file; those that are finished are kept."""


def run_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> str:
    """The answer (JSON text) of ``python -m module``. `what` names the work in errors."""
    with started_isolated(module, request, timeout_s, what) as answer:
        return answer()


@contextlib.contextmanager
def started_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> Iterator[Callable[[], str]]:
    """Start ``python -m module``, and give a function that waits for its answer, so that something can be done meanwhile.

    The process ends with the context, whether it was waited for or not.
    """
    with tempfile.TemporaryDirectory(prefix="trainpace-") as folder, _start(module, request, folder) as worker:

        def wait_for_answer() -> str:
            if worker.wait(timeout_s) is None:
                raise _late(what, timeout_s)
            return _answer_of(worker, folder, what)

        yield wait_for_answer


def run_ranks(module: str, requests: Sequence[dict[str, Any]], timeout_s: float, what: str) -> str:
    """Run workers that need each other, one for each request; the answer of the first.

    Raises as soon as one has failed, for the others would wait for it until the timeout.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="trainpace-")) for _ in requests]
        workers = [stack.enter_context(_start(module, r, f)) for r, f in zip(requests, folders, strict=True)]
        while time.monotonic() < deadline:
            ended = [rank for rank, worker in enumerate(workers) if worker.exit_code is not None]
            # a rank that was killed is the reason why others failed
            for rank in sorted(ended, key=lambda rank: Path(folders[rank], "answer.json").exists()):
                _answer_of(workers[rank], folders[rank], f"rank {rank} of {what}")
            if 0 in ended:
                return _answer_of(workers[0], folders[0], what)
            time.sleep(_POLL_S)
    raise _late(what, timeout_s)


def error_of(answer: dict[str, Any]) -> TrainpaceError:
    """The error that a worker's answer tells of."""
    kind: type[TrainpaceError] = UserCodeError
    for key, named in (("out_of_memory", OutOfMemory), ("disk_full", DiskFull), ("misuse", TrainpaceError)):
        if answer.get(key):
            kind = named
            break
    return kind(answer["error"], answer["hint"])


def _start(module: str, request: dict[str, Any], folder: str) -> Child:
    files = [str(Path(folder, name)) for name in ("request.json", "answer.json")]
    Path(files[0]).write_text(json.dumps(request))
    return Child([sys.executable, "-m", module, *files], stdout=_standard_error())


def _answer_of(worker: Child, folder: str, what: str) -> str:
    """The result of a worker that has ended."""
    file, code = Path(folder, "answer.json"), worker.exit_code
    assert code is not None
    if not file.exists():
        kind = OutOfMemory if code == 128 + signal.SIGKILL else UserCodeError
        raise kind(f"{what} ended without an answer ({cause_of(code)}).")
    answer: dict[str, Any] = json.loads(file.read_text())
    if "error" in answer:
        raise error_of(answer)
    return str(answer["result"])


def _late(what: str, timeout_s: float) -> TimedOut:
    return TimedOut(f"{what} took longer than {timeout_s:g} s.", "Allow more with --timeout.")


def _standard_error() -> int:
    """Where the worker prints; nowhere where this process's own standard error is no file."""
    try:
        return sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return subprocess.DEVNULL
