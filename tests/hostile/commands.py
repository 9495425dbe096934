"""Run commands on hostile files in this process and report violations."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainpace.cli.program import main

TIME_LIMIT_S = 10
MOST_MEMORY_KIB = 1 << 20
"""Limit of the additional memory for one file."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\ud800-\udfff]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Hung(BaseException):
    """Raised by the alarm. No handler of the program catches it."""


class Ended(NamedTuple):
    """Result of a command: its output and its problem, or None if it behaved."""

    said: str
    problem: str | None
    seconds: float
    memory_kib: int


def command(*arguments: str) -> Callable[[Path], None]:
    """Return a function that runs the command with the file in place of FILE."""

    def run(file: Path) -> None:
        try:
            main([str(file) if word == "FILE" else word for word in arguments])
        except SystemExit as ended:
            assert ended.code in (0, 1, 2), f"exit code {ended.code}"

    return run


def attempt(run: Callable[[Path], None], file: Path) -> Ended:
    """Run the command and describe what went wrong.

    All output is checked. Warnings of NumPy count as errors.
    """
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (proc(5))
    before_kib, begun = _peak_kib(), time.monotonic()
    beside = set(os.listdir(file.parent))
    said = io.StringIO()
    problem = None
    try:
        with (
            _clock(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            run(file)
    except Hung:
        problem = f"still at work after {TIME_LIMIT_S} s"
    except MemoryError:
        problem = "MemoryError"
    except BaseException as error:
        text = re.sub(r"\s+", " ", str(error))[:200]
        problem = f"{type(error).__name__}: {text} (line {_line_of(error)})"
    seconds = time.monotonic() - begun
    memory_kib = _peak_kib() - before_kib
    text = _COLOURS.sub("", said.getvalue())
    if problem is None and (found := CONTROL.search(text.replace("\r\n", "\n"))):
        problem = f"control character {found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 20]!r}"
    if problem is None and "Traceback (most" in text:
        problem = "a traceback is printed"
    if problem is None and memory_kib > MOST_MEMORY_KIB:
        problem = f"{memory_kib >> 10} MiB more than before"
    if problem is None and (new := set(os.listdir(file.parent)) - beside):
        problem = f"new files: {sorted(new)}"
    return Ended(text, problem, seconds, memory_kib)


def _peak_kib() -> int:
    """Return the peak memory of this process since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1])  # type: ignore[index]


def _line_of(error: BaseException) -> str:
    place = error.__traceback__
    inner = "?"
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if "/trainpace/" in name:
            inner = f"{name.rpartition('/trainpace/')[2]}:{place.tb_lineno}"
        place = place.tb_next
    return inner


@contextlib.contextmanager
def _clock() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
