"""`make lock`: the lock files anew, every package with the hashes of the files that PyPI has of its version.

Which versions: requirements.lock takes what stands in .venv; requirements-cuda.lock what PyPI's torch for Linux wants besides;
requirements-lowest.lock the oldest that pyproject.toml admits; requirements-pythons.lock what runs without torch. Every other
file keeps its own pins: to change a version, edit its line and run this.
Hashes of a pin that did not change are kept, among them that of torch's CPU build, which PyPI does not have.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

BASE, CUDA = Path("requirements.lock"), Path("requirements-cuda.lock")
LOWEST, PYTHONS = Path("requirements-lowest.lock"), Path("requirements-pythons.lock")
UV = ".audit/bin/uv"  # apart, so that .venv does not see it
EXTRAS_OF_LOWEST = (
    "transformers",
    "peft",
    "demo",
    "data",
    "postgresql",
    "serve",
    "figures",
    "pandas",
)
PIN = re.compile(
    r"^([\w.-]+)==([^\s;+]+)", re.MULTILINE
)  # without the label of a build (2.13.0+cpu)


def pins_of(text: str) -> dict[str, str]:
    """Version by package, of what `pip freeze` prints or of a lock file."""
    return dict(PIN.findall(text))


def lines_of(pins: dict[str, str]) -> str:
    return "".join(f"{name}=={pinned}\n" for name, pinned in pins.items())


def oldest_admitted(pyproject: Path, torch: str) -> str:
    """The oldest versions that pyproject.toml admits; torch as it is, since PyPI has no CPU builds of older ones for Linux."""
    declared = tomllib.loads(pyproject.read_text())
    extras = declared["project"]["optional-dependencies"]
    wanted = declared["project"]["dependencies"] + declared["dependency-groups"]["dev"]
    wanted += declared["build-system"]["requires"] + [
        one for extra in EXTRAS_OF_LOWEST for one in extras[extra]
    ]
    oldest = {one.replace(">=", "==") for one in wanted if not one.startswith("torch>")}
    return "\n".join([*sorted(oldest), "editables", f"torch=={torch}"])


def without_torch(pyproject: Path) -> str:
    """What this package and its tests need where no torch is to be had."""
    declared = tomllib.loads(pyproject.read_text())
    wanted = (
        declared["build-system"]["requires"] + declared["project"]["dependencies"] + ["editables"]
    )
    tests = [
        one
        for one in declared["dependency-groups"]["dev"]
        if one.startswith(("pytest", "hypothesis"))
    ]
    return "\n".join(one for one in wanted + tests if not one.startswith("torch>"))


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@functools.cache
def hash_of_local_torch() -> str | None:
    """The hash of the torch that this environment has, where that is a build that PyPI does not have."""
    if "+" not in version("torch"):
        return None
    quietly = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    report = json.loads(pip("install", *quietly, f"torch=={version('torch')}"))
    return (
        f"--hash=sha256:{report['install'][0]['download_info']['archive_info']['hashes']['sha256']}"
    )


def write(lock: Path, requirements: str, *options: str) -> None:
    """A lock file by uv, which keeps the versions and hashes in it that still hold; the comments at its head stay."""
    head = (
        [line for line in lock.read_text().splitlines() if line.startswith("#")]
        if lock.exists()
        else []
    )
    command = [UV, "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-index-url", "--python", sys.executable]
    command += [*options, "--output-file", str(lock), "-"]
    subprocess.run(command, input=requirements, stdout=subprocess.DEVNULL, check=True, text=True)
    lines = lock.read_text().splitlines()
    local = hash_of_local_torch() if "torch" in pins_of(lock.read_text()) else None
    if local and not any(local in line for line in lines):
        torch = next(place for place, line in enumerate(lines) if line.startswith("torch=="))
        lines.insert(torch + 1, f"    {local} \\")
    lock.write_text("\n".join([*head, *lines, ""]))


def main() -> None:
    here = pins_of(pip("freeze", "--all", "--exclude", "pip", "--exclude-editable"))
    write(BASE, lines_of(here), "--no-deps")
    beside = [f"--no-emit-package={name}" for name in here]
    write(CUDA, f"torch=={here['torch']}", "--universal", "--constraints", str(BASE), *beside)
    without_cuda = [f"--no-emit-package={name}" for name in pins_of(CUDA.read_text())]
    write(
        LOWEST,
        oldest_admitted(Path("pyproject.toml"), here["torch"]),
        "--only-binary=:all:",
        *without_cuda,
    )
    write(PYTHONS, without_torch(Path("pyproject.toml")), "--universal", "--constraints", str(BASE))
    for lock in sorted(set(Path().glob("requirements-*.lock")) - {CUDA, LOWEST, PYTHONS}):
        write(lock, lines_of(pins_of(lock.read_text())), "--no-deps")


if __name__ == "__main__":
    main()
