"""Readers of profiler traces: JSON of torch.profiler (Kineto), and SQLite of Nsight Systems.

`export_chrome_trace` and `tensorboard_trace_handler` write these files, and Holistic Trace Analysis
reads them too. The format is Chrome's Trace Event Format as in Kineto's output_json.cpp. NVIDIA and
AMD traces have the same format; torch 1.8 used other names for categories. Events with an
impossible time (not a number, or a negative duration) are skipped and counted.

A report of Nsight Systems, exported by `nsys export --type sqlite`, contains one trace per process
that used a GPU. Its reader follows the documented schema (Nsight Systems User Guide, "SQLite Schema
Reference") and public programs that read such files. **It was not tested with a real export.**
Tables and columns may be missing: some exports have no `NVTX_EVENTS`. Times are nanoseconds on one
clock. A `globalPid` is a `globalTid` with its low 24 bits set to 0.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import opened_database, pieces
from trainpace.diagnose.traces import Events, Trace
from trainpace.measure import DATA_RANGE, OPTIMIZER_RANGE, STEP_RANGE

MADE_BY = "torch.profiler"
MOST_BYTES = 1 << 32
"""Largest uncompressed trace, 4 GiB. Trace viewers open much less."""
LARGEST_US = 1e18
"""Upper limit of a valid timestamp in microseconds. Unix time is about 2e15."""
_OWN_RANGES = (STEP_RANGE, DATA_RANGE, OPTIMIZER_RANGE)
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)


class About(msgspec.Struct):
    """Arguments of an event. `correlation` links a runtime call to the work that it launched."""

    correlation: Any = None


class Event(msgspec.Struct):
    """Unchecked event of the Trace Event Format. `ts` and `dur` are in microseconds."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    args: About | None = None


class Document(msgspec.Struct):
    """Parsed trace file: events, process information and device properties."""

    traceEvents: list[Event] = []  # noqa: N815
    distributedInfo: Any = None  # noqa: N815
    deviceProperties: Any = None  # noqa: N815
    computeProperties: Any = None  # noqa: N815
    host_name: Any = None


def read_kineto(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a JSON file, optionally compressed with gzip.

    Raises:
        UnreadableInput: If the file is not a trace, or has neither operators nor kernels.
    """
    document, events = _document(path), Events()
    for event, column in _placed(document):
        correlation = event.args.correlation if event.args else None
        events.add(column, _time(event.ts), _time(event.dur), event.name, correlation)
    rank, world_size = _place(document.distributedInfo, Path(path).name)
    trace = events.trace(
        source=os.fspath(path),
        made_by=MADE_BY,
        rank=rank,
        world_size=world_size,
        device=_device(document),
        process=_process(document),
    )
    if not len(trace.kernels) and not len(trace.operators):
        raise UnreadableInput(
            f"{os.fspath(path)} contains neither an operator nor a kernel of torch.profiler.",
            "Record one with torch.profiler.profile and its export_chrome_trace.",
        )
    return trace


def _document(path: str | os.PathLike[str]) -> Document:
    content = b"".join(pieces(path, MOST_BYTES))
    try:
        found = msgspec.json.decode(content, type=list[Event] | Document)
    except (ValueError, RecursionError):  # Python's json also accepts NaN and broken UTF-8
        found = _leniently(content, os.fspath(path))
    return Document(found) if isinstance(found, list) else found


def _leniently(content: bytes, source: str) -> Document:
    try:
        data = json.loads(content.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            f"{source} is not a complete trace in JSON ({str(error)[:100]}).",
            "A profiler that was killed while it wrote leaves such a file; record the trace again.",
        ) from None
    about = data if isinstance(data, dict) else {"traceEvents": data}
    events = about.get("traceEvents")
    listed = events if isinstance(events, list) else []
    return msgspec.convert(
        about | {"traceEvents": [_event(e) for e in listed if isinstance(e, dict)]}, Document
    )


def _event(value: dict[str, Any]) -> dict[str, Any]:
    args = value.get("args")
    return value | {"args": args if isinstance(args, dict) else None}


def _placed(document: Document) -> Iterator[tuple[Event, str]]:
    """Yield the complete events (phase X), each with the column of its category."""
    for event in document.traceEvents:
        if event.ph == "X" and isinstance(event.cat, str) and isinstance(event.name, str):
            column = _column_of(event) if event.name else None
            if column is not None:
                yield event, column


def _column_of(event: Event) -> str | None:
    """Return the column of an event's category, or None for Python functions, flows and others."""
    category = event.cat.lower()
    if category == "kernel":
        return "kernels"
    if category in ("gpu_memcpy", "gpu_memset", "memcpy", "memset"):
        return "copies"
    if category.endswith(("runtime", "driver")):
        return "calls"
    if category in ("cpu_op", "operator", "user_annotation"):
        is_range = category == "user_annotation" or event.name.lower().startswith(_OWN_RANGES)
        return "ranges" if is_range else "operators"
    return None


def _time(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < LARGEST_US:
        return None
    return float(value)


def _place(distributed: Any, file: str) -> tuple[int | None, int | None]:
    """Return (rank, number of ranks), or None for unknown ones.

    If the trace does not contain the rank, it is taken from the file's name.
    """
    about = distributed if isinstance(distributed, dict) else {}
    rank, world = (_count(about.get(key)) for key in ("rank", "world_size"))
    in_name = _RANK_IN_NAME.search(file)
    return int(in_name[1]) if rank is None and in_name else rank, world or None


def _process(document: Document) -> str:
    """Return the host and the number of the traced process, or "" if one of them is missing."""
    operators = ("cpu_op", "user_annotation")
    pid = next((event.pid for event in document.traceEvents if event.cat in operators), None)
    host = document.host_name
    return f"{host}_{pid}" if isinstance(host, str) and host and type(pid) is int else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 10**6 else None


def _device(document: Document) -> str:
    for listed in (document.deviceProperties, document.computeProperties):
        first = listed[0] if isinstance(listed, list) and listed else None
        if isinstance(first, dict) and isinstance(first.get("name"), str):
            return str(first["name"])[:80]
    return ""


NSIGHT = "Nsight Systems"
KERNELS, COPIES, FILLS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
)
CALLS, RANGES, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
GPU = "TARGET_INFO_GPU"
LARGEST_NS = 1 << 62
MOST_ROWS = 100_000_000
PROCESS = 1 << 24
"""Divisor that turns a serialized global id (`globalPid`, `globalTid`) into a process number."""
COPY_KINDS = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
"""Names of copies by CUpti_ActivityMemcpyKind."""
RANGE_TYPES = (59, 60)
"""NVTX event types for push/pop and start/end ranges."""
_PLAIN_TABLE = re.compile(r"\s*CREATE\s+TABLE\b", re.IGNORECASE)


def read_nsight(path: str | os.PathLike[str]) -> list[Trace]:
    """Read one trace per process that used a GPU, in the order of the process ids.

    Raises:
        UnreadableInput: If the file is not such an export, or contains no GPU kernels.
    """
    with opened_database(path) as database:
        report = _Report(database, os.fspath(path))
        report.read()
        return report.traces()


class _Report:
    """Spans of each process in a report, collected table by table."""

    def __init__(self, database: sqlite3.Connection, source: str) -> None:
        self._database, self._source = database, source
        self._tables = _tables(database)
        self._strings = {k: s for k, s in self._rows(STRINGS, "id", "value") if isinstance(s, str)}
        self._processes: dict[int, Events] = defaultdict(partial(Events, unit_us=1e-3))

    def read(self) -> None:
        strings, columns = self._strings, self._tables.get(KERNELS, ())
        named = "demangledName" if "demangledName" in columns else "shortName"
        for column, table, owner, key, names, unnamed in (
            ("kernels", KERNELS, "globalPid", named, strings, "a kernel without a name"),
            ("copies", COPIES, "globalPid", "copyKind", COPY_KINDS, "Memcpy"),
            ("copies", FILLS, "globalPid", "value", {}, "Memset"),
            ("calls", CALLS, "globalTid", "nameId", strings, "a call without a name"),
        ):
            rows = self._rows(table, "start", "end", owner, key, "correlationId")
            for *span, value, identity in rows:
                self._put(column, span, names.get(value, unnamed), identity)
        rows = self._rows(RANGES, "start", "end", "globalTid", "text", "textId", "eventType")
        for *span, text, key, kind in rows:
            if span[1] is not None and (kind is None or kind in RANGE_TYPES):
                name = text or strings.get(key, "a range without a name")
                self._put("ranges", span, str(name))

    def _put(self, column: str, span: Sequence[Any], name: str, identity: Any = None) -> None:
        start, end, owner = span
        process = owner // PROCESS if type(owner) is int else 0
        length = end - start if _is_time(start) and _is_time(end) else None
        self._processes[process].add(column, start, length, name, identity)

    def _rows(self, table: str, *columns: str) -> Iterator[Sequence[Any]]:
        """Yield the rows of a table, with None for missing columns.

        A missing table yields no rows.
        """
        there = self._tables.get(table)
        if there is not None:
            listed = ", ".join(f'"{column}"' if column in there else "NULL" for column in columns)
            yield from self._database.execute(f"SELECT {listed} FROM {table} LIMIT {MOST_ROWS}")

    def traces(self) -> list[Trace]:
        """Return the traces of processes that used a GPU."""
        device = next((s for (s,) in self._rows(GPU, "name") if isinstance(s, str)), "")
        about = {"source": self._source, "made_by": NSIGHT, "device": device[:80]}
        every = [
            process.trace(**about, rank=None, world_size=None)
            for _, process in sorted(self._processes.items())
        ]
        traces = [trace for trace in every if len(trace.kernels)]
        if not traces:
            raise UnreadableInput(
                f"{self._source} contains no GPU kernels.",
                "Record with nsys profile --trace cuda,nvtx, then nsys export --type sqlite.",
            )
        if len(traces) == 1:
            return traces
        return [t._replace(rank=i, world_size=len(traces)) for i, t in enumerate(traces)]


def _tables(database: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the names of the columns of each known table.

    Only plain tables count. In a crafted file, a view or virtual table may compute without end.
    """
    found = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        # table_info omits generated columns, which may compute without end like a view.
        name: {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
        for name, sql in found
        if name in (KERNELS, COPIES, FILLS, CALLS, RANGES, STRINGS, GPU)
        and isinstance(sql, str)
        and _PLAIN_TABLE.match(sql)
    }


def _is_time(value: Any) -> bool:
    return type(value) is int and -LARGEST_NS < value < LARGEST_NS
