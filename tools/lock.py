"""Write the locks anew: `python -m tools lock`.

Every package gets the hashes of the files that PyPI has of its version. In locks/trainpace.lock the
versions of the section main are those installed in .venv, cuda is what PyPI's torch for Linux needs
besides, and pythons is the part of main that runs without torch. locks/lowest.lock has the oldest
versions that pyproject.toml admits. Every other section keeps its pins: to change a version, edit
its line and run this. Hashes of unchanged pins stay, also those of torch's CPU build, which PyPI
does not have.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path

FOLDER = Path("locks")
LOCK, LOWEST, FMS = FOLDER / "trainpace.lock", FOLDER / "lowest.lock", FOLDER / "fms.lock"
UV = ".tools/bin/uv"  # apart, so that .venv does not see it
EXTRAS_OF_LOWEST = "transformers peft demo data postgresql serve figures pandas".split()
PIN = re.compile(r"^([\w.-]+)==([^\s;+]+)", re.MULTILINE)  # without a build label (2.13.0+cpu)
SECTION = re.compile(r"^# == (\w+): (.*)\n", re.MULTILINE)


def pins_of(text: str) -> dict[str, str]:
    """Return the version of every package in the text of a lock, or in what `pip freeze` prints."""
    return dict(PIN.findall(text))


def lines_of(pins: dict[str, str]) -> str:
    return "".join(f"{name}=={pinned}\n" for name, pinned in pins.items())


def sections_of(text: str) -> dict[str, tuple[str, str]]:
    """Return description and pins of each section, by name."""
    parts = SECTION.split(text)
    return {parts[i]: (parts[i + 1], parts[i + 2]) for i in range(1, len(parts), 3)}


def oldest_admitted(pyproject: Path, torch: str) -> str:
    """Return the oldest admitted versions; torch as installed, since PyPI has no older CPU builds."""
    declared = tomllib.loads(pyproject.read_text())
    extras = declared["project"]["optional-dependencies"]
    wanted = declared["project"]["dependencies"] + declared["dependency-groups"]["dev"]
    wanted += declared["build-system"]["requires"]
    wanted += [one for extra in EXTRAS_OF_LOWEST for one in extras[extra]]
    oldest = {one.replace(">=", "==") for one in wanted if not one.startswith("torch>")}
    return "\n".join([*sorted(oldest), "editables", f"torch=={torch}"])


def without_torch(pyproject: Path) -> str:
    """Return what the package and its tests need if there is no torch."""
    declared = tomllib.loads(pyproject.read_text())
    wanted = declared["build-system"]["requires"] + declared["project"]["dependencies"]
    tests = declared["dependency-groups"]["dev"]
    wanted += ["editables", *(one for one in tests if one.startswith(("pytest", "hypothesis")))]
    return "\n".join(one for one in wanted if not one.startswith("torch>"))


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@functools.cache
def hash_of_local_torch() -> str | None:
    """Return the hash of the installed torch if PyPI does not have that build."""
    if "+" not in version("torch"):
        return None
    quietly = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    report = json.loads(pip("install", *quietly, f"torch=={version('torch')}"))
    hashes = report["install"][0]["download_info"]["archive_info"]["hashes"]
    return f"--hash=sha256:{hashes['sha256']}"


def locked(requirements: str, before: str, *options: str) -> str:
    """Resolve requirements with uv, keeping the versions and hashes of `before` that still hold."""
    command = [UV, "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-index-url", "--python", sys.executable, *options]
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as file:
        file.write(before)
        file.flush()
        command += ["--output-file", file.name, "-"]
        subprocess.run(
            command, input=requirements, stdout=subprocess.DEVNULL, check=True, text=True
        )
        lines = Path(file.name).read_text().splitlines()
    local = hash_of_local_torch() if any(line.startswith("torch==") for line in lines) else None
    if local and not any(local in line for line in lines):
        torch = next(place for place, line in enumerate(lines) if line.startswith("torch=="))
        lines.insert(torch + 1, f"    {local} \\")
    return "\n".join([*lines, ""])


def head_of(lock: Path) -> str:
    lines = lock.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def main() -> None:
    project = Path("pyproject.toml")
    here = pins_of(pip("freeze", "--all", "--exclude", "pip", "--exclude-editable"))
    sections = sections_of(LOCK.read_text())
    texts = {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as main_pins:
        main_pins.write(lines_of(here))
        main_pins.flush()
        beside = [f"--no-emit-package={name}" for name in here]
        for name, (_, before) in sections.items():
            asked: tuple[str, ...] = (lines_of(pins_of(before)), before, "--no-deps")
            if name == "main":
                asked = (lines_of(here), before, "--no-deps")
            elif name == "cuda":
                options = ("--universal", "--constraints", main_pins.name, *beside)
                asked = (f"torch=={here['torch']}", before, *options)
            elif name == "pythons":
                options = ("--universal", "--constraints", main_pins.name)
                asked = (without_torch(project), before, *options)
            texts[name] = locked(*asked)
    head = LOCK.read_text().partition("\n# == ")[0]
    parts = (f"\n# == {name}: {sections[name][0]}\n{text}" for name, text in texts.items())
    LOCK.write_text(f"{head}\n" + "".join(parts))
    no_cuda = [f"--no-emit-package={name}" for name in pins_of(texts["cuda"])]
    oldest = oldest_admitted(project, here["torch"])
    LOWEST.write_text(
        head_of(LOWEST) + locked(oldest, LOWEST.read_text(), "--only-binary=:all:", *no_cuda)
    )
    before = FMS.read_text()
    FMS.write_text(head_of(FMS) + locked(lines_of(pins_of(before)), before, "--no-deps"))


if __name__ == "__main__":
    main()
