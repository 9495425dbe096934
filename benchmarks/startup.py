"""How long until the first answer: the commands that users run as whole processes, and tracing in one process.

Processes are interleaved, and their medians reported beside bare Python and the imports that they cannot do without, since a
busy machine slows all alike. Tracing is timed with torch imported, the first time (torch's own lazy imports included) and
after that.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
RESULT = Path(__file__).parent / "results" / "startup.md"
PYTHON = {
    "python -c pass": "pass",
    "python -c 'import click'": "import click",
    "python -c 'import numpy'": "import numpy",
    "python -c 'import torch'": "import torch",
}
GOALS = {
    "trainpace --help": "0.06 s",
    "trainpace forecast vgg16.json --gpu T4 --batch 1:70": "0.35 s",
    "trainpace forecast vgg16 --gpu T4 --batch 1:70": "0.4 s",
    "trainpace forecast resnet50 --gpu T4": "0.4 s",
    "trainpace forecast resnet50 --gpu T4 --gpu A100 --gpu H100 --batch 64 --precision amp_fp16": "0.4 s",
    "trainpace forecast vgg16 --gpu T4 --batch 1:70 --json": "",
    "trainpace match resnet50 --samples 1281167 --epochs 90 --global-batch 256": "",
    "trainpace plan resnet50 --gpu A100 --num-gpus 4 --batch 64 --samples 1281167 --epochs 90": "",
    "trainpace schedule --samples 50k --epochs 3 --micro-batch 32 --step-time 80ms": "",
    "trainpace gpus T4": "",
    "trainpace forecast task.py:task --gpu T4": "1.3 times torch",
    "trainpace match task.py:task --samples 50k --epochs 10": "1.5 times torch",
}
"""Commands, and the seconds that each should stay below on a quiet machine with two cores, or how many times an import of torch
it may take. vgg16.json is a saved workload, task.py a user's own network."""
TASK = """
import torch

def task():
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    data = torch.utils.data.TensorDataset(torch.randn(64, 784), torch.randint(10, (64,)))
    return model, torch.nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), data
"""

_TRACE = """
import json, resource, sys, time, torch
if len(sys.argv) > 3: import transformers
from trainpace.workload.trace import trace
times = []
for _ in range(3):
    start = time.perf_counter(); trace(sys.argv[1], [sys.argv[2]]); times.append(time.perf_counter() - start)
print(json.dumps([times[0], min(times[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
"""
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
_LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def main() -> None:
    lines = [
        "# Start-up, tracing and answers",
        "",
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}",
        "",
    ]
    lines += processes()
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
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


def processes() -> list[str]:
    """Each command as a process of its own, one after the other, `ROUNDS` times."""
    commands = {name: [sys.executable, "-c", code] for name, code in PYTHON.items()}
    commands |= {name: [sys.executable, "-m", *name.split()] for name in GOALS}
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "XDG_DATA_HOME": folder,
        }  # no journal or calibration of this machine's user
        environment.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # users' Python keeps the bytecode of what it imports
        saving = [
            sys.executable,
            "-m",
            *"trainpace forecast vgg16 --gpu T4 --save-workload vgg16.json".split(),
        ]
        subprocess.run(saving, capture_output=True, check=True, cwd=folder, env=environment)
        Path(folder, "task.py").write_text(TASK)
        for _ in range(ROUNDS):
            for name, command in commands.items():
                start = time.perf_counter()
                done = subprocess.run(
                    command, capture_output=True, text=True, cwd=folder, env=environment
                )
                times[name].append(time.perf_counter() - start)
                if done.returncode:
                    raise SystemExit(f"{name} failed: {done.stderr}")
    torch_s = times["python -c 'import torch'"]
    lines = [
        "| command, whole process | median s | fastest s | of `import torch` | to reach |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratio = statistics.median(one / torch for one, torch in zip(seconds, torch_s, strict=True))
        fastest, median = min(seconds), statistics.median(seconds)
        lines.append(
            f"| `{name}` | {median:.3f} | {fastest:.3f} | {ratio:.2f} | {GOALS.get(name, '')} |"
        )
    return lines


if __name__ == "__main__":
    main()
