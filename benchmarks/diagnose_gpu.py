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
from truth import read_truth  # noqa: E402

from launch import run  # noqa: E402

TRUTH_STEPS = ("--steps", "80")
OVERHEAD_PAIRS = 6
FORETOLD = {
    # the advice that is a case's fix, by the beginning of its title
    "gpu_fp32": "amp_bf16", "gpu_adamw": "(fused)", "gpu_files": "prepare samples", "gpu_few_workers": "workers",
    "gpu_trainer_tokens": "prepare samples", "gpu_pageable": "copy less",
}  # fmt: skip
TRAINPACE = (sys.executable, "-m", "trainpace")


def measure(folder: Path, parts: list[str], only: list[str]) -> None:
    """Run the parts, and append a line a run to runs.jsonl."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if torch.cuda.is_available() else "no GPU"
    cases = [case for case in GPU_CASES if not only or case.name in only]
    with open(folder / "runs.jsonl", "a", buffering=1) as file:
        for part in parts or ["diagnose", "truth", "overhead"]:
            for row in PARTS[part](folder, cases):
                file.write(json.dumps({"part": part, "device": device, "date": str(datetime.date.today()), **row}) + "\n")


def diagnosed(folder: Path, cases: list[Case]) -> Any:
    """What the command says of each case."""
    for case in cases:
        recording = folder / "recordings" / case.name
        recording.parent.mkdir(exist_ok=True)
        started = time.perf_counter()
        command = (*TRAINPACE, "diagnose", "--json", "--output", str(recording), "--", sys.executable, *case.argv())
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        took_s = time.perf_counter() - started
        answer = json.loads(done.stdout) if done.stdout.startswith("{") else None
        verdict = answer and answer["verdict"]
        print(f"{case.name}: {verdict} (true: {case.expected}) {took_s:.0f} s, exit code {done.returncode}", flush=True)
        if answer is None:
            print(done.stderr[-1500:], flush=True)
        yield {"case": case.name, "took_s": took_s, "code": done.returncode, "answer": answer, "errors": done.stderr[-1500:]}


def truths(folder: Path, cases: list[Case]) -> Any:
    """Steps without a tool, with the fix, and watched; losses beside those of the bare run."""
    for case in cases:
        row: dict[str, Any] = {"case": case.name}
        for way in ("bare", "fixed", "watched"):
            if way == "fixed" and case.fix is None:
                continue
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
        before = (*TRAINPACE, "watch", "--output", f"{folder}/watch", "--") if way == "watched" else ()
        longer = case.__class__(**{f: getattr(case, f) for f in case.__struct_fields__} | {"args": (*case.args, *TRUTH_STEPS)})
        outcome = run(longer, fixed=way == "fixed", before=before, env={"STEP_TIMES": str(times), "LOSSES": str(losses)})
        if not losses.exists():
            raise RuntimeError(outcome.output[-1200:])
        truth = read_truth(times)
        return {"mean_ms": truth.mean_ms, "median_ms": truth.median_ms}, json.loads(losses.read_text())


_STEPS = """
import json, os, time, torch
from torch import nn
torch.manual_seed(0)
wide = int(os.environ["WIDE"])
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.ReLU())), nn.Linear(wide, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(8192, wide, device="cuda"), torch.randint(10, (8192,), device="cuda")
times = []
last = time.perf_counter()
for step in range(1200):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
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
                for way in ("bare", "watched") if pair % 2 else ("watched", "bare"):
                    times = Path(work, f"{name}-{pair}-{way}")
                    env = {**os.environ, "WIDE": str(wide), "TIMES": str(times)}
                    before = (*TRAINPACE, "watch", "--output", f"{times}.recording", "--") if way == "watched" else ()
                    subprocess.run((*before, sys.executable, str(script)), env=env, capture_output=True, check=True)
                    row[way] = json.loads(times.read_text())
                print(row, flush=True)
                yield row


PARTS = {"diagnose": diagnosed, "truth": truths, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
