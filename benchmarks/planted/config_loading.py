"""What the libraries make of written settings files, each asked in a process of its own (`config_libraries`)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import config_slurm
from config_plans import SETS, Round, execution, texts_of
from launch import environment
from msgspec.structs import replace

from trainpace.configs import Changes, combine, parse_config, rewrite
from trainpace.core.execution import Execution

LIBRARIES = {
    "Hugging Face TrainingArguments": "transformers 5.23 `HfArgumentParser`, `TrainingArguments`",
    "DeepSpeed": "DeepSpeed 0.19.8 `DeepSpeedConfig`",
    "accelerate": "accelerate 1.15: `accelerate launch`, up to the environment that it makes",
    "Lightning CLI": "Lightning 2.6 `Trainer`",
    "launch command": "torchrun's, accelerate's and DeepSpeed's own argument parsers; `HfArgumentParser` for flags",
}


SLURM = "Slurm batch script"
if config_slurm.at_hand():
    LIBRARIES[SLURM] = "Slurm's own `sbatch` and `scontrol show job`"


def loaded(kind: str, done: list[Round], folder: Path) -> list[dict[str, Any]]:
    """What the library says of every file, in order."""
    cases: list[dict[str, Any]] = []
    for i, one in enumerate(done):
        path = folder / str(i) / one.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.written.text)
        cases.append({"path": str(path), "data_parallel_size": one.wanted.data_parallel_size})
    if kind == SLURM:
        with config_slurm.controller() as env:
            return [config_slurm.report(Path(case["path"]), env) for case in cases]
    return _ask(kind, cases, folder)


def mismatches(count: int, folder: Path) -> list[tuple[list[str], str]]:
    """(what the Trainer finds to differ from the DeepSpeed file beside its arguments, the diff) for plans written into both."""
    rng, kind = random.Random(0), "Trainer, DeepSpeed, Slurm"
    cases: list[dict[str, Any]] = []
    diffs = []
    while len(cases) < count:
        after = replace(
            execution(rng), tp=1, pp=1, cp=1
        )  # the Trainer has no model parallelism of its own
        done = rewrite(SETS[kind], Changes(before=Execution(), after=after))
        place = folder / str(len(cases))
        place.mkdir()
        for file, text in texts_of(done).items():
            (place / file).write_text(text)
        cases.append(
            {"path": str(place / "args.yaml"), "data_parallel_size": after.data_parallel_size}
        )
        diffs.append("".join(f.diff for f in done.files))
    reports = _ask("Trainer beside DeepSpeed", cases, folder)
    return [
        (report.get("mismatches", [report.get("error", "")]), diff)
        for report, diff in zip(reports, diffs, strict=True)
    ]


def _ask(kind: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(cases))
    command = [
        sys.executable,
        str(Path(__file__).with_name("config_libraries.py")),
        kind,
        str(manifest),
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment({"ACCELERATE_USE_CPU": "0"}),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    reports: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return reports


def differing(one: Round, report: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where the library and the reader say different things: {setting: (library, reader)}. Only what the file states counts."""
    if "error" in report:
        return {"refused": (report["error"], "")}
    combined = combine([parse_config(one.written.text, one.file)])
    stated: dict[str, Any] = {name: setting.value for name, setting in combined.values.items()}
    return {
        name: (report[name], stated[name])
        for name in report.keys() & stated.keys()
        if report[name] != stated[name]
    }
