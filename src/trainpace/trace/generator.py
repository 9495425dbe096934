"""Random architectures by seed, as people train them: ``random:mlp:SEED``, ``random:cnn:SEED``, ``random:rnn:SEED`` and
``random:transformer:SEED``.

The spec alone decides the architecture, on every machine and Python: draws use `random.Random.random` alone, the one
method whose sequence Python promises to keep. Architectures are drawn again until a rough estimate says that a step of
8 samples takes about 5 ms to 2 s on a 2-core CPU. This module imports no torch; `generated` builds what is drawn here.
"""

import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, get_args

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.trace.architectures import (
    Architecture,
    Block,
    Cnn,
    Downsample,
    Mlp,
    Norm,
    Rnn,
    RnnTask,
    Stage,
    Transformer,
)

Family = Literal["mlp", "cnn", "rnn", "transformer"]
RANDOM_FAMILIES: tuple[Family, ...] = get_args(Family)
STEP_MS = (24.0, 2000.0)
"""Bounds of the rough estimate, which is of one core and 0.4 to 2.7 times the truth (88 architectures on one Xeon core)."""

T = TypeVar("T")


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


def parse_random(spec: str) -> tuple[Family, int]:
    """The family and seed of ``random:FAMILY:SEED``."""
    parts = spec.split(":")
    form = "Write random:FAMILY:SEED, such as random:cnn:7."
    if len(parts) != 3 or parts[0] != "random":
        raise TrainpaceError(f"{spec!r} names no random model.", form)
    family = next((name for name in RANDOM_FAMILIES if name == parts[1]), None)
    if family is None:
        families = f"Families: {', '.join(RANDOM_FAMILIES)}."
        raise UnknownName("family of random models", parts[1], RANDOM_FAMILIES, families)
    if not (parts[2].isascii() and parts[2].isdecimal() and len(parts[2]) <= 18):
        raise TrainpaceError(f"the seed {parts[2]!r} of {spec} is not a whole number from 0 to 10^18.", form)
    return family, int(parts[2])


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    # not rng.choice: Python keeps only the sequence of random() the same from version to version
    return items[int(rng.random() * len(items))]


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


_BLOCKS: tuple[Block, ...] = (
    "plain", "plain", "residual", "residual", "bottleneck", "separable", "inverted", "convnext",
)  # fmt: skip
_DOWNSAMPLES: tuple[Downsample, ...] = ("stride", "stride", "max_pool", "avg_pool")
_RNN_TASKS: tuple[RnnTask, ...] = ("classify", "classify", "tag", "language_model", "regress")


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
        widths = tuple(_pick(rng, (64, 100, 200, 256, 300, 500, 512, 1000, 1024, 2048, 4096)) for _ in range(depth))
    else:
        widths = (width,) * depth
    regression = _chance(rng, 0.2)
    return Mlp(
        inputs=inputs,
        widths=widths,
        outputs=_pick(rng, (1, 1, 4, 16)) if regression else _pick(rng, (2, 10, 10, 100, 1000)),
        regression=regression,
        activation=_pick(rng, ("relu", "relu", "relu", "gelu", "silu", "tanh", "leaky_relu", "elu")),
        norm=_pick(rng, ("none", "none", "batch", "batch", "layer")),
        residual=shape == "residual",
        dropout=_pick(rng, (0.0, 0.0, 0.1, 0.2, 0.5)),
    )


def _cnn(rng: random.Random) -> Cnn:
    side = _pick(rng, (28, 32, 32, 48, 64, 64, 96, 128, 160, 192, 224))
    block = _pick(rng, _BLOCKS)
    patchify = block == "convnext" and side >= 64
    stem_channels = _pick(rng, (16, 24, 32, 48, 64))
    stem_stride = 4 if patchify else 2 if side >= 96 or (side >= 64 and _chance(rng, 0.5)) else 1
    stem_pool = not patchify and side >= 128 and _chance(rng, 0.5)
    norms: tuple[Norm, ...] = ("batch", "batch", "batch", "group", "layer")
    remaining = side // stem_stride // (2 if stem_pool else 1)
    groups = _pick(rng, (1, 1, 1, 2, 4, 8))
    stages: list[Stage] = []
    channels = stem_channels
    growth = _pick(rng, (1.5, 2, 2, 2))
    count = _pick(rng, (2, 3, 3, 4, 4, 5))
    downsample = _pick(rng, _DOWNSAMPLES)
    widest = 2048 if block == "bottleneck" else 768
    if block == "bottleneck":
        channels *= 4
    for i in range(count):
        shrinks = i > 0 and remaining >= 8  # down to 4 x 4, so that a norm has values to work with at batch size 1 too
        if shrinks:
            remaining = -(-remaining // 2)
        stages.append(
            Stage(
                channels=channels, blocks=_pick(rng, (1, 1, 2, 2, 3, 4)), downsample=downsample if shrinks else "none"
            )
        )
        # an inner width of a fourth still divides into 8 groups
        channels = min(
            widest, int(channels * growth) // 32 * 32 if block == "bottleneck" else int(channels * growth) // 16 * 16
        )
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
        activation=_pick(rng, ("relu", "relu", "relu", "gelu", "silu", "leaky_relu", "elu", "hardswish")),
        norm=_pick(rng, (*norms, "none") if block == "plain" else norms),
        hidden=_pick(rng, (128, 512, 1024)) if block == "plain" and _chance(rng, 0.5) else 0,
        dropout=_pick(rng, (0.0, 0.0, 0.1, 0.2, 0.5)),
    )


def _rnn(rng: random.Random) -> Rnn:
    task = _pick(rng, _RNN_TASKS)
    tokens = task in ("tag", "language_model") or (task == "classify" and _chance(rng, 0.7))
    vocabulary = _pick(rng, (100, 1000, 5000, 10000, 20000)) if tokens else 0
    layers = _pick(rng, (1, 1, 2, 2, 3))
    bidirectional = task in ("classify", "tag") and _chance(rng, 0.5)
    cells = layers * (2 if bidirectional else 1)
    inputs = _pick(rng, (32, 64, 100, 128, 256, 300, 512) if tokens else (1, 4, 8, 16, 40, 80, 128))
    labels = {"classify": (2, 5, 20, 100), "tag": (9, 17, 50), "regress": (inputs,), "language_model": (vocabulary,)}
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
    image_size, patch = _pick(rng, ((32, 4), (64, 8), (96, 8), (128, 16), (224, 16), (224, 32))) if patches else (0, 0)
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
        sequence_length=(image_size // patch) ** 2 if patches else _pick(rng, (16, 32, 64, 64, 128, 128, 256, 512)),
        width=width,
        layers=_pick(rng, (1, 2, 2, 3, 4, 6, 8, 12)),
        heads=heads,
        kv_heads=_pick(rng, [n for n in (1, 2, 4) if heads % n == 0]) if decoder and _chance(rng, 0.3) else heads,
        # two thirds, so that a gated layer has as many weights (Shazeer 2020)
        feed_forward=(width * 8 // 3) // 16 * 16 if gated else width * _pick(rng, (2, 4, 4, 4)),
        gated=gated,
        activation="silu" if gated else _pick(rng, ("relu", "gelu", "gelu")),
        norm="rms" if not builtin and _chance(rng, 0.3) else "layer",
        norm_first=_chance(rng, 0.7),
        positions=_pick(rng, ("learned", "sinusoidal") if builtin else ("learned", "learned", "sinusoidal", "rotary")),
        tied=decoder and _chance(rng, 0.5),
        builtin=builtin,
        classes=0 if decoder else _pick(rng, (2, 10, 100, 1000)),
        dropout=_pick(rng, (0.0, 0.0, 0.1)),
    )


_DRAW: dict[Family, Callable[[random.Random], Architecture]] = {
    "mlp": _mlp, "cnn": _cnn, "rnn": _rnn, "transformer": _transformer,
}  # fmt: skip
