"""The journal under load, on SQLite and PostgreSQL as they are installed (every commit waits for the disk).

(a) 8 processes add 5,000 runs each, every run in a transaction of its own. (b) A journal of a million runs: a page of the
list, the look-up of one run, and filters. `--runs` and `--adds` make it smaller.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval, StepTime
from trainpace.journal import Entry, Journal, Query, new_id, now_utc
from trainpace.journal.entry import content_id, utc_text

RESULT = Path(__file__).parent / "results" / "journal.md"
WRITERS = 8
ROUNDS = 15
MODELS = 200
SPAWN = multiprocessing.get_context("spawn")
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def example() -> Entry:
    """A run as `trainpace measure` keeps it: parts, an interval, 40 steps."""
    return Entry(
        id=new_id(),
        created_at=now_utc(),
        kind="measure",
        outcome="ok",
        model="timm:resnet50",
        device="NVIDIA A100 SXM 80GB",
        execution=Execution(micro_batch=32, precision="amp_bf16", optimizer="adamw"),
        step_time_ms=100.0,
        interval_ms=Interval(
            low=99.0, high=101.0, coverage=0.9, basis="order statistics of 40 steps"
        ),
        step=StepTime(forward_ms=30.0, backward_ms=60.0, optimizer_ms=10.0),
        peak_memory_gib=11.5,
        step_times_ms=tuple(100 + random.random() for _ in range(40)),
        environment={"torch": "2.13.0", "cuda": "12.8"},
    )


def write(place: str, count: int) -> None:
    with Journal.open(place) as journal:
        one = example()
        for _ in range(count):
            assert journal.add(replace(one, id=new_id(), created_at=now_utc()))


def writers(place: str, adds: int) -> tuple[float, int, int]:
    """Seconds until all are done, runs that are there, and how many ids are there twice."""
    Journal.open(place).close()
    processes = [SPAWN.Process(target=write, args=(place, adds)) for _ in range(WRITERS)]
    start = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    assert all(process.exitcode == 0 for process in processes)
    with Journal.open(place) as journal:
        ids = [entry.id for entry in journal.every()]
    return seconds, len(ids), len(ids) - len(set(ids))


def many(count: int) -> Iterator[Entry]:
    random.seed(1)
    one = example()
    for i in range(count):
        model = i * 7919 % MODELS
        yield replace(
            one,
            id=content_id(str(i)),
            created_at=utc_text(START + datetime.timedelta(seconds=20 * i)),
            model=f"timm:model_{model}",
            device=f"device {i % 12}",
            execution=Execution(micro_batch=1 + i % 64, precision="amp_bf16", optimizer="adamw"),
            step_time_ms=random.lognormvariate(4, 1),
            step_times_ms=one.step_times_ms[:8],
        )


def queries(place: str, count: int) -> tuple[float, dict[str, float]]:
    """Seconds to fill the journal, and the median milliseconds of each question."""
    start = time.perf_counter()
    with Journal.open(place) as journal:
        assert journal.add_many(many(count)) == count
    filled = time.perf_counter() - start
    device_3 = functools.partial(batch_of, "device 3")
    some = [content_id(str(i * 104729 % count)) for i in range(ROUNDS)]
    with Journal.open(place) as journal:
        questions: dict[str, tuple[int, Callable[[int], object]]] = {
            "first page of the list": (ROUNDS, lambda i: journal.find(limit=20)),
            "page 51": (ROUNDS, lambda i: journal.find(limit=20, offset=1000)),
            "newest 20 of one model": (
                ROUNDS,
                lambda i: journal.find(Query(model=f"timm:model_{i}", exact=True)),
            ),
            "newest 20 with a part of a name": (
                ROUNDS,
                lambda i: journal.find(Query(model=f"model_1{i}")),
            ),
            "newest 20 of one device and batch": (
                ROUNDS,
                lambda i: journal.find(device_3(4 + 4 * i)),
            ),
            "a filter that no run fulfils": (3, lambda i: journal.find(Query(precision="fp8"))),
            "one run by its id": (ROUNDS, lambda i: journal.get(some[i])),
            "one run by 10 digits": (ROUNDS, lambda i: journal.get(some[i][:10])),
            "count of all": (5, lambda i: journal.count()),
        }
        return filled, {
            name: timed(repeat, question) for name, (repeat, question) in questions.items()
        }


def batch_of(device: str, batch: int) -> Query:
    return Query(device=device, micro_batch=batch)


def timed(repeat: int, question: Callable[[int], object]) -> float:
    times = []
    for i in range(repeat):
        start = time.perf_counter()
        question(i)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adds", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=1_000_000)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import postgres  # type: ignore[import-not-found]

    program = postgres.binary("postgres")
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[2]
    with tempfile.TemporaryDirectory() as folder, postgres.server(settings=()) as url_of:
        places: dict[str, Callable[[str], str]] = {
            f"SQLite {sqlite3.sqlite_version}": lambda name: str(Path(folder, f"{name}.db")),
            f"PostgreSQL {version}": functools.partial(postgres.create_database, url_of),
        }
        lines = [
            "# The journal under load",
            "",
            f"{datetime.date.today()}, {platform.machine()}, {multiprocessing.cpu_count()} cores, Python"
            f" {platform.python_version()}, beside other work",
            "",
            f"{WRITERS} processes x {options.adds:,} runs, a transaction each:",
            "",
            "| database | seconds | runs/s | lost | doubled |",
            "|---|---|---|---|---|",
        ]
        for name, place in places.items():
            seconds, found, doubled = writers(place("writers"), options.adds)
            wanted = WRITERS * options.adds
            lines.append(
                f"| {name} | {seconds:.1f} | {wanted / seconds:,.0f} | {wanted - found} | {doubled} |"
            )
            print(lines[-1], flush=True)
        answers = {}
        for name, place in places.items():
            answers[name] = queries(place("many"), options.runs)
            print(name, answers[name], flush=True)
    lines += [
        "",
        f"{options.runs:,} runs of {MODELS} models, filled in one transaction"
        f" ({', '.join(f'{name} {filled:.0f} s' for name, (filled, _) in answers.items())}). Median ms of a question:",
        "",
        f"| question | {' | '.join(answers)} | to reach |",
        "|---|" + "---|" * (len(answers) + 1),
    ]
    for question in next(iter(answers.values()))[1]:
        goal = None if question.startswith(("count", "a filter")) else 100
        times = " | ".join(f"{found[question]:.1f}" for _, found in answers.values())
        lines.append(f"| {question} | {times} | {goal or ''} |")
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


if __name__ == "__main__":
    main()
