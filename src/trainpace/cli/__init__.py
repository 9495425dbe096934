"""The command line interface: it parses arguments, calls a verb, and renders the answer.

This module makes signals reliable. A signal handler raises its exception wherever Python happens to
be. An exception in a finalizer is only printed. C code that clears errors drops it silently: of 150
interrupts spread over the first two seconds of `import torch`, 6 were lost. `kept` raises a lost
exception again. It is defined before other imports, because interrupts during imports count too.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

AGAIN_S = 0.05
"""Seconds before a lost signal is raised again. By then its finalizer has most likely ended.
"""
ORDERLY = ("SIGTERM", "SIGHUP")

_lost: list[int] = []
_kept = False


class _Kept(BaseException):
    """Exception that is raised again if it is dropped before the program has ended."""

    number: int

    def __del__(self) -> None:
        if _kept:
            _lost[:] = [self.number]
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


class Interrupted(KeyboardInterrupt, _Kept):
    number = int(signal.SIGINT)


class Left(SystemExit, _Kept):
    """A signal ended the program. The exit code is 128 + its number, as in shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, and SystemExit on SIGTERM and SIGHUP.

    A lost exception is raised again, which ensures that temporary files are removed. An ignored
    signal stays ignored, as under nohup. Nothing changes outside the main thread or without an
    interval timer.
    """
    global _kept
    before = {}
    if hasattr(signal, "setitimer"):
        with contextlib.suppress(ValueError):  # Raised outside the main thread.
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _again)
            for number in (signal.SIGINT, *(getattr(signal, name) for name in ORDERLY)):
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    before[number] = signal.signal(number, _end)
    _kept = bool(before)
    try:
        yield
    finally:
        _kept = False
        if before:
            # A timer that fires later would end the process.
            signal.setitimer(signal.ITIMER_REAL, 0)
            _lost.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: object) -> NoReturn:
    if number == signal.SIGINT:
        raise Interrupted
    raise Left(number)


def _again(_: int, frame: object) -> None:
    if _kept and _lost:
        _end(_lost.pop(), frame)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code. An interrupt at any moment exits quietly with 130."""
    try:
        with kept():
            from trainpace.cli.program import main as run

            run(arguments)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
