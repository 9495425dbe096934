"""Hostile files for a while: `make fuzz MINUTES=30`. Prints how many of each type were tried and what went wrong.

A file that broke something is kept in out/fuzz/TYPE/; once it is mended, move it to tests/hostile/corpus/TYPE/.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
FOUND = Path("out/fuzz")


class Tried(NamedTuple):
    name: str
    cases: int
    seconds: float
    slowest_s: float
    most_mib: int
    findings: dict[str, int]


def tried(name: str, seed: int, seconds: float, most: int) -> Tried:
    """One type of file, in this process, for so long or so many."""
    sys.path.insert(0, str(TESTS))
    from hostile.commands import attempt  # type: ignore[import-not-found]
    from hostile.file_types import file_types  # type: ignore[import-not-found]
    from hostile.mutations import mutant  # type: ignore[import-not-found]

    kind, rng = file_types()[name], random.Random(f"{name} {seed}")
    findings: dict[str, int] = collections.Counter()
    slowest_s, memory_kib, cases, begun = 0.0, 0, 0, time.monotonic()
    kept = FOUND.resolve() / name
    with tempfile.TemporaryDirectory() as place:
        home, files = Path(place, "home"), Path(place, "files")
        home.mkdir()
        files.mkdir()
        os.environ.update({f"XDG_{kind}_HOME": str(home) for kind in ("DATA", "CONFIG", "CACHE")})
        os.environ.pop("TRAINPACE_JOURNAL", None)
        os.chdir(home)
        while cases < most and time.monotonic() - begun < seconds:
            content = mutant(kind.example, kind.form, rng)
            for other in files.iterdir():
                other.unlink()
            for beside, data in {**kind.beside, name: content}.items():
                (files / beside).write_bytes(data)
            ended = attempt(kind.run, files / name)
            cases += 1
            slowest_s, memory_kib = max(slowest_s, ended.seconds), max(memory_kib, ended.memory_kib)
            if ended.problem is not None:
                short = re.sub(r"\d{3,}|'.{30,}", "...", ended.problem)
                findings[short] += 1
                if findings[short] == 1:
                    kept.mkdir(parents=True, exist_ok=True)
                    (kept / f"{seed}-{cases}").write_bytes(content)
        os.chdir("/")
    return Tried(name, cases, time.monotonic() - begun, slowest_s, memory_kib >> 10, dict(findings))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most, of each type")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--types", nargs="*", help="only these")
    asked = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from hostile.file_types import file_types

    names = asked.types or sorted(file_types())
    workers = len(os.sched_getaffinity(0))
    each_s = asked.minutes * 60 * workers / len(names)
    print(f"seed {asked.seed}, {len(names)} types of files, at most {each_s:.0f} s each, {workers} at a time\n")
    print(f"{'type':28} {'cases':>7} {'s':>6} {'slowest, s':>10} {'most MiB':>8}  findings")
    begun, total, wrong = time.monotonic(), 0, 0
    jobs = [(name, asked.seed, each_s, asked.cases) for name in names]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        for one in pool.imap(_unpacked, jobs, chunksize=1):
            total, wrong = total + one.cases, wrong + len(one.findings)
            print(
                f"{one.name:28} {one.cases:7} {one.seconds:6.0f} {one.slowest_s:10.2f} {one.most_mib:8}  "
                f"{len(one.findings) or ''}",
                flush=True,
            )
            for problem, count in sorted(one.findings.items(), key=lambda item: -item[1]):
                print(f"    {count} times: {problem}")
    print(
        f"\n{total:,} cases in {time.monotonic() - begun:.0f} s, {wrong} kinds of findings"
        + (f", kept in {FOUND}" if wrong else "")
    )
    return 1 if wrong else 0


def _unpacked(job: tuple[str, int, float, int]) -> Tried:
    return tried(*job)


if __name__ == "__main__":
    sys.exit(main())
