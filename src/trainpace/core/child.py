"""Starts commands: guarded in a session of their own, or in the foreground of this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainpace.core import guard
from trainpace.core.errors import TrainpaceError, os_reason

GRACE_S = 15.0
"""Time limit for the guard to end everything below it, in seconds."""
_PR_SET_PDEATHSIG = 1


class Limits(NamedTuple):
    """Memory that has to stay free in the machine, and processes that may run at a time."""

    least_free_bytes: int
    most_processes: int


class Overstep(NamedTuple):
    """By how much a command overstepped a limit: its processes, or the memory it held.

    `free_bytes` were left when it held `held_bytes`.
    """

    processes: int = 0
    held_bytes: int = 0
    free_bytes: int = 0


def usual_limits(root: str = "/") -> Limits:
    """Keep a hundredth of the memory free. 2,000 processes are more than any training starts."""
    return Limits(min(guard.meminfo(root).get("MemTotal", 0) // 100, 1 << 30), 2000)


class Child:
    """A running command in a session of its own. Leaving its context ends all of its processes.

    The command runs under a guard (`trainpace.core.guard`), which watches a socket whose other end
    is open here. The socket closes when this process is gone, even if it was killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
        **streams: Any,
    ) -> None:
        """Start the command.

        Args:
            command: the program and its arguments
            environment: its whole environment, by default this process's
            cwd: its working directory
            limits: the command is ended if it oversteps them
            streams: further arguments of `subprocess.Popen`; by default no standard input
        """
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
        self.stdin: Any = self._guard.stdin
        self.stdout: Any = self._guard.stdout
        self.stderr: Any = self._guard.stderr

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """The exit code, 128 + N if signal N killed the command, None while it runs."""
        return self._guard.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self._guard.returncode

    @property
    def overstep(self) -> Overstep | None:
        """The limit for which the guard ended the command. Ask before the context is left."""
        try:
            sent = self._lifeline.recv(200, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            return None
        return Overstep(*map(int, sent.split(b","))) if sent else None

    def cut_lifeline(self) -> None:
        """Tell the guard to end the command, and do not wait."""
        self._lifeline.close()

    def end(self) -> None:
        """End the command and all processes below it, and wait until they are gone."""
        self.cut_lifeline()
        try:
            gone = self.wait(GRACE_S) is not None and self._guard.returncode >= 0
        except BaseException:
            self._kill_session()
            raise
        if not gone:  # the guard itself was killed, or hangs
            self._kill_session()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()


def start_in_foreground(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a command that keeps this process's terminal, input and process group.

    A guard would take those away. On Linux the command gets SIGTERM if this process is killed
    (prctl(2), PR_SET_PDEATHSIG). Raises TrainpaceError if it cannot be started.
    """
    us, arrange = os.getpid(), None
    if sys.platform.startswith("linux"):
        prctl = ctypes.CDLL(None).prctl

        def arrange() -> None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != us:  # this process was killed before prctl took effect
                os._exit(128 + signal.SIGTERM)

    try:
        return subprocess.Popen(list(command), env=environment, preexec_fn=arrange, **streams)
    except OSError as error:
        raise TrainpaceError(f"cannot start {command[0]}: {os_reason(error)}.") from None


def ending_of(exit_code: int) -> str:
    """Return how a process ended, as the predicate of a sentence.

    A signal's exit code is 128 + N, or -N in Python.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128
    if not 0 < number < signal.NSIG:
        return f"ended with exit code {exit_code}"
    name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
    return f"died of {name}" + (", most likely out of memory" if name == "SIGKILL" else "")


def no_command(program: str) -> TrainpaceError:
    """Return the error for a program that is not on the PATH.

    The environment of this Python may have it, and then the error names that environment.
    """
    beside = os.path.join(os.path.dirname(sys.executable), program)
    if os.path.basename(program) == program and os.access(beside, os.X_OK):
        return TrainpaceError(
            f"{program} is not on the PATH, though {beside} exists.",
            f'Activate that environment, or: export PATH="{os.path.dirname(beside)}:$PATH"',
        )
    return TrainpaceError(
        f"unknown command {program}.", "Give the whole command: python train.py ARGUMENTS"
    )
