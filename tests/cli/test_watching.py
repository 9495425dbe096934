"""Tests of `trainpace watch` and `trainpace diagnose` on real scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from watch.scripts import script


def trainpace(*arguments, **more):
    command = [sys.executable, "-m", "trainpace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSES", str(tmp_path / "losses"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return script(tmp_path, sleep_s=0.001, epochs=40)


def test_diagnose_prints_verdict_cause_and_next_step(train, tmp_path):
    train = script(
        tmp_path, sleep_s=0.004, epochs=40
    )  # epochs are long compared with the start of workers
    options = ("--rounds", "2", "--block", "4", "--warm-up", "6", "--epochs", "40")
    wide = {"env": os.environ | {"COLUMNS": "100"}}
    done = trainpace("diagnose", *options, "--", sys.executable, train, **wide)
    assert done.returncode == 0, done.stderr
    assert re.search(r"waiting for data, \d+%", done.stdout)
    assert "same batch" in done.stdout
    assert "loader workers instead of 0" in done.stdout
    assert "the job" in done.stdout
    folder = next((tmp_path / "data" / "trainpace" / "recordings").iterdir())
    again = json.loads(trainpace("diagnose", "--json", folder).stdout)
    assert again["verdict"] == "data"
    assert sum(s["ms"] for s in again["shares"]) == pytest.approx(again["step_ms"])


OVERWRITES = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100000):
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 20 == 0:
        print(loss.item(), file=open("log.csv", "a"))
        torch.save(model.state_dict(), "last.pt")
        open("new.txt", "w").write("new")
"""


@pytest.mark.slow
def test_files_of_earlier_runs_are_restored_after_a_diagnosis(tmp_path):
    (tmp_path / "train.py").write_text(OVERWRITES)
    for name in ("log.csv", "last.pt"):
        (tmp_path / name).write_text("earlier")
    done = trainpace(
        "diagnose",
        "--budget",
        "20s",
        "--",
        sys.executable,
        "train.py",
        cwd=tmp_path,
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")},
    )
    assert done.returncode == 0, done.stderr
    assert "log.csv of an earlier run, which the script overwrote, has been restored." in " ".join(
        done.stdout.split()
    )
    assert {
        path.name: path.read_text()
        for path in tmp_path.iterdir()
        if path.suffix != ".py" and path.is_file()
    } == {"log.csv": "earlier", "last.pt": "earlier", "new.txt": "new"}


def test_watch_prints_step_parts_and_keeps_output_and_exit_code(train, tmp_path):
    train.write_text(
        train.read_text().replace("range(40)", "range(1)")
        + "\n    print('the end')\n    sys.exit(3)\n"
    )
    done = trainpace(
        "watch",
        "--output",
        tmp_path / "r",
        "--timeline",
        "--",
        sys.executable,
        train,
        "--some",
        "argument",
    )
    assert done.returncode == 3
    assert "the end" in done.stdout
    assert "waiting for data" in done.stdout
    assert "ended with exit code 3" in done.stdout
    assert "Traceback" not in done.stderr
    files = {name: tmp_path / name for name in ("t.html", "t.svg", "t.json.gz")}
    again = trainpace(
        "watch",
        "--from",
        tmp_path / "r",
        "--html",
        files["t.html"],
        "--svg",
        files["t.svg"],
        "--trace",
        files["t.json.gz"],
    )
    assert again.returncode == 0
    assert all(f.stat().st_size > 1000 for f in files.values())


def test_json_moves_the_script_output_to_stderr(train, tmp_path):
    train.write_text(
        train.read_text().replace("range(40)", "range(1)") + "\n    print('the end')\n"
    )
    done = trainpace("watch", "--json", "--output", tmp_path / "r", "--", sys.executable, train)
    assert json.loads(done.stdout)["ranks"][0]["parts_ms"]["data"] > 8
    assert "the end" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("watch",), "command"),
        (("diagnose",), "command"),
        (("watch", "--", "no-such-command"), "unknown command no-such-command"),
        (
            ("diagnose", "--", sys.executable, "-c", "pass"),
            "No Python process of this command imported torch",
        ),
        (("watch", "--from", "/nonexistent"), "holds no recording"),
        (("watch", "--from", "/nonexistent", "--steps", "9:3"), "is not a range of steps"),
        (("watch", "--output", "/", "--", "python"), "already exists"),
        (("diagnose", "--rounds", "0", "--", "python"), "--rounds"),
    ],
)
def test_bad_input_exits_2_with_a_message(arguments, said, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = trainpace(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "trainpace" in done.stderr
    assert "Traceback" not in done.stderr.replace(
        'Traceback (most recent call last):\n  File "<string>"', ""
    )


def test_watch_reports_a_script_without_steps(tmp_path):
    done = trainpace(
        "watch", "--output", tmp_path / "r", "--", sys.executable, "-c", "import torch"
    )
    assert done.returncode == 0
    assert "No training step was seen" in done.stdout


def test_diagnose_reports_the_exit_code_without_steps(tmp_path):
    done = trainpace(
        "diagnose", "--output", tmp_path / "r", "--", sys.executable, "-c", "import torch; 1 / 0"
    )
    assert done.returncode == 1
    assert "ended with exit code 1" in done.stderr


def test_damaged_event_log_is_named(tmp_path):
    (tmp_path / "command.json").write_text('{"command": ["x"], "seconds": 1, "exit_code": 0}')
    (tmp_path / "process-1-here.trail").write_bytes(b"something else\n")
    done = trainpace("diagnose", tmp_path)
    assert done.returncode == 2
    assert "process-1-here.trail cannot be read" in done.stderr


def test_diagnose_returns_the_exit_code_of_a_failed_command(train, tmp_path):
    train.write_text(
        train.read_text().replace(
            "losses.append", "len(losses) < 6 or sys.exit(7)\n            losses.append"
        )
    )
    done = trainpace("diagnose", "--output", tmp_path / "r", "--", sys.executable, train)
    assert done.returncode == 7
    assert "the command ended with exit code 7" in " ".join(done.stdout.split())


def test_consecutive_scripts_are_not_two_ranks(train, tmp_path):
    train.write_text(train.read_text().replace("range(40)", "range(len(sys.argv))"))
    both = f"{sys.executable} {train}; {sys.executable} {train} longer"
    done = trainpace("watch", "--json", "--output", tmp_path / "r", "--", "sh", "-c", both)
    said = json.loads(done.stdout)
    assert [(r["steps"], r["beside"]) for r in said["ranks"]] == [(45, 0)]
    assert "1 more process trained with the same rank" in said["seen"]


@pytest.mark.slow
def test_run_slower_than_the_baseline_exits_1(train, tmp_path):
    train.write_text(train.read_text().replace("range(40)", "range(3)"))
    first = trainpace("watch", "--output", tmp_path / "a", "--", sys.executable, train)
    assert first.returncode == 0, first.stderr
    against = ("--baseline", tmp_path / "a")
    same = trainpace("watch", "--from", tmp_path / "a", *against, "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["baseline"]["ratio"]["ratio"] == 1
    fast = train.read_text()
    train.write_text(fast.replace("sleep(0.001)", "sleep(0.01)"))
    assert train.read_text() != fast
    slower = trainpace("watch", "--output", tmp_path / "b", *against, "--", sys.executable, train)
    assert slower.returncode == 1, slower.stdout
    assert "Regressed: the median step takes" in slower.stdout
    lenient = trainpace("watch", "--from", tmp_path / "b", *against, "--tolerance", "10")
    assert lenient.returncode == 0, lenient.stdout
    train.write_text(train.read_text() + "\n    sys.exit(3)\n")
    assert (
        trainpace(
            "watch", "--output", tmp_path / "c", *against, "--", sys.executable, train
        ).returncode
        == 3
    )


def test_unknown_baseline_is_rejected_before_the_command_starts(train, tmp_path):
    done = trainpace(
        "watch",
        "--baseline",
        "deadbeef",
        "--journal",
        tmp_path / "j.db",
        "--",
        sys.executable,
        train,
    )
    assert done.returncode == 2
    assert "unknown baseline 'deadbeef'" in done.stderr
    assert not (tmp_path / "losses").exists()
    assert trainpace("watch", "--tolerance", "0.1", "--", sys.executable, train).returncode == 2


FAILING = (sys.executable, "-c", "import sys; sys.exit(7)")


def test_unwritable_report_keeps_the_command_exit_code(train, tmp_path):
    train.write_text(train.read_text().replace("range(40)", "range(1)") + "\n    sys.exit(7)\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    train.write_text(f"import shutil; shutil.rmtree({str(gone)!r})\n" + train.read_text())
    done = trainpace(
        "watch", "--html", gone / "t.html", "--output", tmp_path / "r", "--", sys.executable, train
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (7, 0)
    assert "cannot write" in done.stderr
    assert "waiting for data" in done.stdout


def test_recording_removed_by_the_command_is_not_an_error(tmp_path):
    remove = f"import shutil; shutil.rmtree({str(tmp_path / 'r')!r})"
    done = trainpace("watch", "--output", tmp_path / "r", "--", sys.executable, "-c", remove)
    assert done.returncode == 0
    assert "No Python process of this command imported torch" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("steps", ["9:3", "²:30", "1:" + "9" * 5000, "1"])
def test_invalid_steps_are_rejected_before_the_command_starts(steps, tmp_path):
    done = trainpace(
        "watch",
        "--steps",
        steps,
        "--",
        sys.executable,
        "-c",
        f"open({str(tmp_path / 'ran')!r}, 'w')",
    )
    assert done.returncode == 2
    assert "is not a range of steps" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("verb", ["watch", "diagnose"])
def test_exit_code_is_kept_without_steps(verb, tmp_path):
    done = trainpace(verb, "--output", tmp_path / "r", "--", *FAILING)
    assert done.returncode == 7


WAITING = "import torch, time, sys; print('here', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("number", "code", "send"),
    [
        (signal.SIGINT, 130, os.killpg),
        (signal.SIGINT, 130, os.kill),
        (signal.SIGTERM, 143, os.kill),
    ],
)
@pytest.mark.parametrize("verb", ["watch", "diagnose"])
def test_signal_is_forwarded_and_sets_the_exit_code(verb, number, code, send, tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        verb,
        "--output",
        str(tmp_path / "r"),
        "--",
        sys.executable,
        "-c",
        WAITING,
    ]
    with subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "here\n"
        send(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "exit code -" not in stderr


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_killing_watch_ends_its_command(tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "watch",
        "--output",
        str(tmp_path / "r"),
        "--",
        sys.executable,
        "-c",
    ]
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*command, script], stdout=-1, text=True) as process:
        inner = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while runs(inner) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(inner)
