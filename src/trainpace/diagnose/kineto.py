"""Traces of torch.profiler (Kineto): what `export_chrome_trace` and `tensorboard_trace_handler` write, and Holistic Trace
Analysis reads. Of NVIDIA's and AMD's devices alike; of torch 1.8, too, whose categories had other names.

The format is that of Kineto's output_json.cpp and of Chrome's Trace Event Format. Events that cannot be right (a time that is no
number, one below zero) are left out and counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import DEEPEST, pieces
from trainpace.diagnose.traces import Column, Names, Trace, identity_of, launched
from trainpace.measure import DATA_RANGE, OPTIMIZER_RANGE, STEP_RANGE

MADE_BY = "torch.profiler"
LARGEST_US = 1e18
"""A clock that counts from 1970 is at 2e15."""
_OWN_RANGES = (STEP_RANGE, DATA_RANGE, OPTIMIZER_RANGE)
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)


class _Columns(NamedTuple):
    kernels: Column
    copies: Column
    operators: Column
    calls: Column
    ranges: Column


def read_kineto(path: str | os.PathLike[str]) -> Trace:
    """The trace in a JSON file, also one that is compressed by gzip. Raises UnreadableInput for anything else, and for a trace
    that holds neither an operator nor a kernel."""
    columns, names, skipped = _Columns(*(Column() for _ in range(5))), Names(), 0
    events = Events(path)
    origin_us: float | None = None
    for event in _whole(events):
        column = _column_of(event, columns)
        if column is None:
            continue
        start, length = _time(event.ts), _time(event.dur)
        if start is None or length is None or length < 0:
            skipped += 1
            continue
        if origin_us is None:
            origin_us = (
                start  # doubles hold a quarter of a microsecond where a clock counts from 1970
            )
        begins = start - origin_us
        column.add(
            begins,
            begins + length,
            names.number(event.name),
            identity_of(event.args.correlation if event.args else None),
        )
    kernels, copies, operators, calls, ranges = (column.spans() for column in columns)
    if not len(kernels) and not len(operators):
        raise UnreadableInput(
            f"{os.fspath(path)} holds neither an operator nor a kernel of torch.profiler.",
            "Record one with torch.profiler.profile and its export_chrome_trace.",
        )
    rank, world_size = _place(events.about, Path(path).name)
    call_ids = columns.calls.ids()
    return Trace(
        source=os.fspath(path),
        made_by=MADE_BY,
        rank=rank,
        world_size=world_size,
        device=_device(events.about),
        names=names.all(),
        kernels=kernels,
        kernels_launched_us=launched(columns.kernels.ids(), calls, call_ids),
        copies=copies,
        copies_launched_us=launched(columns.copies.ids(), calls, call_ids),
        operators=operators,
        calls=calls,
        ranges=ranges,
        skipped=skipped,
    )


def _whole(events: Events) -> Iterator[Event]:
    return (
        e
        for e in events
        if e.ph == "X" and isinstance(e.cat, str) and isinstance(e.name, str) and e.name
    )


def _column_of(event: Event, columns: _Columns) -> Column | None:
    """Where an event belongs, by its category; None for what is not read, such as Python's functions and flows."""
    category = event.cat.lower()
    if category == "kernel":
        return columns.kernels
    if category in ("gpu_memcpy", "gpu_memset", "memcpy", "memset"):
        return columns.copies
    if category.endswith(("runtime", "driver")):
        return columns.calls
    if category in ("cpu_op", "operator", "user_annotation"):
        is_range = category == "user_annotation" or event.name.lower().startswith(_OWN_RANGES)
        return columns.ranges if is_range else columns.operators
    return None


def _time(value: Any) -> float | None:
    """A number of microseconds; None for what is none."""
    if type(value) not in (int, float) or not abs(value) < LARGEST_US:
        return None
    return float(value)


def _place(about: dict[str, Any], file: str) -> tuple[int | None, int | None]:
    """Rank and number of ranks, from the trace or else from the file's name."""
    info = about.get("distributedInfo")
    told = info if isinstance(info, dict) else {}
    rank, world = (_count(told.get(key)) for key in ("rank", "world_size"))
    in_name = _RANK_IN_NAME.search(file)
    return int(in_name[1]) if rank is None and in_name else rank, world or None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 10**6 else None


def _device(about: dict[str, Any]) -> str:
    for key in ("deviceProperties", "computeProperties"):
        listed = about.get(key)
        first = listed[0] if isinstance(listed, list) and listed else None
        if isinstance(first, dict) and isinstance(first.get("name"), str):
            return str(first["name"])[:80]
    return ""


MOST_VALUE_BYTES = 1 << 25
"""32 MiB: of one event, or of one value beside the events. A real one has a few hundred bytes."""
MOST_EVENTS = 100_000_000
_SPACE = re.compile(r"[\s\ufeff]*")
_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|id|args|dur|s|bp)")')
_TAIL_BYTES = 1 << 16


class About(msgspec.Struct):
    """Of an event's `args`, the number that joins a call with the work that it started."""

    correlation: Any = None


class Event(msgspec.Struct):
    """An event of the Trace Event Format, unchecked: `ts` and `dur` in microseconds."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    args: About | None = None


class Events:
    """Iterates over the file's events. `about` holds the other top-level values that were met so far."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.about: dict[str, Any] = {}
        self._name = os.fspath(path)
        self._pieces = pieces(path)
        # bytes as characters of the same number, so that positions are the same; names are put right below
        self._text, self._at = "", 0
        self._one_by_one = False
        self._decoder = json.JSONDecoder()
        self._fast = msgspec.json.Decoder(list[Event])

    def __iter__(self) -> Iterator[Event]:
        first = self._peek()
        if first == "[":  # the array alone, as the format admits
            yield from self._array()
        elif first == "{":
            self._at += 1
            yield from self._members()
        else:
            raise UnreadableInput(f"{self._name} is no trace in JSON.")

    def _members(self) -> Iterator[Event]:
        if self._peek() == "}":
            return
        while True:
            key = self._value()
            if not isinstance(key, str) or self._take() != ":":
                raise self._broken()
            if key == "traceEvents" and self._peek() == "[":
                yield from self._array()
            else:
                value = self._value()
                if len(self.about) < DEEPEST:
                    self.about[key] = value
            end = self._take()
            if end == "}":
                return
            if end != ",":
                raise self._broken()

    def _array(self) -> Iterator[Event]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        count = 0
        while True:
            if run := self._run():
                yield from run
                count += len(run)
            else:
                yield _event(self._value())
                count += 1
            if count > MOST_EVENTS:
                raise UnreadableInput(f"{self._name} holds more than {MOST_EVENTS:,} events.")
            end = self._take()
            if end == "]":
                return
            if end != ",":
                raise self._broken()

    def _run(self) -> list[Event]:
        """As many whole events as the text at hand holds; none where they have to be taken one by one."""
        if len(self._text) - self._at < _TAIL_BYTES:
            self._more()
        if self._one_by_one:
            return []
        self._one_by_one = True  # until the next piece, unless this one can be decoded
        left = self._text[self._at :].encode("latin-1")
        ends = [
            match.start() + 1 for match in _BOUNDARY.finditer(left, max(0, len(left) - _TAIL_BYTES))
        ]
        if not ends:
            return []
        try:
            events = self._fast.decode(b"[" + left[: ends[-1]] + b"]")
        except (ValueError, RecursionError):
            return []
        self._at += ends[-1]
        return events

    def _value(self) -> Any:
        """The JSON value that begins here."""
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # a number may go on in the next piece
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if len(self._text) - self._at > MOST_VALUE_BYTES or not self._more():
                    raise self._broken() from None
            except RecursionError:
                raise UnreadableInput(
                    f"{self._name} is nested more than {DEEPEST} levels deep."
                ) from None
            except ValueError:
                raise UnreadableInput(
                    f"{self._name} holds an integer of thousands of digits."
                ) from None

    def _peek(self) -> str:
        """The next character that is no blank; nothing at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _take(self) -> str:
        found = self._peek()
        self._at += 1
        return found

    def _more(self) -> bool:
        piece = next(self._pieces, b"")
        if piece:
            self._text, self._at = self._text[self._at :] + piece.decode("latin-1"), 0
            self._one_by_one = False
        return bool(piece)

    def _broken(self) -> UnreadableInput:
        if len(self._text) - self._at > MOST_VALUE_BYTES:
            return UnreadableInput(
                f"{self._name} holds a value of more than {MOST_VALUE_BYTES >> 20} MiB, or is"
                " damaged."
            )
        return UnreadableInput(
            f"{self._name} is not a whole trace in JSON: it is cut short or damaged.",
            "A profiler that was killed while it wrote leaves such a file; record the trace again.",
        )


def _event(value: Any) -> Event:
    """An event that was taken alone; one without a name for anything else."""
    if not isinstance(value, dict):
        return Event()
    args = value.get("args")
    about = About(args.get("correlation")) if isinstance(args, dict) else None
    name = value.get("name")
    if isinstance(name, str):
        with contextlib.suppress(UnicodeEncodeError):  # it was written with escapes
            name = name.encode("latin-1").decode("utf-8", "replace")
    return Event(value.get("ph"), value.get("cat"), name, value.get("ts"), value.get("dur"), about)
