"""Whether a training computes with more threads than it has cores for: its threads then wait for each other at the end of every
operator, which no clock of one thread shows. An intervention does: some steps with fewer."""

import os
import socket
import sys
import time
from typing import Any

from trainpace.core.host import usable_cores
from trainpace.watch.inside.cores import delayed_share
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import Step, read_header, records_from

DELAYED = 0.1
"""Share of its time in which the training thread waits for a core, from which on it is said, and others are taken to need cores
too. A judgement, not a measurement: in recordings of a busy day it was 0 to 0.03 where nothing disturbed; from which share on a
verdict is wrong, nobody measured."""
TRAINS_WITHIN_S = 10.0
"""Since another process last wrote to its trail: several of its flushes, also where it is slow."""


def own_threads() -> int:
    return int(_torch().get_num_threads())


def fewer_threads(recorder: Recorder) -> int:
    """How many threads to try instead of the script's own; 0 where it has a core for each."""
    threads, cpus = own_threads(), usable_cores()
    fair = max(1, cpus // (1 + len(beside(recorder.trail.path))))
    if fair < threads:
        return fair
    waited = delayed_share(recorder.scheduled) if recorder.scheduled is not None else None
    return 1 if threads > 1 and waited is not None and waited >= DELAYED else 0


def computes_with(threads: int) -> None:
    _torch().set_num_threads(threads)


def beside(own_trail: str) -> list[str]:
    """The trails of other processes of this command and host that are training now."""
    folder, name = os.path.split(own_trail)
    try:
        others = os.listdir(folder)
    except OSError:
        return []
    return [
        path
        for other in others
        if other.startswith("process-")
        and other != name
        and _trains(path := os.path.join(folder, other))
    ]


def _trains(path: str) -> bool:
    try:
        if time.time() - os.path.getmtime(path) > TRAINS_WITHIN_S:
            return False
        with open(path, "rb") as file:
            first = file.readline()
            rest = file.read()
        if read_header(first).get("host") != socket.gethostname():
            return False
        return any(isinstance(record, Step) for record in records_from(rest, 0))
    except (OSError, ValueError):
        return False


def _torch() -> Any:
    return sys.modules["torch"]
