"""Workers that answer many requests: asked in JSON lines, answering in JSON lines, gone when this process is."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainpace.errors import UserCodeError
from trainpace.process.child import Child, cause_of
from trainpace.process.isolation import error_of
from trainpace.units import format_duration

PATIENCE_S = 60.0
Answer = dict[str, Any]


class Pool:
    """`count` processes of ``python -m module argument``, which use `trainpace.process.serve_lines`. Leaving its context ends
    them all.

    `note` hears when nothing has come from any worker for a minute.
    """

    def __init__(self, module: str, argument: str, count: int, note: Callable[[str], None] = lambda _: None) -> None:
        self._command, self._count, self._note = [sys.executable, "-m", module, argument], count, note
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue()
        self._workers: list[Child] = []

    def __enter__(self) -> Pool:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one thread each: the workers are the parallelism
        for number in range(self._count):
            self._workers.append(Child(self._command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.cut_lifeline()
        for worker in self._workers:
            worker.end()

    def ask(self, worker: int, **request: Any) -> None:
        """Send a request; the answer comes out of `answers`."""
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
                self._note(f"no sample has come for {format_duration(PATIENCE_S)} ({'; '.join(doing)})")
                continue
            if answer is None:
                cause = cause_of(self._workers[worker].wait() or 0)
                raise UserCodeError(f"a worker ended while {what(worker)} ({cause}).", "What is finished is kept.")
            if "error" in answer:
                raise error_of(answer)
            yield worker, answer

    def _listen(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self._workers[number].stdout:
                self._answers.put((number, json.loads(line)))
        self._answers.put((number, None))
