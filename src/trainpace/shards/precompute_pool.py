"""Worker processes that compute shards: asked in JSON lines, answering in JSON lines, gone when this process is."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.isolation import LIFELINE
from trainpace.units import format_duration

PATIENCE_S = 60.0
Answer = dict[str, Any]


class DiskFull(TrainpaceError):
    """No room for another shard; those that are finished are kept."""


class Pool:
    """`count` workers, each with the dataset of `target`. Use as a context: leaving it ends them all.

    `note` is told when nothing has come from any worker for a minute.
    """

    def __init__(self, target: str, count: int, note: Callable[[str], None] = lambda _: None) -> None:
        self._target, self._count, self._note = target, count, note
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue()

    def __enter__(self) -> Pool:
        read_end, self._lifeline = os.pipe()
        # one thread each: the workers are the parallelism
        environment = {"OMP_NUM_THREADS": "1", **os.environ, LIFELINE: str(read_end)}
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", "trainpace.shards.precompute_worker", self._target], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, start_new_session=True, pass_fds=(read_end,), env=environment,
            )
            for _ in range(self._count)
        ]  # fmt: skip
        os.close(read_end)
        for number in range(self._count):
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lifeline)
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def ask(self, worker: int, **request: Any) -> None:
        """Send a request; the answer comes out of `answers`."""
        pipe = self._workers[worker].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its answers says that it has died
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()

    def answers(self, what: Callable[[int], str]) -> Iterator[tuple[int, Answer]]:
        """(worker, answer) as they come. Raises what a worker says went wrong; `what` names a worker's work."""
        while True:
            try:
                worker, answer = self._answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                doing = sorted({what(worker) for worker in range(self._count)})
                self._note(f"no sample has come for {format_duration(PATIENCE_S)} ({'; '.join(doing)})")
                continue
            if answer is None:
                code = self._workers[worker].wait()
                cause = f"it died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                if code == -signal.SIGKILL:
                    cause = "it was killed, most likely for want of memory"
                raise UserCodeError(f"a worker ended while {what(worker)} ({cause}).", "What is finished is kept.")
            if "error" in answer:
                kind = (
                    DiskFull if answer.get("disk_full") else TrainpaceError if answer.get("misuse") else UserCodeError
                )
                raise kind(answer["error"], answer["hint"])
            yield worker, answer

    def _listen(self, number: int) -> None:
        pipe = self._workers[number].stdout
        assert pipe is not None
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in pipe:
                self._answers.put((number, json.loads(line)))
        self._answers.put((number, None))
