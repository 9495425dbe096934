"""Worker modules in processes of their own, so that users' code can crash, hang or exit without harm to ours.

A worker answers one request from a JSON file in another (`serve`), or many in JSON lines (`serve_lines`), each with a result or
with one sentence of what went wrong. Success is read from the answer, never from the exit code alone. What the user's code
prints goes to stderr.
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
"""Without the current folder on its path, where a torch.py or random.py of anybody's would be imported in place of the real one;
who names a FILE.py brings its folder in by that."""
_NOT_THE_USERS = ("/torch/", "/trainpace/", "/lightning/", "/deepspeed/", "<frozen", "runpy")
_POLL_S = 0.02
_SIZE_POLL_S = 0.5
"""How often it is asked how long an answer has become."""
PATIENCE_S = 60.0
LIMITS: Limits | None = None
"""Of every worker; the usual ones by default."""
_WAITING_ANSWERS = 1000
"""Of a pool; workers that answer faster than they are heard wait then."""


def serve(work: Callable[[dict[str, Any]], str]) -> None:
    """Do `work` on the request in the file `sys.argv[1]`, answer in the file `sys.argv[2]`, and end this process."""
    answer: Answer
    aside, written, dumps, replace = (
        f"{sys.argv[2]}.aside",
        open,
        json.dumps,
        os.replace,
    )  # before users' code changes them
    try:
        answer = {"result": work(json.loads(Path(sys.argv[1]).read_text()))}
    except BaseException as error:  # users' code may raise anything
        answer = failure_of(error)
    with written(aside, "w", encoding="utf-8") as file:
        file.write(dumps(answer))
    replace(aside, sys.argv[2])
    end()


def serve_lines() -> tuple[Iterator[Answer], IO[str]]:
    """(requests as they come, a file that takes answers), each JSON on a line. What the user's code prints goes to stderr."""
    requests, answers = (
        os.fdopen(os.dup(0), encoding="utf-8"),
        os.fdopen(os.dup(1), "w", encoding="utf-8"),
    )
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
        return {
            "error": error.message,
            "hint": error.hint,
            "misuse": not isinstance(error, UserCodeError),
        }
    return {"error": explain(error, who), "hint": ""}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: Python's, torch's on any device, or a C++ allocation's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(
        word in _message(error).lower() for word in _MEMORY_WORDS
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its message cannot be read"


def place_in_code(error: BaseException) -> str:
    """The last line of the user's own code that an exception went through: train.py line 12; empty where it went through none."""
    place, trace_back = "", error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        if not any(part in file for part in _NOT_THE_USERS):
            place = f"{_short(file)} line {trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    return place


def _short(file: str) -> str:
    """A file's name; of an installed package, the path that tells which."""
    return (
        file.rpartition(f"{os.sep}site-packages{os.sep}")[2]
        if "site-packages" in file
        else os.path.basename(file)
    )


def explain(error: BaseException, who: str = "the model's code") -> str:
    """One sentence: that `who` raised, the exception, and the last line of the user's own code that it went through."""
    place = place_in_code(error)
    where = f" at {place}" if place else ""
    lines = [line.strip() for line in _message(error).splitlines() if line.strip()] or [
        "no message"
    ]
    # a DataLoader's worker sends its whole traceback, whose last line is the exception
    is_traceback = any(line.startswith("Original Traceback") for line in lines)
    reason = lines[-1].removeprefix(f"{type(error).__name__}: ") if is_traceback else lines[0]
    return f"{who} raised {type(error).__name__}{where}: {reason[:300]}"


class DiskFull(TrainpaceError):
    """No room for another file; those that are finished are kept."""


def run_isolated(module: str, request: dict[str, Any], timeout_s: float, what: str) -> str:
    """The answer (JSON text) of ``python -m module``. `what` names the work in errors."""
    with started_isolated(module, request, timeout_s, what) as answer:
        return answer()


@contextlib.contextmanager
def started_isolated(
    module: str, request: dict[str, Any], timeout_s: float, what: str
) -> Iterator[Callable[[], str]]:
    """Start ``python -m module``, and give a function that waits for its answer, so that something can be done meanwhile. The
    process ends with the context, whether it was waited for or not."""
    with _started(module, request) as (worker, folder):

        def wait_for_answer() -> str:
            deadline = time.monotonic() + timeout_s
            while worker.wait(min(_SIZE_POLL_S, max(0.0, deadline - time.monotonic()))) is None:
                if time.monotonic() >= deadline:
                    raise _late(what, timeout_s)
                _check_size(folder, what)
            return _answer_of(worker, folder, what)

        yield wait_for_answer


def run_ranks(module: str, requests: Sequence[dict[str, Any]], timeout_s: float, what: str) -> str:
    """Run workers that need each other, one for each request; the answer of the first. Raises as soon as one has failed, for the
    others would wait for it until the timeout."""
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
    raise _late(what, timeout_s)


class Pool:
    """`count` processes of ``python -m module argument``, which use `serve_lines`. Leaving its context ends them all. `note`
    hears when nothing has come from any worker for a minute."""

    def __init__(
        self, module: str, argument: str, count: int, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self._command, self._count, self._note = [*_PYTHON, module, argument], count, note
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue(_WAITING_ANSWERS)
        self._workers: list[Child] = []

    def __enter__(self) -> Pool:
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
        }  # one thread each: the workers are the parallelism
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
        with contextlib.suppress(BrokenPipeError):  # the end of its answers says that it has died
            self._workers[worker].stdin.write(json.dumps(request).encode() + b"\n")
            self._workers[worker].stdin.flush()

    def answers(self, what: Callable[[int], str]) -> Iterator[tuple[int, Answer]]:
        """(worker, answer) as they come. Raises what a worker says went wrong; `what` names a worker's work."""
        while True:
            try:
                worker, answer = self._answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                doing = sorted({what(worker) for worker in range(self._count)})
                self._note(
                    f"no sample has come for {format_duration(PATIENCE_S)} ({'; '.join(doing)})"
                )
                continue
            if answer is None:
                ending = ending_of(self._workers[worker].wait() or 0)
                _raise_overstep(self._workers[worker], what(worker), "Try fewer --workers.")
                raise UserCodeError(
                    f"a worker {ending} while {what(worker)}.", "What is finished is kept."
                )
            _raise_error_of(answer)
            yield worker, answer

    def _listen(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            while line := self._workers[number].stdout.readline(MOST_BYTES + 1):
                self._answers.put((number, _line_of(line)))
                if len(line) > MOST_BYTES:  # what follows is no line
                    return
        self._answers.put((number, None))


@contextlib.contextmanager
def _started(module: str, request: dict[str, Any]) -> Iterator[tuple[Child, Path]]:
    """A worker, and the folder of its request and its answer. That is its temporary folder too, since a process that is ended
    cannot remove its own."""
    with tempfile.TemporaryDirectory(prefix="trainpace-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        files = [str(folder / "request.json"), str(folder / "answer.json")]
        Path(files[0]).write_text(json.dumps(request))
        try:
            output = sys.stderr.fileno()
        except (
            OSError,
            AttributeError,
            ValueError,
        ):  # this process's own standard error is no file
            output = subprocess.DEVNULL
        around = {**os.environ, **temporary_environment(name)}
        with Child(
            [*_PYTHON, module, *files], around, None, LIMITS or usual_limits(), stdout=output
        ) as worker:
            yield worker, folder


def _answered_at(folder: Path) -> int:
    """Sorts ranks that have ended by why the others failed: first those that died without an answer, then by time."""
    file = folder / "answer.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _answer_of(worker: Child, folder: Path, what: str) -> str:
    file, code = folder / "answer.json", worker.exit_code
    assert code is not None
    _raise_overstep(worker, what)
    if not file.exists():
        kind = OutOfMemory if code == 128 + signal.SIGKILL else UserCodeError
        raise kind(f"{what} gave no answer: it {ending_of(code)}.")
    try:
        answer = read_json(file)
        _raise_error_of(answer)
        return str(answer["result"])
    except (
        UnreadableInput,
        AttributeError,
        KeyError,
        TypeError,
    ):  # users' code runs beside it, and may write anywhere
        raise UserCodeError(
            f"{what} left an answer that is damaged; it {ending_of(code)}."
        ) from None


def _raise_overstep(worker: Child, what: str, hint: str = "Try a smaller batch.") -> None:
    """Where the worker was ended for its limits."""
    over = worker.overstep
    if over is None:
        return
    if over.processes:
        raise UserCodeError(f"{what} was ended: it ran {over.processes:,} processes at once.")
    held, free = (f"{gib_from_bytes(size):.1f} GiB" for size in (over.held_bytes, over.free_bytes))
    raise OutOfMemory(
        f"{what} was ended: it held {held}, and only {free} of this machine's memory were left.",
        hint,
    )


def _check_size(folder: Path, what: str) -> None:
    """Raise where the answer grows beyond what could be read, for it may have no end."""
    written = 0
    with contextlib.suppress(OSError):  # renamed or removed meanwhile
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


def _late(what: str, timeout_s: float) -> TimedOut:
    return TimedOut(f"{what} took longer than {timeout_s:g} s.", "Allow more with --timeout.")


# ---- the user's own Python file


def load_name(path: Path, name: str, what: str = "name") -> Any:
    """The value of `name` in a Python file, whose folder joins the import path as it does under ``python FILE.py``.

    A file with relative imports is loaded as a part of the package that its folders make. Raises `UnreadableInput` or
    `UnknownName` (which calls it `what`); what the file's own code raises goes through.
    """
    if not path.is_file():
        raise UnreadableInput(f"cannot read {path}: no such file.")
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))))
    except SyntaxError:  # which the import tells with its line
        nodes = []
    sys.path.insert(0, str(path.resolve().parent))
    module = _as_part_of_a_package(path.resolve(), nodes) or _alone(path)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if not n.startswith("_") and _is_from(v, module)]
        mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
        hidden = (
            "What a function or `if __name__ == ...` defines is not there when the file is"
            " imported."
        )
        raise UnknownName(f"{what} in {path}", name, own, hidden if name in mentioned else "")
    return getattr(module, name)


_MACHINES = ("sitecustomize.py", "usercustomize.py")
"""Files that Python itself loads at its start, wherever a system has them."""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's own: no library's, no built-in, and not ours."""
    if file.startswith(("~", "<")) or not file or os.path.basename(file) in _MACHINES:
        return False
    return Path(file) != Path(sys.executable) and not _is_installed(
        os.path.dirname(os.path.abspath(file))
    )


def _alone(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _as_part_of_a_package(path: Path, nodes: Sequence[ast.AST]) -> ModuleType | None:
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
    """In the standard library, in trainpace, or in a folder into which pip installed packages."""
    paths, root = sysconfig.get_paths(), Path(folder)
    if any(
        root.is_relative_to(known)
        for known in (paths["stdlib"], paths["platstdlib"], Path(__file__).parents[1])
    ):
        return True
    return holds_packages(top_of(folder))
