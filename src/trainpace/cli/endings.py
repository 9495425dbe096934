"""Ctrl-C and a scheduler's SIGTERM, kept until they have ended the program.

What a signal's handler raises comes up wherever Python happens to be. In a finalizer it is printed and forgotten, and C code that
clears errors drops it without a word: of 150 interrupts spread over the first two seconds of `import torch`, 6 were lost so.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

AGAIN_S = 0.05
"""How long after it was lost an ending is raised again: by then the finalizer that lost it is most likely over."""
ORDERLY = ("SIGTERM", "SIGHUP")

_lost: list[int] = []
_kept = False


class _Kept(BaseException):
    """Raised again if it is dropped before the program has ended."""

    number: int

    def __del__(self) -> None:
        if _kept:
            _lost[:] = [self.number]
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


class Interrupted(KeyboardInterrupt, _Kept):
    number = int(signal.SIGINT)


class Left(SystemExit, _Kept):
    """The program was told to end by a signal; its exit code is 128 + the signal's number, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within it SIGINT raises KeyboardInterrupt and SIGTERM and SIGHUP SystemExit, again if need be, so that temporary files are
    removed on the way out. A signal that is ignored, as under nohup, stays so. Nothing is changed outside the main thread, nor
    where there is no interval timer."""
    global _kept
    before = {}
    if hasattr(signal, "setitimer"):
        with contextlib.suppress(ValueError):  # not in the main thread
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
            signal.setitimer(
                signal.ITIMER_REAL, 0
            )  # a signal that comes after this would end the process by itself
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
