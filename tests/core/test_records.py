import json
import os
import threading

import pytest

from nouns import every_noun
from trainpace.core import records
from trainpace.core.errors import UnreadableInput, nearest_names
from trainpace.core.execution import Execution
from trainpace.job import Schedule
from trainpace.plan import Plan


@pytest.mark.parametrize("noun", every_noun(), ids=lambda noun: type(noun).__name__)
def test_records_survive_json_round_trip(noun):
    text = records.to_json(noun)
    again = records.from_json(text, type(noun))
    assert records.to_json(again) == text
    assert json.loads(text)["schema_version"] == records.SCHEMA_VERSION


@pytest.mark.parametrize("noun", every_noun(), ids=lambda noun: type(noun).__name__)
def test_records_are_frozen(noun):
    with pytest.raises(AttributeError):
        setattr(noun, noun.__struct_fields__[0], None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"Schedule"',
        "{}",
        '{"record":"Execution","schema_version":1}',
        '{"record":"Schedule","schema_version":2}',
        '{"record":"Schedule","schema_version":"1"}',
        '{"record":"Schedule"}',
        '{"record":"Schedule","schema_version":1,"samples":-1}',
        '{"record":"Schedule","schema_version":1,"samples":"many"}',
        '{"record":"Schedule","schema_version":1,"sampels":5}',
        '{"record":"Schedule","schema_version":1,"epochs":1e999}',
    ],
)
def test_invalid_json_is_reported_in_one_line(text):
    with pytest.raises(UnreadableInput) as caught:
        records.from_json(text, Schedule, "run.json")
    assert "run.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_record_files_are_written_atomically(tmp_path):
    path = tmp_path / "plan.json"
    plan = Plan(start=Execution(), changes=())
    records.save(plan, path)
    assert records.load(path, Plan) == plan
    assert plan.end == Execution()
    before = path.read_text()
    with pytest.raises(UnreadableInput):
        records.write_whole(tmp_path / "none" / "x.json", "text")
    with pytest.raises(TypeError):
        records.write_whole(path, None)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_write_preserves_symlink_and_file_mode(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    records.write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_write_rejects_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableInput):
        records.write_whole(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_reader_never_sees_partial_file(tmp_path):
    path = tmp_path / "x"
    texts = {letter * 200_000 for letter in "ab"}
    records.write_whole(path, "a" * 200_000)
    done = threading.Event()

    def write():
        for i in range(60):
            records.write_whole(path, "ab"[i % 2] * 200_000)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in texts
    writer.join()


def test_read_bytes_rejects_unreadable_paths(tmp_path):
    for path in (tmp_path, tmp_path / "missing", "nul\0byte"):
        with pytest.raises(UnreadableInput):
            records.read_bytes(path)


def test_nearest_names_returns_only_similar_names():
    assert nearest_names("rtx 309", ["RTX 3090", "T4"]) == ["RTX 3090"]
    assert nearest_names("zzzz", ["RTX 3090"]) == []
