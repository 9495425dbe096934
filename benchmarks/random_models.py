"""Random architectures by seed, as people train them: four families, each a task by its name.

    trainpace forecast benchmarks/random_models.py:cnn_7 --gpu A100

NAME is FAMILY_SEED with mlp, cnn, rnn or transformer. The name alone decides the architecture, on
every machine and Python: draws use only `random.Random.random`, whose sequence Python promises to
keep. An architecture is drawn again until a rough estimate says that a step of 8 samples takes
about 5 ms to 2 s on a 2-core CPU.
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from trainpace.core.records import Record

STEP_MS = (24.0, 2000.0)
"""Bounds of the rough estimate, which is of one core and 0.4 to 2.7 times the truth (88 architectures on one Xeon core)."""

T = TypeVar("T")


Activation = Literal["relu", "gelu", "silu", "tanh", "leaky_relu", "elu", "hardswish"]
Norm = Literal["none", "batch", "layer", "group"]


class Mlp(Record):
    """Feed-forward net: `widths` are the hidden layers'. `residual`: layers of equal width add their input."""

    inputs: int
    widths: tuple[int, ...]
    outputs: int
    regression: bool
    activation: Activation
    norm: Norm
    residual: bool
    dropout: float

    def rough_step_ms(self) -> float:
        """A step of 8 samples on one core, which is the weights' traffic alone: about 9 passes of 4 bytes at 10 GB/s."""
        sizes = (self.inputs, *self.widths, self.outputs)
        return 1e3 * 36 * sum(a * b for a, b in itertools.pairwise(sizes)) / 10e9


Block = Literal["plain", "residual", "bottleneck", "separable", "inverted", "convnext"]
Downsample = Literal["none", "stride", "max_pool", "avg_pool"]


class Stage(Record):
    """Alike blocks at one resolution; the first one changes the channels."""

    channels: int
    blocks: int
    downsample: Downsample


class Cnn(Record):
    """Convolutional classifier of square images.

    block: plain (VGG), residual (ResNet's basic one), bottleneck (ResNet; with `groups` ResNeXt), separable (MobileNet),
    inverted (MobileNetV2, EfficientNet with `squeeze`), convnext. `expansion` is the hidden width over the block's own.
    """

    channels: int
    image_size: int
    classes: int
    stem_channels: int
    stem_kernel: int
    stem_stride: int
    stem_pool: bool
    block: Block
    kernel: int
    groups: int
    expansion: int
    squeeze: bool
    stages: tuple[Stage, ...]
    activation: Activation
    norm: Norm
    hidden: int
    dropout: float

    def rough_step_ms(self) -> float:
        """Products at 80 GFLOP/s, depthwise ones at 8, and element-wise passes at 10 GB/s, three times forward."""
        side = -(-self.image_size // self.stem_stride)
        pixels = side * side
        dense = float(self.channels * self.stem_kernel**2 * self.stem_channels * pixels)
        depthwise, elements = 0.0, float(self.stem_channels * pixels)
        if self.stem_pool:
            side = -(-side // 2)
        width = self.stem_channels
        for stage in self.stages:
            for i in range(stage.blocks):
                if i == 0 and stage.downsample != "none":
                    side = -(-side // 2)
                c, area, k2 = stage.channels, side * side, self.kernel**2
                if self.block in ("plain", "residual"):
                    d, w, e = (
                        (width * c + (self.block == "residual") * c * c) * k2 / self.groups,
                        0,
                        2 * c,
                    )
                elif self.block == "bottleneck":
                    inner = c // self.expansion
                    d, w, e = (
                        (width + c) * inner + inner * inner * k2 / self.groups,
                        0,
                        2 * inner + c,
                    )
                elif self.block == "separable":
                    d, w, e = width * c, width * k2, width + c
                else:
                    inner = (
                        width * self.expansion if self.block == "inverted" else c * self.expansion
                    )
                    # the expansion of an inverted block runs before its stride
                    before = (
                        4
                        if self.block == "inverted" and i == 0 and stage.downsample == "stride"
                        else 1
                    )
                    d, w, e = (width * before + c) * inner, inner * k2, inner * (1 + before) + c
                dense, depthwise, elements = (
                    dense + d * area,
                    depthwise + w * area,
                    elements + e * area,
                )
                width = c
        flat = width * (side * side if self.hidden else 1)
        classifier = flat * (self.hidden or self.classes) + self.hidden * self.classes
        seconds = 3 * 8 * (2 * dense / 80e9 + 2 * depthwise / 8e9 + elements * 24 / 10e9)
        return 1e3 * (seconds + classifier * 36 / 10e9)


RnnTask = Literal["classify", "tag", "language_model", "regress"]


class Rnn(Record):
    """Recurrent net over tokens (`vocabulary` > 0, embedded) or over a series of `inputs` numbers a step.

    task: classify (one label a sequence), tag (one a step), language_model (the next token), regress (the next value).
    """

    cell: Literal["rnn_tanh", "rnn_relu", "gru", "lstm"]
    vocabulary: int
    inputs: int
    hidden: int
    layers: int
    bidirectional: bool
    sequence_length: int
    task: RnnTask
    outputs: int
    pooling: Literal["last", "mean"]
    dropout: float

    def rough_step_ms(self) -> float:
        """80 us a cell and step, products at 50 GFLOP/s, the weights' traffic."""
        gates = {"gru": 3, "lstm": 4}.get(self.cell, 1)
        directions = 2 if self.bidirectional else 1
        cells = self.layers * directions * self.sequence_length
        weights = (
            directions
            * gates
            * self.hidden
            * (self.inputs + self.hidden + (self.layers - 1) * (directions + 1) * self.hidden)
        )
        out = directions * self.hidden * self.outputs
        per_step = self.task != "classify"
        products = 8 * self.sequence_length * (weights + out * per_step)
        traffic = 36 * (weights + out + self.vocabulary * self.inputs)
        logits = 8 * self.sequence_length * self.outputs * per_step * 40
        return 1e3 * (cells * 80e-6 + 6 * products / 50e9 + (traffic + logits) / 10e9)


class Transformer(Record):
    """Transformer of plain torch.nn. encoder: one label a sequence; decoder: causal language model.

    `patch` > 0: the encoder reads patches of an image instead of tokens. `kv_heads` < `heads`: grouped-query attention.
    `builtin`: torch.nn.TransformerEncoder's own layers.
    """

    kind: Literal["encoder", "decoder"]
    vocabulary: int
    patch: int
    image_size: int
    sequence_length: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    gated: bool
    activation: Activation
    norm: Literal["layer", "rms"]
    norm_first: bool
    positions: Literal["learned", "sinusoidal", "rotary"]
    tied: bool
    builtin: bool
    classes: int
    dropout: float

    def rough_step_ms(self) -> float:
        """Products at 80 GFLOP/s, and the traffic of weights, scores and logits at 10 GB/s."""
        length = self.sequence_length
        keys = self.width * self.kv_heads // self.heads
        feed_forward = self.width * self.feed_forward * (3 if self.gated else 2)
        weights = self.layers * (2 * self.width * (self.width + keys) + feed_forward)
        table = self.vocabulary * self.width
        attention = self.layers * 2 * length * length * self.width
        decoder = self.kind == "decoder"
        products = 8 * (length * (weights + table * decoder) + attention)
        elements = (
            8
            * length
            * (
                self.layers * (14 * self.width + 4 * self.feed_forward)
                + 10 * self.vocabulary * decoder
            )
        )
        traffic = 36 * (weights + table * (1 if self.tied or not decoder else 2)) + 12 * elements
        return 1e3 * (6 * products / 80e9 + traffic / 10e9)


Architecture = Mlp | Cnn | Rnn | Transformer


def architecture(family: str, seed: int) -> Architecture:
    rng = random.Random(f"{family}:{seed}")
    while True:
        drawn = _DRAW[family](rng)
        if STEP_MS[0] <= drawn.rough_step_ms() <= STEP_MS[1]:
            return drawn


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    # not rng.choice: Python keeps only the sequence of random() the same from version to version
    return items[int(rng.random() * len(items))]


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _draw_mlp(rng: random.Random) -> Mlp:
    inputs = _pick(rng, (64, 128, 256, 512, 784, 1024, 2048, 3072, 4096))
    width = _pick(rng, (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096))
    depth = _pick(rng, (1, 2, 2, 3, 3, 4, 5, 6, 8, 12))
    shape = _pick(rng, ("constant", "constant", "pyramid", "hourglass", "residual", "free"))
    if shape == "pyramid":
        widths = tuple(max(32, width >> i) for i in range(depth))
    elif shape == "hourglass":
        widths = tuple(max(32, width >> min(i, depth - 1 - i)) for i in range(depth))
    elif shape == "free":
        widths = tuple(
            _pick(rng, (64, 100, 200, 256, 300, 500, 512, 1000, 1024, 2048, 4096))
            for _ in range(depth)
        )
    else:
        widths = (width,) * depth
    regression = _chance(rng, 0.2)
    return Mlp(
        inputs=inputs,
        widths=widths,
        outputs=_pick(rng, (1, 1, 4, 16)) if regression else _pick(rng, (2, 10, 10, 100, 1000)),
        regression=regression,
        activation=_pick(
            rng, ("relu", "relu", "relu", "gelu", "silu", "tanh", "leaky_relu", "elu")
        ),
        norm=_pick(rng, ("none", "none", "batch", "batch", "layer")),
        residual=shape == "residual",
        dropout=_pick(rng, (0.0, 0.0, 0.1, 0.2, 0.5)),
    )


def _draw_cnn(rng: random.Random) -> Cnn:
    side = _pick(rng, (28, 32, 32, 48, 64, 64, 96, 128, 160, 192, 224))
    block: Block = _pick(
        rng,
        (
            "plain",
            "plain",
            "residual",
            "residual",
            "bottleneck",
            "separable",
            "inverted",
            "convnext",
        ),
    )
    patchify = block == "convnext" and side >= 64
    stem_channels = _pick(rng, (16, 24, 32, 48, 64))
    stem_stride = 4 if patchify else 2 if side >= 96 or (side >= 64 and _chance(rng, 0.5)) else 1
    stem_pool = not patchify and side >= 128 and _chance(rng, 0.5)
    norms: tuple[Norm, ...] = ("batch", "batch", "batch", "group", "layer")
    remaining = side // stem_stride // (2 if stem_pool else 1)
    groups = _pick(rng, (1, 1, 1, 2, 4, 8))
    stages: list[Stage] = []
    growth = _pick(rng, (1.5, 2, 2, 2))
    count = _pick(rng, (2, 3, 3, 4, 4, 5))
    downsample: Downsample = _pick(rng, ("stride", "stride", "max_pool", "avg_pool"))
    # an inner width of a fourth still divides into 8 groups
    channels, widest, multiple = (
        (4 * stem_channels, 2048, 32) if block == "bottleneck" else (stem_channels, 768, 16)
    )
    for i in range(count):
        shrinks = (
            i > 0 and remaining >= 8
        )  # down to 4 x 4, so that a norm has values to work with at batch size 1 too
        if shrinks:
            remaining = -(-remaining // 2)
        repeats = _pick(rng, (1, 1, 2, 2, 3, 4))
        stages.append(
            Stage(channels=channels, blocks=repeats, downsample=downsample if shrinks else "none")
        )
        channels = min(widest, int(channels * growth) // multiple * multiple)
    return Cnn(
        channels=1 if side == 28 else 3,
        image_size=side,
        classes=_pick(rng, (10, 10, 100, 1000)),
        stem_channels=stem_channels,
        stem_kernel=4 if patchify else _pick(rng, (3, 3, 5, 7)),
        stem_stride=stem_stride,
        stem_pool=stem_pool,
        block=block,
        kernel=7 if block == "convnext" else _pick(rng, (3, 3, 3, 5)),
        groups=groups if block in ("plain", "residual", "bottleneck") else 1,
        expansion=_pick(rng, (2, 4)) if block == "bottleneck" else _pick(rng, (2, 3, 4, 6)),
        squeeze=block == "inverted" and _chance(rng, 0.5),
        stages=tuple(stages),
        activation=_pick(
            rng, ("relu", "relu", "relu", "gelu", "silu", "leaky_relu", "elu", "hardswish")
        ),
        norm=_pick(rng, (*norms, "none") if block == "plain" else norms),
        hidden=_pick(rng, (128, 512, 1024)) if block == "plain" and _chance(rng, 0.5) else 0,
        dropout=_pick(rng, (0.0, 0.0, 0.1, 0.2, 0.5)),
    )


def _draw_rnn(rng: random.Random) -> Rnn:
    task: RnnTask = _pick(rng, ("classify", "classify", "tag", "language_model", "regress"))
    tokens = task in ("tag", "language_model") or (task == "classify" and _chance(rng, 0.7))
    vocabulary = _pick(rng, (100, 1000, 5000, 10000, 20000)) if tokens else 0
    layers = _pick(rng, (1, 1, 2, 2, 3))
    bidirectional = task in ("classify", "tag") and _chance(rng, 0.5)
    cells = layers * (2 if bidirectional else 1)
    inputs = _pick(rng, (32, 64, 100, 128, 256, 300, 512) if tokens else (1, 4, 8, 16, 40, 80, 128))
    labels = {
        "classify": (2, 5, 20, 100),
        "tag": (9, 17, 50),
        "regress": (inputs,),
        "language_model": (vocabulary,),
    }
    return Rnn(
        cell=_pick(rng, ("rnn_tanh", "rnn_relu", "gru", "gru", "lstm", "lstm", "lstm")),
        vocabulary=vocabulary,
        inputs=inputs,
        hidden=_pick(rng, (64, 100, 128, 200, 256, 384, 512, 650, 1024)),
        layers=layers,
        bidirectional=bidirectional,
        # every step of every cell is traced on its own: 192 of them take about 4 s
        sequence_length=_pick(rng, [n for n in (16, 24, 32, 48, 64, 96, 128) if n * cells <= 192]),
        task=task,
        outputs=_pick(rng, labels[task]),
        pooling=_pick(rng, ("last", "mean")),
        dropout=_pick(rng, (0.0, 0.1, 0.2, 0.5)),
    )


def _draw_transformer(rng: random.Random) -> Transformer:
    decoder = _chance(rng, 0.5)
    patches = not decoder and _chance(rng, 0.4)
    image_size, patch = (
        _pick(rng, ((32, 4), (64, 8), (96, 8), (128, 16), (224, 16), (224, 32)))
        if patches
        else (0, 0)
    )
    builtin = not decoder and _chance(rng, 0.3)
    head_size = _pick(rng, (32, 48, 64, 64, 80, 128))
    heads = _pick(rng, (2, 3, 4, 6, 8, 12))
    gated = not builtin and _chance(rng, 0.3)
    width = head_size * heads
    return Transformer(
        kind="decoder" if decoder else "encoder",
        vocabulary=0 if patches else _pick(rng, (256, 1000, 5000, 8000, 16000, 30000)),
        patch=patch,
        image_size=image_size,
        sequence_length=(
            (image_size // patch) ** 2
            if patches
            else _pick(rng, (16, 32, 64, 64, 128, 128, 256, 512))
        ),
        width=width,
        layers=_pick(rng, (1, 2, 2, 3, 4, 6, 8, 12)),
        heads=heads,
        kv_heads=(
            _pick(rng, [n for n in (1, 2, 4) if heads % n == 0])
            if decoder and _chance(rng, 0.3)
            else heads
        ),
        # two thirds, so that a gated layer has as many weights (Shazeer 2020)
        feed_forward=(width * 8 // 3) // 16 * 16 if gated else width * _pick(rng, (2, 4, 4, 4)),
        gated=gated,
        activation="silu" if gated else _pick(rng, ("relu", "gelu", "gelu")),
        norm="rms" if not builtin and _chance(rng, 0.3) else "layer",
        norm_first=_chance(rng, 0.7),
        positions=_pick(
            rng,
            (
                ("learned", "sinusoidal")
                if builtin
                else ("learned", "learned", "sinusoidal", "rotary")
            ),
        ),
        tied=decoder and _chance(rng, 0.5),
        builtin=builtin,
        classes=0 if decoder else _pick(rng, (2, 10, 100, 1000)),
        dropout=_pick(rng, (0.0, 0.0, 0.1)),
    )


_DRAW: dict[str, Callable[[random.Random], Architecture]]
_DRAW = {"mlp": _draw_mlp, "cnn": _draw_cnn, "rnn": _draw_rnn, "transformer": _draw_transformer}
FAMILIES = tuple(_DRAW)


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
Build = tuple[nn.Module, Loss, "Samples"]
Shape = tuple[tuple[int, ...], int]
"""The dims of a sample's tensor, and the number of classes or tokens that its whole numbers name; 0 for real numbers."""


def __getattr__(name: str) -> Callable[[], dict[str, Any]]:
    """Return the function that builds FAMILY_SEED. Trainpace calls it for FILE.py:FAMILY_SEED."""
    named = re.fullmatch(rf"({'|'.join(FAMILIES)})_(\d+)", name)
    if named is None:
        raise AttributeError(name)
    return lambda: build(named[1], int(named[2]))


def build(family: str, seed: int) -> dict[str, Any]:
    """Return the parts of a task: a model, a loss and random samples."""
    drawn = architecture(family, seed)
    if isinstance(drawn, Mlp):
        model, loss, samples = _mlp(drawn)
    elif isinstance(drawn, Cnn):
        model, loss, samples = _image_classifier(
            _Cnn(drawn), drawn.channels, drawn.image_size, drawn.classes
        )
    else:
        model, loss, samples = _rnn(drawn) if isinstance(drawn, Rnn) else _transformer(drawn)
    return {"model": model, "loss": loss, "dataset": samples}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples. `inputs` and `targets` are the shape of a sample and a number of classes."""

    def __init__(self, inputs: Shape, targets: Shape) -> None:
        self.shapes = inputs, targets

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        seeded = torch.Generator().manual_seed(index)
        inputs, targets = (
            torch.randint(0, classes, dims, generator=seeded)
            if classes
            else torch.randn(dims, generator=seeded)
            for dims, classes in self.shapes
        )
        return inputs, targets


def _built(model: nn.Module, inputs: Shape, targets: Shape) -> Build:
    return model, _cross_entropy if targets[1] else F.mse_loss, Samples(inputs, targets)


def _image_classifier(model: nn.Module, channels: int, side: int, classes: int) -> Build:
    return _built(model, ((channels, side, side), 0), ((), classes))


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
    return _built(nn.Sequential(*layers), ((a.inputs,), 0), targets)


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
    return _built(_Rnn(a), inputs, targets)


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
    return _built(_Transformer(a), tokens, targets)


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
