"""Faults that code for accelerators usually has, planted one by one: the tests on a simulated device must catch each.

    python benchmarks/accelerator_faults.py [FIRST]

Every fault of planted/accelerator_faults.toml, or those from the FIRST on, is planted in a copy of the package, and
`tests/measure` and `tests/diagnose` run against it: the fast tests, then the slow ones that its `likely` names, then all. First
comes a copy without any, since a test that fails by itself catches nothing.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "accelerator_faults.md"
FAULTS = Path(__file__).parent / "planted" / "accelerator_faults.toml"
TESTS = ("tests/measure", "tests/diagnose")


class Fault(NamedTuple):
    what: str
    file: str
    before: str
    after: str
    likely: str = ""


def first_failure(fault: Fault | None, folder: Path) -> str:
    """The first test that fails against a copy of the package, with the fault planted where there is one; "" where none does."""
    shutil.copytree(
        ROOT / "src",
        folder / "src",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    if fault is not None:
        path = folder / "src" / "trainpace" / fault.file
        text = path.read_text()
        if fault.before not in text:
            raise SystemExit(f"{fault.what}: {fault.file} has changed, nothing to plant")
        path.write_text(text.replace(fault.before, fault.after))
    likely = ["slow", "-k", fault.likely] if fault is not None and fault.likely else []
    for selected in (["not slow"], likely, ["slow"]):
        failed = _first_of(selected, folder) if selected else ""
        if failed:
            return failed
    return ""


def _first_of(selected: list[str], folder: Path) -> str:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-x",
            *TESTS,
            "-p",
            "no:cacheprovider",
            "-m",
            *selected,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(\S+)", run.stdout, re.MULTILINE)
    if failed is None and run.returncode not in (0, 5):  # 5: none is selected
        raise SystemExit(
            f"pytest ended with {run.returncode}, and no test failed: {(run.stdout + run.stderr)[-500:]}"
        )
    return failed[1] if failed else ""


def main() -> None:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    faults = [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["fault"]]
    with tempfile.TemporaryDirectory() as folder:
        failing = first_failure(None, Path(folder))
    if failing:
        raise SystemExit(
            f"{failing} fails without any fault, so that it would seem to catch each: mend it first."
        )
    rows = []
    for fault in faults[first - 1 :]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append((fault, first_failure(fault, Path(folder))))
        print(f"{fault.what}: {rows[-1][1] or 'NOT CAUGHT'}", flush=True)
    caught = sum(bool(test) for _, test in rows)
    lines = [
        "# Faults planted in the code for accelerators",
        "",
        f"`python -m benchmarks accelerator`, {datetime.date.today()}: `tests/measure` and `tests/diagnose`, which pass without them,"
        f" catch {caught} of {len(rows)}.",
        "",
        "| fault | in | caught by |",
        "|---|---|---|",
        *(
            f"| {m.what} | `{m.file}` | {f'`{test}`' if test else '**not caught**'} |"
            for m, test in rows
        ),
    ]
    if first == 1:
        RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
