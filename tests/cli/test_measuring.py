"""Tests of `trainpace measure` and `trainpace calibrate` with a separate journal."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

TASK = """
import time, torch
from torch import nn
class Tiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x):
        time.sleep(0.004 + 0.0002 * x.shape[0] + 0.02 * (x.shape[0] > 9))
        return self.layer(x)
def task():
    model = Tiled()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(8), i % 2) for i in range(64)]
def hungry():
    class Hungry(Tiled):
        def forward(self, x):
            if x.shape[0] > 5:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)
    model = Hungry()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(8), i % 2) for i in range(64)]
"""
QUICK = ("--seconds", "0s")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def command(folder, *arguments):
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data"), "COLUMNS": "160"}
    environment.pop("TRAINPACE_JOURNAL", None)
    return {
        "args": [sys.executable, "-m", "trainpace", *map(str, arguments)],
        "env": environment,
        "cwd": folder,
        "text": True,
    }


def trainpace(folder, *arguments, code=0):
    done = subprocess.run(**command(folder, *arguments), capture_output=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def ask(folder, *arguments):
    return json.loads(trainpace(folder, *arguments, "--json").stdout)


@pytest.mark.slow
def test_noise_scale_is_measured_at_the_largest_batch(folder):
    options = (
        "--batch",
        "4,8",
        "--repeats",
        "1",
        *QUICK,
        "--no-forecast",
        "--noise-scale",
        "--output",
        "out.json",
    )
    done = trainpace(folder, "measure", "mine.py:task", *options)
    assert "Gradient noise scale:" in done.stdout
    small, large = json.loads((folder / "out.json").read_text())
    assert small["noise_scale"] is None
    assert (large["noise_scale"]["batch"], large["noise_scale"]["scale"]["steps"] >= 30) == (
        8,
        True,
    )
    done = trainpace(folder, "measure", "resnet18", *options[:-3], "--noise-scale", code=2)
    assert "random" in done.stderr


@pytest.mark.slow
def test_measured_sweep_is_saved_in_the_journal(folder):
    done = trainpace(
        folder,
        "measure",
        "mine.py:task",
        "--repeats",
        "2",
        "--batch",
        "8,16",
        *QUICK,
        "--output",
        "out.json",
        "--html",
        "page.html",
    )
    assert "Best throughput: batch" in done.stdout
    assert "calibrate first" in done.stderr
    assert "differ by" in done.stdout
    assert "mine.py:task" in (folder / "page.html").read_text()
    assert len(json.loads((folder / "out.json").read_text())) == 4
    listed = json.loads(trainpace(folder, "journal", "list", "--json").stdout)
    assert sorted(e["execution"]["micro_batch"] for e in listed) == [8, 8, 16, 16]
    assert str(folder) not in json.dumps(listed)
    assert all(
        e["commit"] is None and e["command"].startswith("trainpace measure mine.py:task")
        for e in listed
    )
    answer = ask(
        folder, "measure", "mine.py:task", "--batch", "8", "--repeats", "1", *QUICK, "--no-journal"
    )
    assert answer["analysis"]["points"][0]["batch"] == 8
    assert answer["sweep"] is None
    assert len(json.loads(trainpace(folder, "journal", "list", "--json").stdout)) == 4


@pytest.mark.slow
def test_until_oom_finds_the_largest_batch(folder):
    answer = ask(folder, "measure", "mine.py:hungry", "--until-oom", *QUICK)
    assert answer["analysis"]["largest_that_fits"] == 5
    assert {f["batch"] for f in answer["analysis"]["failures"]} == {6, 8}
    assert any("Largest batch that fits: 5" in line for line in answer["verdict"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_sweep_keeps_its_runs_and_resumes(folder, how):
    arguments = (
        "measure",
        "mine.py:task",
        "--batch",
        "1,2,3,4",
        *QUICK,
        "--repeats",
        "1",
        "--no-forecast",
    )
    process = subprocess.Popen(
        **command(folder, *arguments),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    journal = folder / "data" / "trainpace" / "journal.db"
    with process:
        while kept_in(journal) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(how)
        said = process.stderr.read()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "takes it up again" in said
    with sqlite3.connect(journal) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert len(json.loads(trainpace(folder, "journal", "list", "--json").stdout)) == 2
    # the probe in flight ends with its parent
    deadline = time.monotonic() + 20
    while workers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers(folder)
    done = trainpace(folder, *arguments)
    assert "2 probes" in done.stderr
    assert len(json.loads(trainpace(folder, "journal", "list", "--json").stdout)) == 4


def kept_in(journal):
    """Return the number of runs in the journal."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
            return database.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def workers(folder):
    """Return the probe processes that were started in this folder."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{number}/cmdline").read_text()
            if "trainpace.measure.steps" in words and os.readlink(f"/proc/{number}/cwd") == str(
                folder
            ):
                found.append(number)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_suite_results_are_saved_in_the_journal(folder):
    (folder / "mine.toml").write_text(
        '[[task]]\nmodel = "mine.py:task"\nbatch = [2, 4]\n[[task]]\nmodel = "mine.py:nothing"\n'
    )
    done = trainpace(
        folder, "measure", "--suite", "mine.toml", *QUICK, "--repeats", "1", "--no-forecast"
    )
    assert "1 of 2 models measured" in done.stdout
    assert "nothing" in done.stderr
    assert len(json.loads(trainpace(folder, "journal", "list", "--json").stdout)) == 2


@pytest.mark.slow
def test_later_forecasts_use_the_calibration(folder):
    said = trainpace(folder, "calibrate", "--seconds", "6s").stdout
    assert "steady" in said
    assert "random networks" in said
    assert (folder / "data" / "trainpace" / "machine.json").exists()
    (row,) = ask(folder, "forecast", "resnet18", "--gpu", "cpu", "--batch", "8")["rows"]
    assert row["provenance"] == "calibrated"
    answer = ask(folder, "measure", "resnet18", "--batch", "8", *QUICK, "--repeats", "1")
    (foreseen,) = answer["forecasts"]
    assert foreseen["step_time_ms"] == pytest.approx(row["step_time_ms"])
    score = json.loads(trainpace(folder, "journal", "score", "--json").stdout)
    assert score["overall"]["n"] == 1
    again = ask(folder, "forecast", "resnet18", "--gpu", "cpu", "--batch", "8")
    assert "measured on this device at batch 8" in again["journal"][0]
    assert again["rows"][0]["provenance"] == "transferred"
    assert again["rows"][0]["step_time_ms"] == pytest.approx(
        answer["analysis"]["points"][0]["step_ms"], rel=0.05
    )
    (plain,) = ask(folder, "forecast", "resnet18", "--gpu", "cpu", "--batch", "8", "--no-journal")[
        "rows"
    ]
    assert plain["step_time_ms"] == pytest.approx(row["step_time_ms"])
    # a profile of other software is not used here
    profile = folder / "data" / "trainpace" / "machine.json"
    profile.write_text(profile.read_text().replace('"torch":"2', '"torch":"1'))
    assert (
        "calibrate again"
        in trainpace(
            folder, "measure", "mine.py:task", "--batch", "2", *QUICK, "--repeats", "1"
        ).stderr
    )


def test_detect_only_describes_the_machine(folder):
    done = trainpace(folder, "calibrate", "--detect-only")
    assert "processor" in done.stdout
    assert (
        json.loads(trainpace(folder, "calibrate", "--detect-only", "--json").stdout)["record"]
        == "Machine"
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("measure",), "MODEL"),
        (("measure", "resnet18", "--suite", "small"), "MODEL"),
        (("measure", "--suite", "nothing"), "suite"),
        (("measure", "--suite", "small", "--json"), "one model"),
        (("measure", "resnet18", "--batch", "0"), "batch"),
        (("measure", "resnet18", "--output", "no/such/folder.json"), "folder"),
        (("measure", "nothing", "--batch", "2", "--no-journal"), "nothing"),
        (("measure", "resnet18", "--device", "cuda", "--no-journal"), "GPU"),
        (("calibrate", "--output", "no/such/folder.json"), "folder"),
        (("measure", "resnet18", "--journal", "redis://nowhere"), "journal"),
        (("calibrate", "--storage", "/no/such/folder", "--seconds", "1s"), "folder"),
    ],
)
def test_bad_input_exits_2_with_a_message(folder, arguments, word):
    done = trainpace(folder, *arguments, code=2)
    assert word in done.stderr
    assert not list(folder.glob("data/trainpace/machine.json"))
