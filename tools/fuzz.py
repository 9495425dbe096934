"""Hostile files for a while: `python -m tools fuzz --minutes 30`. Prints how many of each type were
tried and what went wrong.

Where atheris is installed (`python -m tools fuzz` tries to), mutants that reach new code are
mutated further. A file that broke something is kept in out/fuzz/TYPE/; once it is mended, move it
to tests/hostile/corpus/TYPE/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
GUIDED = Path(__file__).with_name("fuzz_guided.py")
FOUND = Path("out/fuzz")


class Tried(NamedTuple):
    name: str
    cases: int
    seconds: float
    slowest_s: float
    most_mib: int
    findings: dict[str, int]


class Attempts:
    """Files of one type tried in this process, one after another, in a place of their own."""

    def __init__(self, name: str, seed: int, place: Path) -> None:
        sys.path.insert(0, str(TESTS))
        from hostile.file_types import file_types  # type: ignore[import-not-found]

        self.name, self.seed, self.kind = name, seed, file_types()[name]
        self.cases, self._begun, self._findings = 0, time.monotonic(), dict[str, int]()
        self._slowest_s, self._memory_kib, self._kept = 0.0, 0, FOUND.resolve() / name
        home, self._files = place / "home", place / "files"
        home.mkdir()
        self._files.mkdir()
        os.environ.update({f"XDG_{kind}_HOME": str(home) for kind in ("DATA", "CONFIG", "CACHE")})
        os.environ.pop("TRAINPACE_JOURNAL", None)
        os.chdir(home)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def attempt(self, content: bytes) -> None:
        from hostile.commands import attempt  # type: ignore[import-not-found]

        for other in self._files.iterdir():
            other.unlink()
        for beside, data in {**self.kind.beside, self.name: content}.items():
            (self._files / beside).write_bytes(data)
        ended = attempt(self.kind.run, self._files / self.name)
        self.cases += 1
        self._slowest_s = max(self._slowest_s, ended.seconds)
        self._memory_kib = max(self._memory_kib, ended.memory_kib)
        if ended.problem is not None:
            short = re.sub(r"\d{3,}|'.{30,}", "...", ended.problem)
            self._findings[short] = self._findings.get(short, 0) + 1
            if self._findings[short] == 1:
                self._kept.mkdir(parents=True, exist_ok=True)
                (self._kept / f"{self.seed}-{self.cases}").write_bytes(content)

    def tried(self) -> Tried:
        return Tried(
            self.name,
            self.cases,
            self.seconds,
            self._slowest_s,
            self._memory_kib >> 10,
            self._findings,
        )


def tried(name: str, seed: int, seconds: float, most: int) -> Tried:
    """One type of file, in this process, for so long or so many."""
    with tempfile.TemporaryDirectory() as place:
        attempts = Attempts(name, seed, Path(place))
        from hostile.mutations import mutant  # type: ignore[import-not-found]

        rng = random.Random(f"{name} {seed}")
        while attempts.cases < most and attempts.seconds < seconds:
            attempts.attempt(mutant(attempts.kind.example, attempts.kind.form, rng))
        os.chdir("/")
    return attempts.tried()


def tried_guided(name: str, seed: int, seconds: float, most: int) -> Tried:
    """The same in a process that libFuzzer drives."""
    words = [name, "--seconds", str(seconds), "--cases", str(most), "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(GUIDED), *words], capture_output=True, text=True, check=False
    )
    try:
        return Tried(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Tried(
            name, 0, seconds, 0.0, 0, {f"the fuzzer itself ended: {done.stderr[-300:]}": 1}
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cases", type=int, default=10**9, help="at most, of each type")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--types", nargs="*", help="only these")
    parser.add_argument(
        "--unguided",
        action="store_true",
        help="random mutants of the examples alone: many more a second",
    )
    asked = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from hostile.file_types import file_types

    names = asked.types or sorted(file_types())
    workers = len(os.sched_getaffinity(0))
    each_s = asked.minutes * 60 * workers / len(names)
    guided = not asked.unguided and importlib.util.find_spec("atheris") is not None
    how = "guided by coverage (atheris)" if guided else "random mutants"
    print(
        f"seed {asked.seed}, {len(names)} types of files, at most {each_s:.0f} s each, {workers} at a time, {how}\n"
    )
    print(f"{'type':28} {'cases':>7} {'s':>6} {'slowest, s':>10} {'most MiB':>8}  findings")
    begun, total, wrong = time.monotonic(), 0, 0
    jobs = [(guided, name, asked.seed, each_s, asked.cases) for name in names]
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


def _unpacked(job: tuple[bool, str, int, float, int]) -> Tried:
    guided, name, seed, seconds, most = job
    return (tried_guided if guided else tried)(name, seed, seconds, most)


if __name__ == "__main__":
    sys.exit(main())
