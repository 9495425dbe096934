"""Traces of torch.profiler (Kineto): what `export_chrome_trace` and `tensorboard_trace_handler` write, and Holistic Trace
Analysis reads. Of NVIDIA's and AMD's devices alike; of torch 1.8, too, whose categories had other names.

The format is that of Kineto's output_json.cpp and of Chrome's Trace Event Format. Events that cannot be right (a time that is no
number, one below zero) are left out and counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.errors import UnreadableInput
from trainpace.diagnose.spans import Column, Names, Trace, identity_of, launched
from trainpace.diagnose.trace_events import Event, Events
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
