"""`python -m tools mutants`: small faults planted in the arithmetic by mutmut, one at a time, and
how many of them its tests notice.

mutmut writes a copy of each function for every fault and runs the tests that reach the function;
pyproject.toml has its settings. Of each module as many faults are tried as SAMPLE says, drawn at
random (all where it has fewer), since all 9,000 take hours. What is known stays in mutants/ until
the function changes; `--survivors` tries again only what was not noticed.

Exit code 1: fewer than GOAL of the faults were noticed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import fnmatch
import functools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

GOAL = 0.85
SEED = 20
FOLDER = Path("mutants")
_READS = (
    "x_read*",
    "x__read*",
    "x_put_training_arguments*",
    "x_is_*",
    "x_sections_with_arguments*",
)
MODULES = {
    "job": ["trainpace.job.training.*", "trainpace.job.learning_rate.*"],
    "forecast/matmul": ["trainpace.forecast.matmul.*"],
    "measure/changes": ["trainpace.measure.changes.*"],
    "configs: files as a whole": [
        *(
            f"trainpace.configs.files.{name}__mutmut*"
            for name in ("x_read_configs", "x_syntax_of", "x_parse_config")
        ),
        "trainpace.configs.files.x__in_known_format__mutmut*",
        *(
            f"trainpace.configs.syntax.{name}__mutmut*"
            for name in ("x_parse", "x_parse_yaml", "x__count")
        ),
        *(
            f"trainpace.configs.syntax.{name}__mutmut*"
            for name in ("x__parts", "x_checked", "x__check_unique")
        ),
        "trainpace.configs.settings.*",
    ],
    "configs: each format": [
        *(
            f"trainpace.configs.{tool}.{name}"
            for tool in ("accelerate", "deepspeed", "huggingface")
            for name in _READS
        ),
        *(
            f"trainpace.configs.{tool}.{name}"
            for tool in ("lightning", "command", "sbatch")
            for name in _READS
        ),
        "trainpace.configs.files.*",
    ],
}
"""Patterns of mutmut's names of the faults that count. What writes settings files is left out."""
_VERDICTS = {
    0: "survived",
    1: "killed",
    3: "killed",
    5: "no tests",
    33: "no tests",
    24: "timeout",
    -24: "timeout",
    36: "timeout",
}


def mutmut(*names: str) -> None:
    """Make the faults where they are not there yet, and try the named ones."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", "run", "--max-children", "2", *names],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"mutmut ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def verdicts() -> dict[str, str | None]:
    """What is known of each fault by its name; None: not tried."""
    known: dict[str, str | None] = {}
    for file in FOLDER.rglob("*.py.meta"):
        for name, code in json.loads(file.read_text())["exit_code_by_key"].items():
            known[name] = None if code is None else _VERDICTS.get(code, "error")
    return known


def drawn(known: dict[str, str | None], module: str, most: int) -> list[str]:
    names = sorted(
        name
        for name in known
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in MODULES[module])
    )
    return random.Random(SEED).sample(names, most) if 0 < most < len(names) else names


def change_of(name: str) -> str:
    """The fault, as the lines that differ."""
    module, _, function = name.rpartition(".")
    bodies = _bodies((FOLDER / "src" / module.replace(".", "/")).with_suffix(".py"))
    before, after = bodies[re.sub(r"\d+$", "orig", function)], bodies[function]
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


@functools.cache
def _bodies(file: Path) -> dict[str, list[str]]:
    """The lines of every function of a file below its `def`, where its name differs from the
    others'.
    """
    text = file.read_text()
    lines, functions = (
        text.splitlines(),
        [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)],
    )
    return {function.name: lines[function.lineno : function.end_lineno] for function in functions}


def table(samples: dict[str, list[str]], known: dict[str, str | None]) -> tuple[str, float]:
    """(the table as Markdown, the share that was killed).

    A fault whose tests ran out of time is not counted as killed.
    """
    lines = [
        "| module | faults | tried | killed | survived | no tests | timeout | killed of tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for module, names in samples.items():
        counts = Counter(known[name] or "not tried" for name in names)
        counts["faults"], counts["tried"] = (
            len(drawn(known, module, 0)),
            len(names) - counts["not tried"],
        )
        total += counts
        lines.append(_row(module, counts))
    lines.append(_row("**all**", total))
    return "\n".join(lines), total["killed"] / max(total["tried"], 1)


def _row(name: str, counts: Counter[str]) -> str:
    shown = [counts[c] for c in ("faults", "tried", "killed", "survived", "no tests", "timeout")]
    return f"| {name} | {' | '.join(map(str, shown))} | {counts['killed'] / max(counts['tried'], 1):.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant small faults and count those that the tests notice."
    )
    parser.add_argument(
        "--sample", type=int, default=150, help="faults to try of each module; 0 for all"
    )
    parser.add_argument(
        "--module", action="append", choices=MODULES, help="only this module; may be given again"
    )
    parser.add_argument(
        "--survivors",
        action="store_true",
        help="try again only those of the sample that were not noticed",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="try none: show what is known, with the faults that survived",
    )
    arguments = parser.parse_args()
    if not FOLDER.exists():
        mutmut("trainpace.job.learning_rate.*")
    known = verdicts()
    samples = {
        module: drawn(known, module, arguments.sample) for module in arguments.module or MODULES
    }
    wanted = ["survived", "no tests", "timeout", "error"] if arguments.survivors else [None]
    names = [name for module in samples.values() for name in module if known[name] in wanted]
    if names and not arguments.show:
        mutmut(*names)
        known = verdicts()
    lines, share = table(samples, known)
    print(lines)
    for name in (
        name
        for module in samples.values()
        for name in module
        if known[name] not in (None, "killed")
    ):
        print(f"\n{name}: {known[name]}\n{change_of(name)}")
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
