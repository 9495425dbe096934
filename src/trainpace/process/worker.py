"""A worker's side: answer one request from a file, or many from a pipe, with a result or with one sentence of what went wrong."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.records import write_whole

Answer = dict[str, Any]

_MEMORY_WORDS = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc",
)  # fmt: skip
_NOT_THE_USERS = ("/torch/", "/trainpace/", "/lightning/", "/deepspeed/", "<frozen", "runpy")


def serve(work: Callable[[dict[str, Any]], str]) -> None:
    """Do `work` on the request in the file `sys.argv[1]`, answer in the file `sys.argv[2]`, and end this process."""
    answer: Answer
    try:
        answer = {"result": work(json.loads(Path(sys.argv[1]).read_text()))}
    except (Exception, SystemExit) as error:
        answer = failure_of(error)
    write_whole(sys.argv[2], json.dumps(answer))
    end()


def serve_lines() -> tuple[Iterator[Answer], IO[str]]:
    """(requests as they come, a file that takes answers), each JSON on a line. What the user's code prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return (json.loads(line) for line in requests), answers


def end(exit_code: int = 0) -> NoReturn:
    """End this process at once: threads of the user's code must not keep it, and torch may abort in its own exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def failure_of(
    error: BaseException, who: str = "the model's code", memory_hint: str = "Try a smaller batch."
) -> Answer:
    """One sentence of what went wrong and a hint, with `out_of_memory` or `misuse` true where it was that."""
    if is_out_of_memory(error.__cause__ or error):
        return {"error": "the memory is not enough.", "hint": memory_hint, "out_of_memory": True}
    if isinstance(error, TrainpaceError):
        return {"error": error.message, "hint": error.hint, "misuse": not isinstance(error, UserCodeError)}
    return {"error": explain(error, who), "hint": ""}


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
    is_traceback = any(line.startswith("Original Traceback") for line in lines)
    reason = lines[-1].removeprefix(f"{type(error).__name__}: ") if is_traceback else lines[0]
    return f"{who} raised {type(error).__name__}{where}: {reason[:300]}"
