"""Forecasts of the training steps that were measured on a lent H100 and H200 (fitting/data): whole steps, the GPU's part, memory.

python -m benchmarks gpu (needs no GPU). None of these steps is fitted on. Kept in benchmarks/results/gpu_accuracy.md.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from fitting.gpu_steps import CONFIGURATIONS

import trainpace
from trainpace.core.errors import TrainpaceError

HERE = Path(__file__).parent
DATA = HERE.parent / "fitting" / "data"
CARDS = {"NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H200": "H200 SXM"}
RESULT = HERE / "results" / "gpu_accuracy.md"
DEVICE_BOUND = 0.9
"""Steps whose GPU was busy for this share of them tell how well kernels are forecast; the others, how well the host is."""


def cases() -> list[dict[str, Any]]:
    lines = [
        line
        for card in ("h200", "h100")
        for line in Path(DATA, f"{card}_steps.jsonl").read_text().splitlines()
    ]
    return [
        case for line in lines if "error" not in (case := json.loads(line)) and case["profiled"]
    ]


def forecast(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The forecast step and the part of it on the GPU, in milliseconds, with the interval."""
    model = case["model"]
    if model.startswith("transformers:"):
        path = folder / f"{model.partition(':')[2]}.json"
        path.write_text(json.dumps(CONFIGURATIONS[model.partition(":")[2]]))
        model = f"transformers:{path}"
    answer = trainpace.forecast(
        model,
        gpu=CARDS[case["gpu"]],
        batch=case["batch"],
        precision=case["precision"],
        channels_last=case["channels_last"],
        compile=case["compile"],
        optimizer=case["optimizer"],
        sequence_length=case["length"],
        image_size=case["image"],
        checkpointing="full" if case["checkpoint"] else "none",
        no_journal=True,
    )
    row = answer.rows[0]
    step, interval, memory = row.step, row.step_time_interval_ms, row.memory
    assert step is not None
    assert interval is not None
    assert memory is not None
    return {
        "step_ms": step.total_ms,
        "device_ms": step.computing_ms,
        "low": interval.low,
        "high": interval.high,
        "memory_gib": memory.allocated_gib,
    }


def table(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for case, answer in rows:
        kind = "language" if case["model"].startswith("transformers:") else "images"
        bound = "GPU-bound" if case["busy_ms"] > DEVICE_BOUND * case["median_ms"] else "host-bound"
        card = CARDS[case["gpu"]]
        form = f"{case['precision']}{', compile' if case['compile'] else ''}"
        for name in (f"{card}, {bound}, {kind}, {form}", f"{card}, {bound}, all"):
            groups.setdefault(name, []).append((case, answer))
    lines = [
        "| steps | n | step, mean error | median | in the 90 % interval | GPU's part, mean error | median | bias | memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, group in sorted(groups.items()):
        step = [a["step_ms"] / c["median_ms"] - 1 for c, a in group]
        device = [a["device_ms"] / c["busy_ms"] - 1 for c, a in group]
        memory = [a["memory_gib"] / c["peak_gib"] - 1 for c, a in group]
        held = sum(a["low"] <= c["median_ms"] <= a["high"] for c, a in group)
        lines.append(
            f"| {name} | {len(group)} | {_mean(step)} | {_median(step)} | {held / len(group):.0%} | {_mean(device)} | "
            f"{_median(device)} | {statistics.median(device):+.1%} | {_mean(memory)} |"
        )
    return lines


def _mean(errors: list[float]) -> str:
    return f"{statistics.fmean(map(abs, errors)):.1%}"


def _median(errors: list[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}"


def main() -> None:
    rows, refused = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            try:
                rows.append((case, forecast(case, Path(folder))))
            except TrainpaceError as error:
                refused.append(f"{case['model']}: {error}")
                continue
            answer = rows[-1][1]
            print(
                f"{case['model']} {case['batch']} {case['precision']} {answer['step_ms'] / case['median_ms'] - 1:+.0%} "
                f"GPU {answer['device_ms'] / case['busy_ms'] - 1:+.0%}",
                file=sys.stderr,
            )
    lines = [
        "# Forecasts against steps measured on a lent H100 and H200",
        "",
        f"{datetime.date.today()}; `python -m benchmarks gpu`; the measurements are those of fitting/data/README.md.",
        "",
        *table(rows),
        "",
        *(f"Refused: {line}" for line in sorted(set(refused))),
    ]
    RESULT.write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
