"""Reports of Nsight Systems, exported by `nsys export --type sqlite`: one trace for each process that used a GPU.

Written after the schema that NVIDIA documents (Nsight Systems User Guide, "SQLite Schema Reference") and after public programs
that read such files; **no real export was at hand**. Tables and columns that an export lacks are done without: old ones have no
`globalPid`, some no `NVTX_EVENTS`. Times are nanoseconds on one clock. A `globalPid` is a `globalTid` whose low 24 bits are 0.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import opened_database
from trainpace.diagnose.traces import Column, Names, Trace, identity_of, launched

MADE_BY = "Nsight Systems"
KERNELS, COPIES, FILLS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
)
CALLS, RANGES, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
LARGEST_NS = 1 << 62
MOST_ROWS = 100_000_000
PROCESS = 1 << 24
"""A serialised global id divided by this is its process."""
COPY_KINDS = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
"""CUpti_ActivityMemcpyKind."""
RANGE_TYPES = (59, 60)
"""Of NVTX: from push to pop, and from start to end."""
_PLAIN_TABLE = re.compile(r"\s*CREATE\s+TABLE\b", re.IGNORECASE)


class _Process:
    def __init__(self) -> None:
        self.kernels, self.copies, self.calls, self.ranges = Column(), Column(), Column(), Column()


def read_nsight(path: str | os.PathLike[str]) -> list[Trace]:
    """The processes of a report, in the order of their ids. Raises UnreadableInput for a file that is no such export, and for
    one in which no GPU computed."""
    with opened_database(path) as database:
        tables = _tables(database)
        if KERNELS not in tables:
            raise UnreadableInput(
                f"{os.fspath(path)} holds no kernel of a GPU.",
                "Record with nsys profile --trace cuda,nvtx, then nsys export --type sqlite.",
            )
        strings = {
            key: text
            for key, text in _rows(database, tables, STRINGS, "id", "value")
            if isinstance(text, str)
        }
        return _read(database, tables, strings, os.fspath(path))


def _read(
    database: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[Any, str], source: str
) -> list[Trace]:
    names, skipped = Names(), 0
    processes: defaultdict[int, _Process] = defaultdict(_Process)
    origin: int | None = None

    def put(column: str, owner: Any, start: Any, end: Any, name: str, identity: Any = None) -> None:
        nonlocal skipped, origin
        if not (_is_time(start) and _is_time(end) and start <= end):
            skipped += 1
            return
        if origin is None:
            origin = start
        process = owner // PROCESS if type(owner) is int else 0
        into: Column = getattr(processes[process], column)
        into.add(
            (start - origin) / 1e3, (end - origin) / 1e3, names.number(name), identity_of(identity)
        )

    def rows(table: str, owner: str, *more: str) -> Iterator[Sequence[Any]]:
        return _rows(database, tables, table, "start", "end", owner, *more)

    named = "demangledName" if "demangledName" in tables[KERNELS] else "shortName"
    for start, end, owner, name, identity in rows(KERNELS, "globalPid", named, "correlationId"):
        put("kernels", owner, start, end, strings.get(name, "a kernel without a name"), identity)
    for start, end, owner, kind, identity in rows(COPIES, "globalPid", "copyKind", "correlationId"):
        put("copies", owner, start, end, COPY_KINDS.get(kind, "Memcpy"), identity)
    for start, end, owner, identity in rows(FILLS, "globalPid", "correlationId"):
        put("copies", owner, start, end, "Memset", identity)
    for start, end, owner, name, identity in rows(CALLS, "globalTid", "nameId", "correlationId"):
        put("calls", owner, start, end, strings.get(name, "a call without a name"), identity)
    for start, end, owner, text, key, kind in rows(
        RANGES, "globalTid", "text", "textId", "eventType"
    ):
        if end is not None and (kind is None or kind in RANGE_TYPES):
            name = (
                text
                if isinstance(text, str) and text
                else strings.get(key, "a range without a name")
            )
            put("ranges", owner, start, end, name)
    if not any(len(process.kernels.ids()) for process in processes.values()):
        raise UnreadableInput(
            f"{source} holds no kernel of a GPU.", "Record with nsys profile --trace cuda,nvtx."
        )
    device = next(
        (
            text
            for (text,) in _rows(database, tables, "TARGET_INFO_GPU", "name")
            if isinstance(text, str)
        ),
        "",
    )
    return _traces(processes, names.all(), source, device[:80], skipped)


def _traces(
    processes: dict[int, _Process], names: tuple[str, ...], source: str, device: str, skipped: int
) -> list[Trace]:
    """Of the processes that used a GPU. Where kernels have no process of theirs, all belongs to one."""
    computing = sorted(key for key, process in processes.items() if len(process.kernels.ids()))
    traces = []
    for number, key in enumerate(computing):
        process = processes[key]
        host = process
        others = [
            one
            for other, one in processes.items()
            if other not in computing and len(one.calls.ids())
        ]
        if not len(process.calls.ids()) and len(computing) == len(others) == 1:
            host = others[0]
        calls, call_ids = host.calls.spans(), host.calls.ids()
        nothing = Column().spans()
        traces.append(
            Trace(
                source=source,
                made_by=MADE_BY,
                rank=number if len(computing) > 1 else None,
                world_size=len(computing) if len(computing) > 1 else None,
                device=device,
                names=names,
                kernels=process.kernels.spans(),
                kernels_launched_us=launched(process.kernels.ids(), calls, call_ids),
                copies=process.copies.spans(),
                copies_launched_us=launched(process.copies.ids(), calls, call_ids),
                operators=nothing,
                calls=calls,
                ranges=host.ranges.spans(),
                skipped=skipped if not number else 0,
            )
        )
    return traces


def _tables(database: sqlite3.Connection) -> dict[str, set[str]]:
    """The columns of each plain table. A view or a virtual table may compute without end, so none is read."""
    found = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    wanted = (KERNELS, COPIES, FILLS, CALLS, RANGES, STRINGS, "TARGET_INFO_GPU")
    tables = {}
    for name, sql in found:
        if name in wanted and isinstance(sql, str) and _PLAIN_TABLE.match(sql):
            # table_info leaves out generated columns, which are views of one row
            tables[name] = {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
    return tables


def _rows(
    database: sqlite3.Connection, tables: dict[str, set[str]], table: str, *columns: str
) -> Iterator[Sequence[Any]]:
    """Rows of a table, None for columns that it lacks; none where there is no such table."""
    there = tables.get(table)
    if there is None:
        return
    listed = ", ".join(f'"{column}"' if column in there else "NULL" for column in columns)
    yield from database.execute(f"SELECT {listed} FROM {table} LIMIT {MOST_ROWS}")


def _is_time(value: Any) -> bool:
    return type(value) is int and -LARGEST_NS < value < LARGEST_NS
