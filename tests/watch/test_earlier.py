"""Tests of which files are set aside. tests/verbs/test_look.py covers their restoration."""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainpace.watch import command
from trainpace.watch.inside import engines
from trainpace.watch.inside.event_log import EventLogWriter, aside_of
from trainpace.watch.inside.files import Earlier, Writers


class Trail:
    def __init__(self):
        self.notes = []

    def note(self, **content):
        self.notes.append(content)

    def flush(self):
        pass


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)
    made = SimpleNamespace(
        log=Trail(), trials=None, charged=lambda part, name, function, *args: function(*args)
    )
    made.earlier = Earlier(made)
    return made


def test_only_files_of_earlier_runs_are_set_aside(recorder, tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    old.write_text("earlier")
    for _ in range(2):
        for path in (old, new):
            recorder.earlier.set_aside(path)
            path.write_text("this run's")
    assert Path(aside_of(str(old), recorder.earlier.folder)).read_text() == "earlier"
    assert recorder.log.notes == [{"earlier": str(old)}]


def test_file_replaced_by_a_checkpoint_is_set_aside(recorder, tmp_path):
    best, other = tmp_path / "best.pt", tmp_path / "other.txt"
    best.write_text("earlier")
    other.write_text("no checkpoint")
    recorder.earlier.set_aside(tmp_path / "last.pt")
    for source, place in ((tmp_path / "notes.txt", other), (tmp_path / "last.pt", best)):
        recorder.earlier._replaced("shutil.copyfile", (str(source), str(place)))
    assert recorder.log.notes == [{"earlier": str(best)}]
    recorder.earlier._replaced(
        "os.rename", ("last.pt", "x.pt", 5, -1)
    )  # relative to an open folder descriptor, so the path is unknown
    recorder.earlier._replaced("os.rename", (3, "x.pt", -1, -1))
    assert recorder.log.notes == [{"earlier": str(best)}]


def test_other_files_are_copied_before_they_are_written(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder.earlier = Earlier(recorder)  # tmp_path is not a temporary folder for this instance
    log, lock, read, late = (
        tmp_path / name for name in ("log.csv", "a.lock", "data.csv", "late.csv")
    )
    for path in (log, lock, read, late):
        path.write_text("earlier")
        os.utime(path, (1, 1))
    late.touch()
    os.utime(late, (2**33, 2**33))  # written by this run, through another library
    same = log.stat().st_ino
    for path, flags in (
        (log, os.O_WRONLY | os.O_TRUNC),
        (lock, os.O_RDWR),
        (read, os.O_RDONLY),
        (late, os.O_WRONLY),
        (3, os.O_WRONLY),
    ):
        recorder.earlier.copies.opened("open", (path if path == 3 else str(path), "w", flags))
    recorder.earlier.copies.opened("open", (os.fsencode(log), "a", os.O_APPEND))
    assert recorder.log.notes == [{"copied": str(log)}]
    aside = Path(aside_of(str(log), recorder.earlier.folder))
    assert aside.read_text() == "earlier"
    assert log.stat().st_ino == same
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.lock",
        "data.csv",
        "late.csv",
        "log.csv",
        aside.name,
    ]


def test_only_new_temporary_files_of_the_script_are_removed(recorder, tmp_path):
    copies = recorder.earlier.copies
    copies.temporary = str(tmp_path)
    made, others = tmp_path / "tmpa", tmp_path / "tmpb"
    others.mkdir()
    for path in (made, others, tmp_path / "gone", tmp_path.parent / "elsewhere"):
        copies.opened("tempfile.mkdtemp", (str(path),))
    (made / "inner").mkdir(parents=True)
    noted = [note["temporary"] for note in recorder.log.notes]
    assert noted == [str(made), str(tmp_path / "gone")]
    command.remove_temporary(SimpleNamespace(values=lambda name: noted))
    assert list(tmp_path.iterdir()) == [others]


@pytest.mark.parametrize(("there", "written"), [("checkpoint-500", 0), ("runs", 2)])
def test_trainer_saves_nothing_into_a_folder_with_checkpoints(recorder, tmp_path, there, written):
    (tmp_path / there).mkdir()
    saved = []
    save = partial(engines._saving(recorder, lambda self: self.folder), saved.append)
    trainer = SimpleNamespace(folder=tmp_path)
    for i in range(2):
        save(trainer)
        (tmp_path / f"checkpoint-{i}").mkdir()  # saved by this trainer
    assert len(saved) == written


def test_files_of_a_killed_look_return_only_to_free_paths(recorder, tmp_path):
    lost, trained_since = tmp_path / "lost.pt", tmp_path / "trained.pt"
    for path in (lost, trained_since):
        Path(aside_of(str(path), "another look")).write_text("moved aside")
    older = Path(aside_of(str(lost), "a look before that"))
    older.write_text("older")
    os.utime(older, (1, 1))
    trained_since.write_text("newer")
    for path in (lost, trained_since):
        recorder.earlier.set_aside(path)
        kept = Path(aside_of(str(path), recorder.earlier.folder))
        assert kept.read_text() == ("moved aside" if path == lost else "newer")
    assert Path(aside_of(str(trained_since), "another look")).read_text() == "moved aside"
    assert older.read_text() == "older"


def written_by_others(folder, path):
    return command._written_by_others(command.notes_in(folder).values("written"), [str(path)])


OTHERS = {
    "nobody": (lambda path: None, False),
    "it reads": (lambda path: path.read_text(), False),
    "it appends": (lambda path: _append(path), True),
    "it replaces": (
        lambda path: (path.with_name("x").write_text("x"), path.with_name("x").rename(path)),
        True,
    ),
}


def _append(path):
    with path.open("a") as file:
        file.write("other")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
@pytest.mark.parametrize("still_open", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_files_written_by_another_program_are_detected(tmp_path, other, still_open):
    path = tmp_path / "log.csv"
    path.write_text("earlier")
    writers, (acts, is_shared) = Writers(), OTHERS[other]
    assert writers.watch(str(path))
    assert str(path) in writers
    for _ in range(3):
        writers.opened(str(path))
        _append(path)
    if still_open:
        writers.opened(str(path))
        opened = path.open("a")
    acts(path)
    log = EventLogWriter(str(tmp_path / "process-1.trail"), {})
    log.note(written=writers.accounts())
    log.flush()
    if still_open:
        opened.close()
    assert written_by_others(tmp_path, path) == ({str(path)} if is_shared else set())


def test_unaccounted_or_open_files_count_as_written_by_others(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("earlier")
    assert written_by_others(tmp_path, path) == {str(path)}
    writers = Writers()
    writers.watch(str(path))
    log = EventLogWriter(str(tmp_path / "process-1.trail"), {})
    log.note(written=writers.accounts())
    log.flush()
    assert written_by_others(tmp_path, path) == set()
    with path.open("a"):
        assert written_by_others(tmp_path, path) == {str(path)}
