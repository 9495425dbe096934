"""Every command in README and docs runs, and every path and verb that they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.cli.main import VERBS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [
    line.removeprefix("$ ")
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_there_are_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_run(command):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_make_targets_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(
        r"(?<!-)\bmake ([a-z][a-z-]+)\b", re.sub(r"\bmake (it|a|the|other|every|up|meta)\b", "", text)
    ):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+\w)`", text):
        assert (ROOT / path).exists(), path


def test_every_verb_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS if f"trainpace {verb}" not in readme] == []


def test_the_version_is_the_projects():
    import tomllib

    import trainpace

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == trainpace.__version__


@pytest.mark.slow
def test_the_first_look(tmp_path):
    """What `make run` runs, shortened."""
    command = [
        sys.executable,
        "examples/first_look.py",
        "--batches",
        "4",
        "--seconds",
        "0.5",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  this CPU  ") == 2
    page = (tmp_path / "first_look.html").read_text()
    assert page.index('class="verdict"') < page.index("<table>")
    assert not re.findall(r"(?:src|href)=|https?://", page)  # opens offline
    assert (tmp_path / "cnn_batch_4.json").exists()
