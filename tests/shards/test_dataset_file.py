"""Valid dataset targets, and errors for targets without indexed samples."""

import sys

import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.shards.user_dataset import load_dataset

MADE = """
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Data(Dataset):
    def __init__(self, count=3):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return i

class Stream(IterableDataset):
    def __len__(self):
        return 3
    def __iter__(self):
        yield from range(3)

def made(): return Data()
def loader(): return DataLoader(Data(), 2)
loaded = loader()
def task(): return nn.Linear(1, 1), None, None, Data()

class Split(Data):
    def __init__(self):
        self.offline, self.count = Data(3), 5

def split(): return nn.Linear(1, 1), None, None, Split()

class Offline(Data):
    offline = True
numbers = [1, 2, 3]
def of(folder, *, size, more=1): return Data()
def streamed(): return DataLoader(Stream())
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "made_here.py").write_text(MADE)
    return tmp_path / "made_here.py"


@pytest.mark.parametrize(
    "name", ["Data", "made", "loader", "loaded", "task", "numbers", "split", "Offline"]
)
def test_targets_with_samples_are_loaded(file, name):
    assert len(load_dataset(f"{file}:{name}")) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Stream", "is an IterableDataset"),
        ("streamed", "is an IterableDataset"),
        ("MADE", "unknown name"),
    ],
)
def test_streams_and_unknown_names_are_rejected(file, name, words):
    with pytest.raises(TrainpaceError) as caught:
        load_dataset(f"{file}:{name}")
    assert caught.match(words)
