"""Twenty people who work with the dashboard, beside 500 connections that ask nothing and 50 that ask or read a byte at a time.

Phases with and without the crowd take turns. Those who are thrown out connect again at once.

    python benchmarks/soak.py --minutes 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import http.client
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
from dashboard import anonymous_mib, filled  # noqa: E402

from trainpace.journal import Journal  # noqa: E402

RESULT = Path(__file__).parent / "results" / "soak.md"
RUNS = 20_000
WORKING, IDLE, SLOW = 20, 500, 50
PHASE_S = 60.0
PAUSE_S = 2.0
PATHS = (
    "/runs",
    "/runs?model=resnet50",
    "/runs?order=fastest",
    "/sweeps",
    "/score",
    "/whatif?model=resnet50&gpu=T4&batch=32",
)
MOST_RATIO = 1.5


def crowd(port: int, until: float) -> None:
    """A process of its own: connections that ask nothing, or nearly nothing."""
    asyncio.run(_crowd(port, until))


async def _crowd(port: int, until: float) -> None:
    async def one(slow: bool) -> None:
        while time.time() < until:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    if not slow:
                        await asyncio.wait_for(reader.read(1), until - time.time())
                    for byte in b"GET /runs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 100:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.5)
                        if reader.at_eof() or time.time() > until:
                            break
                except TimeoutError:
                    return
                finally:
                    writer.close()
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one(i < SLOW) for i in range(IDLE + SLOW)))


def working(port: int, until: float, seed: int, times: list[float], failures: list[str]) -> None:
    """One person: a page, a pause."""
    rng = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.time() < until:
        begun = time.perf_counter()
        try:
            connection.request("GET", rng.choice(PATHS))
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures.append(str(answer.status))
        except (OSError, http.client.HTTPException) as error:
            # a kept connection may have been closed while it was free, and a browser asks again without a word
            connection.close()
            try:
                connection.request("GET", rng.choice(PATHS))
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                failures.append(type(error).__name__)
                connection.close()
        times.append(1e3 * (time.perf_counter() - begun))
        time.sleep(rng.uniform(0.5, 1.5) * PAUSE_S)
    connection.close()


def phase(port: int, seconds: float, crowded: bool, seed: int) -> tuple[list[float], list[str]]:
    until = time.time() + seconds
    others = multiprocessing.Process(target=crowd, args=(port, until)) if crowded else None
    if others is not None:
        others.start()
        time.sleep(2.0)  # until all of them are there
    times: list[float] = []
    failures: list[str] = []
    people = [
        threading.Thread(target=working, args=(port, until, 100 * seed + i, times, failures))
        for i in range(WORKING)
    ]
    for person in people:
        person.start()
    for person in people:
        person.join()
    if others is not None:
        others.join()
    return times, failures


def p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * (len(times) - 1))]


def main() -> int:
    from served import served  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    rounds = max(1, round(asked.minutes * 60 / (2 * PHASE_S)))
    quiet: list[list[float]] = []
    crowded: list[list[float]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "journal.db")
        with Journal.open(str(place)) as journal:
            assert journal.add_many(filled(RUNS)) == RUNS
        with served(Path(folder), "--journal", str(place)) as server:
            phase(server.port, 10.0, False, 0)
            before = anonymous_mib(server.process.pid)
            for number in range(1, rounds + 1):
                for into, with_crowd in ((quiet, False), (crowded, True)):
                    times, failed = phase(server.port, PHASE_S, with_crowd, number)
                    into.append(times)
                    failures += failed
            after = anonymous_mib(server.process.pid)
    ratio = statistics.median(p95(c) / p95(q) for q, c in zip(quiet, crowded, strict=True))
    rows = [("alone", quiet), ("beside the crowd", crowded)]
    table = [
        f"| {name} | {sum(map(len, some)):,} | {statistics.median(statistics.median(t) for t in some):.0f} |"
        f" {statistics.median(map(p95, some)):.0f} | {max(map(max, some)):.0f} |"
        for name, some in rows
    ]
    report = "\n".join(
        [
            "# The dashboard beside a crowd (`python -m benchmarks soak`)",
            "",
            f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores for server and clients. {WORKING} people ask for"
            f" a page every {PAUSE_S:g} s; the crowd is {IDLE} connections that ask nothing and {SLOW} that send a byte every half"
            f" second, all from one address, and connect again when they are closed. {rounds} phases of {PHASE_S:.0f} s each, taking"
            f" turns; {RUNS:,} runs.",
            "",
            "| | answers | median ms | 95th percentile ms | slowest ms |",
            "|---|--:|--:|--:|--:|",
            *table,
            "",
            f"The 95th percentile beside the crowd is {ratio:.2f} of that alone (median of the rounds; {MOST_RATIO} allowed). Failed"
            f" requests: {len(failures)}{' (' + ', '.join(sorted(set(failures))) + ')' if failures else ''}. Anonymous memory of the"
            f" server: {before:.0f} MiB before, {after:.0f} after.",
            "",
        ]
    )
    print(report)
    RESULT.write_text(report)
    return 0 if ratio <= MOST_RATIO and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
