"""Tasks for the sweeps of benchmarks/measure.py: one computes in tiles of 16 samples, as cuDNN's Winograd does, one does not."""

from typing import Any

import torch
from torch import nn


class _Padded(nn.Module):
    """Pads the batch to a multiple of `tile` before it computes: real work for samples that nobody asked for."""

    def __init__(self, inner: nn.Module, tile: int) -> None:
        super().__init__()
        self.inner, self.tile = inner, tile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        padded = nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -n % self.tile))
        return self.inner(padded)[:n]


def _data() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 24, 24, generator=generator), i % 10) for i in range(128)]


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def tiled() -> tuple[Any, ...]:
    model = _Padded(_network(), 16)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-3), _data()


def smooth() -> tuple[Any, ...]:
    model = _network()
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-3), _data()


def wide() -> tuple[Any, ...]:
    """A step of some 20 ms at batch 16, for figures that a clock's own cost must not blur."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(1728, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        _data(),
    )


def hangs() -> tuple[Any, ...]:
    model, loss, optimizer, data = smooth()
    model.register_forward_pre_hook(lambda *_: __import__("time").sleep(3600))
    return model, loss, optimizer, data
