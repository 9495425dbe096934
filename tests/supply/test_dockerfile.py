"""Static checks of the Dockerfile. No image is built."""

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
    """Return the instructions of each stage as (word, rest)."""
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
    """Return the paths that are copied from the build context."""
    return [
        source
        for stage in stages()
        for rest in of(stage, "COPY")
        if "--from" not in rest
        for source in rest.split()[:-1]
    ]


def is_ignored(path):
    """Match as Docker does: a pattern includes its subfolders, and the last match counts."""
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


def test_final_stage_runs_as_a_non_root_user():
    last = stages()[-1]
    (user,) = of(last, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), (
        "a number, so that a cluster can see that it is not root"
    )
    words = [word for word, _ in last]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")


def test_base_image_is_a_supported_slim_python():
    bases = [of(stage, "FROM")[0].split()[0] for stage in stages()]
    assert set(bases) == {"python:3.11-slim"}
    assert PROJECT["requires-python"] == ">=3.11"


def test_final_stage_contains_no_source_and_no_build_tools():
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


def test_entrypoint_is_a_list_naming_an_installed_script():
    last = stages()[-1]
    assert json.loads(of(last, "ENTRYPOINT")[0])[0] in PROJECT["scripts"]
    assert json.loads(of(last, "CMD")[0]) == ["--help"]


def test_copied_paths_exist_and_dockerignore_excludes_the_rest():
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
def test_run_instructions_are_valid_shell(run):
    subprocess.run(["sh", "-n", "-c", run], check=True)


def test_dockerfile_names_existing_extras():
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "tools/Dockerfile").read_text())
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_wheel_builds_from_the_copied_files(tmp_path):
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
