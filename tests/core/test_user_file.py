"""Names are loaded from a user's script or package, and missing names give a helpful error."""

import sys

import pytest

from trainpace.core.errors import UnknownName, UnreadableInput
from trainpace.core.worker import is_users, load_name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_user_file_can_import_neighboring_module(folder):
    (folder / "beside_mine.py").write_text("four = 4\n")
    (folder / "mine_alone.py").write_text("from beside_mine import four\n")
    assert load_name(folder / "mine_alone.py", "four") == 4


@pytest.mark.parametrize("with_init", [True, False])
def test_user_file_can_use_relative_imports(folder, with_init):
    inner = folder / f"project_{with_init}" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "above.py").write_text("from .constants import four\n")
    (inner.parent / "constants.py").write_text("four = 4\n")
    (inner / "mine.py").write_text("from ..above import four\n")
    for place in (inner, inner.parent) if with_init else ():
        (place / "__init__.py").touch()
    assert load_name(inner / "mine.py", "four") == 4


def test_load_name_reports_missing_names_and_files(folder):
    text = "from pathlib import Path as Training\ntrainset = 1\nif __name__ == '__main__':\n    train_set = 2\n"
    (folder / "mine_script.py").write_text(text)
    with pytest.raises(UnknownName, match="__name__") as hidden:
        load_name(folder / "mine_script.py", "train_set")
    with pytest.raises(UnknownName) as unknown:
        load_name(folder / "mine_script.py", "train_sets")
    assert hidden.value.nearest == unknown.value.nearest == ["trainset"]
    with pytest.raises(UnreadableInput):
        load_name(folder / "none.py", "trainset")


def test_is_users_excludes_libraries():
    import random

    import torch

    import trainpace

    assert is_users(__file__)
    assert not any(is_users(m.__file__) for m in (torch, torch.nn.functional, random, trainpace))
