"""A command ended by a signal leaves no files and exits with 128 plus the signal number."""

import os
import signal
import subprocess
import sys
import time

import pytest

ASLEEP = "import time\ndef task():\n    open('begun', 'w').close()\n    time.sleep(600)\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(ASLEEP)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def begun(folder, *before):
    command = [
        *before,
        sys.executable,
        "-m",
        "trainpace",
        "measure",
        "task.py:task",
        "--batch",
        "1",
        "--no-journal",
    ]
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "temporary"),
        "XDG_DATA_HOME": str(folder / "data"),
    }
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not (folder / "begun").exists():
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_removes_temporary_files_and_sets_the_exit_code(folder, number):
    process = begun(folder)
    assert list((folder / "temporary").glob("trainpace-*"))
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"Traceback" not in said
    assert not list((folder / "temporary").glob("trainpace-*"))


def test_sighup_under_nohup_does_not_end_the_command(folder):
    process = begun(folder, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    process.stdout.close()
