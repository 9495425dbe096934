"""Reader of Nsight Systems reports exported by `nsys export --type sqlite`.

A report contains one trace per process that used a GPU. The reader follows the documented schema
(Nsight Systems User Guide, "SQLite Schema Reference") and public programs that read such files.
**It was not tested with a real export.** Tables and columns may be missing: some exports have no
`NVTX_EVENTS`. Times are nanoseconds on one clock. A `globalPid` is a
`globalTid` with its low 24 bits set to 0.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import opened_database
from trainpace.diagnose.traces import Events, Trace

MADE_BY = "Nsight Systems"
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
        about = {"source": self._source, "made_by": MADE_BY, "device": device[:80]}
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
