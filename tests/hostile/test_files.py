"""Hostile files of every type produce at most one line. `python -m tools fuzz` tries more."""

import random
from pathlib import Path

import pytest

from hostile.commands import attempt
from hostile.file_types import file_types
from hostile.mutations import mutant

CASES = 25
CORPUS = Path(__file__).parent / "corpus"
"""Files that once broke a command, in one folder per type."""


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
    """Run the command on a file and return its result."""
    beside = folder / "files"
    beside.mkdir(exist_ok=True)
    for name, data in {**kind.beside, kind.name: content}.items():
        (beside / name).write_bytes(data)
    return attempt(kind.run, beside / kind.name)


FOREIGN = ("import.mlflow.db",)
"""A database that is not from MLflow."""
NAMES = sorted(file_types())


@pytest.mark.parametrize("name", NAMES)
def test_valid_file_is_read(name, folder):
    kind = file_types()[name]
    ended = tried(kind, kind.example, folder)
    assert ended.problem is None
    assert ("trainpace: " in ended.said) == (name in FOREIGN), ended.said


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_file_produces_at_most_one_line(name, folder):
    kind = file_types()[name]
    rng = random.Random(name)
    for case in range(CASES):
        content = mutant(kind.example, kind.form, rng)
        ended = tried(kind, content, folder)
        assert ended.problem is None, (case, ended.problem, content[:2000])


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_regression_corpus_files_produce_at_most_one_line(path, folder):
    assert tried(file_types()[path.parent.name], path.read_bytes(), folder).problem is None
