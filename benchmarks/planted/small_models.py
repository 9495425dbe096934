"""Two small networks for steps on several hosts: one mostly of convolutions, one of repeated transformer blocks."""

from typing import Any

import torch
from torch import nn

CLASSES = 10
TOKENS, WIDTH = 32, 192


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.inner(self.norm2(x))


class Transformer(nn.Module):
    """Four blocks of 0.44 million parameters over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)).mean(1))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (128, 2), (256, 2), (256, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


def _samples(*shape: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(*shape, generator=generator), i % CLASSES) for i in range(64)]


def convolutional() -> tuple[Any, ...]:
    """A million parameters, 4 MB of gradients."""
    model = _convolutions()
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        _samples(3, 32, 32),
    )


def transformer() -> tuple[Any, ...]:
    """1.8 million parameters, 7 MB of gradients."""
    model = Transformer()
    return (
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        _samples(TOKENS, 64),
    )
