"""A suite as a job array on a real Slurm: judged by results, taken up again, cancelled by Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planted"))

import slurm_cluster

from trainpace.journal import Journal
from trainpace.measure import SuiteItem
from trainpace.verbs.measure import SuiteRequest, _job

NEEDS_SLURM = pytest.mark.skipif(
    bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}"
)
SUITE = """
[[task]]
model = "mlps.py:small"
[[task]]
model = "broken.py:task"
[[task]]
model = "mlps.py:large"
"""
MLPS = """
import torch
from torch import nn
def small(width=8):
    model = nn.Linear(width, 2)
    return model, nn.CrossEntropyLoss(), None, [(torch.randn(width), i % 2) for i in range(64)]
def large():
    return small(64)
"""
QUICK = (
    "--batch",
    "2,4",
    "--repeats",
    "1",
    "--seconds",
    "0.1s",
    "--no-forecast",
    "--journal",
    "j.db",
    "--out",
    "out",
)


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.cluster(2) as made:
        yield made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "mlps.py").write_text(MLPS)
    (tmp_path / "broken.py").write_text("def task():\n    raise ValueError('not today')\n")
    return tmp_path


def measure(folder, *arguments, **around):
    command = [sys.executable, "-m", "trainpace", "measure", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **around},
    )


def test_misuse_is_said_before_anything_starts(folder):
    done = measure(folder, "resnet18", "--partition", "gpu")
    assert done.returncode == 2
    assert "--launcher slurm" in done.stderr
    done = measure(folder, "--suite", "suite.toml", "--launcher", "slurm", "--html", "a.html")
    assert done.returncode == 2
    assert "journal export" in done.stderr
    done = measure(folder, "--suite", "suite.toml", "--launcher", "slurm", PATH=str(folder))
    assert done.returncode == 2
    assert "sbatch" in done.stderr
    assert {p.name for p in folder.iterdir()} == {"suite.toml", "broken.py", "mlps.py"}


def test_a_result_is_of_its_options_code_and_versions(folder, monkeypatch):
    items = [
        SuiteItem(spec=spec, batches=(2,))
        for spec in (str(folder / "broken.py:task"), "resnet18", "none.py:task")
    ]

    def names(**options):
        return [
            _job(item, i, folder, SuiteRequest(suite="classic", **options)).name
            for i, item in enumerate(items)
        ]

    before = names()
    assert names() == before
    assert not set(names(seconds=3.0)) & set(before)
    (folder / "broken.py").write_text("def task():\n    return 'mended'\n")
    after = names()
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
    monkeypatch.setattr("trainpace.verbs.measure.version", lambda package: f"{package} of tomorrow")
    assert not set(names()) & set(after)


@pytest.mark.slow
@NEEDS_SLURM
@pytest.mark.usefixtures("cluster")
def test_a_suite_is_an_array_whose_results_count(folder):
    call = ("--suite", "suite.toml", "--launcher", "slurm", *QUICK)
    done = measure(folder, *call)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 models measured" in done.stdout
    assert "broken.py-task" in done.stderr
    assert "ValueError" in done.stderr
    with Journal.open(str(folder / "j.db")) as journal:
        runs = list(journal.every())
        sweeps = journal.sweeps()
    assert sorted({run.model for run in runs if run.outcome == "ok"}) == [
        "mlps.py:small",
        "mlps.py:large",
    ]
    assert {s.model for s in sweeps if s.finished_at} >= {"mlps.py:small", "mlps.py:large"}
    assert all(run.command.startswith("trainpace measure --suite suite.toml") for run in runs)
    (folder / "broken.py").write_text(
        "import torch\n\ndef task():\n    model = torch.nn.Linear(4, 2)\n    data = torch.utils.data.TensorDataset("
        "torch.randn(64, 4), torch.zeros(64, dtype=torch.long))\n"
        "    return model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), data\n"
    )
    again = measure(folder, *call)
    assert again.returncode == 0, again.stderr
    assert "2 of 3 are there from an earlier call" in again.stderr
    assert "3 of 3 models measured" in again.stdout
    with Journal.open(str(folder / "j.db")) as journal:
        assert {run.id for run in journal.every()} > {run.id for run in runs}


@pytest.mark.slow
@NEEDS_SLURM
@pytest.mark.usefixtures("cluster")
def test_ctrl_c_cancels_the_array_and_keeps_what_is_there(folder):
    (folder / "broken.py").write_text(
        "import time\n\ndef task():\n    open('begun', 'w').close()\n    time.sleep(600)\n"
    )
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "measure",
        "--suite",
        "suite.toml",
        "--launcher",
        "slurm",
        *QUICK,
    ]
    process = subprocess.Popen(
        [*command, "--at-once", "2"], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 200
    while (
        len(list(folder.glob("out/*mlp*.json"))) < 2 + 2 or not (folder / "begun").exists()
    ):  # a request and a result each
        assert time.monotonic() < end, list(folder.rglob("*"))
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    queue = subprocess.run(
        ("squeue", "-h", "-o", "%i %T"), capture_output=True, text=True, check=True
    ).stdout
    assert queue == ""
    with Journal.open(str(folder / "j.db")) as journal:
        assert {run.model for run in journal.every()} == {"mlps.py:small", "mlps.py:large"}
