"""How long until the first answer: start-up of the command, and tracing, against what they cannot do without.

Start-up is timed as whole processes, interleaved, medians of ratios within a round; tracing in one process, with torch
imported, the first time (torch's own lazy imports included) and after that.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
RESULT = Path(__file__).parent / "results" / "startup.md"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "trainpace --help": [sys.executable, "-m", "trainpace", "--help"],
    "trainpace schedule": [
        sys.executable, "-m", "trainpace", "schedule", "--samples", "50k", "--epochs", "3", "--micro-batch", "32",
        "--step-time", "80ms",
    ],
}  # fmt: skip
_TRACE = """
import json, resource, sys, time, torch
if len(sys.argv) > 3: import transformers
from trainpace.trace.trace import trace
times = []
for _ in range(3):
    start = time.perf_counter(); trace(sys.argv[1], [sys.argv[2]]); times.append(time.perf_counter() - start)
print(json.dumps([times[0], min(times[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
"""
_SWEEP = """
import json, statistics, sys, time
from trainpace.execution import Execution
from trainpace.forecast.sweep import sweep_ms
from trainpace.hardware import catalogue
from trainpace.records import load
from trainpace.workload import Workload
workload, devices = load(sys.argv[1], Workload), [d for d in catalogue() if d.kind == "gpu"]
times = []
for _ in range(5):
    start = time.perf_counter()
    sweep_ms(workload, Execution(precision="amp_fp16"), devices, range(1, 71))
    times.append(time.perf_counter() - start)
print(json.dumps([len(devices), statistics.median(times)]))
"""
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
_LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip


def main() -> None:
    lines = [
        "# Start-up, tracing and answers",
        "",
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}",
        "",
    ]
    lines += startup()
    lines += [
        "",
        "| trace (torch imported, two cores) | first s | again s | peak GiB of the process | to reach |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        gpt2, llama = Path(folder, "gpt2.json"), Path(folder, "llama.json")
        gpt2.write_text(json.dumps(_GPT2))
        llama.write_text(json.dumps(_LLAMA_70B))
        for name, spec, form, goal in (
            ("ResNet-50, fp32", "resnet50", "fp32", "1 s"),
            ("VGG-16, fp32", "vgg16", "fp32", "0.3 s"),
            ("MobileNetV2, fp32", "mobilenet_v2", "fp32", ""),
            ("GPT-2, fp32", f"transformers:{gpt2}", "fp32", "2 s"),
            ("Llama-70B, bf16", f"transformers:{llama}", "half", "8 s, 2 GiB"),
        ):
            extra = ["transformers"] if spec.startswith("transformers") else []
            command = [sys.executable, "-c", _TRACE, spec, form, *extra]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            first, again, peak = json.loads(done.stdout)
            lines.append(f"| {name} | {first:.2f} | {again:.2f} | {peak:.2f} | {goal} |")
    lines += ["", *answers()]
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


def answers() -> list[str]:
    """A forecast from a saved workload as a whole process, and a sweep of all batches and GPUs within one."""
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder, "resnet50.json"))
        base = [sys.executable, "-m", "trainpace", "forecast"]
        once = [*base, "resnet50", "--gpu", "T4", "--save-workload", saved]
        subprocess.run(once, capture_output=True, check=True)
        command = [*base, saved, "--gpu", "T4", "--batch", "32", "--precision", "amp_fp16", "--json"]
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        swept = subprocess.run([sys.executable, "-c", _SWEEP, saved], capture_output=True, text=True, check=True)
    devices, seconds = json.loads(swept.stdout)
    return [
        "| ResNet-50, amp_fp16 | median s | to reach |",
        "|---|---|---|",
        f"| `trainpace forecast WORKLOAD.json`, whole process | {statistics.median(times):.2f} | 0.35 |",
        f"| batches 1 to 70 on {devices} GPUs, once traced | {seconds:.2f} | 0.5 |",
    ]


def startup() -> list[str]:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times[name].append(time.perf_counter() - start)
    bare, click = times["python -c pass"], times["python -c 'import click'"]
    lines = ["| command | median ms | (time - click's import) / `python -c pass` | to reach |", "|---|---|---|---|"]
    for name, own in times.items():
        # 4 x bare Python, plus what importing click adds to it
        ratios = [(t - (c - b)) / b for t, b, c in zip(own, bare, click, strict=True)]
        goal = "4x" if name == "trainpace --help" else ""
        ratio = f"{statistics.median(ratios):.1f}x" if name.startswith("trainpace") else ""
        lines.append(f"| `{name}` | {1e3 * statistics.median(own):.0f} | {ratio} | {goal} |")
    return lines


if __name__ == "__main__":
    main()
