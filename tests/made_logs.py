"""Handmade event logs of a watched run, with times in whole milliseconds."""

import itertools

from trainpace.watch.inside.event_log import (
    PARTS,
    EventLogWriter,
    Fetch,
    Step,
    read_header,
    records_from,
)

MS = 1_000_000
START = 1000  # ms on the clock when the first step begins


def write_process(
    folder,
    spans,
    bounds,
    *,
    rank=None,
    pid=100,
    host="here",
    clock_ms=0,
    trials=(),
    first=0,
    parts=None,
    **more,
):
    """Write one training process. `bounds`: starts and ends of steps; `spans`: (part, name, start, end, depth) by step."""
    path = folder / f"process-{pid}-{host}.trail"
    header = {
        "role": "process",
        "pid": pid,
        "parent": 1,
        "host": host,
        "rank": rank,
        "clock_to_wall_ns": clock_ms * MS,
        **more,
    }
    log = EventLogWriter(str(path), header)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        for part, name, a, b, depth in spans[i] if i < len(spans) else ():
            log.span(
                PARTS.index(part), depth, name, 0, round((START + a) * MS), round((START + b) * MS)
            )
        spent = [ms * MS for ms in (parts or {}).get(i, [0] * len(PARTS))]
        trial = trials[i] if trials else 0
        log.step(
            Step(
                trial,
                1,
                first + i,
                round((START + start) * MS),
                round((START + end) * MS),
                8,
                0.0,
                0.0,
                tuple(spent),
            )
        )
    log.flush()
    return path


def write_worker(folder, worker, fetches, *, parent=100, pid=200, host="here"):
    """Write one worker process. `fetches`: (start, end)."""
    path = folder / f"worker-{parent}-{worker}-{pid}.trail"
    log = EventLogWriter(
        str(path), {"role": "worker", "worker": worker, "pid": pid, "parent": parent, "host": host}
    )
    for start, end in fetches:
        log.fetch(Fetch(worker, 8, (START + start) * MS, (START + end) * MS, 1 * MS, 0))
    log.flush()
    return path


def simple_run(folder, steps=20, first=0, **options):
    """Write steps of 10 ms: 4 ms of waiting, 1 ms without a name, 3 ms forward, 2 ms backward."""
    spans = [
        [
            ("data", "next batch", t, t + 4, 0),
            ("forward", "Net<&>", t + 5, t + 8, 0),
            ("backward", "backward", t + 8, t + 10, 0),
        ]
        for t in range(0, 10 * steps, 10)
    ]
    return write_process(folder, spans, range(0, 10 * steps + 1, 10), first=first, **options)


def read_log(data):
    """Return (header, records in order) of an event log."""
    line, newline, _ = data.partition(b"\n")
    return read_header(line + newline), list(records_from(data, len(line) + 1))
