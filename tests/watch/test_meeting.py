"""Tests of tasks that synchronize through a shared folder."""

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.watch import command, tasks
from trainpace.watch.command import _wait, watch
from trainpace.watch.inside.event_log import PARTS, EventLogWriter, Step, aside_of
from trainpace.watch.inside.files import keep_first
from trainpace.watch.tasks import Task

FIRST = Task("7.0", 0, 3)
TRIALS = {"limit_s": 60.0}


def task(number):
    return FIRST._replace(number=number)


def met(folder, number, patience_s):
    """Return the error message of the task, or "" if all tasks arrived."""
    try:
        tasks.meet(folder, task(number), patience_s)
    except TrainpaceError as error:
        return error.message
    return ""


def all_at_once(*functions):
    said = [None] * len(functions)

    def call(i):
        said[i] = functions[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_tasks_start_when_all_have_arrived(tmp_path):
    assert all_at_once(*(lambda n=n: met(tmp_path, n, 20.0) for n in (1, 2, 0))) == ["", "", ""]


def test_unshared_folder_is_reported_by_every_task(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "SLACK_S", 0.3)
    (tmp_path / "own").mkdir()
    said = all_at_once(
        lambda: met(tmp_path, 0, 0.3),
        lambda: met(tmp_path, 1, 0.3),
        lambda: met(tmp_path / "own", 2, 0.3),
    )
    assert said[0] == said[1]
    assert said[0].startswith("task 2 of 3")
    assert said[2].startswith("task 0 of 3")


def test_first_task_waits_for_the_files_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.3)
    log = tmp_path / f"process-5-{socket.gethostname()}.trail"
    log.write_bytes(b"x" * 100)
    tasks.end(tmp_path, FIRST, 0)
    tasks.end(tmp_path, task(2), 5)
    assert tasks.missing_after(tmp_path, FIRST) == [1]
    assert tasks.first_failure(tasks.ends(tmp_path, FIRST)) == 5
    assert f"Task 1 of 3 left nothing in {tmp_path}" in tasks.ends_in_words(tmp_path, FIRST, [1])
    tasks.arrive(tmp_path, task(1))
    assert "Task 1 of 3 had not ended" in tasks.ends_in_words(tmp_path, FIRST, [1])
    tasks.end(tmp_path, task(1), 0)
    assert tasks.missing_after(tmp_path, FIRST) == []
    log.write_bytes(b"x" * 99)  # a network file system may still show the old size
    assert tasks.missing_after(tmp_path, FIRST) == [0, 1, 2]


def test_only_the_first_failed_task_is_named_with_its_host(tmp_path):
    for number, code in ((2, 3), (0, 1), (1, 1)):
        tasks.end(tmp_path, task(number), code)
    assert tasks.first_failure(tasks.ends(tmp_path, FIRST)) == 3
    assert (
        tasks.ends_in_words(tmp_path, FIRST, [])
        == f"Task 2 of 3 (on {socket.gethostname()}) ended with exit code 3."
    )


def test_successful_tasks_are_not_mentioned(tmp_path):
    for number in range(3):
        tasks.end(tmp_path, task(number), 0)
    assert tasks.ends_in_words(tmp_path, FIRST, []) == ""


def test_command_of_a_failed_job_ends_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "GRACE_S", 0.3)
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.3)
    monkeypatch.setattr(tasks, "LOOK_S", 0.1)
    tasks.end(tmp_path, task(1), 7)
    tasks.end(tmp_path, task(2), 0)
    began = time.monotonic()
    code = watch(
        (sys.executable, "-c", "import time; time.sleep(60)"), tmp_path, TRIALS, task=FIRST
    )
    assert (code, time.monotonic() - began < 30) == (7, True)
    note = json.loads((tmp_path / "command.json").read_text())
    assert note["exit_code"] == 7
    assert "command of task 0" in note["unended"]


def test_stalled_training_is_ended_only_after_its_first_step(tmp_path):
    lookout = tasks.Lookout(tmp_path, FIRST, still_s=0.2)
    log = EventLogWriter(str(tmp_path / "process-5-a.trail"), {})
    for _ in range(
        2
    ):  # before the first step the script may download data and note its written files
        assert not lookout.gives_up()
        time.sleep(0.3)
        log.note(copied="log.txt")
        log.flush()
    log.step(Step(0, 1, 0, 0, 1, 0, 0.0, 0.0, (0,) * len(PARTS)))
    log.flush()
    assert not lookout.gives_up()
    time.sleep(0.3)
    assert lookout.gives_up()
    assert "no rank completed a step" in lookout.gave_up


def test_unresponsive_disk_does_not_end_the_training(tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise OSError(116, "Stale file handle")

    lookout = tasks.Lookout(tmp_path, FIRST, still_s=0.0)
    monkeypatch.setattr(tasks.Path, "glob", refuses)
    monkeypatch.setattr(tasks.Path, "exists", refuses)
    assert not lookout.gives_up()
    assert tasks.missing_after(tmp_path, FIRST, 0.0) == [0, 1, 2]


def test_task_that_gave_up_does_not_count_as_arrived(tmp_path):
    two = FIRST._replace(tasks=2)
    second = two._replace(number=1)
    with pytest.raises(TrainpaceError, match="task 0 of 2"):
        tasks.meet(tmp_path, second, patience_s=-tasks.SLACK_S)
    with pytest.raises(TrainpaceError, match="1 of 2"):
        tasks.meet(tmp_path, two, patience_s=0.0)


@pytest.mark.parametrize("links", [True, False])
def test_first_copy_of_a_file_is_kept(tmp_path, monkeypatch, links):
    """The second rank may have copied a file that the first had begun to overwrite."""
    aside, first, second = (tmp_path / name for name in ("aside", "first", "second"))
    first.write_text("earlier")
    second.write_text("half")
    if not links:

        def refuses(*_):
            raise PermissionError

        monkeypatch.setattr("os.link", refuses)
    keep_first(str(first), str(aside))
    assert (aside.read_text(), first.exists()) == ("earlier", False)
    if links:
        keep_first(str(second), str(aside))
        assert (aside.read_text(), second.exists()) == ("earlier", False)


def test_shared_file_overwritten_by_two_tasks_is_restored_once(tmp_path):
    """The tasks share a disk. The later one ends after the first has restored its files."""
    folder, shared = tmp_path / "recording", tmp_path / "log.txt"
    folder.mkdir()
    own = [tmp_path / f"own-{n}.txt" for n in range(2)]
    for place in (shared, *own):
        place.write_text("overwritten")
    for place in (shared, *own):
        with open(aside_of(str(place), str(folder.resolve())), "w") as file:
            file.write("earlier")
    host = socket.gethostname()
    for n in range(2):
        log = EventLogWriter(
            str(folder / f"process-{n}-{host}.trail"),
            {"role": "process", "pid": n, "host": host, "task": n},
        )
        account = {"closed": 0, "opened": 0, "open": 0}
        places = [shared, own[n]]
        log.note(written=[{"place": str(p), "inode": p.stat().st_ino, **account} for p in places])
        for place in places:
            log.note(copied=str(place))
        log.flush()
    two = FIRST._replace(tasks=2)
    commands = (
        lambda n=n: watch((sys.executable, "-c", ""), folder, TRIALS, task=two._replace(number=n))
        for n in (1, 0)
    )
    assert all_at_once(*commands) == [0, 0]
    assert [place.read_text() for place in (shared, *own)] == ["earlier"] * 3
    note = json.loads((folder / "command.json").read_text())
    assert sorted(note["restored"]) == sorted(map(str, (shared, *own)))
    assert list(command.notes_in(folder, lambda header: header["task"] == 1).values("copied")) == [
        str(shared),
        str(own[1]),
    ]


def test_ended_launcher_gets_time_to_stop_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "LOOK_S", 0.2)
    ending = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(7)));"
    begun = tmp_path / "begun"
    code = f"{ending} open({str(begun)!r}, 'w').close(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])

    class Lookout:
        gave_up = ""

        def gives_up(self):
            self.gave_up = "since it waited" if begun.exists() else ""
            return bool(self.gave_up)

    assert _wait(process, Lookout()) == 7
