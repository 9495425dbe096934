"""Recordings in the journal: listed, shown and compared like other runs."""

from pathlib import Path

import pytest
import recordings
from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.journal import Journal, Query, anonymous_entry, compare, entry_of_recording
from trainpace.verbs.request import Silent
from trainpace.verbs.watch import Watched, kept


def recorded(ms=20.0, **more):
    one = recordings.rank(forward=ms, micro_steps=2.0, samples=32.0, **more)
    one = replace(
        one, optimizer="AdamW", median_ms=ms, median_ms_low=0.99 * ms, median_ms_high=1.01 * ms
    )
    command = ("python", "/home/jane/train.py", "--lr", "1")
    return replace(recordings.recording(one), command=command)


def test_entry_of_a_recording_has_its_pace_and_batch():
    entry = anonymous_entry(entry_of_recording(recorded(), Path("/home/jane/train-2026")))
    assert (entry.kind, entry.model, entry.device) == ("watch", "train.py", "cpu")
    assert (entry.step_time_ms, entry.source) == (20.0, "train-2026")
    assert (entry.execution.micro_batch, entry.execution.accumulation) == (16, 2)
    assert entry.execution.optimizer == "adamw"
    assert "jane" not in entry.command
    on_gpu = entry_of_recording(
        recorded(accelerator="NVIDIA L4", number_format="amp_bf16"), Path("r")
    )
    assert (on_gpu.device, on_gpu.execution.precision) == ("L4", "amp_bf16")


def test_recordings_are_listed_and_compared(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINPACE_JOURNAL", str(tmp_path / "j.db"))
    for ms in (20.0, 30.0):
        kept(Watched(recording=recorded(ms), folder=tmp_path / "r"), Silent())
    with Journal.open() as journal:
        slow, fast = journal.find(Query(kind="watch", since="yesterday"))
    assert compare([fast], [slow]).ratios[0].ratio == pytest.approx(1.5)


def test_unusable_journal_is_only_a_note(monkeypatch, tmp_path):
    (tmp_path / "j.db").write_text("no database at all, but long enough to be one")
    monkeypatch.setenv("TRAINPACE_JOURNAL", str(tmp_path / "j.db"))
    notes = []
    monkeypatch.setattr(Silent, "note", lambda self, text: notes.append(text))
    watched = Watched(recording=recorded(), folder=tmp_path / "r")
    assert kept(watched, Silent()) is watched
    assert "is not in the journal" in notes[0]


def test_recording_without_steps_has_no_entry(tmp_path):
    with pytest.raises(UnreadableInput):
        entry_of_recording(replace(recorded(), ranks=()), tmp_path)
