"""The Dockerfile, as far as it can be judged without Docker: nothing here builds an image."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"FROM", "ARG", "WORKDIR", "RUN", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}


def stages():
    """The instructions of each stage: (word, rest)."""
    lines = [
        line
        for line in (ROOT / "tools/Dockerfile").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        assert word in KNOWN, line
        if word == "FROM":
            found.append([])
        found[-1].append((word, " ".join(rest.split())))
    return found


def of(stage, word):
    return [rest for name, rest in stage if name == word]


def copied():
    """What is copied from the folder."""
    return [
        source
        for stage in stages()
        for rest in of(stage, "COPY")
        if "--from" not in rest
        for source in rest.split()[:-1]
    ]


def is_ignored(path):
    """As Docker reads the file: a pattern also takes what is below it, and the last one that matches counts."""
    ignored = False
    places = [path, *(str(parent) for parent in Path(path).parents[:-1])]
    for line in (ROOT / "tools/Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        below = pattern.removeprefix("**/")
        names = [place.rpartition("/")[2] for place in places] if below != pattern else places
        if any(fnmatch(name, below) for name in names):
            ignored = not line.startswith("!")
    return ignored


def test_it_ends_as_a_user_without_rights():
    last = stages()[-1]
    (user,) = of(last, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), (
        "a number, so that a cluster can see that it is not root"
    )
    words = [word for word, _ in last]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")


def test_its_base_is_pinned_slim_and_a_python_that_is_supported():
    bases = [of(stage, "FROM")[0].split()[0] for stage in stages()]
    assert set(bases) == {"python:3.11-slim"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_the_last_stage_brings_no_source_and_no_tools():
    last = stages()[-1]
    assert [rest.split()[0] for rest in of(last, "COPY")] == ["--from=build"]
    assert "apt-get" not in str(stages())
    assert all(
        "--no-cache-dir" in part
        for stage in stages()
        for rest in of(stage, "RUN")
        for part in rest.split("&&")
        if "pip install" in part
    )


def test_commands_are_lists_and_the_program_is_there():
    last = stages()[-1]
    assert json.loads(of(last, "ENTRYPOINT")[0])[0] in PROJECT["scripts"]
    assert json.loads(of(last, "CMD")[0]) == ["--help"]


def test_what_is_copied_is_there_and_not_ignored_and_the_rest_is():
    assert all((ROOT / name).exists() and not is_ignored(name) for name in copied())
    for name in (
        ".git/config",
        ".venv/bin/python",
        "out/x",
        "tests/x.py",
        ".env",
        "team.db",
        "src/trainpace/__pycache__/a.x",
        "src/a.pyc",
    ):
        assert is_ignored(name), name
    assert not is_ignored("src/trainpace/cli/program.py")


@pytest.mark.parametrize("run", [rest for stage in stages() for rest in of(stage, "RUN")])
def test_shells_read_it(run):
    subprocess.run(["sh", "-n", "-c", run], check=True)


def test_extras_exist():
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "tools/Dockerfile").read_text())
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_a_wheel_can_be_built_from_what_is_copied(tmp_path):
    for name in copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path / "out",
    ]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    assert list((tmp_path / "out").glob("trainpace-*.whl"))
