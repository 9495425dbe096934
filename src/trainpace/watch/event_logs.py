"""Read the event logs of a folder: their headers, records and notes."""

import contextlib
import json
import mmap
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.core.errors import UnreadableInput, os_reason
from trainpace.core.records import Record
from trainpace.watch.inside.event_log import Fetch, Span, Step, read_header, records_from


class ProcessLog(NamedTuple):
    """Event log of a process that imported torch, with the logs of its DataLoader workers.

    Attributes:
        workers: (path, worker number) of each worker.
    """

    path: Path
    header: dict[str, Any]
    workers: list[tuple[Path, int]]


def process_logs(folder: Path) -> list[ProcessLog]:
    """Return the event logs of a folder, one per process that imported torch."""
    workers = defaultdict(list)
    for path, header in _with_headers(folder, "worker-*.trail"):
        with readable(path):
            workers[header["host"], header["parent"]].append((path, int(header["worker"])))
    logs = []
    for path, header in _with_headers(folder, "process-*.trail"):
        with readable(path):
            logs.append(ProcessLog(path, header, workers[header["host"], header["pid"]]))
    return logs


def _with_headers(folder: Path, pattern: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob(pattern)):
        if header := header_of(path):
            yield path, header


def header_of(path: Path) -> dict[str, Any] | None:
    """Return the header of a log, or None if the disk was full before the header was written.

    Raises:
        UnreadableInput: The file is not an event log.
    """
    with readable(path):
        with path.open("rb") as file:
            line = file.readline()
        return read_header(line) if line.endswith(b"\n") or len(line) > 100_000 else None


def records_of(path: Path) -> Iterator[Step | Span | Fetch | dict[str, Any]]:
    """Yield the records of a log one at a time.

    A last record that is incomplete because the process was killed is skipped.
    """
    with (
        readable(path),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield from records_from(data, data.find(b"\n") + 1)


def fetches_of(path: Path) -> Iterator[Fetch]:
    """Return the fetches in the event log of a worker."""
    return (r for r in records_of(path) if isinstance(r, Fetch))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn any error that damaged bytes can cause into UnreadableInput."""
    try:
        yield
    except UnreadableInput:
        raise
    except OSError as error:
        raise UnreadableInput(f"cannot read {path}: {os_reason(error)}.") from None
    except DAMAGE as error:
        what = "it is damaged"
        if isinstance(error, RecursionError | json.JSONDecodeError | UnicodeDecodeError):
            what = "not JSON"
        elif type(error) is ValueError:
            what = str(error)
        hint = "Record the command again."
        raise UnreadableInput(f"{path} cannot be read ({what}).", hint) from None


DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.ValidationError,
    struct.error,
)
"""Errors that changed bytes in an event log can cause."""

FEWEST_LOOKS = 3
"""Least number of stack samples for a line to be listed.

A judgement: one or two samples say nothing about the line's share of the time.
"""


class Note(NamedTuple):
    """Values by name, and the number of the last step before them (-1 before the first step)."""

    content: dict[str, Any]
    after: int


class Notes:
    """Notes by name, in the order of writing.

    A note with several values appears under each of its names.
    """

    def __init__(self, records: Iterable[Any] = ()) -> None:
        self._by_name: defaultdict[str, list[Note]] = defaultdict(list)
        self._after = -1
        for record in records:
            self.add(record)

    def add(self, record: Any) -> None:
        """Add a record of a log. A step sets the step number of the notes that follow it."""
        if isinstance(record, Step):
            self._after = record.number
        elif isinstance(record, dict):
            for name in record:
                self._by_name[name].append(Note(record, self._after))

    def with_name(self, name: str) -> list[Note]:
        """Return the notes with a value of this name, oldest first."""
        return self._by_name.get(name, [])

    def values(self, name: str) -> list[Any]:
        """Return the values of this name, oldest first."""
        return [note.content[name] for note in self.with_name(name)]

    def last(self, name: str, default: Any = None) -> Any:
        """Return the last value of this name, or `default`."""
        return [default, *self.values(name)][-1]

    def last_of_each(self) -> dict[str, Any]:
        """Return the last value of each name."""
        return {name: notes[-1].content[name] for name, notes in self._by_name.items()}

    @property
    def span_names(self) -> dict[int, str]:
        """Names of spans by number."""
        named = self.with_name("number")
        return {note.content["number"]: note.content["name"] for note in named}

    def by_step(self, name: str) -> dict[int, Any]:
        """Return the values, keyed by the number of the step that they were logged after."""
        return {note.after: note.content[name] for note in self.with_name(name)}


class Loader(Record):
    """Settings of a DataLoader.

    Attributes:
        samples_in_dataset: Length of the dataset, or None if it has none.
        batches: Batches per epoch, or None if the loader has no length.
        one_by_one: Samples are fetched one by one and collated by torch's default function.
    """

    dataset: str
    samples_in_dataset: int | None
    batches: int | None
    batch_size: int | None
    workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    one_by_one: bool = False


def training_loader(notes: Notes, steps: Sequence[Step]) -> Loader | None:
    """Return the loader that fed the steps, or None without a DataLoader.

    If the log names loaders with trained batches, only these are considered. The first one whose
    batch size fits a step is returned, or else the first one.
    """
    loaders = [note.content for note in notes.with_name("loader")]
    if not loaders:
        return None
    feeds, taken = notes.values("feeds"), {s.samples // max(1, s.micro_steps) for s in steps}
    loaders = [found for found in loaders if found["loader"] in feeds] or loaders
    fits = next((found for found in loaders if found["batch_size"] in taken), loaders[0])
    return Loader(**{name: fits[name] for name in Loader.__struct_fields__ if name in fits})


class Line(Record):
    """Line of the script that the stack samples show.

    Attributes:
        part: Part of the step that ran.
        called: Function that the line called.
        share: Share of the part's samples that show this line.
    """

    part: str
    line: str
    called: str
    share: float


def lines_of(notes: Notes) -> tuple[Line, ...]:
    """Return the lines of the script in the last stack samples, with each line's share."""
    samples: Sequence[Sequence[Any]] = notes.last("samples", [])
    totals: Counter[str] = Counter()
    for part, _, _, count in samples:
        totals[part] += count
    return tuple(
        Line(part=part, line=line, called=called, share=count / totals[part])
        for part, line, called, count in samples
        if line and count >= FEWEST_LOOKS
    )
