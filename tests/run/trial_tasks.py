"""Small tasks for trials whose results do not depend on how a batch is divided."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def _model():
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))


def _with(dataset, model=None, lr=1e-2):
    model = model or _model()
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=lr), dataset


def _samples(count=100):
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 16, generator=draw), torch.randint(0, 4, (count,), generator=draw)
    )


def mlp():
    return _with(_samples())


def sgd():
    """Task with plain gradient descent. Adam would hide a factor on the gradients."""
    model = _model()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05), _samples()


def diverging():
    model = _model()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e30), _samples()


def out_of_memory():
    raise MemoryError


class Torn(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 31:
            raise ValueError("sample 31 is torn")
        return torch.zeros(16), 0


class Fatal(Torn):
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(16), 0


def fatal():
    return _with(Fatal())


def torn():
    return _with(Torn())


def hanging():
    time.sleep(600)


class Plain(Dataset):
    """Dataset for precompute: every call returns the same sample."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((16,), index, dtype=torch.uint8), index % 4


def online(sample):
    values, label = sample
    return values.float() / 64, label


class Online(Dataset):
    """Dataset for training, with the part that stays online."""

    online = staticmethod(online)

    def __init__(self):
        self.offline = Plain()

    def __len__(self):
        return len(self.offline)

    def __getitem__(self, index):
        return online(self.offline[index])


def expensive():
    return _with(Online())


class Floats(Plain):
    def __getitem__(self, index):
        return online(super().__getitem__(index))


def expensive_without_a_split():
    return _with(Floats())


def relative():
    """Read a file by a relative path, as task files do."""
    assert Path("beside.txt").read_text() == "here", os.getcwd()
    return mlp()


def regression_data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 8, generator=draw)
    y = x @ torch.linspace(1.0, 2.0, 8).unsqueeze(1) + 2 * torch.randn(4000, 1, generator=draw)
    return x, y


def regression():
    """Regression whose weights stay at 0, where the gradient of every sample is known."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    return (
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=1e-12),
        TensorDataset(*regression_data()),
    )
