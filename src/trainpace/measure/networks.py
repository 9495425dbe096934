"""Networks that a calibration both forecasts and trains, to compare the two times.

They are not real models, so that forecasts of real models can be tested against measurements. They
never change, so the corrections of different calibrations are comparable.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainpace.workload import Task, image_task

LENGTH = 64
"""Number of tokens per sample of a transformer."""
Layers = list[nn.Module]
Make = Callable[..., nn.Module]


class _Residual(nn.Module):
    def __init__(self, body: Layers, shortcut: Layers) -> None:
        super().__init__()
        self.body, self.shortcut = nn.Sequential(*body), nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) + self.shortcut(x)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


def _cnn(
    channels: int,
    side: int,
    stages: tuple[tuple[int, int], ...],
    norm: Make,
    activation: Make,
    kernel: int = 3,
    stem_stride: int = 1,
    groups: int = 0,
) -> Task:
    """Return a convolutional classifier of square images.

    Args:
        channels: Channels of the images.
        side: Height and width of the images.
        stages: Channels and number of blocks of each stage. Each stage but the first halves the
            image.
        norm: Normalization layer.
        activation: Activation layer.
        kernel: Kernel size.
        stem_stride: Stride of the first convolution.
        groups: Groups of the convolutions in residual blocks. 0 means plain convolutions without
            residual blocks.
    """

    def normed(n_in: int, n_out: int, size: int, stride: int) -> Layers:
        split = groups or 1 if size == kernel and n_in != channels else 1
        layer = nn.Conv2d(n_in, n_out, size, stride, size // 2, groups=split, bias=False)
        return [layer, norm(n_out)]

    width = stages[0][0]
    layers = [*normed(channels, width, kernel, stem_stride), activation()]
    for stage, (n_out, blocks) in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            body = [*normed(width, n_out, kernel, stride), activation()]
            if groups:
                shortcut = [] if width == n_out else normed(width, n_out, 1, stride)
                body = [_Residual([*body, *normed(n_out, n_out, kernel, 1)], shortcut)]
                body.append(activation())
            layers += body
            width = n_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(width, 100)]
    return image_task("CNN", nn.Sequential(*layers), (channels, side, side), 100)


class _OnTokens(nn.Module):
    """Language model, or text classifier if `classes` is given, built from torch's own layers."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, norm_first: bool, classes: int
    ) -> None:
        super().__init__()
        self.vocabulary, self.classes = vocabulary, classes
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            *(width, heads, 4 * width, 0.1, "gelu"), batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes or vocabulary)

    def forward(self, x: torch.Tensor) -> Any:
        causal = not self.classes
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None
        x = self.layers(self.embedding(x) + self.positions, mask, is_causal=causal)
        return self.head(x).flatten(0, 1) if causal else self.head(x.mean(1))


def _transformer(
    vocabulary: int, width: int, layers: int, heads: int, norm_first: bool = False, classes: int = 0
) -> Task:
    model = _OnTokens(vocabulary, width, layers, heads, norm_first, classes)

    def make_batch(n: int) -> Any:
        targets = (model.classes, (n,)) if model.classes else (model.vocabulary, (n * LENGTH,))
        return torch.randint(0, model.vocabulary, (n, LENGTH)), torch.randint(0, *targets)

    task = image_task("transformer", model, (), model.classes)
    return task._replace(make_batch=make_batch, sample=f"{LENGTH} tokens", sequence_length=LENGTH)


_CNNS = (
    partial(
        _cnn, 3, 64, ((64, 4), (128, 1), (256, 1), (512, 1)), _group_norm, nn.GELU, 3, 2, groups=1
    ),
    partial(_cnn, 1, 28, ((24, 3), (48, 1), (96, 1)), nn.BatchNorm2d, nn.GELU, 5),
    partial(_cnn, 3, 32, ((48, 3), (96, 4), (192, 3), (384, 2), (768, 2)), nn.BatchNorm2d, nn.SiLU),
    partial(
        _cnn, 3, 160, ((48, 1), (96, 2), (192, 2)), _group_norm, nn.ReLU, 5, stem_stride=4, groups=4
    ),
)
_TRANSFORMERS = (
    partial(_transformer, 1000, 480, 8, 6, norm_first=True),
    partial(_transformer, 16000, 128, 8, 4, classes=10),
    partial(_transformer, 256, 256, 8, 4),
    partial(_transformer, 256, 384, 1, 12, norm_first=True, classes=2),
)
NETWORKS: tuple[tuple[Callable[[], Task], int], ...] = tuple(
    (network, batch)
    for cnn, transformer in zip(_CNNS, _TRANSFORMERS, strict=True)
    for network, batch in ((cnn, 8), (transformer, 4), (cnn, 24))
)
"""Pairs of a function that builds a network, and the batch size to train it with."""
