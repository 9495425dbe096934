"""Tests of `trainpace run` on a small ladder."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

TASK = """
import time
import torch
from torch import nn

class Slow(torch.utils.data.Dataset):
    online = staticmethod(lambda sample: sample)
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.full((8,), float(i % 7))
        for _ in range(300):
            x = (x * 1.01).sin()
        return x, i % 2

def samples():
    return Slow()

def task():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), Slow()

def hanging():
    parts = task()
    time.sleep(3600)
    return parts
"""
LADDER = """
task = "train.py:task"
seconds = 0.3
[start]
micro_batch = 4
accumulation = 2
[job]
samples = 64
epochs = 100
[[rung]]
title = "shards"
precompute = "train.py:samples"
[[rung]]
title = "five"
micro_batch = 5
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TASK)
    (tmp_path / "ladder.toml").write_text(LADDER)
    return tmp_path


def trainpace(folder, *arguments, timeout=300):
    command = [sys.executable, "-m", "trainpace", "run", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)


def test_misuse_is_rejected_before_anything_starts(folder):
    for arguments, said in (
        (["none.toml"], "no such file"),
        (["ladder.toml", "--html", "no/where.html"], "does not exist"),
        (["ladder.toml", "--seconds", "0s"], "out of range"),
    ):
        done = trainpace(folder, *arguments)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_missing_launcher_is_reported_before_anything_starts(folder):
    (folder / "ladder.toml").write_text(LADDER.replace("micro_batch = 5", "nnodes = 2"))
    done = subprocess.run(
        [sys.executable, "-m", "trainpace", "run", "ladder.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": str(folder)},
    )
    assert done.returncode == 2
    assert "sbatch" in done.stderr
    assert not (folder / "ladder-run").exists()


def test_second_run_in_the_same_folder_is_rejected(folder):
    (folder / "run").mkdir()
    with (folder / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = trainpace(folder, "ladder.toml", "--out", "run", "--no-journal", "--no-forecast")
    assert done.returncode == 2
    assert "Another trainpace run" in done.stderr


def test_unusable_lock_file_is_reported(folder):
    (folder / "run" / ".lock").mkdir(parents=True)
    done = trainpace(folder, "ladder.toml", "--out", "run", "--no-journal", "--no-forecast")
    assert done.returncode == 2
    assert "cannot write into run: is a directory." in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_shows_the_commands(folder):
    done = trainpace(folder, "ladder.toml", "--dry-run", "--no-forecast")
    assert done.returncode == 0, done.stderr
    assert "trainpace.run.trial_worker" in done.stdout
    assert "not possible" in done.stdout
    assert not (folder / "ladder-run" / "ladder.json").exists()


@pytest.mark.slow
def test_run_measures_a_ladder_and_resumes(folder):
    options = (
        "ladder.toml",
        "--no-forecast",
        "--journal",
        "journal.db",
        "--markdown",
        "t.md",
        "--html",
        "t.html",
    )
    done = trainpace(folder, *options)
    assert done.returncode == 0, done.stderr
    assert "shards: kept" in done.stderr
    assert "Gradient noise scale: " in done.stdout
    assert "five: undone" in done.stdout
    assert "| shards |" in (folder / "t.md").read_text()
    assert "<table>" in (folder / "t.html").read_text()
    again = trainpace(folder, *options, "--json")
    answer = json.loads(again.stdout)
    assert again.stderr.count("measured before") == 2
    assert answer["rungs"][0]["kept"]
    assert answer["rows"][1]["total"] > 1
    listed = subprocess.run(
        [sys.executable, "-m", "trainpace", "journal", "list", "--journal", "journal.db", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert len(json.loads(listed.stdout)) == 2, listed.stdout


@pytest.mark.slow
def test_hanging_baseline_times_out_and_is_reported(folder):
    done = trainpace(
        folder,
        "ladder.toml",
        "--task",
        "train.py:hanging",
        "--no-forecast",
        "--no-journal",
        "--timeout",
        "8s",
    )
    assert done.returncode == 2, done.stderr
    assert "the baseline cannot be measured" in done.stderr
    assert "8 s" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(folder):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainpace",
            "run",
            "ladder.toml",
            "--no-forecast",
            "--no-journal",
            "--seconds",
            "20s",
        ],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stderr.readline()
    assert "baseline" in line
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "goes on from there" in said
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True)
    assert left.stdout == ""
