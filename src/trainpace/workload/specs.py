"""From a model spec to its task."""

import contextlib
from pathlib import Path
from typing import Any

from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.workload import zoo
from trainpace.workload.diffusers_config import diffusers_task
from trainpace.workload.model_spec import FORMS, LIBRARIES, ModelSpec
from trainpace.workload.optional_packages import import_package
from trainpace.workload.task import Task, image_task
from trainpace.workload.transformers_config import transformers_task
from trainpace.workload.user_task import TASK, task_from_file


def build_task(
    spec: str,
    sequence_length: int | None = None,
    image_size: int | None = None,
    fused_attention: bool = True,
) -> Task:
    """Build the task that a model spec names.

    `image_size` is the side in pixels, for image models. Without `fused_attention` transformers and timm compute it from
    plain products, as they did before torch 2.0. Call under ``torch.device("meta")`` to get a model without weights.
    A FILE.py's function decides for itself.
    """
    _, kind, name, path = named = ModelSpec.of(spec)
    if kind == "script" or (named.runs_code and not name):
        raise TrainpaceError(f"name the function: {path}:FUNCTION.", f"{TASK}.")
    if named.runs_code:
        return task_from_file(Path(path), name)
    if kind == "diffusers":
        return diffusers_task(name, sequence_length, image_size)
    if kind == "transformers":
        return transformers_task(name, sequence_length, image_size, fused_attention)
    if sequence_length is not None:
        raise TrainpaceError(f"{spec} has no sequence length.", "Leave --sequence-length out.")
    if kind == "timm":
        return _timm(spec, name, image_size, fused_attention)
    if kind == "torchvision" and name not in zoo.MODELS:
        models = import_package("torchvision.models", "torchvision")
        if name not in models.list_models():
            raise UnknownName("torchvision model", name, models.list_models())
        try:
            model = models.get_model(
                name, weights=None, weights_backbone=None
            )  # which others would download
        except TypeError:
            model = models.get_model(name, weights=None)
        side = image_size or (299 if name == "inception_v3" else 224)
        return image_task(spec, model, (3, side, side), 1000)
    if kind in ("built_in", "torchvision"):
        if name not in zoo.MODELS:
            raise UnknownName("model", spec, zoo.MODELS, f"Or name it {FORMS}.")
        side = image_size or 224
        model = zoo.MODELS[name](**{"image_size": side} if name.endswith("_keras") else {})
        return image_task(spec, model, (3, side, side), 1000)
    raise UnknownName(
        "kind of model",
        spec.rpartition(":")[0] + ":",
        [*(f"{library}:" for library in LIBRARIES), "FILE.py:"],
    )


def _timm(spec: str, name: str, image_size: int | None, fused_attention: bool) -> Task:
    timm = import_package("timm", "timm")
    timm.layers.set_fused_attn(fused_attention)

    def create(**options: Any) -> nn.Module:
        try:
            made: nn.Module = timm.create_model(
                name, **options
            )  # which also understands names of older releases
        except RuntimeError as error:
            if "nknown model" not in str(error):
                raise
            raise UnknownName("timm model", name, timm.list_models()) from None
        return made

    model: Any = create()
    shape = tuple(model.default_cfg.get("input_size", (3, 224, 224)))
    if image_size is not None and image_size != shape[-1]:
        shape = (shape[0], image_size, image_size)
        # convolutional models take any size and refuse the option; transformers have to know it
        with contextlib.suppress(TypeError):
            model = create(img_size=image_size)
    return image_task(spec, model, shape, model.num_classes or 1)  # 0 for models without a head
