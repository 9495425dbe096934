"""Whose checkpoints are moved aside; that they come back is shown by real scripts in tests/verbs/test_look.py."""

import sys
from types import SimpleNamespace

import pytest

from trainpace.watch.inside import engines
from trainpace.watch.inside.earlier import Earlier
from trainpace.watch.inside.trail import EARLIER


class Trail:
    def __init__(self):
        self.notes = []

    def note(self, content):
        self.notes.append(content)

    def flush(self):
        pass


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)
    made = SimpleNamespace(trail=Trail(), trials=None, wraps=lambda function, part, name: function)
    made.earlier = Earlier(made)
    return made


def test_only_what_this_run_did_not_write(recorder, tmp_path):
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    old.write_text("earlier")
    for _ in range(2):
        for path in (old, new):
            recorder.earlier.keep(path)
            path.write_text("this run's")
    assert (tmp_path / f"old.pt{EARLIER}").read_text() == "earlier"
    assert recorder.trail.notes == [{"earlier": str(old)}]


def test_names_that_a_checkpoint_takes_over(recorder, tmp_path):
    best, other = tmp_path / "best.pt", tmp_path / "other.txt"
    best.write_text("earlier")
    other.write_text("no checkpoint")
    recorder.earlier.keep(tmp_path / "last.pt")
    for source, place in ((tmp_path / "notes.txt", other), (tmp_path / "last.pt", best)):
        recorder.earlier._replaced("shutil.copyfile", (str(source), str(place)))
    assert recorder.trail.notes == [{"earlier": str(best)}]
    recorder.earlier._replaced("os.rename", ("last.pt", "x.pt", 5, -1))  # beside an open folder: not known
    recorder.earlier._replaced("os.rename", (3, "x.pt", -1, -1))
    assert recorder.trail.notes == [{"earlier": str(best)}]


@pytest.mark.parametrize(("there", "written"), [("checkpoint-500", 0), ("runs", 2)])
def test_a_trainer_leaves_a_folder_alone_that_holds_checkpoints(recorder, tmp_path, there, written):
    (tmp_path / there).mkdir()
    saved = []
    save = engines._saving(recorder, "checkpoint", lambda self: self.folder)(lambda self: saved.append(self))
    trainer = SimpleNamespace(folder=tmp_path)
    for i in range(2):
        save(trainer)
        (tmp_path / f"checkpoint-{i}").mkdir()  # its own
    assert len(saved) == written
