"""Measured training steps with expert parallelism against their forecasts, no constant of which was fitted on any of them.

python -m benchmarks.experts --data ../shared/data        prints the table of benchmarks/results/experts.md
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from fitting.prepare import prepared

from trainpace.validation import Row, Run, evaluate, read_runs

FILES = ("measured_runs.parquet", "runs2.parquet")
DEEPSEEK_V3 = Run(
    index=0, file="DeepSeek-V3 report", model="DeepSeekV3", framework="pytorch", gpu="H800", gpu_canonical="H800",
    interconnect="InfiniBand 400 Gb/s per GPU", precision="fp8", compile="compile", optimizer="AdamW", engine="megatron_core",
    attention="flash3", parallelism="pp=16,ep=64,zero=1,deepep,ep_overlap", num_gpus=2048.0, num_nodes=256.0, batch_per_gpu=1.0,
    global_batch=15360.0, seq_len=4096.0, tokens_per_sec=1e12 / (180e3 / 2048 * 3600),
)  # fmt: skip
"""DeepSeek-V3's training as its report tells it (arXiv:2412.19437, sections 3.1, 3.2 and 4.2): 180 thousand H800 hours for
a trillion tokens. Its kernels are fused by hand, which `compile` stands for; what it computes again is not counted."""


def expert_runs(data: Path) -> list[Run]:
    """The timed runs that divide their experts."""
    runs = [run for name in FILES for run in read_runs(data / name)]
    divided = [run for run in runs if re.search(r"\bep=(?!1\b)\d", run.parallelism) and run.mode in ("", "train")]
    return [DEEPSEEK_V3, *divided]


def table(runs: Sequence[Run], rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: errors by model, then every run."""
    pairs = [(run, row) for run, row in zip(runs, rows, strict=True) if row.error_pct is not None]
    yield "| model | n | mean error | median | bias |"
    yield "|---|--:|--:|--:|--:|"
    families = sorted({run.model.partition(" (")[0] for run, _ in pairs})
    for name in [*families, ""]:
        errors = [row.error_pct for run, row in pairs if run.model.startswith(name) and row.error_pct is not None]
        if errors:
            sizes = [abs(error) for error in errors]
            figures = statistics.fmean(sizes), statistics.median(sizes), statistics.fmean(errors)
            yield f"| {name or 'all'} | {len(errors)} | " + " | ".join(f"{figure:.1f} %" for figure in figures) + " |"
    yield ""
    yield "| model | GPUs | parallelism | precision | measured, ms | forecast, ms | error |"
    yield "|---|---|---|---|--:|--:|--:|"
    for run, row in pairs:
        yield (
            f"| {run.model} | {row.num_gpus} x {row.gpu} | {run.parallelism} | {row.precision} | {row.measured_ms:,.0f}"
            f" | {row.forecast_ms:,.0f} | {row.error_pct:+.1f} % |"
        )
    yield ""
    reasons = [row.unsupported or "no time was measured" for row in rows if row.error_pct is None]
    for reason in sorted(set(reasons)):
        yield f"- {reasons.count(reason)} runs without a forecast: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, default=Path("out/experts"))
    options = parser.parse_args()
    runs = [prepared(run, options.data, options.work / "configurations") for run in expert_runs(options.data)]
    rows = evaluate(runs, options.data, options.work / "traces", print, workers=1)
    print("\n".join(table(runs, rows)))


if __name__ == "__main__":
    main()
