"""Start commands: guarded in their own session, or in the foreground of this one."""

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
"""Time limit for the guard to end all processes below it, in seconds."""
_PR_SET_PDEATHSIG = 1


class Limits(NamedTuple):
    """Limits of a command: memory that must stay free, and processes that may run at a time."""

    least_free_bytes: int
    most_processes: int


class Overstep(NamedTuple):
    """Report of a command that exceeded a limit. Either `processes` is set or both sizes are.

    Attributes:
        processes: Number of processes that ran at a time.
        held_bytes: Memory that the command used.
        free_bytes: Memory that was still free on the machine.
    """

    processes: int = 0
    held_bytes: int = 0
    free_bytes: int = 0


def usual_limits(root: str = "/") -> Limits:
    """Return the default limits: 1% of the memory stays free (at most 1 GiB), 2,000 processes.

    No training starts as many processes.
    """
    return Limits(min(guard.meminfo(root).get("MemTotal", 0) // 100, 1 << 30), 2000)


class Child:
    """Running command in its own session. Leaving its context ends all of its processes.

    The command runs under a guard (`trainpace.core.guard`). The guard watches a socket whose other
    end is open in this process. The socket closes when this process ends, even if it is killed.
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
            command: The program and its arguments.
            environment: All environment variables of the command. None means those of this process.
            cwd: Working directory.
            limits: Limits. The command is ended if it exceeds one.
            streams: Further arguments of `subprocess.Popen`. By default there is no standard input.
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
        """Exit code: 128 + N if signal N killed the command. None while the command runs."""
        return self._guard.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the command, and return its exit code. None if the timeout ends first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self._guard.returncode

    @property
    def overstep(self) -> Overstep | None:
        """Report of the limit for which the guard ended the command, or None.

        Read it before leaving the context.
        """
        try:
            sent = self._lifeline.recv(200, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            return None
        return Overstep(*map(int, sent.split(b","))) if sent else None

    def cut_lifeline(self) -> None:
        """Tell the guard to end the command, without waiting for it."""
        self._lifeline.close()

    def end(self) -> None:
        """End the command and all processes below it, and wait until they are gone."""
        self.cut_lifeline()
        try:
            gone = self.wait(GRACE_S) is not None and self._guard.returncode >= 0
        except BaseException:
            self._kill_session()
            raise
        if not gone:  # the guard was killed itself, or hangs
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
    """Start a command that shares the terminal, input and process group of this process.

    A guarded command would lose them. On Linux the command gets SIGTERM if this process is killed
    (prctl(2), PR_SET_PDEATHSIG).

    Raises:
        TrainpaceError: If the command cannot be started.
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
    """Describe how a process ended, as the predicate of a sentence.

    Args:
        exit_code: The exit code. For signal N it is 128 + N, or -N in Python.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128
    if not 0 < number < signal.NSIG:
        return f"ended with exit code {exit_code}"
    name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
    return f"died of {name}" + (", most likely out of memory" if name == "SIGKILL" else "")


def no_command(program: str) -> TrainpaceError:
    """Return the error for a program that is not on the PATH.

    If the environment of this Python has the program, the error names the environment.
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
