"""What is true of the planted scripts: step times without any tool, with and without the fix, and the planted time.

python benchmarks/planted/truth.py [NAME ...]   prints a table; on two quiet cores all cases take about ten minutes
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from cases import CASES, Case
from launch import run

from trainpace.core.records import Record

WARM_UP_STEPS = 10


class Truth(Record):
    """Milliseconds per optimizer step of one run, after the warm-up; the mean, since some causes come now and then."""

    mean_ms: float
    median_ms: float
    planted_ms: float
    steps: int


def truth_of(case: Case, *, fixed: bool = False) -> Truth:
    """Runs the script once, with nothing attached but a note of when each step ended. RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        times, losses = Path(folder) / "times", Path(folder) / "losses"
        outcome = run(case, fixed=fixed, env={"STEP_TIMES": str(times), "LOSSES": str(losses)})
        owns = [f".{rank}" for rank in range(case.ranks)] if case.ranks > 1 else [""]
        if not all(Path(f"{losses}{own}").exists() for own in owns):
            raise RuntimeError(f"{case.name} ended with {outcome.code}:\n{outcome.output[-3000:]}")
        own = owns[case.planted_rank]
        return read_truth(Path(f"{times}{own}"))


def read_truth(path: Path) -> Truth:
    """Reads what a script left at STEP_TIMES."""
    kept = json.loads(path.read_text())
    ends = kept["ends"][WARM_UP_STEPS:]
    steps = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
    planted = sum(ms for start, ms in kept["planted"] if ends[0] <= start < ends[-1])
    return Truth(
        mean_ms=statistics.mean(steps),
        median_ms=statistics.median(steps),
        planted_ms=planted / len(steps),
        steps=len(steps),
    )


def main(names: list[str]) -> None:
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}")
    print(
        "| case | engine | verdict | step ms | fixed | saved % | planted ms (said, found) |\n|---|---|---|---|---|---|---|"
    )
    for case in CASES:
        if names and case.name not in names:
            continue
        slow = truth_of(case)
        fast = truth_of(case, fixed=True) if case.fix is not None else None
        fixed = (
            f"{fast.mean_ms:.1f} | {100 * (1 - fast.mean_ms / slow.mean_ms):.0f}"
            if fast
            else "- | -"
        )
        planted = f"{case.planted_ms:.1f}, {slow.planted_ms:.2f}" if case.planted_ms else "-"
        step = f"{slow.mean_ms:.1f} (median {slow.median_ms:.1f})"
        print(
            f"| {case.name} | {case.engine} | {case.expected} | {step} | {fixed} | {planted} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
