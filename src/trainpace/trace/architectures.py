"""The nouns of random architectures: what `generator` draws and `generated` builds. No torch here."""

import itertools
from typing import Literal

from trainpace.records import Record

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
                    d, w, e = (width * c + (self.block == "residual") * c * c) * k2 / self.groups, 0, 2 * c
                elif self.block == "bottleneck":
                    inner = c // self.expansion
                    d, w, e = (width + c) * inner + inner * inner * k2 / self.groups, 0, 2 * inner + c
                elif self.block == "separable":
                    d, w, e = width * c, width * k2, width + c
                else:
                    inner = width * self.expansion if self.block == "inverted" else c * self.expansion
                    # the expansion of an inverted block runs before its stride
                    before = 4 if self.block == "inverted" and i == 0 and stage.downsample == "stride" else 1
                    d, w, e = (width * before + c) * inner, inner * k2, inner * (1 + before) + c
                dense, depthwise, elements = dense + d * area, depthwise + w * area, elements + e * area
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
        weights = directions * gates * self.hidden * (
            self.inputs + self.hidden + (self.layers - 1) * (directions + 1) * self.hidden
        )  # fmt: skip
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
            8 * length * (self.layers * (14 * self.width + 4 * self.feed_forward) + 10 * self.vocabulary * decoder)
        )
        traffic = 36 * (weights + table * (1 if self.tied or not decoder else 2)) + 12 * elements
        return 1e3 * (6 * products / 80e9 + traffic / 10e9)


Architecture = Mlp | Cnn | Rnn | Transformer
