"""``python -m trainpace.machine.allreduce_worker``: start the ranks of an all-reduce, and wait for what rank 0 writes.

The ranks stay in this process's group, which the asking process kills as a whole; each also ends itself by an alarm,
should that one be gone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.isolation import serve
from trainpace.records import write_whole


def _work(request: dict[str, Any]) -> str:
    folder = Path(request["folder"])
    write_whole(folder / "request.json", json.dumps(request))
    command = [sys.executable, "-m", "trainpace.machine.allreduce_rank", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], stdin=subprocess.DEVNULL) for rank in range(request["ranks"])]
    try:
        return _answer(ranks, folder)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _answer(ranks: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """What rank 0 writes. Raises as soon as a rank has failed: the others would wait for it until the timeout.

    Success is read from the answer alone, for torch may abort at exit when all is done.
    """
    answer = folder / "seconds.json"
    while True:
        codes = [rank.poll() for rank in ranks]  # before the files, so that a rank that has ended has written its own
        if answer.exists():
            return answer.read_text()
        for i, code in enumerate(codes):
            if code is not None and code < 0:
                raise TrainpaceError(f"rank {i} of the all-reduce died of {signal.Signals(-code).name}.")
        for i, code in enumerate(codes):
            error = folder / f"error-{i}.txt"
            if error.exists():
                raise TrainpaceError(error.read_text())
            if code is not None:
                raise TrainpaceError(f"rank {i} of the all-reduce ended without an answer (exit code {code}).")
        time.sleep(0.02)


if __name__ == "__main__":
    serve(_work)
