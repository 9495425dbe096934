"""How good `trainpace watch` and `diagnose` are on a GPU: verdicts, savings foretold, and what watching costs.

Where a GPU is:  python benchmarks/diagnose_gpu.py measure FOLDER [diagnose] [truth] [overhead] [--only NAME ...]
Anywhere:        python benchmarks/diagnose_gpu.py table FOLDER    reads what was measured into results/diagnose_gpu.md

`diagnose` is the real command; `truth` runs each script bare, with its fix, and watched; each takes about six minutes.
FOLDER gets a line a run (runs.jsonl) and the recordings, so that a later version of the diagnosis can read them again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "diagnose_gpu.md"
sys.path.insert(0, str(HERE / "planted"))

from cases import GPU_CASES, Case  # noqa: E402
from launch import in_turns, run  # noqa: E402
from truth import read_truth  # noqa: E402

WATCHED = ("gpu_compute", "gpu_launch", "gpu_lightning")
TRUTH_STEPS = ("--steps", "60")
OVERHEAD_PAIRS = 4
FORETOLD = {
    # a case's fix: words in the title of its advice, or a cause that it takes away
    "gpu_fp32": "bf16",
    "gpu_launch": "launch",
    "gpu_adamw": "(fused)",
    "gpu_checkpoint": "checkpoint",
    "gpu_evaluate": "evaluation",
    "gpu_clean": "own_code",
    "gpu_files": "prepare samples",
    "gpu_few_workers": "loader workers",
    "gpu_lightning": "launch",
    "gpu_trainer_tokens": "prepare samples",
    "gpu_pageable": "copy less",
    "gpu_images_compute": "torch.compile",
    "gpu_compute": "torch.compile",
    "gpu_trainer": "torch.compile",
    "gpu_loss_each_step": "log every",
}
LEFT_OUT = {"gpu_checkpoint": 1 - 10 / 50, "gpu_evaluate": 1 - 5 / 50}
TRAINPACE = (sys.executable, "-m", "trainpace")


def measure(folder: Path, parts: list[str], only: list[str]) -> None:
    """Run the parts, and append a line a run to runs.jsonl."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    device = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        if torch.cuda.is_available()
        else "no GPU"
    )
    cases = [case for case in GPU_CASES if not only or case.name in only]
    with open(folder / "runs.jsonl", "a", buffering=1) as file:
        for part in parts or ["diagnose", "truth", "overhead"]:
            for row in PARTS[part](folder, cases):
                file.write(
                    json.dumps(
                        {"part": part, "device": device, "date": str(datetime.date.today()), **row}
                    )
                    + "\n"
                )


def diagnosed(folder: Path, cases: list[Case]) -> Any:
    """What the command says of each case."""
    for case in cases:
        recording = folder / "recordings" / case.name
        recording.parent.mkdir(exist_ok=True)
        started = time.perf_counter()
        command = (
            *TRAINPACE,
            "diagnose",
            "--json",
            "--output",
            str(recording),
            "--",
            sys.executable,
            *case.argv(),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        took_s = time.perf_counter() - started
        answer = json.loads(done.stdout) if done.stdout.startswith("{") else None
        verdict = answer and answer["verdict"]
        print(
            f"{case.name}: {verdict} (true: {case.expected}) {took_s:.0f} s, exit code {done.returncode}",
            flush=True,
        )
        if answer is None:
            print(done.stderr[-1500:], flush=True)
        yield {
            "case": case.name,
            "took_s": took_s,
            "code": done.returncode,
            "answer": answer,
            "errors": done.stderr[-1500:],
        }


def truths(folder: Path, cases: list[Case]) -> Any:
    """Steps without a tool, with the fix, and watched; losses beside those of the bare run."""
    for case in cases:
        row: dict[str, Any] = {"case": case.name}
        for way in ("bare", "fixed", *(("watched",) if case.name in WATCHED else ())):
            try:
                row[way], row[f"{way}_losses"] = true_step(case, way)
            except Exception as error:
                row[way] = None
                print(f"{case.name}, {way}: {type(error).__name__}: {error}"[:1500], flush=True)
        print(case.name, {k: v for k, v in row.items() if "losses" not in k}, flush=True)
        yield row


def true_step(case: Case, way: str) -> tuple[dict[str, Any], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        times, losses = Path(folder, "times"), Path(folder, "losses")
        before = (
            (*TRAINPACE, "watch", "--output", f"{folder}/watch", "--") if way == "watched" else ()
        )
        longer = case.__class__(
            **{f: getattr(case, f) for f in case.__struct_fields__}
            | {"args": (*case.args, *TRUTH_STEPS)}
        )
        outcome = run(
            longer,
            fixed=way == "fixed",
            before=before,
            env={"STEP_TIMES": str(times), "LOSSES": str(losses)},
        )
        if not losses.exists():
            raise RuntimeError(outcome.output[-1200:])
        truth = read_truth(times)
        return {"mean_ms": truth.mean_ms, "median_ms": truth.median_ms}, json.loads(
            losses.read_text()
        )


_STEPS = """
import json, os, time, torch
from torch import nn
torch.manual_seed(0)
wide = int(os.environ["WIDE"])
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.ReLU())), nn.Linear(wide, 10))
model = model.cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(16384, wide, device="cuda", dtype=torch.bfloat16)
labels = torch.randint(10, (16384,), device="cuda")
times = []
last = time.perf_counter()
for step in range(600):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).float(), labels)
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(1e3 * (now - last) / 20)
        last = now
times = sorted(times[10:])
json.dump({"median_ms": times[len(times) // 2], "loss": loss.item()}, open(os.environ["TIMES"], "w"))
"""


def overhead(folder: Path, cases: list[Case]) -> Any:
    """A step that the launches bound, and one of about ten milliseconds that the GPU bounds, watched and bare in turns."""
    with tempfile.TemporaryDirectory() as work:
        script = Path(work, "train.py")
        script.write_text(_STEPS)
        for name, wide in (("launch-bound", 64), ("GPU-bound", 4096)):
            for pair in range(OVERHEAD_PAIRS):
                row: dict[str, Any] = {"step": name, "pair": pair}
                for way in in_turns(pair):
                    times = Path(work, f"{name}-{pair}-{way}")
                    env = {**os.environ, "WIDE": str(wide), "TIMES": str(times)}
                    before = (
                        (*TRAINPACE, "watch", "--output", f"{times}.recording", "--")
                        if way == "watched"
                        else ()
                    )
                    subprocess.run(
                        (*before, sys.executable, str(script)),
                        env=env,
                        capture_output=True,
                        check=True,
                    )
                    row[way] = json.loads(times.read_text())
                print(row, flush=True)
                yield row


def table(folder: Path) -> str:
    """The page of results."""
    rows = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    last: dict[tuple[str, str], dict[str, Any]] = {
        (row["part"], row.get("case", "")): row for row in rows
    }
    cases = [c for c in GPU_CASES if ("diagnose", c.name) in last]
    lines, right, close, told = [], 0, 0, 0
    for case in cases:
        found, truth = last["diagnose", case.name], last.get(("truth", case.name), {})
        answer = read_again(folder / "recordings" / case.name) or found["answer"]
        said = answer["verdict"] if answer else "no answer"
        is_right = said in case.accepted
        right += is_right
        bare, fixed = ((truth.get(way) or {}).get("mean_ms") for way in ("bare", "fixed"))
        step = answer["step_ms"] if answer else None
        saved = 1 - fixed / bare if bare and fixed else None
        foretold = share_foretold(case, answer) if answer else None
        if saved is not None and foretold is not None:
            told += 1
            close += abs(foretold - saved) <= 0.15 * abs(saved)
        numbers = ["" if ms is None else f"{ms:.1f}" for ms in (step, bare, fixed)]
        numbers += ["" if share is None else f"{100 * share:.0f} %" for share in (saved, foretold)]
        shown = said if is_right else f"**{said}**"
        lines.append(
            f"| {case.name} | {case.expected} | {shown} | {' | '.join(numbers)} | {found['took_s']:.0f} |"
        )
    first = last["diagnose", cases[0].name]
    return "\n".join(
        [
            "# trainpace watch and diagnose on a GPU (`python -m benchmarks diagnose-gpu`)",
            "",
            f"{first['date']}, {first['device']}, 16 cores. Recorded there, and read by that day's diagnosis. Steps of `diagnose`"
            " and of bare runs are from different machines of this kind, so savings are shares of the step. For gpu_norms launching"
            " is as right: reading the norms and launching the model take about half of its step each.",
            "",
            f"Verdict right in {right} of {len(cases)}; saving foretold within 15 % in {close} of {told}, of which"
            " gpu_compute and gpu_images_compute helped to fit what torch.compile saves.",
            "",
            "| case | true cause | said | step ms | bare | fixed | saved | foretold | s in all |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|",
            *lines,
            "",
            *overhead_lines(rows),
            "",
        ]
    )


def read_again(recording: Path) -> dict[str, Any] | None:
    """What today's diagnosis says of a recording; None where it was not brought back."""
    if not recording.is_dir():
        return None
    done = subprocess.run(
        (*TRAINPACE, "diagnose", "--json", str(recording)),
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def share_foretold(case: Case, answer: dict[str, Any]) -> float | None:
    """What the diagnosis says that this case's fix saves of a step: an advice by its title, or all of a cause. Without such an
    advice it is none, where one was to be given.
    """
    wanted = FORETOLD.get(case.name)
    if wanted is None:
        return None
    causes = {share["cause"]: share["ms"] for share in answer["shares"]}
    if wanted in causes:
        return float(causes[wanted]) * LEFT_OUT.get(case.name, 1.0) / float(answer["step_ms"])
    changes = (*answer["advice"], *answer["not_worth"])
    return next((float(a["saves_ms"]) for a in changes if wanted in a["title"]), 0.0) / float(
        answer["step_ms"]
    )


def overhead_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(row["step"] for row in rows if row["part"] == "overhead"):
        pairs = [row for row in rows if row["part"] == "overhead" and row["step"] == name]
        more_us = [1e3 * (row["watched"]["median_ms"] - row["bare"]["median_ms"]) for row in pairs]
        bare = statistics.median(row["bare"]["median_ms"] for row in pairs)
        same = sum(row["watched"]["loss"] == row["bare"]["loss"] for row in pairs)
        middle_us = statistics.median(more_us)
        lines.append(
            f"- A {name} step of {bare:.2f} ms takes {middle_us:+.0f} us watched ({min(more_us):+.0f} to {max(more_us):+.0f} in"
            f" {len(pairs)} pairs in turns), {middle_us / 10 / bare:+.1f} %; the last loss is the same in {same}."
        )
    return lines


PARTS = {"diagnose": diagnosed, "truth": truths, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", default=[], help=" ".join(PARTS))
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.folder, arguments.parts, arguments.only)
    else:
        RESULT.write_text(table(arguments.folder))


if __name__ == "__main__":
    main()
