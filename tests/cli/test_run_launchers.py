"""Tests of the launchers of `trainpace run` and of the options for Slurm."""

import json
import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from ladder_world import result
from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.journal import Journal
from trainpace.run.job import Job
from trainpace.run.ladder import Ladder, LauncherChoice, Rung, Setup
from trainpace.run.results import Attempt, measured_of
from trainpace.run.slurm import SlurmOptions
from trainpace.run.step_forecasts import StepForecast
from trainpace.verbs.run import RunRequest, _keeper

TASK = """
import torch
from torch import nn

def task():
    model = nn.Linear(8, 2)
    data = [(torch.full((8,), float(i)), i % 2) for i in range(32)]
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), data
"""
LADDER = """
task = "train.py:task"
seconds = 0.2
[start]
micro_batch = 4
accumulation = 2
threads = 1
[[rung]]
title = "eight"
micro_batch = 8
"""
FAKES = {
    # starts one rank on one node, like the real commands
    "sbatch": 'SLURM_JOB_ID=7 SLURM_JOB_NODELIST=here bash "$2" >> "$FAKE/log" 2>&1; cp "$2" "$FAKE/script"; echo 7',
    "srun": 'while [ "$1" != bash ]; do shift; done; SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 exec "$@"',
    "scontrol": '[ "$2" = hostnames ] && echo here || echo "NodeAddr=127.0.0.1 "',
    "squeue": "echo '7|COMPLETED|None|0|0:05|0|'",
    "scancel": "true",
}


def ladder(*values, **start) -> Ladder:
    rungs = tuple(Rung(title=str(v), changes=v) for v in values) or (
        Rung(title="", changes={"micro_batch": 2}),
    )
    return Ladder(start=Setup(task="t.py:t", execution=Execution(**start)), rungs=rungs)


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_auto_selects_the_simplest_launcher_for_the_ranks():
    for sizes, name in (
        ({}, "process"),
        ({"nproc_per_node": 2}, "torchrun"),
        ({"nnodes": 2}, "slurm"),
    ):
        assert LauncherChoice().of(Execution(**sizes)).name == name
    assert LauncherChoice("slurm").of(Execution()).name == "slurm"


def test_slurm_options_appear_in_the_batch_script():
    choice = LauncherChoice(
        "slurm", SlurmOptions(partition="a100", account="lab", extra=("--qos=debug",))
    )
    text = choice.of(Execution()).text(Job(name="t", program=("x.py",), folder="/f", result="/f/r"))
    for option in ("--partition=a100", "--account=lab", "--qos=debug"):
        assert f"#SBATCH {option}\n" in text


@pytest.mark.usefixtures("no_slurm")
def test_launcher_needed_by_any_rung_must_be_installed():
    LauncherChoice().check(ladder({"nproc_per_node": (1, 2)}))
    for needs_it in (ladder({"micro_batch": 2}, {"nnodes": (1, 2)}), ladder(nnodes=2)):
        with pytest.raises(TrainpaceError, match="sbatch"):
            LauncherChoice().check(needs_it)
    with pytest.raises(TrainpaceError, match="sbatch"):
        LauncherChoice("slurm").check(ladder())


def test_options_of_an_unused_launcher_are_rejected():
    with pytest.raises(Contradiction, match="--partition"):
        LauncherChoice("auto", SlurmOptions(partition="a100")).check(ladder({"nproc_per_node": 2}))


def test_journal_stores_the_device_of_the_measurement(tmp_path):
    options = RunRequest(ladder="ladder.toml", launcher="slurm")
    climb, kept = replace(ladder(), device="cuda"), []
    with Journal.open(str(tmp_path / "j.db")) as journal:
        keep = _keeper(climb, options, journal)
        for measured in (
            None,
            measured_of(
                replace(result(9.0), environment={"cpu": "a CPU", "gpu": "Tesla V100-SXM2-16GB"})
            ),
            None,
            measured_of(replace(result(9.0), environment={"cpu": "a CPU"})),
        ):
            keep(
                Attempt(
                    setup=climb.start,
                    foreseen=StepForecast(reason=""),
                    measured=measured,
                    failure="failed",
                )
            )
            kept = [entry.device for entry in journal.every()]
    assert sorted(kept) == sorted(
        ["NVIDIA GPU", *2 * [find_device("Tesla V100-SXM2-16GB").name], "a CPU"]
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TASK)
    (tmp_path / "ladder.toml").write_text(LADDER)
    (tmp_path / "bin").mkdir()
    return tmp_path


def trainpace(folder, *arguments, path):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "run",
        "ladder.toml",
        "--no-forecast",
        "--no-journal",
        *arguments,
    ]
    env = {**os.environ, "PATH": path, "FAKE": str(folder / "bin")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_misuse_is_rejected_before_anything_starts(folder):
    for arguments, said in (
        (["--launcher", "slurm"], "sbatch, squeue, scancel, scontrol"),
        (["--partition", "a100"], "no rung is launched with it"),
        (["--launcher", "slurm", "--sbatch", "qos=debug"], "not an option of sbatch"),
    ):
        done = trainpace(folder, *arguments, path=str(folder / "bin"))
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not (folder / "ladder-run").exists()


def test_dry_run_shows_the_batch_script_without_slurm(folder):
    done = trainpace(
        folder,
        "--dry-run",
        "--launcher",
        "slurm",
        "--account",
        "lab",
        "--sbatch=--mem=4G",
        "--json",
        path=str(folder / "bin"),
    )
    assert done.returncode == 0, done.stderr
    for option in ("--account=lab", "--mem=4G"):
        assert f"#SBATCH {option}" in done.stdout


@pytest.mark.slow
def test_ladder_runs_through_slurm_commands(folder):
    for name, code in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = trainpace(folder, "--launcher", "slurm", "--partition", "a100", "--json", path=path)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["rungs"][0]["tried"][0]["measured"] is not None, (
        folder / "bin" / "log"
    ).read_text()
    assert "#SBATCH --partition=a100" in (folder / "bin" / "script").read_text()
