"""Build the random architectures that `generator` draws, as tasks."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainpace.core.errors import TrainpaceError
from trainpace.workload.generator import (
    Activation,
    Cnn,
    Mlp,
    Norm,
    Rnn,
    Stage,
    Transformer,
    architecture,
)

_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "hardswish": nn.Hardswish,
}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeBatch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
Build = tuple[nn.Module, Loss, MakeBatch, str, int | None]
"""Model, loss of (output, target), make_batch, one sample in words, sequence length."""
Shape = tuple[tuple[int, ...], int]
"""The dims of a sample's tensor, and the number of classes or tokens that its whole numbers name; 0 for real numbers."""


def build_generated(spec: str, sequence_length: int | None, image_size: int | None) -> Build:
    """The model of ``random:FAMILY:SEED`` with its loss and batches.

    Another sequence length or image size than the drawn one keeps every width. Raises `TrainpaceError` where the
    architecture has none.
    """
    drawn = architecture(spec)
    has_length = isinstance(drawn, Rnn) or (isinstance(drawn, Transformer) and not drawn.patch)
    has_image = isinstance(drawn, Cnn) or (isinstance(drawn, Transformer) and drawn.patch > 0)
    if sequence_length is not None:
        if not has_length:
            raise TrainpaceError(f"{spec} has no sequence length.", "Leave --sequence-length out.")
        drawn = msgspec.structs.replace(drawn, sequence_length=sequence_length)
    if image_size is not None:
        if not has_image:
            raise TrainpaceError(f"{spec} takes no images.", "Leave --image-size out.")
        least = drawn.patch if isinstance(drawn, Transformer) else 28
        if image_size < least or (isinstance(drawn, Transformer) and image_size % drawn.patch):
            raise TrainpaceError(
                f"{spec} cannot take images of side {image_size}.", f"Try a multiple of {least}."
            )
        drawn = msgspec.structs.replace(drawn, image_size=image_size)
        if isinstance(drawn, Transformer):
            drawn = msgspec.structs.replace(drawn, sequence_length=(image_size // drawn.patch) ** 2)
    if isinstance(drawn, Mlp):
        return _mlp(drawn)
    if isinstance(drawn, Cnn):
        return _image_classifier(_Cnn(drawn), drawn.channels, drawn.image_size, drawn.classes)
    return _rnn(drawn) if isinstance(drawn, Rnn) else _transformer(drawn)


def _built(
    model: nn.Module, inputs: Shape, targets: Shape, sample: str, length: int | None = None
) -> Build:
    def numbers(n: int, dims: tuple[int, ...], classes: int) -> torch.Tensor:
        return torch.randint(0, classes, (n, *dims)) if classes else torch.randn(n, *dims)

    def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers(n, *inputs), numbers(n, *targets)

    return model, _cross_entropy if targets[1] else F.mse_loss, make_batch, sample, length


def _image_classifier(model: nn.Module, channels: int, side: int, classes: int) -> Build:
    return _built(
        model, ((channels, side, side), 0), ((), classes), f"{channels} x {side} x {side} image"
    )


def _mlp(a: Mlp) -> Build:
    layers: list[nn.Module] = []
    width = a.inputs
    for wide in a.widths:
        layer: list[nn.Module] = [nn.Linear(width, wide, bias=a.norm != "batch")]
        if a.norm != "none":
            layer.append(nn.BatchNorm1d(wide) if a.norm == "batch" else nn.LayerNorm(wide))
        layer += [_ACTIVATIONS[a.activation](), *_drop(a.dropout)]
        layers += [_Residual(nn.Sequential(*layer))] if a.residual and width == wide else layer
        width = wide
    layers.append(nn.Linear(width, a.outputs))
    targets = ((a.outputs,), 0) if a.regression else ((), a.outputs)
    return _built(nn.Sequential(*layers), ((a.inputs,), 0), targets, f"{a.inputs} numbers")


class _Residual(nn.Module):
    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = (
            body,
            shortcut or nn.Identity(),
            after or nn.Identity(),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.body(x) + self.shortcut(x))


class _SqueezeExcitation(nn.Module):
    """Hu et al. 2017."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 16)
        squeeze = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.ReLU()]
        self.gate = nn.Sequential(*squeeze, nn.Conv2d(inner, channels, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.gate(x)


class _Cnn(nn.Module):
    def __init__(self, a: Cnn) -> None:
        super().__init__()
        self.a = a
        stem = self._conv(a.channels, a.stem_channels, a.stem_kernel, a.stem_stride)
        stem += [nn.MaxPool2d(3, 2, 1)] if a.stem_pool else []
        self.stem = nn.Sequential(*stem)
        stages, width = [], a.stem_channels
        for stage in a.stages:
            stages.append(self._stage(width, stage))
            width = stage.channels
        self.stages = nn.Sequential(*stages)
        if a.hidden:
            side = 4
            head = [
                nn.AdaptiveAvgPool2d(side),
                nn.Flatten(),
                nn.Linear(width * side * side, a.hidden),
            ]
            head += [
                _ACTIVATIONS[a.activation](),
                *_drop(a.dropout),
                nn.Linear(a.hidden, a.classes),
            ]
        else:
            head = [
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                *_drop(a.dropout),
                nn.Linear(width, a.classes),
            ]
        self.head = nn.Sequential(*head)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.stages(self.stem(x)))

    def _conv(
        self, n_in: int, n_out: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True
    ) -> list[nn.Module]:
        """Convolution, norm, activation. Even kernels are patches without overlap."""
        padding = kernel // 2 if kernel % 2 else 0
        bias = self.a.norm == "none"
        layers: list[nn.Module] = [
            nn.Conv2d(n_in, n_out, kernel, stride, padding, groups=groups, bias=bias)
        ]
        layers += _norm2d(self.a.norm, n_out)
        return [*layers, _ACTIVATIONS[self.a.activation]()] if act else layers

    def _stage(self, width: int, stage: Stage) -> nn.Module:
        layers: list[nn.Module] = []
        if stage.downsample == "max_pool":
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
        elif stage.downsample == "avg_pool":
            layers.append(nn.AvgPool2d(2, 2, ceil_mode=True))
        for i in range(stage.blocks):
            stride = 2 if i == 0 and stage.downsample == "stride" else 1
            layers.append(self._block(width, stage.channels, stride))
            width = stage.channels
        return nn.Sequential(*layers)

    def _block(self, n_in: int, n_out: int, stride: int) -> nn.Module:
        a, act = self.a, _ACTIVATIONS[self.a.activation]
        changes = stride != 1 or n_in != n_out
        shortcut = (
            nn.Sequential(*self._conv(n_in, n_out, 1, stride, act=False)) if changes else None
        )
        if a.block == "plain":
            return nn.Sequential(*self._conv(n_in, n_out, a.kernel, stride, a.groups))
        if a.block == "residual":
            body = self._conv(n_in, n_out, a.kernel, stride, a.groups)
            body += self._conv(n_out, n_out, a.kernel, 1, a.groups, act=False)
            return _Residual(nn.Sequential(*body), shortcut, act())
        if a.block == "bottleneck":
            inner = n_out // a.expansion
            body = [
                *self._conv(n_in, inner, 1),
                *self._conv(inner, inner, a.kernel, stride, a.groups),
            ]
            return _Residual(
                nn.Sequential(*body, *self._conv(inner, n_out, 1, act=False)), shortcut, act()
            )
        if a.block == "separable":
            return nn.Sequential(
                *self._conv(n_in, n_in, a.kernel, stride, n_in), *self._conv(n_in, n_out, 1)
            )
        if a.block == "inverted":
            inner = n_in * a.expansion
            body = [*self._conv(n_in, inner, 1), *self._conv(inner, inner, a.kernel, stride, inner)]
            body += [_SqueezeExcitation(inner)] if a.squeeze else []
            inverted = nn.Sequential(*body, *self._conv(inner, n_out, 1, act=False))
            return inverted if changes else _Residual(inverted)
        widen = [nn.Conv2d(n_in, n_out, stride, stride), *_norm2d(a.norm, n_out)] if changes else []
        inner = n_out * a.expansion
        body = [
            nn.Conv2d(n_out, n_out, a.kernel, 1, a.kernel // 2, groups=n_out),
            *_norm2d(a.norm, n_out),
        ]
        body += [nn.Conv2d(n_out, inner, 1), act(), nn.Conv2d(inner, n_out, 1)]
        return nn.Sequential(*widen, _Residual(nn.Sequential(*body)))


def _norm2d(norm: Norm, channels: int) -> list[nn.Module]:
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    # one group is layer norm over channels and pixels, as torch users write it for images
    groups = 1 if norm == "layer" else math.gcd(channels, 8)
    return [] if norm == "none" else [nn.GroupNorm(groups, channels)]


class _Rnn(nn.Module):
    def __init__(self, a: Rnn) -> None:
        super().__init__()
        self.a = a
        self.embedding = nn.Embedding(a.vocabulary, a.inputs) if a.vocabulary else nn.Identity()
        between = a.dropout if a.layers > 1 else 0.0
        options = {"batch_first": True, "bidirectional": a.bidirectional, "dropout": between}
        cell, _, nonlinearity = a.cell.partition("_")
        if nonlinearity:
            self.recurrent: nn.Module = nn.RNN(
                a.inputs, a.hidden, a.layers, nonlinearity=nonlinearity, **options
            )
        else:
            self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](
                a.inputs, a.hidden, a.layers, **options
            )
        self.dropout = nn.Dropout(a.dropout)
        self.head = nn.Linear(a.hidden * (2 if a.bidirectional else 1), a.outputs)

    def forward(self, x: torch.Tensor) -> Any:
        out, _ = self.recurrent(self.embedding(x))
        if self.a.task == "classify":
            out = out.mean(1) if self.a.pooling == "mean" else out[:, -1]
        return self.head(self.dropout(out))


def _rnn(a: Rnn) -> Build:
    length = a.sequence_length
    inputs = ((length,), a.vocabulary) if a.vocabulary else ((length, a.inputs), 0)
    targets = (
        ((length, a.outputs), 0)
        if a.task == "regress"
        else ((length,) * (a.task != "classify"), a.outputs)
    )
    unit = "tokens" if a.vocabulary else f"steps of {a.inputs} numbers"
    return _built(_Rnn(a), inputs, targets, f"{length} {unit}", length)


class _Attention(nn.Module):
    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, a: Transformer) -> None:
        super().__init__()
        self.a = a
        self.head_size = a.width // a.heads
        self.qkv = nn.Linear(a.width, self.head_size * (a.heads + 2 * a.kv_heads))
        self.out = nn.Linear(a.width, a.width)
        self.rotary = a.positions == "rotary"
        if self.rotary:
            angles = _angles(a.sequence_length, self.head_size)
            self.register_buffer("cosine", angles.cos(), persistent=False)
            self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        a, size = self.a, self.head_size
        n, length, _ = x.shape
        parts = self.qkv(x).split([a.heads * size, a.kv_heads * size, a.kv_heads * size], dim=-1)
        q, k, v = (part.view(n, length, -1, size).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = self._turn(q), self._turn(k)
        if a.kv_heads < a.heads:
            k, v = (t.repeat_interleave(a.heads // a.kv_heads, dim=1) for t in (k, v))
        dropout = a.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=a.kind == "decoder"
        )
        return self.out(mixed.transpose(1, 2).reshape(n, length, a.width))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions (Su et al. 2021), halves paired."""
        first, second = x.chunk(2, dim=-1)
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class _FeedForward(nn.Module):
    def __init__(self, a: Transformer) -> None:
        super().__init__()
        self.gated = a.gated
        self.up = nn.Linear(a.width, a.feed_forward * (2 if a.gated else 1))
        self.activation = _ACTIVATIONS[a.activation]()
        self.dropout = nn.Dropout(a.dropout)
        self.down = nn.Linear(a.feed_forward, a.width)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.activation(gate) * x
        else:
            x = self.activation(x)
        return self.down(self.dropout(x))


class _Layer(nn.Module):
    def __init__(self, a: Transformer) -> None:
        super().__init__()
        self.norm_first = a.norm_first
        self.attention, self.feed_forward = _Attention(a), _FeedForward(a)
        self.first, self.second = _sequence_norm(a), _sequence_norm(a)
        self.dropout = nn.Dropout(a.dropout)

    def forward(self, x: torch.Tensor) -> Any:
        if self.norm_first:
            x = x + self.dropout(self.attention(self.first(x)))
            return x + self.dropout(self.feed_forward(self.second(x)))
        x = self.first(x + self.dropout(self.attention(x)))
        return self.second(x + self.dropout(self.feed_forward(x)))


class _Transformer(nn.Module):
    positions: torch.Tensor

    def __init__(self, a: Transformer) -> None:
        super().__init__()
        self.a = a
        self.embedding: nn.Module
        if a.patch:
            self.embedding = nn.Sequential(nn.Conv2d(3, a.width, a.patch, a.patch), nn.Flatten(2))
        else:
            self.embedding = nn.Embedding(a.vocabulary, a.width)
            nn.init.normal_(self.embedding.weight, std=0.02)
        if a.positions == "learned":
            self.positions = nn.Parameter(0.02 * torch.randn(a.sequence_length, a.width))
        elif a.positions == "sinusoidal":
            angles = _angles(a.sequence_length, a.width)
            self.register_buffer(
                "positions", torch.cat((angles.sin(), angles.cos()), dim=-1), persistent=False
            )
        self.dropout = nn.Dropout(a.dropout)
        if a.builtin:
            layer = nn.TransformerEncoderLayer(
                a.width,
                a.heads,
                a.feed_forward,
                a.dropout,
                a.activation,
                batch_first=True,
                norm_first=a.norm_first,
            )
            self.layers: nn.Module = nn.TransformerEncoder(
                layer, a.layers, enable_nested_tensor=False
            )
        else:
            self.layers = nn.Sequential(*(_Layer(a) for _ in range(a.layers)))
        self.norm = _sequence_norm(a) if a.norm_first else nn.Identity()
        self.head = nn.Linear(a.width, a.classes or a.vocabulary, bias=not a.tied)
        if a.tied:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embedding(x)
        if self.a.patch:
            x = x.transpose(1, 2)
        if self.a.positions != "rotary":
            x = x + self.positions.to(x.dtype)
        x = self.norm(self.layers(self.dropout(x)))
        return self.head(x.mean(1) if self.a.kind == "encoder" else x)


def _transformer(a: Transformer) -> Build:
    if a.patch:
        return _image_classifier(_Transformer(a), 3, a.image_size, a.classes)
    length = a.sequence_length
    tokens: Shape = ((length,), a.vocabulary)
    targets = tokens if a.kind == "decoder" else ((), a.classes)
    return _built(_Transformer(a), tokens, targets, f"{length} tokens", length)


def _sequence_norm(a: Transformer) -> nn.Module:
    return nn.RMSNorm(a.width) if a.norm == "rms" else nn.LayerNorm(a.width)


def _angles(length: int, size: int) -> torch.Tensor:
    """length x size/2 angles of positions (Vaswani et al. 2017)."""
    frequencies = torch.exp(torch.arange(0, size, 2) * (-math.log(10000.0) / size))
    return torch.arange(length)[:, None] * frequencies


def _drop(p: float) -> list[nn.Module]:
    return [nn.Dropout(p)] if p else []


def _cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the last dim of (n, classes) or (n, length, classes) scores."""
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())
