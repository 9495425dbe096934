"""Are jumps found where they were planted, nowhere else, and with a fraction of the probes?

Synthetic sweeps in variants, seeds apart from those that the prices of `measure/changes.py` were set with; an
oracle that knows the noise, all other jumps and which kind each is, as the ceiling; the probes and successes of
adaptive sweeps; the time an analysis takes; and the one public sweep (`--data`), if it is there.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.measure.changes import Kind, Search, Term, find_changes
from trainpace.measure.sweep import best_batches, fitted_curve, next_batch

Floats = NDArray[np.float64]

RESULT = Path(__file__).parent / "results" / "jumps.md"
SWEEP = "bryzgalov_vgg16_batch_sweep"
BINS = ("3-4", "4-6", ">6")
LEAST_RATIO = 3.0
VARIANTS: dict[str, dict[str, Any]] = {
    "plain: own slope none, up only": {},
    "small jumps (log-uniform)": {"log_uniform": True},
    "no intercept": {"intercept": 0.0},
    "large intercept": {"intercept": 150.0},
    "percent of the mean": {"of_mean": True},
    "both signs": {"signs": True},
    "slope changes at jumps": {"slopes": True},
    "slope changes, both signs": {"slopes": True, "signs": True},
    "8 points apart, 6 from the ends": {"gap": 8, "margin": 6},
    "additive noise": {"additive": True, "of_mean": True},
    "log-normal noise": {"tails": "log-normal"},
    "Student t4 noise": {"tails": "t4"},
    "3 % of points disturbed": {"disturbed": 0.03},
    "lengths 20 to 40": {"longest": 40},
}
NO_JUMPS = (
    "line",
    "line, 20 to 30 points",
    "launch-bound",
    "soft launch-bound",
    "quadratic",
    "odd-even",
)


class Sweep(NamedTuple):
    x: NDArray[np.int64]
    step_ms: Floats
    sigma: Floats
    noise: float
    jumps: list[tuple[int, float]]
    """(index of the first point after it, size over the noise before it)"""


def sweep(
    rng: np.random.Generator,
    count: int | None = None,
    intercept: float | None = None,
    signs: bool = False,
    slopes: bool = False,
    of_mean: bool = False,
    additive: bool = False,
    tails: str = "",
    disturbed: float = 0.0,
    gap: int = 3,
    margin: int = 3,
    log_uniform: bool = False,
    shortest: int = 20,
    longest: int = 200,
    shape: str = "line",
) -> Sweep:
    n, noise, slope = (
        int(rng.integers(shortest, longest + 1)),
        rng.uniform(0.005, 0.03),
        rng.uniform(0.2, 3),
    )
    x = np.arange(1, n + 1)
    start = slope * (float(rng.choice([0, 0.1, 1, 10, 50])) if intercept is None else intercept)
    y = start + slope * x
    knee = slope * n * rng.uniform(0.2, 0.7)
    if shape == "launch-bound":
        y = np.maximum(knee, slope * x)
    elif shape == "soft launch-bound":
        y = np.hypot(knee, slope * x)
    elif shape == "quadratic":
        y = y * (1 + rng.uniform(-0.3, 0.8) * x / n)
    elif shape == "odd-even":
        y = start + slope * np.ceil(x / 2) * 2
    count = min(int(rng.integers(0, 5)) if count is None else count, (n - 2 * margin) // gap)
    places: list[int] = []
    while len(places) < count:
        places = sorted(
            int(p) for p in rng.choice(np.arange(margin, n - margin + 1), count, replace=False)
        )
        if any(b - a < gap for a, b in pairwise(places)):
            places = []
    mean, sizes = float(y.mean()), []
    for t in places:
        share = (
            np.exp(rng.uniform(np.log(0.03), np.log(0.3)))
            if log_uniform
            else rng.uniform(0.03, 0.3)
        )
        size = share * (mean if of_mean else y[t - 1]) * (-1 if signs and rng.random() < 0.4 else 1)
        if size < 0 and y[t:].min() + size < 0.3 * y[t]:
            size = -size
        y[t:] += size
        if slopes:
            y[t:] += slope * rng.uniform(-0.5, 0.8) * (x[t:] - x[t])
        sizes.append(size)
    sigma = np.full(n, noise * float(y.mean())) if additive else noise * y
    z = rng.standard_t(4, n) / np.sqrt(2) if tails == "t4" else rng.standard_normal(n)
    step = y * np.exp(noise * z) if tails == "log-normal" else y + sigma * z
    step = np.where(rng.random(n) < disturbed, step * (1 + rng.uniform(0.05, 0.5, n)), step)
    jumps = [(t, abs(size) / float(sigma[t - 1])) for t, size in zip(places, sizes, strict=True)]
    return Sweep(
        x,
        np.asarray(np.maximum(step, 1e-3 * y), dtype=float),
        np.asarray(sigma, dtype=float),
        noise,
        jumps,
    )


def bin_of(ratio: float) -> str:
    return BINS[0] if ratio < 4 else BINS[1] if ratio < 6 else BINS[2]


class Score:
    """Counts of one variant: jumps of at least 3x the noise are to be found; a found one near no planted one is false."""

    def __init__(self) -> None:
        self.planted: Counter[str] = Counter()
        self.hit: Counter[tuple[int, str]] = Counter()
        self.false: Counter[int] = Counter()
        self.found = 0

    def add(self, jumps: list[tuple[int, float]], found: list[int]) -> None:
        self.found += len(found)
        self.planted.update(bin_of(ratio) for _, ratio in jumps if ratio >= LEAST_RATIO)
        for tolerance in (0, 1, 2):
            left = list(found)
            for t, ratio in sorted(jumps, key=lambda jump: -jump[1]):
                near = [f for f in left if abs(f - t) <= tolerance]
                if near:
                    left.remove(min(near, key=lambda f: abs(f - t)))
                    if ratio >= LEAST_RATIO:
                        self.hit[tolerance, bin_of(ratio)] += 1
            self.false[tolerance] += len(left)

    def recall(self, tolerance: int, ratio: str = "") -> float:
        bins = [ratio] if ratio else BINS
        return sum(self.hit[tolerance, b] for b in bins) / max(
            1, sum(self.planted[b] for b in bins)
        )

    def precision(self, tolerance: int) -> float:
        return 1 - self.false[tolerance] / max(1, self.found)

    def __iadd__(self, other: Score) -> Score:
        self.planted += other.planted
        self.hit += other.hit
        self.false += other.false
        self.found += other.found
        return self

    def cells(self) -> str:
        figures = [f"{self.recall(t):.3f} / {self.precision(t):.3f}" for t in (0, 1, 2)]
        return " | ".join(
            [*figures, *(f"{self.recall(1, b):.2f} ({self.planted[b]})" for b in BINS)]
        )


def found_in(s: Sweep, known: bool) -> list[int]:
    # sweeps of consecutive batch sizes from 1: the batch after a jump is its index + 1
    return [
        jump.after - 1
        for jump in find_changes(s.x.tolist(), s.step_ms.tolist(), s.noise if known else None).jumps
    ]


def oracle(s: Sweep, slopes: bool) -> list[int]:
    """Each jump's likeliest place, the noise and all others known, if it is worth a chi-square of 1 %."""
    kind = Kind.BOTH if slopes else Kind.LEVEL
    search = Search(s.x.astype(float), s.step_ms, s.sigma, 1e9)
    found = []
    for t, _ in s.jumps:
        others = [Term(kind, u) for u, _ in s.jumps if u != t]
        low = max([2, *(u + 2 for u, _ in s.jumps if u < t)])
        high = min([len(s.x) - 2, *(u - 2 for u, _ in s.jumps if u > t)])
        squares = {u: search.squares([*others, Term(kind, u)]) for u in range(low, high + 1)}
        best = min(squares, key=lambda u: squares[u], default=t)
        if squares and search.squares(others) - squares[best] > (9.2 if slopes else 6.6):
            found.append(best)
    return found


def accuracy(count: int, seed: int) -> list[str]:
    head = "| recall / precision, tolerance 0 | 1 | 2 | recall at 3-4x (jumps) | 4-6x | >6x |\n|---|---|---|---|---|---|---|"
    lines = []
    totals: dict[str, Score] = {}
    for known in (False, True):
        lines += ["", f"Noise {'known' if known else 'not known'}:", "", f"| variant {head}"]
        total = totals[f"noise {'known' if known else 'not known'}"] = Score()
        for i, (name, options) in enumerate(VARIANTS.items()):
            rng, score = np.random.default_rng([seed, i]), Score()
            for _ in range(count):
                s = sweep(rng, **options)
                score.add(s.jumps, found_in(s, known))
            lines.append(f"| {name} | {score.cells()} |")
            total += score
        lines.append(f"| all | {total.cells()} |")
    ceiling = Score()
    for i, options in enumerate(VARIANTS.values()):
        rng = np.random.default_rng([seed, i])
        for _ in range(count // 2):
            s = sweep(rng, **options)
            ceiling.add(s.jumps, oracle(s, options.get("slopes", False)))
    return [
        *lines,
        "",
        "Ceiling (half of the same sweeps):",
        "",
        f"| oracle {head}",
        f"| all | {ceiling.cells()} |",
    ]


def no_jumps(count: int, seed: int) -> list[str]:
    lines = ["| no jumps planted | sweeps without one, noise not known | known |", "|---|---|---|"]
    for i, name in enumerate(NO_JUMPS):
        options: dict[str, Any] = {"longest": 30} if "20" in name else {}
        cells = []
        for known in (False, True):
            rng = np.random.default_rng([seed, 100 + i])
            shape = name.split(",")[0]
            clean = sum(
                not found_in(sweep(rng, count=0, shape=shape, **options), known)
                for _ in range(count)
            )
            cells.append(f"{100 * clean / count:.1f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def timing(seed: int) -> list[str]:
    lines = ["| points | median ms | slowest of 60 ms |", "|---|---|---|"]
    for n in (20, 70, 200):
        rng, times = np.random.default_rng([seed, n]), []
        for _ in range(60):
            s = sweep(rng, shortest=n, longest=n)
            start = time.perf_counter()
            found_in(s, False)
            times.append(1e3 * (time.perf_counter() - start))
        lines.append(f"| {n} | {statistics.median(times):.1f} | {max(times):.1f} |")
    return lines


def curve_of(kind: str, rng: np.random.Generator) -> tuple[Floats, list[int]]:
    """Step times in ms of batches 1 to 70, and the batches right after its jumps."""
    x, slope = np.arange(1, 71), rng.uniform(0.5, 2)
    start = slope * float(rng.choice([1, 10, 40]))
    line = np.asarray(start + slope * x, dtype=float)
    jumps: list[int] = []
    if kind.startswith("VGG, padded"):
        return start + slope * (0.4 * x + 0.6 * np.ceil(x / 16) * 16), [17, 33, 49, 65]
    if kind == "launch-bound":
        return np.asarray(np.maximum(slope * rng.uniform(15, 40), slope * x), dtype=float), jumps
    if kind == "odd-even":
        return start + slope * np.ceil(x / 2) * 2, jumps
    if kind == "smooth":
        return line * (1 + 0.4 * x / 70), jumps
    if kind.startswith("VGG"):
        jumps = [17, 33, 49, 65]
    elif kind != "line":
        count = int(kind[0])
        while len(jumps) < count or (count == 2 and jumps[1] - jumps[0] < 4):
            jumps = sorted(int(t) for t in rng.choice(np.arange(5, 67), count, replace=False))
    for t in jumps:
        line[x >= t] += rng.uniform(0.06, 0.2) * line[t - 2]
    return line, jumps


def adaptive(count: int, seed: int) -> list[str]:
    lines = [
        "| 70 batch sizes | noise | probes, mean (most) | the jumps of all 70 probes | the planted jumps (all 70 probes) |"
        " within 2x noise of the curve | within 2x noise + its own 3x of all 70 |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = [
        "line",
        "smooth",
        "launch-bound",
        "odd-even",
        "1 jump of 6 to 20 %",
        "2 jumps of 6 to 20 %",
    ]
    for i, kind in enumerate(
        [*kinds, "VGG, padded to 16", "VGG, 4 jumps of 6 to 20 %", "VGG, padded to 16, with hints"]
    ):
        for noise in (0.005, 0.01, 0.02, 0.03):
            rng = np.random.default_rng([seed, i, round(1e3 * noise)])
            probes, marks = [], []
            for k in range(count):
                truth, jumps = curve_of(kind, rng)
                measured: dict[int, list[float]] = {}
                hints = jumps if "hints" in kind else []
                while (b := next_batch(range(1, 71), measured, hints, seed=k)) is not None:
                    measured.setdefault(b, []).append(
                        float(truth[b - 1] * (1 + noise * rng.standard_normal()))
                    )
                all_ms = truth * (1 + noise * rng.standard_normal(70))
                few, every = fitted_curve(measured), find_changes(range(1, 71), all_ms.tolist())
                found = [jump.after for jump in few.jumps]
                found_by_all = [jump.after for jump in every.jumps]
                at = np.array([few.at(b) for b in range(1, 71)])
                probes.append(sum(map(len, measured.values())))
                marks.append(
                    [
                        same(found, found_by_all),
                        same(found, jumps),
                        same(found_by_all, jumps),
                        np.abs(at / truth - 1).max() <= 2 * noise,
                        np.abs(at / all_ms - 1).max() <= 5 * noise,
                    ]
                )
            share = [f"{100 * s:.0f} %" for s in np.mean(marks, axis=0)]
            cells = f"{share[0]} | {share[1]} ({share[2]}) | {share[3]} | {share[4]}"
            lines.append(
                f"| {kind} | {100 * noise:g} % | {np.mean(probes):.1f} ({max(probes)}) | {cells} |"
            )
    return lines


def same(one: list[int], other: list[int]) -> bool:
    """The same jumps, each within one batch."""
    return len(one) == len(other) and all(abs(a - b) <= 1 for a, b in zip(one, other, strict=True))


def public_sweep(data: Path) -> list[str]:
    import pyarrow.parquet as pq

    rows = pq.read_table(data / "measured_runs.parquet").to_pylist()
    times: dict[int, list[float]] = {}
    for row in rows:
        if SWEEP in row["file"] and "DIGITISED" in row["notes"]:
            epoch = re.search(r"epoch_time_s=([\d.]+)", row["notes"])
            assert epoch, "every digitised row has its epoch time in the notes"
            batch = int(row["batch_per_gpu"])
            times.setdefault(batch, []).append(1e3 * float(epoch[1]) * batch / 50_000)
    lines = [
        "| read as | batches | jump between | ms (90 % interval) | % of the step |",
        "|---|---|---|---|---|",
    ]
    for label, pick in (("the slower of two values in a column", max), ("the faster", min)):
        for top in (256, 900):
            sizes = [b for b in sorted(times) if b <= top]
            curve = find_changes(sizes, [pick(times[b]) for b in sizes], 0.003)
            for jump in curve.jumps:
                interval = f"{jump.size_ms:.1f} ({jump.low_ms:.1f} to {jump.high_ms:.1f})"
                place = f"{sizes[0]} to {sizes[-1]} | {jump.before} and {jump.after}"
                lines.append(f"| {label} | {place} | {interval} | {jump.percent:.1f} |")
            best = best_batches(curve).best
            lines.append(
                f"| | | best throughput: batch {best.batch}, {best.samples_per_second:.0f} samples/s | | |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of measured_runs.parquet"
    )
    parser.add_argument("--sweeps", type=int, default=200, help="of each variant")
    parser.add_argument(
        "--seed", type=int, default=2026, help="not 0 to 9: those were used to set the prices"
    )
    options = parser.parse_args()
    where = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    lines = ["# Jumps of measured curves", "", f"{datetime.date.today()}, {where}", ""]
    lines += [
        f"{options.sweeps} sweeps of each variant, seed {options.seed}. To reach: 0.95 / 0.95; 95 %; 50 ms; 40 % of probes."
    ]
    lines += accuracy(options.sweeps, options.seed)
    lines += ["", *no_jumps(options.sweeps, options.seed), "", *timing(options.seed), ""]
    lines += [
        "Adaptive sweeps (at most 28 probes, repeats included; a jump within one batch counts as the same):",
        "",
    ]
    lines += adaptive(max(options.sweeps // 10, 2), options.seed)
    if (options.data / "measured_runs.parquet").exists():
        lines += ["", "The public sweep: VGG16 on a K80, digitised (batch +-3, time +-0.3 %):", ""]
        lines += public_sweep(options.data)
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


if __name__ == "__main__":
    main()
