"""Run worker modules in separate processes, so users' code can crash, hang or exit without harm.

A worker either reads one request from a JSON file and writes its answer to another file (`serve`),
or it answers many requests as JSON lines (`serve_lines`). An answer contains a result or one
sentence about the error. A run succeeded if its answer contains a result; the exit code alone never
decides. Output of users' code goes to stderr.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from trainpace.core.child import Child, Limits, ending_of, usual_limits
from trainpace.core.errors import (
    OutOfMemory,
    TimedOut,
    TrainpaceError,
    UnknownName,
    UnreadableInput,
    UserCodeError,
    as_sentence,
    message_of,
)
from trainpace.core.host import holds_packages, temporary_environment, top_of
from trainpace.core.intake import MOST_BYTES, json_of, read_json
from trainpace.core.units import format_duration, gib_from_bytes

Answer = dict[str, Any]

_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
)
_PYTHON = (sys.executable, "-P", "-m")
"""Command to run a module with Python, without the current folder on the import path.

A file torch.py or random.py there could hide the real module. `load_name` later adds the folder of
a user's FILE.py.
"""
_NOT_THE_USERS = ("/torch/", "/trainpace/", "/lightning/", "/deepspeed/", "<frozen")
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_POLL_S = 0.02
_SIZE_POLL_S = 0.5
"""Seconds between checks of an answer's size."""
PATIENCE_S = 60.0
"""Seconds without an answer after which a pool tells that it is still waiting."""
LIMITS: Limits | None = None
"""Limits of every worker. None means the default limits (`child.usual_limits`)."""
_WAITING_ANSWERS = 1000
"""Maximum number of answers in the queue of a pool. Workers wait while it is full."""


def serve(work: Callable[[dict[str, Any]], str]) -> None:
    """Answer one request, and end this process.

    The request is in the file `sys.argv[1]`. The answer is written to the file `sys.argv[2]`.

    Args:
        work: Function that computes the result of a request.
    """
    answer: Answer
    aside = f"{sys.argv[2]}.aside"
    # keep the original functions, because users' code may replace them
    open_file, dumps, replace = open, json.dumps, os.replace
    try:
        answer = {"result": work(json.loads(Path(sys.argv[1]).read_text()))}
    except BaseException as error:  # users' code can raise any exception
        answer = failure_of(error)
    with open_file(aside, "w", encoding="utf-8") as file:
        file.write(dumps(answer))
    replace(aside, sys.argv[2])
    end()


def serve_lines() -> tuple[Iterator[Answer], IO[str]]:
    """Return (requests, file for answers) of a worker in a `Pool`.

    The requests are yielded as they arrive. Answers are written to the file, with one JSON object
    per line. Standard output is redirected to stderr for users' code.
    """
    requests, answers = (
        os.fdopen(os.dup(0), encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8"),
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return (json.loads(line) for line in requests), answers


def end(exit_code: int = 0) -> NoReturn:
    """End this process at once.

    Threads of users' code cannot keep it alive, and torch cannot abort during shutdown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def failure_of(
    error: BaseException, who: str = "the model's code", memory_hint: str = "Try a smaller batch."
) -> Answer:
    """Return the answer for an exception: one sentence about the error, and a hint.

    `out_of_memory` is True for out of memory. `misuse` is True if trainpace itself raised the
    error, for example because the request is wrong.

    Args:
        error: The exception.
        who: Code that raised it, for the sentence.
        memory_hint: Hint for out of memory.
    """
    if is_out_of_memory(error.__cause__ or error):
        return {"error": "out of memory.", "hint": memory_hint, "out_of_memory": True}
    if isinstance(error, TrainpaceError):
        return {
            "error": error.message,
            "hint": error.hint,
            "misuse": not isinstance(error, UserCodeError),
        }
    return {"error": explain(error, who), "hint": ""}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception of Python, torch or C++ means out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(
        word in message_of(error).lower() for word in _MEMORY_WORDS
    )


def place_in_code(error: BaseException) -> str:
    """Return the last place in users' code in a traceback, such as "train.py line 12", or ""."""
    place, trace_back = "", error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and not any(p in file for p in _PACKAGES)
        if not is_standard and not any(part in file for part in _NOT_THE_USERS):
            place = f"{_short(file)} line {trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    return place


def _short(file: str) -> str:
    """Return the path of a file below site-packages, or else its name."""
    return (
        file.rpartition(f"{os.sep}site-packages{os.sep}")[2]
        if "site-packages" in file
        else os.path.basename(file)
    )


def explain(error: BaseException, who: str = "the model's code") -> str:
    """Return one sentence with the exception and the last place in users' code.

    Args:
        error: The exception.
        who: Code that raised it, the subject of the sentence.
    """
    place = place_in_code(error)
    where = f" at {place}" if place else ""
    return as_sentence(f"{who} raised {type(error).__name__}{where}: {message_of(error)}")


class DiskFull(TrainpaceError):
    """The disk is full. Files that were already complete are kept."""


def run_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> str:
    """Run ``python -m module`` on a request, and return its answer.

    Args:
        module: The worker module, which calls `serve`.
        request: The request.
        timeout_s: Time limit in seconds.
        what: Description of the work, for errors.

    Returns:
        The result as text.

    Raises:
        TrainpaceError: If the worker fails, dies, or exceeds the time limit.
    """
    deadline = time.monotonic() + timeout_s
    with _started(module, request) as (worker, folder):
        while worker.wait(min(_SIZE_POLL_S, max(0.0, deadline - time.monotonic()))) is None:
            if time.monotonic() >= deadline:
                raise _timed_out(what, timeout_s)
            _check_size(folder, what)
        return _answer_of(worker, folder, what)


def run_ranks(module: str, requests: Sequence[dict[str, Any]], timeout_s: float, what: str) -> str:
    """Run several ranks that communicate with each other, and return the answer of rank 0.

    An error is raised as soon as one rank has failed, because the others would wait for it until
    the timeout.

    Args:
        module: The worker module, which calls `serve`.
        requests: The request of each rank.
        timeout_s: Time limit in seconds.
        what: Description of the work, for errors.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_started(module, request)) for request in requests]
        while time.monotonic() < deadline:
            ended = [
                rank for rank, (worker, _) in enumerate(workers) if worker.exit_code is not None
            ]
            for rank in sorted(ended, key=lambda rank: _answered_at(workers[rank][1])):
                _answer_of(*workers[rank], f"rank {rank} of {what}")
            if 0 in ended:
                return _answer_of(*workers[0], what)
            for rank, (_, folder) in enumerate(workers):
                _check_size(folder, f"rank {rank} of {what}")
            time.sleep(_POLL_S)
    raise _timed_out(what, timeout_s)


class Pool:
    """Pool of ``python -m module argument`` processes. Leaving the context ends them.

    Args:
        module: The worker module, which calls `serve_lines`.
        argument: Its command-line argument.
        count: Number of processes.
        note: Function that is called with a sentence if no worker has answered for a minute.
    """

    def __init__(
        self, module: str, argument: str, count: int, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self._command, self._count, self._note = [*_PYTHON, module, argument], count, note
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue(_WAITING_ANSWERS)
        self._workers: list[Child] = []

    def __enter__(self) -> Pool:
        # one thread per worker, because the workers already run in parallel
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        for number in range(self._count):
            limits = LIMITS or usual_limits()
            worker = Child(
                self._command,
                environment,
                None,
                limits,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._workers.append(worker)
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.cut_lifeline()
        for worker in self._workers:
            worker.end()

    def ask(self, worker: int, **request: Any) -> None:
        """Send a request to a worker. `answers` yields the answer."""
        with contextlib.suppress(BrokenPipeError):  # `answers` reports a dead worker
            self._workers[worker].stdin.write(json.dumps(request).encode() + b"\n")
            self._workers[worker].stdin.flush()

    def answers(self, what: Callable[[int], str]) -> Iterator[tuple[int, Answer]]:
        """Yield (worker, answer) as answers arrive. Errors of workers are raised.

        Args:
            what: Function that returns a description of a worker's work, for errors.
        """
        while True:
            try:
                worker, answer = self._answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                doing = sorted({what(worker) for worker in range(self._count)})
                self._note(
                    f"no worker has answered for {format_duration(PATIENCE_S)} ({'; '.join(doing)})"
                )
                continue
            if answer is None:
                ending = ending_of(self._workers[worker].wait() or 0)
                _raise_overstep(self._workers[worker], what(worker), "Try fewer --workers.")
                raise UserCodeError(
                    f"a worker {ending} while {what(worker)}.",
                    "Files that were already complete are kept.",
                )
            _raise_error_of(answer)
            yield worker, answer

    def _listen(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # the pipe may be closed while it is read
            while line := self._workers[number].stdout.readline(MOST_BYTES + 1):
                self._answers.put((number, _line_of(line)))
                if len(line) > MOST_BYTES:  # the rest of a cut line cannot be parsed
                    return
        self._answers.put((number, None))


@contextlib.contextmanager
def _started(module: str, request: dict[str, Any]) -> Iterator[tuple[Child, Path]]:
    """Yield a started worker, and the folder with its request and answer.

    The worker also puts its temporary files there, so they are removed even if it is killed.
    """
    with tempfile.TemporaryDirectory(prefix="trainpace-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        files = [str(folder / "request.json"), str(folder / "answer.json")]
        Path(files[0]).write_text(json.dumps(request))
        try:
            output = sys.stderr.fileno()
        except (OSError, AttributeError, ValueError):  # sys.stderr is not a real file
            output = subprocess.DEVNULL
        environment = {**os.environ, **temporary_environment(name)}
        with Child(
            [*_PYTHON, module, *files], environment, None, LIMITS or usual_limits(), stdout=output
        ) as worker:
            yield worker, folder


def _answered_at(folder: Path) -> int:
    """Return a key that sorts ended ranks: first ranks without an answer, then by time.

    The first failure is usually the cause of the others.
    """
    file = folder / "answer.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _answer_of(worker: Child, folder: Path, what: str) -> str:
    file, code = folder / "answer.json", worker.exit_code
    assert code is not None
    _raise_overstep(worker, what)
    if not file.exists():
        # The guard reports its own kills. Another SIGKILL is most likely the kernel's, for memory.
        kind = OutOfMemory if code == 128 + signal.SIGKILL else UserCodeError
        raise kind(f"{what} gave no answer: it {ending_of(code)}.")
    try:
        answer = read_json(file)
        _raise_error_of(answer)
        return str(answer["result"])
    # users' code runs in the worker's process, and may have overwritten the answer
    except (UnreadableInput, AttributeError, KeyError, TypeError):
        raise UserCodeError(
            f"{what} left an answer that is damaged; it {ending_of(code)}."
        ) from None


def _raise_overstep(worker: Child, what: str, hint: str = "Try a smaller batch.") -> None:
    over = worker.overstep
    if over is None:
        return
    if over.processes:
        raise UserCodeError(f"{what} was ended: it ran {over.processes:,} processes at once.")
    held, free = (f"{gib_from_bytes(size):.1f} GiB" for size in (over.held_bytes, over.free_bytes))
    raise OutOfMemory(
        f"{what} was ended: it used {held}, and only {free} of this machine's memory were free.",
        hint,
    )


def _check_size(folder: Path, what: str) -> None:
    """Raise an error if the answer is too long to be read, since it may grow without end."""
    written = 0
    with contextlib.suppress(OSError):  # a file may be renamed or removed in between
        written = sum(file.stat().st_size for file in folder.glob("answer.json*"))
    if written > MOST_BYTES:
        raise UserCodeError(f"{what} was ended: its answer was longer than {MOST_BYTES >> 20} MiB.")


def _raise_error_of(answer: Answer) -> None:
    if "error" in answer:
        kinds = {"out_of_memory": OutOfMemory, "disk_full": DiskFull, "misuse": TrainpaceError}
        kind: type[TrainpaceError] = next(
            (kind for key, kind in kinds.items() if answer.get(key)), UserCodeError
        )
        raise kind(str(answer["error"]), str(answer["hint"]))


def _line_of(line: bytes) -> Answer:
    if len(line) > MOST_BYTES:
        return {"error": f"a worker's answer was longer than {MOST_BYTES >> 20} MiB.", "hint": ""}
    try:
        answer = json_of(line, "an answer")
        return answer if isinstance(answer, dict) else {}
    except UnreadableInput as error:
        return {"error": f"a worker's answer is damaged: {error.message}", "hint": ""}


def _timed_out(what: str, timeout_s: float) -> TimedOut:
    return TimedOut(f"{what} took longer than {timeout_s:g} s.", "Allow more with --timeout.")


# ---- the user's own Python file


def load_name(path: Path, name: str, what: str = "name") -> Any:
    """Import a user's Python file, and return the value of a name in it.

    This runs users' code, so call it only in a worker. The folder of the file is added to the
    import path, as with ``python FILE.py``. A file with relative imports is loaded as a part of its
    package. Exceptions of the file's own code are not caught.

    Args:
        path: The file.
        name: The name.
        what: Word for the kind of name, for errors.

    Raises:
        UnreadableInput: If there is no such file.
        UnknownName: If the file does not define the name.
    """
    if not path.is_file():
        raise UnreadableInput(f"cannot read {path}: no such file.")
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))))
    except SyntaxError:  # the import below reports it, with its line
        nodes = []
    sys.path.insert(0, str(path.resolve().parent))
    module = _import_in_package(path.resolve(), nodes) or _import_file(path)
    if not hasattr(module, name):
        raise _unknown_name(module, nodes, f"{what} in {path}", name)
    return getattr(module, name)


def _unknown_name(
    module: ModuleType, nodes: Sequence[ast.AST], what: str, name: str
) -> UnknownName:
    own = [n for n, v in vars(module).items() if not n.startswith("_") and _is_from(v, module)]
    mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
    hidden = (
        "Names defined in a function or under `if __name__ == ...` do not exist when the"
        " file is imported."
    )
    return UnknownName(what, name, own, hidden if name in mentioned else "")


_STARTUP_FILES = ("sitecustomize.py", "usercustomize.py")
"""Files that Python loads at startup. They do not count as users' files."""


@functools.cache
def is_users(file: str) -> bool:
    """Return True for a user's own file, which is not part of a library, Python or trainpace."""
    # cProfile names built-in functions "~". Code that is not from a file has names like "<string>".
    if file.startswith(("~", "<")) or not file or os.path.basename(file) in _STARTUP_FILES:
        return False
    return Path(file) != Path(sys.executable) and not _is_installed(
        os.path.dirname(os.path.abspath(file))
    )


def _import_file(path: Path) -> ModuleType:
    """Import a file as a top-level module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _import_in_package(path: Path, nodes: Sequence[ast.AST]) -> ModuleType | None:
    """Import a file with relative imports as a module of its package, or return None.

    The package is as deep as the deepest relative import, such as ``from ...x``. It also includes
    all further parent folders that have an ``__init__.py``.
    """
    depth = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    if not depth:
        return None
    parts, folder = [path.stem], path.parent
    while len(parts) <= depth or (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    return importlib.import_module(".".join(parts))


def _is_from(value: Any, module: ModuleType) -> bool:
    return (
        not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    )


@functools.cache
def _is_installed(folder: str) -> bool:
    """Return True for folders of the standard library, trainpace and installed packages."""
    paths, root = sysconfig.get_paths(), Path(folder)
    if any(
        root.is_relative_to(known)
        for known in (paths["stdlib"], paths["platstdlib"], Path(__file__).parents[1])
    ):
        return True
    return holds_packages(top_of(folder))
