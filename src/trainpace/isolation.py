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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.records import write_whole

Work = Callable[[dict[str, Any]], str]


def run_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> str:
    """The answer (JSON text) of ``python -m module``. `what` names the work in errors."""
    with tempfile.TemporaryDirectory(prefix="trainpace-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(asked), str(answered)],
            stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UserCodeError(f"{what} took longer than {timeout_s:g} s.", "Allow more with --timeout.") from None
        finally:
            _end(process)
        if not answered.exists():
            raise UserCodeError(f"{what} ended without an answer ({_cause(process.returncode)}).")
        answer: dict[str, Any] = json.loads(answered.read_text())
    if "error" in answer:
        raise UserCodeError(answer["error"], answer["hint"])
    return str(answer["result"])


def serve(work: Work) -> None:
    """The worker's side: do `work` on the request, and answer with its result or one sentence of what went wrong."""
    request = json.loads(Path(sys.argv[1]).read_text())
    try:
        answer = {"result": work(request)}
    except TrainpaceError as error:
        answer = {"error": error.message, "hint": error.hint}
    except MemoryError:
        answer = {"error": "the machine's memory is not enough.", "hint": "Try a smaller batch."}
    except (Exception, SystemExit) as error:
        answer = {"error": explain(error), "hint": ""}
    write_whole(sys.argv[2], json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the user's code must not keep the process


def explain(error: BaseException) -> str:
    """One sentence: the exception, and the last line of the user's own code that it went through."""
    where, trace_back = "", error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/trainpace/", "<frozen", "runpy")):
            where = f" at {Path(file).name} line {trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"the model's code raised {type(error).__name__}{where}: {reason[:300]}"


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what the worker started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "it was killed, most likely for want of memory"
    return f"it died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
