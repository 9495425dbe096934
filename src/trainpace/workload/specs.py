"""Define the built-in models, and build the task that a model spec names.

The built-in models do not need torchvision. They match its layers, names and parameter counts.
VGG: Simonyan and Zisserman 2014. ResNet: He et al. 2015, with the stride in the 3x3 convolution as
in torchvision. MobileNet v1: Howard et al. 2017. MobileNetV2: Sandler et al. 2018.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.workload.hugging_face import diffusers_task, transformers_task
from trainpace.workload.model_spec import FORMS, LIBRARIES, ModelSpec, import_package
from trainpace.workload.task import Task, image_task
from trainpace.workload.user_task import task_from_file

_VGG = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
_RESNET = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
    "resnet152": (True, (3, 8, 36, 3)),
}


def vgg(
    convolutions: tuple[int, ...], classes: int = 1000, image_size: int | None = None
) -> nn.Module:
    """Return a VGG model.

    Args:
        convolutions: Number of 3x3 convolutions in each of the five stages.
        classes: Number of classes.
        image_size: If given, return Keras' VGG for images of this side in pixels. It has no
            adaptive pooling, so its classifier grows with the image.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, repeats in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    side = 7 if image_size is None else image_size // 32
    pooling = nn.AdaptiveAvgPool2d(7) if image_size is None else nn.Identity()
    head = [
        nn.Linear(512 * side * side, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
    ]
    head += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes)]
    return nn.Sequential(nn.Sequential(*layers), pooling, nn.Flatten(), nn.Sequential(*head))


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = width * (4 if bottleneck else 1)
        shapes = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        if not bottleneck:
            shapes = [(channels, width, 3, stride), (width, out, 3, 1)]
        layers: list[nn.Module] = []
        for n_in, n_out, kernel, step in shapes:
            layers += [
                nn.Conv2d(n_in, n_out, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(n_out),
            ]
            layers.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*layers[:-1])
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> Any:
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(bottleneck: bool, blocks: tuple[int, ...], classes: int = 1000) -> nn.Module:
    """Return a ResNet.

    Args:
        bottleneck: True for blocks with three convolutions, False for blocks with two.
        blocks: Number of blocks in each stage.
        classes: Number of classes.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for stage, repeats in enumerate(blocks):
        for i in range(repeats):
            layers.append(_Residual(channels, 64 << stage, 2 if stage and not i else 1, bottleneck))
            channels = (64 << stage) * (4 if bottleneck else 1)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class _InvertedResidual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers = [] if expansion == 1 else [_conv_relu6(channels, hidden, 1)]
        layers += [
            _conv_relu6(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, out, 1, bias=False),
        ]
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(out))
        self.adds = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.adds else y


def _conv_relu6(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


def mobilenet_v1(classes: int = 1000) -> nn.Module:
    """Return MobileNet v1: a 3x3 convolution and 13 separable ones.

    The layers are those of table 1 of the paper, with ReLU6 as in Keras.
    """
    separable = (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *((512, 1),) * 5,
        (1024, 2),
        (1024, 1),
    )
    layers, channels = [_conv_relu6(3, 32, 3, 2)], 32
    for width, stride in separable:
        layers += [
            _conv_relu6(channels, channels, 3, stride, channels),
            _conv_relu6(channels, width, 1),
        ]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.001), nn.Linear(1024, classes)
    )


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """Return MobileNetV2."""
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    layers = [_conv_relu6(3, 32, 3, 2)]
    channels = 32
    for expansion, width, repeats, stride in stages:
        for i in range(repeats):
            layers.append(_InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
            channels = width
    layers.append(_conv_relu6(channels, 1280, 1))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, classes)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(vgg, stages) for name, stages in _VGG.items()},
    **{f"{name}_keras": partial(vgg, stages) for name, stages in _VGG.items()},
    **{name: partial(resnet, *shape) for name, shape in _RESNET.items()},
    "mobilenet_v1": mobilenet_v1,
    "mobilenet_v2": mobilenet_v2,
}
"""Functions that build the models, for 3 x 224 x 224 images and 1,000 classes.

Keras' VGGs need the argument `image_size`.
"""


def build_task(
    spec: str,
    sequence_length: int | None = None,
    image_size: int | None = None,
    fused_attention: bool = True,
) -> Task:
    """Build the task that a model spec names.

    Under ``torch.device("meta")``, the model has no values of weights. If the spec is a function in
    the user's file, the other arguments are ignored.

    Args:
        spec: The model spec.
        sequence_length: Tokens per sample, for models that accept any length.
        image_size: Side of images in pixels, for image models.
        fused_attention: If False, transformers and timm compute attention with plain matmuls.
    """
    named = ModelSpec.of(spec)
    if named.kind in ("script", "code"):
        return task_from_file(Path(named.path), named.name)
    if named.kind == "diffusers":
        return diffusers_task(named.path, sequence_length, image_size)
    if named.kind == "transformers":
        return transformers_task(named.path, sequence_length, image_size, fused_attention)
    if sequence_length is not None:
        raise TrainpaceError(f"{spec} has no sequence length.", "Omit --sequence-length.")
    if named.kind == "timm":
        return _timm(spec, named.name, image_size, fused_attention)
    if named.kind == "torchvision" and named.name not in MODELS:
        return _torchvision(spec, named.name, image_size)
    if named.kind == "unknown":
        prefixes = [*(f"{library}:" for library in LIBRARIES), "FILE.py:"]
        raise UnknownName("kind of model", spec.rpartition(":")[0] + ":", prefixes)
    return _built_in(spec, named.name, image_size or 224)


def _built_in(spec: str, name: str, side: int) -> Task:
    if name not in MODELS:
        raise UnknownName("model", spec, MODELS, f"Or name it {FORMS}.")
    sizes = {"image_size": side} if name.endswith("_keras") else {}
    return image_task(spec, MODELS[name](**sizes), (3, side, side), 1000)


def _torchvision(spec: str, name: str, image_size: int | None) -> Task:
    models = import_package("torchvision.models", "torchvision")
    if name not in models.list_models():
        raise UnknownName("torchvision model", name, models.list_models())
    try:  # weights_backbone=None: otherwise some models download the weights of their backbone
        model = models.get_model(name, weights=None, weights_backbone=None)
    except TypeError:
        model = models.get_model(name, weights=None)
    side = image_size or (299 if name == "inception_v3" else 224)
    return image_task(spec, model, (3, side, side), 1000)


def _timm(spec: str, name: str, image_size: int | None, fused_attention: bool) -> Task:
    timm = import_package("timm", "timm")
    timm.layers.set_fused_attn(fused_attention)

    def create(**options: Any) -> nn.Module:
        try:
            made: nn.Module = timm.create_model(name, **options)  # accepts older names too
        except RuntimeError as error:
            if "nknown model" not in str(error):
                raise
            raise UnknownName("timm model", name, timm.list_models()) from None
        return made

    model: Any = create()
    shape = tuple(model.default_cfg.get("input_size", (3, 224, 224)))
    if image_size is not None and image_size != shape[-1]:
        shape = (shape[0], image_size, image_size)
        # convolutional models accept any size but reject this option, and transformers need it
        with contextlib.suppress(TypeError):
            model = create(img_size=image_size)
    return image_task(spec, model, shape, model.num_classes or 1)  # num_classes is 0 without a head
