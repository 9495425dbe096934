"""Run tests in other environments: `python -m tools test-lowest` and `python -m tools
test-pythons`.

lowest: the oldest versions that pyproject.toml admits, torch excepted, since PyPI has no CPU build
of 2.6 for Linux. Warnings are not errors there: old packages warn about today's Python.
pythons: Python 3.12 and 3.13, if installed, with the tests that run without torch.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHONS = ("3.12", "3.13")
WITHOUT_TORCH = (
    *("tests/forecast", "tests/core", "tests/job", "tests/plan", "tests/test_architecture.py"),
    "tests/supply/test_command_without_torch.py",
)
FAST = ("-m", "not slow and not long")


def python_of(version: str) -> str | None:
    """Return the interpreter of a Python version, from pyenv or the path."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(command, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def lowest(tests: list[str]) -> None:
    run("tools/install.sh", "lowest", ".lowest")
    run(".lowest/bin/python", "-m", "pytest", *FAST, "-W", "default", *(tests or ["tests"]))


def pythons(tests: list[str]) -> None:
    found = {version: python for version in PYTHONS if (python := python_of(version))}
    print(f"Pythons found: {', '.join(found) or 'none'}. Tests that need torch are not run there.")
    for version, python in found.items():
        folder = f".pythons/{version}"
        run("tools/install.sh", "pythons", folder, PYTHON=python)
        pytest = (f"{folder}/bin/python", "-m", "pytest", "-p", "supply.without_torch", "-q")
        run(*pytest, *FAST, *(tests or WITHOUT_TORCH), PYTHONPATH="tests")


if __name__ == "__main__":
    {"lowest": lowest, "pythons": pythons}[sys.argv[1]](sys.argv[2:])
