"""What a calibration runs: small blocks of layers by seed, over the shapes that people train, and no model that anyone has.

Blocks and not lone operators, since an operator's time depends on what ran before it: outputs go to fresh memory, and a backward
pass reads what the forward pass wrote. Each has its own optimizer step, so that all three phases are timed.
"""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

LARGEST_FLOPS = 1e9
"""The most that one operator of a block may compute: about 10 ms on a small CPU. Efficiency follows from shape; larger ones
need no timing."""
LARGEST_BYTES = 5e7
FEWEST_FLOPS = 2e6

_ACTIVATIONS: list[Callable[[], nn.Module]] = [
    lambda: nn.ReLU(inplace=True),
    nn.ReLU,
    lambda: nn.ReLU6(inplace=True),
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.Tanh,
]


class Block(NamedTuple):
    """A module whose output is a scalar loss, and a maker of its input."""

    module: nn.Module
    make_input: Callable[[], torch.Tensor]


def block(seed: int) -> Block:
    """The block that a seed draws: out of 100, 57 are convolutional, 22 linear, 10 attention, 8 embedding with a vocabulary's
    loss, 3 of large parameters that little is computed with."""
    draw = random.Random(f"kit:{seed}")
    kinds: tuple[Callable[[random.Random], Block], ...] = (
        _convolutional,
        _linear,
        _attention,
        _language_head,
        _large_parameters,
    )
    kind = draw.choices(kinds, weights=(57, 22, 10, 8, 3))[0]
    return kind(draw)


class _Loss(nn.Module):
    """Layers in turn, an addition as residual connections have it, and a mean in place of a loss."""

    def __init__(self, layers: list[nn.Module], residual_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.residual_at = residual_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.residual_at:
                x = x + x.detach()
        return x.mean()


def _convolutional(draw: random.Random) -> Block:
    while True:
        n, side = (
            draw.choice([1, 2, 4, 8, 16, 32]),
            draw.choice([4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 112]),
        )
        kernel, stride = draw.choice([1, 1, 1, 3, 3, 3, 3, 5, 7]), draw.choice([1, 1, 1, 2])
        c_in = draw.choice([3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
        c_out = draw.choice([16, 24, 32, 64, 96, 128, 160, 256, 512, 768, 1024, 2048])
        groups = 1
        family = draw.random()
        if family < 0.25:
            groups, c_out, kernel = c_in, c_in, draw.choice([3, 3, 5, 7])
        elif family < 0.33 and c_in % 16 == 0 and c_out % 16 == 0:
            groups = draw.choice([2, 4, 8, 16])
        out = -(-side // stride)
        weights = c_out * (c_in // groups) * kernel**2
        flops = 2.0 * n * out**2 * weights
        traffic = 4.0 * n * (c_in * side**2 + c_out * out**2)
        if kernel > side or flops > LARGEST_FLOPS or traffic > LARGEST_BYTES or weights > 3e6:
            continue
        if flops + 20 * traffic > FEWEST_FLOPS:
            break
    before: nn.Module = nn.BatchNorm2d(c_in) if draw.random() < 0.5 else nn.Identity()
    layers = [
        before,
        nn.Conv2d(
            c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=draw.random() < 0.3
        ),
    ]
    norm = draw.random()
    if norm < 0.85:
        layers.append(
            nn.GroupNorm(8, c_out) if norm > 0.75 and c_out % 8 == 0 else nn.BatchNorm2d(c_out)
        )
    residual_at = len(layers) - 1 if draw.random() < 0.4 else None
    layers.append(draw.choice(_ACTIVATIONS)())
    pooling = draw.random()
    if pooling < 0.2 and out >= 4:
        layers.append(draw.choice([nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)]))
    elif pooling < 0.35:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Block(
        _Loss(layers, residual_at), lambda: torch.randn(n, c_in, side, side, requires_grad=True)
    )


def _linear(draw: random.Random) -> Block:
    while True:
        rows = draw.choice([1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
        width = draw.choice([32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 4096])
        out = draw.choice([10, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192])
        if 1e5 < 2.0 * rows * width * out < 1.2 * LARGEST_FLOPS and width * out < 1.3e7:
            break
    samples = draw.choice([1, 2, 4, 8])
    shape = (
        (samples, rows // samples, width)
        if rows % samples == 0 and rows > samples
        else (rows, width)
    )
    layers: list[nn.Module] = [nn.LayerNorm(width)] if draw.random() < 0.5 else []
    layers.append(nn.Linear(width, out, bias=draw.random() < 0.7))
    after: list[Callable[[], nn.Module]] = [
        nn.GELU,
        nn.ReLU,
        nn.SiLU,
        lambda: nn.Dropout(0.1),
        nn.Identity,
    ]
    layers.append(draw.choice(after)())
    return Block(_Loss(layers, len(layers) - 1), lambda: torch.randn(shape, requires_grad=True))


class _Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int, explicit: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.explicit, self.causal = heads, head_dim, explicit, causal
        self.qkv = nn.Linear(heads * head_dim, 3 * heads * head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if self.explicit:
            y = ((q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(n, tokens, -1)


def _attention(draw: random.Random) -> Block:
    heads, head_dim = draw.choice([2, 4, 6, 8, 12]), draw.choice([32, 48, 64, 64, 128])
    n, tokens = draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 64, 128, 197, 256, 512])
    while 4.0 * n * heads * tokens**2 * head_dim > LARGEST_FLOPS:
        tokens //= 2
    layer = _Attention(heads, head_dim, explicit=draw.random() < 0.4, causal=draw.random() < 0.4)
    return Block(
        _Loss([layer]), lambda: torch.randn(n, tokens, heads * head_dim, requires_grad=True)
    )


class _LanguageHead(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), tokens.flatten())


def _language_head(draw: random.Random) -> Block:
    vocabulary, width = (
        draw.choice([100, 1000, 5000, 20000, 32000]),
        draw.choice([64, 128, 256, 384]),
    )
    n, tokens = draw.choice([1, 4, 8]), draw.choice([16, 32, 64, 128])
    while 2.0 * n * tokens * vocabulary * width > LARGEST_FLOPS:
        tokens //= 2
    return Block(
        _LanguageHead(vocabulary, width), lambda: torch.randint(0, vocabulary, (n, tokens))
    )


class _LargeParameters(nn.Module):
    """An optimizer's work at the size of whole models: its operators take all parameters at once."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(elements) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part * x).sum() for part in self.parts)


def _large_parameters(draw: random.Random) -> Block:
    tensors = draw.choice([4, 10, 40, 150])
    elements = int(10 ** draw.uniform(6.0, 7.6)) // tensors
    return Block(_LargeParameters(tensors, elements), lambda: torch.ones(1))


def tiny_step(layers: list[nn.Module]) -> Callable[[], Any]:
    """Forward and backward of layers of 4 features on 2 samples, whose operators do next to nothing."""
    model = nn.Sequential(*layers)
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step
