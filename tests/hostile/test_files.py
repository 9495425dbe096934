"""Hostile files of every type: one sentence each, at most. `python -m tools fuzz` tries many more."""

import random
from pathlib import Path

import pytest

from hostile.commands import attempt
from hostile.file_types import file_types
from hostile.mutations import mutant

CASES = 25
CORPUS = Path(__file__).parent / "corpus"
"""Files that broke something once, in a folder for each type."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("TRAINPACE_JOURNAL", raising=False)
    return tmp_path


def tried(kind, content, folder):
    """How the command ended that was given this file, beside the files that belong to it."""
    beside = folder / "files"
    beside.mkdir(exist_ok=True)
    for name, data in {**kind.beside, kind.name: content}.items():
        (beside / name).write_bytes(data)
    return attempt(kind.run, beside / kind.name)


FOREIGN = ("import.mlflow.db",)
"""A database, but not one of MLflow."""
NAMES = sorted(file_types())


@pytest.mark.parametrize("name", NAMES)
def test_the_right_file_is_read(name, folder):
    kind = file_types()[name]
    ended = tried(kind, kind.example, folder)
    assert ended.problem is None
    assert ("trainpace: " in ended.said) == (name in FOREIGN), ended.said


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_file_is_one_sentence(name, folder):
    kind = file_types()[name]
    rng = random.Random(name)
    for case in range(CASES):
        content = mutant(kind.example, kind.form, rng)
        ended = tried(kind, content, folder)
        assert ended.problem is None, (case, ended.problem, content[:2000])


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_broke_once(path, folder):
    assert tried(file_types()[path.parent.name], path.read_bytes(), folder).problem is None
