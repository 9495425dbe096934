"""`trainpace loader` as a real command in real processes."""

import json
import os
import subprocess
import sys

import pytest

MINE = """
import os, time, torch
from torch import nn
class Data:
    sleep_s = 0.004
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(self.sleep_s)
        return torch.full((8,), float(i)), i % 2
def data(): return Data()
class Broken(Data):
    def __getitem__(self, i):
        if i == 3: raise ValueError("cannot decode this.")
        return torch.zeros(8), 0
def broken(): return Broken()
def empty(): return []
def nothing(): return None
class Hanging(Data):
    sleep_s = 1000
def hanging(): return Hanging()
class OnlyHere(Data):
    sleep_s = 0
    parent = os.getpid()
    def __getitem__(self, i):
        if os.getpid() != self.parent: raise RuntimeError("not in a worker")
        return super().__getitem__(i)
def only_here(): return OnlyHere()
class Dying(OnlyHere):
    def __getitem__(self, i):
        if os.getpid() != self.parent and i == 7: os._exit(1)
        return Data.__getitem__(self, i)
def dying(): return Dying()
def task():
    model = nn.Linear(8, 2)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), Data()
def raising(): raise RuntimeError("no data today")
"""
QUICK = ("--seconds", "100ms", "--repeats", "1")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def trainpace(folder, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "trainpace", "loader", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "160"},
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_loader_command_writes_verdict_and_output_file(folder):
    done = trainpace(
        folder,
        "mine.py:data",
        "--batch",
        "4",
        "--workers",
        "0,2",
        "--compute-ms",
        "2",
        *QUICK,
        "--output",
        "out.json",
    )
    assert "time.sleep in __getitem__" in done.stdout
    assert "Verdict:" in done.stdout
    written = json.loads((folder / "out.json").read_text())
    assert written["record"] == "LoaderMeasurement"
    assert written["sample"]["wall_ms"] >= 4
    assert [point["workers"] for point in written["points"]] == [0, 2]


@pytest.mark.slow
def test_loader_command_measures_compute_of_task(folder):
    answer = json.loads(
        trainpace(
            folder, "mine.py:task", "--batch", "4", "--workers", "0:2", *QUICK, "--json"
        ).stdout
    )
    assert [p["workers"] for p in answer["points"]] == [0, 1, 2]
    assert answer["advice"]["compute_ms"] > 0
    assert answer["points"][0]["batch_ms"] >= 16
    assert answer["sample"]["wall_ms"] - answer["sample"]["cpu_ms"] >= 3
    steps = answer["advice"]["step_ms_by_workers"]
    assert steps["0"] > steps["2"]


@pytest.mark.slow
def test_default_worker_sweep_stops_without_gain(folder):
    (folder / "quick.py").write_text("def data(): return list(range(1000))")
    answer = json.loads(trainpace(folder, "quick.py:data", *QUICK, "--json").stdout)
    assert [p["workers"] for p in answer["points"]][:2] == [0, 1]
    assert len(answer["points"]) <= 5
    assert answer["advice"]["workers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("broken", "ValueError at mine.py line 13"),
        ("empty", "mine.py:empty is a dataset of no samples."),
        (
            "nothing",
            "mine.py:nothing is of type NoneType, which is no dataset with __len__ and __getitem__.",
        ),
        ("raising", "mine.py:raising raised RuntimeError at mine.py line 36: no data today."),
        ("only_here", "RuntimeError: not in a worker"),
        ("dying", "exited unexpectedly"),
        ("absent", "unknown name in mine.py 'absent'."),
    ],
)
def test_bad_input_gives_one_line_error(folder, what, said):
    done = trainpace(folder, f"mine.py:{what}", "--batch", "4", "--workers", "1", *QUICK, code=2)
    last = done.stderr.splitlines()[-1]
    assert said in last
    assert last.startswith("trainpace: ")


@pytest.mark.slow
def test_hanging_dataset_is_stopped_at_timeout(folder):
    done = trainpace(folder, "mine.py:hanging", "--timeout", "6s", code=2)
    assert "measuring the loader of mine.py:hanging took longer than 6 s" in done.stderr


def test_invalid_worker_range_is_an_error(folder):
    done = trainpace(folder, "mine.py:data", "--workers", "4:0", code=2)
    assert "'4:0' is not a number of workers" in done.stderr
    assert "is not FILE.py:NAME" in trainpace(folder, "resnet50", code=2).stderr
