"""Networks that a calibration both forecasts and trains, to compare the two times.

They are not real models: they were drawn at random once (benchmarks/random_models.py, seeds 101 to
104). They never change, so the corrections of different calibrations are comparable.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainpace.workload import Task, image_task

LENGTH = 64
"""Number of tokens per sample of a transformer."""
Layers = list[nn.Module]
Make = Callable[..., Any]


class _Residual(nn.Module):
    def __init__(self, body: Layers, shortcut: Layers, after: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*body), nn.Sequential(*shortcut)
        self.after = after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.body(x) + self.shortcut(x))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


class _Cnn(NamedTuple):
    """Convolutional classifier of square images.

    Attributes:
        stem: Channels, kernel and stride of the first convolution, and the window of the max pool
            after it.
        stages: Channels, number of blocks, and the pool before the blocks or the stride of the
            first block.
        groups: Groups of the convolutions in residual blocks. None means plain convolutions without
            residual blocks.
        hidden: Width of the hidden layer of the head, or 0.
    """

    channels: int
    side: int
    classes: int
    kernel: int
    norm: Make
    activation: Make
    stem: tuple[int, int, int, int | None]
    stages: tuple[tuple[int, int, int | Make], ...]
    dropout: float
    groups: int | None = None
    hidden: int = 0

    def task(self) -> Task:
        width, kernel, stride, pool = self.stem
        layers = [*self._normed(self.channels, width, kernel, stride), self.activation()]
        if pool:
            layers.append(nn.MaxPool2d(pool, 2, 1))
        for channels, blocks, reduces in self.stages:
            if not isinstance(reduces, int):
                layers.append(reduces(2, 2, ceil_mode=True))
            for i in range(blocks):
                stride = reduces if i == 0 and isinstance(reduces, int) else 1
                layers += self._block(width, channels, stride)
                width = channels
        side = 4 if self.hidden else 1
        layers += [nn.AdaptiveAvgPool2d(side), nn.Flatten()]
        if self.hidden:
            layers += [nn.Linear(width * side * side, self.hidden), self.activation()]
        layers += [nn.Dropout(self.dropout), nn.Linear(self.hidden or width, self.classes)]
        shape = (self.channels, self.side, self.side)
        return image_task("CNN", nn.Sequential(*layers), shape, self.classes)

    def _block(self, n_in: int, n_out: int, stride: int) -> Layers:
        body = [*self._normed(n_in, n_out, self.kernel, stride, self.groups), self.activation()]
        if self.groups is None:
            return body
        body += self._normed(n_out, n_out, self.kernel, 1, self.groups)
        shortcut = [] if n_in == n_out else self._normed(n_in, n_out, 1, stride)
        return [_Residual(body, shortcut, self.activation())]

    def _normed(
        self, n_in: int, n_out: int, kernel: int, stride: int, groups: int | None = None
    ) -> Layers:
        convolution = nn.Conv2d(
            n_in, n_out, kernel, stride, kernel // 2, groups=groups or 1, bias=False
        )
        return [convolution, self.norm(n_out)]


class _CausalLayer(nn.Module):
    """Decoder layer with attention and feed-forward network.

    Two query heads may share a key head.
    """

    def __init__(self, a: "_Transformer") -> None:
        super().__init__()
        width = a.width
        self.size, self.norm_first = width // a.heads, a.norm_first
        self.sizes = [width, a.key_heads * self.size, a.key_heads * self.size]
        self.qkv, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        up, down = nn.Linear(width, a.feed_forward), nn.Linear(a.feed_forward, width)
        self.feed_forward = nn.Sequential(up, nn.GELU(), down)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> Any:
        layers: tuple[Make, Make] = (self.attend, self.feed_forward)
        for layer, norm in zip(layers, self.norms, strict=True):
            x = x + layer(norm(x)) if self.norm_first else norm(x + layer(x))
        return x

    def attend(self, x: torch.Tensor) -> Any:
        parts = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        if k.shape[1] < q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Transformer(NamedTuple):
    """Language model, or text classifier if `classes` is given, built from torch's own layers."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    norm_first: bool
    key_heads: int = 0
    classes: int = 0
    trains_positions: bool = True
    tied: bool = False

    def task(self) -> Task:
        def make_batch(n: int) -> Any:
            targets = (self.classes, (n,)) if self.classes else (self.vocabulary, (n * LENGTH,))
            return torch.randint(0, self.vocabulary, (n, LENGTH)), torch.randint(0, *targets)

        task = image_task("transformer", _OnTokens(self), (), self.classes)
        return task._replace(
            make_batch=make_batch, sample=f"{LENGTH} tokens", sequence_length=LENGTH
        )


class _OnTokens(nn.Module):
    def __init__(self, a: _Transformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(a.vocabulary, a.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        positions = 0.02 * torch.randn(LENGTH, a.width)
        self.positions = nn.Parameter(positions, requires_grad=a.trains_positions)
        self.head = nn.Linear(a.width, a.classes or a.vocabulary, bias=not a.tied)
        if a.tied:
            self.head.weight = self.embedding.weight
        if a.classes:
            layer = nn.TransformerEncoderLayer(
                *(a.width, a.heads, a.feed_forward, 0.1, "gelu"),
                batch_first=True,
                norm_first=a.norm_first,
            )
            encoder = nn.TransformerEncoder(layer, a.layers, enable_nested_tensor=False)
            layers = [nn.Dropout(0.1), encoder]
        else:
            layers = [_CausalLayer(a) for _ in range(a.layers)]
        self.layers = nn.Sequential(*layers, *([nn.LayerNorm(a.width)] if a.norm_first else []))
        self.is_classifier = bool(a.classes)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers(self.embedding(x) + self.positions)
        return self.head(x.mean(1)) if self.is_classifier else self.head(x).flatten(0, 1)


_CNNS = (
    _Cnn(
        *(3, 64, 100, 3, _group_norm, nn.GELU),
        stem=(64, 5, 2, None),
        stages=((64, 4, 1), (128, 1, nn.AvgPool2d), (256, 1, nn.AvgPool2d), (512, 1, nn.AvgPool2d)),
        dropout=0.5,
        groups=1,
    ),
    _Cnn(
        *(1, 28, 10, 3, nn.BatchNorm2d, nn.GELU),
        stem=(24, 7, 1, None),
        stages=((24, 3, 1), (48, 1, nn.MaxPool2d), (96, 1, nn.MaxPool2d)),
        dropout=0.5,
        hidden=1024,
    ),
    _Cnn(
        *(3, 32, 10, 3, nn.BatchNorm2d, nn.SiLU),
        stem=(48, 3, 1, None),
        stages=(
            *((48, 3, 1), (96, 4, nn.MaxPool2d), (192, 3, nn.MaxPool2d), (384, 2, nn.MaxPool2d)),
            (768, 4, 1),
        ),
        dropout=0.1,
        hidden=1024,
    ),
    _Cnn(
        *(3, 160, 10, 5, _group_norm, nn.ReLU),
        stem=(48, 5, 2, 3),
        stages=((48, 1, 1), (96, 2, 2), (192, 2, 2)),
        dropout=0.1,
        groups=4,
    ),
)
_TRANSFORMERS = (
    _Transformer(1000, 480, 12, 6, 960, norm_first=True, key_heads=6),
    _Transformer(16000, 128, 8, 4, 512, norm_first=False, classes=10, trains_positions=False),
    _Transformer(256, 256, 8, 4, 1024, norm_first=False, key_heads=2, tied=True),
    _Transformer(256, 384, 1, 12, 1536, norm_first=True, classes=2),
)
NETWORKS: tuple[tuple[Callable[[], Task], int], ...] = tuple(
    (network.task, batch)
    for cnn, transformer in zip(_CNNS, _TRANSFORMERS, strict=True)
    for network, batch in ((cnn, 8), (transformer, 4), (cnn, 24))
)
"""Pairs of a function that builds a network, and the batch size to train it with."""
