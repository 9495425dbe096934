"""A command in a session of its own, which ends with everything it started, however this process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainpace.core import guard
from trainpace.core.errors import TrainpaceError
from trainpace.core.limits import Limits, Overstep

GRACE_S = 15.0
"""How long the guard may take to end everything below it."""


class Child:
    """A running command; leaving its context ends it, and all processes below it, at once. It runs under a guard
    (`trainpace.core.guard`), which reads a socket whose other end is open here: it closes when this process is gone,
    killed as it may be. `streams` are stdin, stdout and stderr as `subprocess.Popen` takes them; no standard input by
    default."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
        **streams: Any,
    ) -> None:
        """Start the command. `environment` is its whole environment, this process's by default; beyond `limits` it is ended."""
        self._lifeline, theirs = socket.socketpair()
        numbers = "" if limits is None else ",".join(map(str, limits))
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-IS", guard.__file__, str(theirs.fileno()), numbers, *command],
                start_new_session=True,
                env=environment,
                cwd=cwd,
                pass_fds=(theirs.fileno(),),
                **{"stdin": subprocess.DEVNULL, **streams},
            )
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            theirs.close()
        # the pipes to it and from it, where `streams` ask for them
        self.stdin: Any = self._guard.stdin
        self.stdout: Any = self._guard.stdout

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """None while the command runs; 128 + N where signal N killed it."""
        return self._guard.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self._guard.returncode

    @property
    def overstep(self) -> Overstep | None:
        """The limit for which it was ended, of a command that has ended so and whose context was not left."""
        try:
            said = self._lifeline.recv(200, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            return None
        return Overstep(*map(int, said.split(b","))) if said else None

    def cut_lifeline(self) -> None:
        """Have the command ended, without waiting for that."""
        self._lifeline.close()

    def end(self) -> None:
        """End the command and everything below it, and wait until that is done."""
        self.cut_lifeline()
        try:
            gone = self.wait(GRACE_S) is not None and self._guard.returncode >= 0
        except BaseException:
            self._kill_session()
            raise
        if not gone:  # the guard itself was killed, or hangs
            self._kill_session()
        for pipe in (self._guard.stdin, self._guard.stdout, self._guard.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()


def ending_of(exit_code: int) -> str:
    """How a process ended: what a sentence about it goes on with. A signal's code is 128 + N, or -N as Python has it."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    if not 0 < number < signal.NSIG:
        return f"ended with exit code {exit_code}"
    name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
    return f"died of {name}" + (", most likely for want of memory" if name == "SIGKILL" else "")


def no_command(program: str) -> TrainpaceError:
    """The error for a program that is not on the PATH, where the environment of this Python may have it."""
    beside = os.path.join(os.path.dirname(sys.executable), program)
    if os.path.basename(program) == program and os.access(beside, os.X_OK):
        return TrainpaceError(
            f"{program} is not on the PATH, though {beside} exists.",
            f'Activate that environment, or: export PATH="{os.path.dirname(beside)}:$PATH"',
        )
    return TrainpaceError(
        f"there is no command {program}.", "Give the whole command: python train.py ARGUMENTS"
    )
