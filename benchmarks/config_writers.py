"""Config writers: read -> write -> read for seeded plans, and the files loaded by the libraries that they are for.

python benchmarks/config_writers.py [--plans 200]       (needs .engines; a few minutes)
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "planted")]
import config_slurm  # noqa: E402
from config_plans import FILES, SETS, Round, execution, rounds, texts_of  # noqa: E402

from launch import environment  # noqa: E402
from trainpace.configs import combine, parse_config  # noqa: E402
from trainpace.configs.changes import Changes  # noqa: E402
from trainpace.configs.write import BY_HAND, rewrite  # noqa: E402
from trainpace.execution import Execution  # noqa: E402

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
        after = replace(execution(rng), tp=1, pp=1, cp=1)  # the Trainer has no model parallelism of its own
        done = rewrite(SETS[kind], Changes(before=Execution(), after=after))
        place = folder / str(len(cases))
        place.mkdir()
        for file, text in texts_of(done).items():
            (place / file).write_text(text)
        cases.append({"path": str(place / "args.yaml"), "data_parallel_size": after.data_parallel_size})
        diffs.append("".join(f.diff for f in done.files))
    reports = _ask("Trainer beside DeepSpeed", cases, folder)
    return [
        (report.get("mismatches", [report.get("error", "")]), diff) for report, diff in zip(reports, diffs, strict=True)
    ]


def _ask(kind: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(cases))
    command = [sys.executable, str(ROOT / "benchmarks" / "config_libraries.py"), kind, str(manifest)]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment({"ACCELERATE_USE_CPU": "0"})
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
        name: (report[name], stated[name]) for name in report.keys() & stated.keys() if report[name] != stated[name]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "config_writers.md")
    o = parser.parse_args()
    rows = []
    for kind in FILES:
        done = list(rounds(kind, o.plans))
        wrong = [one for one in done if one.wrong()]
        by_hand = sum(BY_HAND in one.written.left.values() for one in done)
        same = "none at hand"
        if kind in LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                reports = loaded(kind, done, Path(folder))
            other = [(one, d) for one, report in zip(done, reports, strict=True) if (d := differing(one, report))]
            for one, d in other[:5]:
                print(f"{kind}: {one.file}: {d}")
            same = f"{o.plans - len(other)} of {o.plans}"
        for one in wrong[:5]:
            print(f"{kind}: {one.file}: {one.wrong()}")
        kept = sum(_kept(one) for one in done)
        library = LIBRARIES.get(kind, "the reader alone")
        n = o.plans
        cells = (kind, len(FILES[kind]), f"{n - len(wrong)} of {n}", by_hand, f"{kept} of {n}", same, library)
        rows.append(f"| {' | '.join(map(str, cells))} |")
        print(rows[-1])
    with tempfile.TemporaryDirectory() as name:
        differ = [found for found, _ in mismatches(o.plans, Path(name)) if found]
    print(*differ[:3], sep="\n")
    agree = f"{o.plans - len(differ)} of {o.plans}"
    both = f"\nWritten into TrainingArguments and the DeepSpeed file beside them: in {agree} plans the Trainer's own comparison\n"
    both += "of the two (`trainer_config_process`) finds no difference.\n"
    o.output.write_text(HEAD.format(plans=o.plans) + "\n".join(rows) + "\n" + both)


def _kept(one: Round) -> bool:
    """Whether every comment of the file is still there."""

    def comments(text: str) -> list[str]:
        return sorted(line[line.index("# ") :] for line in text.splitlines() if "# " in line)

    return comments(one.written.before) == comments(one.written.text)


HEAD = """# Config writers

Made by `make bench-run` (`benchmarks/config_writers.py`). For every format {plans} seeded plans: a file is brought to one
execution, read, changed to another one and read again. *Same*: it reads back as the execution that was wanted; what the format
cannot say (each with its reason) stays as it was. *By hand*: a setting that the format can say was given up. *Library*: the
library loads the written file and reports what the reader reads: batch sizes, processes, ZeRO stage, offload, number format.

| format | texts | same | by hand | comments kept | library says the same | library |
|---|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
