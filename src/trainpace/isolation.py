"""Run a worker module in a process of its own, so that users' code can crash, hang or exit without harm to ours.

The worker reads a JSON request from a file and writes a JSON answer to another. Success is read from the answer, never
from the exit code alone. What the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainpace.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.records import write_whole

Work = Callable[[dict[str, Any]], str]

LIFELINE = "TRAINPACE_LIFELINE"
"""Names the end of a pipe that the worker reads: it closes when whoever asked is gone, however that came about."""

_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
)

_NOT_THE_USERS = ("/torch/", "/trainpace/", "/lightning/", "/deepspeed/", "<frozen", "runpy")


def run_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> str:
    """The answer (JSON text) of ``python -m module``. `what` names the work in errors."""
    with started_isolated(module, request, timeout_s, what) as answer:
        return answer()


@contextlib.contextmanager
def started_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> Iterator[Callable[[], str]]:
    """Start ``python -m module``, and give what waits for its answer, so that something can be done meanwhile.

    The process ends with the context, whether it was waited for or not.
    """
    with tempfile.TemporaryDirectory(prefix="trainpace-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(asked), str(answered)],
                stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
                start_new_session=True, pass_fds=(read_end,), env={**os.environ, LIFELINE: str(read_end)},
            )  # fmt: skip
            try:
                yield lambda: _answer_of(process, answered, timeout_s, what)
            finally:
                _end(process)
        finally:
            os.close(read_end)
            os.close(write_end)


def _answer_of(process: subprocess.Popen[bytes], answered: Path, timeout_s: float, what: str) -> str:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{what} took longer than {timeout_s:g} s.", "Allow more with --timeout.") from None
    if not answered.exists():
        kind = OutOfMemory if process.returncode == -signal.SIGKILL else UserCodeError
        raise kind(f"{what} ended without an answer ({_cause(process.returncode)}).")
    answer: dict[str, Any] = json.loads(answered.read_text())
    if "error" in answer:
        error = (
            OutOfMemory if answer.get("out_of_memory") else TrainpaceError if answer.get("misuse") else UserCodeError
        )
        raise error(answer["error"], answer["hint"])
    return str(answer["result"])


def serve(work: Work) -> None:
    """The worker's side: do `work` on the request, and answer with its result or one sentence of what went wrong."""
    end_with_parent()
    request = json.loads(Path(sys.argv[1]).read_text())
    answer: dict[str, Any]
    try:
        answer = {"result": work(request)}
    except (Exception, SystemExit) as error:
        answer = failure_of(error)
    write_whole(sys.argv[2], json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the user's code must not keep the process


def failure_of(error: BaseException) -> dict[str, Any]:
    """One sentence of what went wrong and a hint, with `out_of_memory` or `misuse` true where it was that."""
    if is_out_of_memory(error.__cause__ or error):
        return {"error": "the memory is not enough.", "hint": "Try a smaller batch.", "out_of_memory": True}
    if isinstance(error, TrainpaceError):
        return {"error": error.message, "hint": error.hint, "misuse": not isinstance(error, UserCodeError)}
    return {"error": explain(error), "hint": ""}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: Python's, torch's on any device, or a C++ allocation's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS)


def explain(error: BaseException, who: str = "the model's code") -> str:
    """One sentence: that `who` raised, the exception, and the last line of the user's own code that it went through."""
    where, trace_back = "", error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        if not any(part in file for part in _NOT_THE_USERS):
            where = f" at {Path(file).name} line {trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # a DataLoader's worker sends its whole traceback, whose last line is the exception
    sent = any(line.startswith("Original Traceback") for line in lines)
    reason = lines[-1].removeprefix(f"{type(error).__name__}: ") if sent else lines[0]
    return f"{who} raised {type(error).__name__}{where}: {reason[:300]}"


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True


def end_with_parent() -> None:
    """End this process, and what it started, once the parent has gone without ending it: killed, say."""
    end = os.environ.pop(LIFELINE, None)
    if end is None:
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(end), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what the worker started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "it was killed, most likely for want of memory"
    return f"it died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
