"""The gradient noise scale of linear regressions, whose value is known, and what gathering it costs a real training.

Run from the repository: python benchmarks/noise_scale.py. Kept in benchmarks/results/noise_scale.md.
"""

from __future__ import annotations

import datetime
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from trainpace.core.outcome import NoiseScale
from trainpace.job import noise_scale
from trainpace.measure.engine import NoiseNorms
from trainpace.measure.sweep import Conditions, measure_noise_scale

HERE = Path(__file__).parent
RESULT = HERE / "results" / "noise_scale.md"
STEPS = 10_000
SEEDS = range(20)
SHORT = 100
"""Steps of the runs whose intervals are checked."""


class Case(NamedTuple):
    """A regression of `dims` inputs whose variances run from `least` to 2, at weights `off` the true ones."""

    dims: int
    least: float
    off: float
    deviation: float
    small: int
    parts: int

    def known(self) -> float:
        """tr(Sigma) / |G|^2 of 0.5 (w x - y)^2: one sample's gradient is x (x d - e), and by Isserlis' theorem
        E|g|^2 = tr(C) (dCd + s^2) + 2 |Cd|^2, with G = C d."""
        variances = torch.linspace(self.least, 2.0, self.dims, dtype=torch.float64)
        off = torch.full((self.dims,), self.off, dtype=torch.float64)
        pulled = variances * off
        squared = float(pulled @ pulled)
        return float(variances.sum() * (off @ pulled + self.deviation**2) + squared) / squared

    def measured(self, steps: int, seed: int) -> NoiseScale:
        """From torch's gradients at fixed weights."""
        torch.manual_seed(seed)
        spread = torch.linspace(self.least, 2.0, self.dims).sqrt()
        model = nn.Linear(self.dims, 1, bias=False)
        nn.init.constant_(model.weight, self.off)
        gathered = NoiseNorms(model, self.small, self.parts)
        for _ in range(steps):
            model.zero_grad()
            for part in range(self.parts):
                x = torch.randn(self.small, self.dims) * spread
                loss = (
                    0.5 * (model(x) - self.deviation * torch.randn(self.small, 1)).square().mean()
                )
                (loss / self.parts).backward()
                if part == 0:
                    gathered.after_first()
            gathered.after_last()
        return noise_scale(gathered.norms())


CASES = (
    Case(10, 0.2, 0.5, 1.0, 16, 4),
    Case(10, 0.2, 0.5, 5.0, 16, 4),
    Case(100, 1.0, 0.3, 3.0, 16, 2),
    Case(100, 1.0, 0.1, 3.0, 64, 2),
    Case(1000, 1.0, 0.05, 1.0, 32, 4),
    Case(50, 2.0, 1.0, 0.0, 8, 2),
)


def main() -> None:
    torch.set_num_threads(1)
    lines, errors, held, told = [], [], 0, 0
    for case in CASES:
        known, found = case.known(), case.measured(STEPS, seed=1000)
        short = [case.measured(SHORT, seed) for seed in SEEDS]
        with_scale = [s for s in short if s.samples is not None]
        covered = sum(1 for s in with_scale if (s.low or 0.0) <= known <= (s.high or float("inf")))
        held, told = held + covered, told + len(with_scale)
        assert found.samples is not None
        errors.append(100 * (found.samples / known - 1))
        lines.append(
            f"| {case.dims} | {case.small} and {case.small * case.parts} | {known:.1f} | {found.samples:.1f} |"
            f" {errors[-1]:+.1f} % | {found.low:.1f} to {found.high:.1f} | {covered} of {len(with_scale)} |"
        )
        print(lines[-1], flush=True)
    costs = []
    for task, batch in (("cnn", 32), ("cnn", 64)):
        m = measure_noise_scale(
            Conditions(model=f"{HERE.parent / 'examples' / 'photo_tasks.py'}:{task}", seconds=10.0),
            batch,
        )
        words = (
            m.scale.reason
            if m.scale.samples is None
            else f"{m.scale.samples:.0f} samples ({m.scale.low:.0f} to {m.scale.high or float('inf'):.0f})"
        )
        costs.append(
            f"| {task} | {batch} | {m.step_ms:.1f} | {m.norms_ms:.2f} | {100 * m.norms_ms / m.step_ms:.1f} % | {words} |"
        )
        print(costs[-1], flush=True)
    worst = max(errors, key=abs)
    RESULT.write_text(
        "# Gradient noise scale\n\n"
        f"{datetime.date.today()}, torch {version('torch')}, {platform.machine()} CPU, `python benchmarks/noise_scale.py`.\n\n"
        "## Against the known value\n\n"
        f"Linear regressions at fixed weights, {STEPS:,} steps of real gradients, two norms a step. Worst error {worst:+.1f} %,"
        f" median {statistics.median(abs(e) for e in errors):.1f} %. The 90 % intervals of {SHORT} steps,"
        f" for {len(SEEDS)} seeds a case, hold the known value in {held} of {told}"
        f" ({len(CASES) * len(SEEDS) - told} runs could not tell the gradient from 0).\n\n"
        "| inputs | batches | known | measured | error | 90 % interval | intervals of short runs that hold it |\n"
        "|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n\n## What it costs\n\n"
        "`trainpace measure --noise-scale` on the tasks of `examples/photo_tasks.py`: milliseconds of a step, and of its"
        " two norms. A single run on a machine with other work.\n\n"
        "| task | batch | step ms | norms ms | share | noise scale |\n|---|---:|---:|---:|---:|---|\n"
        + "\n".join(costs)
        + "\n"
    )


if __name__ == "__main__":
    main()
