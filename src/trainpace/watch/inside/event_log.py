"""Event log: a file that a watched process writes while it runs.

Records that were written survive if the process is killed.

Each process has one file. The file starts with a JSON header line. Binary records follow, each
after a letter for its kind. Times are ``time.perf_counter_ns``, which is the same clock for all
processes of a host.

Files keep the suffix ``.trail`` and the header key ``trail`` of the first version, so that old
recordings stay readable.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import mmap

VERSION = 2

PARTS = (
    "other",
    "data",
    "loader_start",
    "host_to_device",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "synchronisation",
    "logging",
    "checkpoint",
    "evaluation",
    "trainpace",
)
(
    OTHER,
    DATA,
    LOADER_START,
    HOST_TO_DEVICE,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    COMMUNICATION,
    SYNCHRONISATION,
    LOGGING,
    CHECKPOINT,
    EVALUATION,
    TRAINPACE,
) = range(len(PARTS))

TRIALS = (
    "plain",
    "settling",
    "cached_batch",
    "batch_on_device",
    "no_sync",
    "few_samples",
    "muted",
    "fewer_threads",
)
"""Trials that a step may run under. Settling steps follow a change and are not counted."""
PLAIN, SETTLING, CACHED_BATCH, BATCH_ON_DEVICE, NO_SYNC, FEW_SAMPLES, MUTED, FEWER_THREADS = range(
    len(TRIALS)
)
REPLACING = (CACHED_BATCH, BATCH_ON_DEVICE, FEW_SAMPLES)
"""Trials that replace the loader's batch by a remembered one."""
FEW = 2
"""Samples per batch in the trial `few_samples`."""

OF_TRIAL = ".trainpace-trial"
"""Suffix of checkpoints that a script writes under trials."""
EARLIER = ".before-trainpace-look"
"""Part of the new name when `trainpace look` moves a file of an earlier run aside."""
STOP_AFTER = "TRAINPACE_STOP_AFTER_S"
"""Environment variable with the seconds of steps after which `trainpace look` ends the script."""
TASK = "TRAINPACE_TASK"
"""Environment variable with the number of this task if several record into one folder."""

LONGEST_WRITE_S = 2.0
"""Seconds that a thread waits for another thread to finish writing.

The wait has a limit because a signal handler may interrupt its own thread in the middle of a write.
"""

_STEP = struct.Struct(f"<cBHIqqIff{len(PARTS)}q")
_SPAN = struct.Struct("<cBBHIqq")
_FETCH = struct.Struct("<chxIqqqq")
_JSON = struct.Struct("<cI")
_FORMS = {b"S": _STEP, b"P": _SPAN, b"F": _FETCH, b"J": _JSON}


class Step(NamedTuple):
    """One optimizer step: nanoseconds by part, which add up to end - start, and counts."""

    trial: int
    micro_steps: int
    number: int
    start_ns: int
    end_ns: int
    samples: int
    reserved_gib: float
    allocator_retries: float
    parts_ns: tuple[int, ...]


class Span(NamedTuple):
    """A stretch of one part on one thread.

    Attributes:
        depth: Number of spans around it. 0 is the outermost.
        name: Number of its name, which an earlier JSON record defines.
        thread: 0 for the training thread, else the thread's identifier.
    """

    part: int
    depth: int
    name: int
    thread: int
    start_ns: int
    end_ns: int


class Fetch(NamedTuple):
    """One batch that the dataset made.

    Attributes:
        worker: Number of the worker process, or -1 for the training process.
    """

    worker: int
    samples: int
    start_ns: int
    end_ns: int
    cpu_ns: int
    collate_ns: int


class EventLogWriter:
    """Appends records to a log.

    `flush` writes them to the file, so a killed process does not lose them. Any thread may append:
    a deque needs no lock, and a fork could leave a lock locked. A forked child closes its parent's
    log, which needs no lock either.
    """

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._waiting = deque([json.dumps({"trail": VERSION, **header}).encode() + b"\n"])
        self._names: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._writing = threading.Lock()
        self.flush()

    def step(self, step: tuple[Any, ...]) -> None:
        """Append a step, given as a tuple of `Step` values. Making a `Step` would cost time."""
        if self._file >= 0:
            self._waiting.append(_STEP.pack(b"S", *step[:8], *step[8]))

    def span(
        self, part: int, depth: int, name: str, thread: int, start_ns: int, end_ns: int
    ) -> None:
        """Append a span. Each name is written once, with the number that spans refer to."""
        number = self._names.get(name) or 0
        if not number and len(self._names) < 0xFFFF:
            number = next(self._numbers)
            self.note(name=name, number=number)
            self._names[name] = number
        self._append(
            _SPAN.pack(b"P", part, depth & 0xFF, number, thread & 0xFFFFFFFF, start_ns, end_ns)
        )

    def fetch(self, fetch: Fetch) -> None:
        """Append a fetch."""
        self._append(_FETCH.pack(b"F", *fetch))

    def note(self, /, **content: Any) -> None:
        """Append a JSON record with these values."""
        text = json.dumps(content).encode()
        self._append(_JSON.pack(b"J", len(text)) + text)

    def _append(self, record: bytes) -> None:
        if self._file >= 0:
            self._waiting.append(record)

    def flush(self) -> None:
        """Write all waiting records. If the disk is full, the log ends and the script continues."""
        if (
            self._file < 0
            or not self._waiting
            or not self._writing.acquire(timeout=LONGEST_WRITE_S)
        ):
            return
        try:
            data = b"".join(self._waiting.popleft() for _ in range(len(self._waiting)))
            if os.write(self._file, data) != len(data):
                self.close()
        # The disk is full, or another thread closed the log meanwhile.
        except (OSError, IndexError):
            self.close()
        finally:
            self._writing.release()

    def close(self) -> None:
        """End the log. A forked child calls this first, because the file belongs to its parent."""
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):
            os.close(file)
        self._waiting.clear()


def unused(folder: str, name: str) -> str:
    """Create a new file in the folder and return its path.

    Containers on two nodes may have the same host name, and their processes the same number. In
    that case, a number is appended to the name. If no file can be created, the path is still
    returned, so that opening it raises the error.
    """
    path = os.path.join(folder, f"{name}.trail")
    for number in range(2, 100):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            path = os.path.join(folder, f"{name}-{number}.trail")
        except OSError:
            break
        else:
            break
    return path


def aside_of(place: str, folder: str) -> str:
    """Return the path to which `look` moves a file of an earlier run.

    It depends on the recording folder.
    """
    return f"{place}{EARLIER}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"


def state_of(place: str) -> tuple[int, int, int]:
    """Return (inode, size, modification time in ns) of a file.

    Any write or replacement changes at least one of them.

    Raises:
        OSError: The file does not exist.
    """
    about = os.stat(place)
    return about.st_ino, about.st_size, about.st_mtime_ns


def read_header(line: bytes) -> dict[str, Any]:
    """Parse the first line of an event log.

    Raises:
        ValueError: The line is not the header of an event log of this version.
    """
    header = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(header, dict) or header.get("trail") != VERSION:
        raise ValueError("not an event log of this version")
    return header


def records_from(
    data: bytes | mmap.mmap, at: int
) -> Iterator[Step | Span | Fetch | dict[str, Any]]:
    """Yield the records from byte `at` on. An incomplete record at the end is skipped.

    Raises:
        ValueError: A record has an unknown kind.
    """
    while at < len(data):
        kind = data[at : at + 1]
        form = _FORMS.get(kind)
        if form is None:
            raise ValueError(f"an unknown record at byte {at}")
        begin, at = at, at + form.size
        if at > len(data):
            return
        values = form.unpack_from(data, begin)[1:]
        if kind == b"S":
            yield Step._make((*values[:8], values[8:]))
        elif kind == b"P":
            yield Span(*values)
        elif kind == b"F":
            yield Fetch(*values)
        else:
            begin, at = at, at + values[0]
            if at > len(data):
                return
            yield json.loads(data[begin:at])
