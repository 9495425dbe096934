"""Random architectures by seed, as people train them: ``random:mlp:SEED``, ``random:cnn:SEED``, ``random:rnn:SEED`` and
``random:transformer:SEED``.

The spec alone decides the architecture, on every machine and Python: draws use `random.Random.random` alone, the one
method whose sequence Python promises to keep. Architectures are drawn again until a rough estimate says that a step of
8 samples takes about 5 ms to 2 s on a 2-core CPU. This module imports no torch; `generated` builds what is drawn here.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from trainpace.core.errors import TrainpaceError, UnknownName
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


def architecture(spec: str) -> Architecture:
    """The architecture that `spec` names. Raises `TrainpaceError` for a family or seed that is none."""
    family, seed = parse_random(spec)
    rng = random.Random(f"{family}:{seed}")
    while True:
        drawn = _DRAW[family](rng)
        if STEP_MS[0] <= drawn.rough_step_ms() <= STEP_MS[1]:
            return drawn


def is_random(spec: str) -> bool:
    return spec == "random" or spec.startswith("random:")


def parse_random(spec: str) -> tuple[str, int]:
    parts = spec.split(":")
    form = "Write random:FAMILY:SEED, such as random:cnn:7."
    if len(parts) != 3 or parts[0] != "random":
        raise TrainpaceError(f"{spec!r} names no random model.", form)
    if parts[1] not in RANDOM_FAMILIES:
        families = f"Families: {', '.join(RANDOM_FAMILIES)}."
        raise UnknownName("family of random models", parts[1], RANDOM_FAMILIES, families)
    if not (parts[2].isascii() and parts[2].isdecimal() and len(parts[2]) <= 18):
        raise TrainpaceError(
            f"the seed {parts[2]!r} of {spec} is not a whole number from 0 to 10^18.", form
        )
    return parts[1], int(parts[2])


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    # not rng.choice: Python keeps only the sequence of random() the same from version to version
    return items[int(rng.random() * len(items))]


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _mlp(rng: random.Random) -> Mlp:
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


def _cnn(rng: random.Random) -> Cnn:
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


def _rnn(rng: random.Random) -> Rnn:
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


def _transformer(rng: random.Random) -> Transformer:
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
_DRAW = {"mlp": _mlp, "cnn": _cnn, "rnn": _rnn, "transformer": _transformer}
RANDOM_FAMILIES = tuple(_DRAW)
