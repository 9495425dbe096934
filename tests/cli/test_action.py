"""Tests of the GitHub Action and the pre-commit hook on a script with a planted slowdown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
SCRIPT = """
import time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    time.sleep(SECONDS)
"""
FAST, SLOW = SCRIPT.replace("SECONDS", "0.05"), SCRIPT.replace("SECONDS", "0.12")
TOLERANCE = "0.3"
"""Wide, because the test machine is shared with other work."""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a repository with one commit of the fast script, using this environment's commands."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "--quiet")
    commit(folder, FAST)
    return folder


def git(folder, *words):
    identity = (
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.com",
        "-c",
        "commit.gpgsign=false",
    )
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder, script):
    (folder / "src" / "train.py").write_text(script)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")


def step(name):
    (found,) = (one for one in ACTION["runs"]["steps"] if one["name"] == name)
    return found


def run_step(name, folder, base, **inputs):
    """Run a step as the GitHub runner does, with its inputs in the environment."""
    values = {key: one.get("default", "") for key, one in ACTION["inputs"].items()} | inputs
    (folder.parent / "summary.md").unlink(missing_ok=True)
    environment = dict(
        os.environ,
        RUNNER_TEMP=str(folder.parent),
        GITHUB_STEP_SUMMARY=str(folder.parent / "summary.md"),
    )
    for variable, expression in step(name)["env"].items():
        first, *others = re.fullmatch(r"\$\{\{ (.+) \}\}", expression)[1].split(" || ")
        given = values[first.removeprefix("inputs.")]
        environment[variable] = given or (
            base if "github.event.pull_request.base.sha" in others else ""
        )
    script = folder.parent / "step.sh"
    script.write_text(step(name)["run"])
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


COMPARE = "Record both commits and compare"
INPUTS = {"command": "python train.py", "directory": "src", "tolerance": TOLERANCE}


@pytest.mark.slow
def test_action_fails_after_a_slowdown_is_confirmed_twice(repository):
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, SLOW)
    done = run_step(COMPARE, repository, base, **INPUTS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("Regressed: the median step takes") == 2
    assert "Slower once." in done.stdout
    assert "Regressed" in (repository.parent / "summary.md").read_text()
    assert git(repository, "worktree", "list").count("\n") == 0, "the base's folder is removed"
    assert git(repository, "status", "--porcelain") == ""


@pytest.mark.slow
def test_action_passes_after_one_comparison_without_a_slowdown(repository):
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, FAST + "# as fast\n")
    setup = 'echo "set up in $(git rev-parse HEAD)" >&2'
    done = run_step(COMPARE, repository, base, **INPUTS, setup=setup)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No regression: the median step takes" in done.stdout.replace("\n  ", " ")
    assert "Slower once" not in done.stdout or done.stdout.count("Regressed") == 1
    assert f"set up in {base}" in done.stderr
    assert f"set up in {git(repository, 'rev-parse', 'HEAD')}" in done.stderr


@pytest.mark.slow
def test_failing_command_is_not_reported_as_a_regression(repository):
    base = commit(repository, "raise SystemExit(7)")
    done = run_step(COMPARE, repository, base, **INPUTS)
    assert (done.returncode, "Regressed" in done.stdout) == (7, False)


def test_unknown_base_commit_is_reported(repository):
    done = run_step(COMPARE, repository, "0" * 40, **INPUTS)
    assert done.returncode == 2
    assert "there is no commit" in done.stderr


def test_action_inputs_are_passed_only_through_env():
    for one in ACTION["runs"]["steps"]:
        assert "${{" not in one["run"]
        assert all("${{ inputs." in expression for expression in one["env"].values())
    used = {
        name
        for one in ACTION["runs"]["steps"]
        for text in one["env"].values()
        for name in re.findall(r"inputs\.(\w+)", text)
    }
    assert used == set(ACTION["inputs"])


def hook_command():
    return [*HOOK["entry"].split(), *HOOK["args"]]


@pytest.mark.slow
def test_pre_commit_hook_detects_a_slowdown(repository):
    folder = repository / "src"
    environment = dict(os.environ, COLUMNS="200")

    def run(command):
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )

    unprepared = run(hook_command())
    assert unprepared.returncode == 2
    assert "baseline" in unprepared.stderr
    recorded = run(["trainpace", "watch", "--output", HOOK["args"][0], "--", *HOOK["args"][2:]])
    assert recorded.returncode == 0, recorded.stderr
    (folder / "train.py").write_text(SLOW)
    done = run(hook_command())
    assert (done.returncode, "Regressed" in done.stdout) == (1, True), done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_action_scripts_pass_shellcheck(tmp_path):
    for one in ACTION["runs"]["steps"]:
        (tmp_path / "step.sh").write_text("#!/usr/bin/env bash\n" + one["run"])
        subprocess.run(["shellcheck", tmp_path / "step.sh"], check=True)
