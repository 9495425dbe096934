"""Batches and losses of transformers' models, by what they take: words, speech, pictures, pictures with words or points."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainpace.core.errors import TrainpaceError

OBJECTS = 10
"""Objects in each image of a detector's batch; COCO has 7 on average (Lin et al. 2014, arXiv:1405.0312)."""
DETECTION_SIDE = 640
"""Pixels of a side where a detector's configuration names none: what RT-DETR is trained with (arXiv:2304.08069)."""
SPECIAL = ("CLIPModel", "SamModel", "RTDetrForObjectDetection", "RTDetrV2ForObjectDetection")
"""Architectures with pictures whose training is known here."""
_OF_LABELS = ("labels", "start_positions", "end_positions")


class Inputs(NamedTuple):
    """What a model takes and how it is trained. notes: what of its usual step is left out."""

    make_batch: Callable[[int], dict[str, torch.Tensor]]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    sample: str
    notes: tuple[str, ...] = ()


def words_or_speech(
    name: str, model: nn.Module, config: Any, vocabulary: int, length: int
) -> Inputs:
    """Of a model that computes its loss from labels itself, after which its class is named."""
    speech = getattr(model, "main_input_name", "input_ids") == "input_features"
    frames = 2 * getattr(config, "max_source_positions", 1500)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        if speech:
            features = torch.randn(n, config.num_mel_bins, frames)
            return {"input_features": features, "labels": torch.randint(0, vocabulary, (n, length))}
        batch = {"input_ids": torch.randint(0, vocabulary, (n, length))}
        if "QuestionAnswering" in name:
            return batch | {
                key: torch.randint(0, length, (n,)) for key in ("start_positions", "end_positions")
            }
        if "SequenceClassification" in name:
            return batch | {"labels": torch.randint(0, config.num_labels, (n,))}
        classes = config.num_labels if "TokenClassification" in name else vocabulary
        return batch | {"labels": torch.randint(0, classes, (n, length))}

    def forward(model: nn.Module, batch: Any) -> Any:
        inputs = {key: value for key, value in batch.items() if key not in _OF_LABELS}
        if (
            getattr(config, "is_encoder_decoder", False)
            and "labels" in batch
            and batch["labels"].dim() == 2
        ):
            inputs["decoder_input_ids"] = batch["labels"]
        return model(**inputs)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(**batch).loss
        return out

    return Inputs(make_batch, forward, loss, f"{length} tokens")


def contrastive(config: Any, side: int, length: int) -> Inputs:
    """CLIP: a picture and its caption a sample."""

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, config.text_config.vocab_size, (n, length))
        return {
            "input_ids": words,
            "pixel_values": torch.randn(n, config.vision_config.num_channels, side, side),
        }

    def forward(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text, image = (
            model.get_text_features(batch["input_ids"]),
            model.get_image_features(batch["pixel_values"]),
        )
        text, image = (getattr(features, "pooler_output", features) for features in (text, image))
        return F.normalize(text, dim=-1), F.normalize(image, dim=-1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        text, image = forward(model, batch)
        return -(text * image).sum(-1).mul(model.logit_scale.exp()).mean()

    note = (
        "The contrastive loss is of the pairs that belong together. The others, which make a"
        f" matrix of batch x batch logits, are left out: {6 * config.projection_dim} FLOPs of a"
        " training step (a third of them forward) and some 12 bytes for the square of the batch,"
        " of all GPUs together."
    )
    return Inputs(make_batch, forward, loss, f"{side} x {side} image with {length} tokens", (note,))


def prompted_masks(config: Any, side: int) -> Inputs:
    """SAM: a picture and one point a sample, three masks out."""

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        pixels = torch.randn(n, config.vision_config.num_channels, side, side)
        points, kinds = (
            torch.randint(0, side, (n, 1, 1, 2)).float(),
            torch.ones(n, 1, 1, dtype=torch.int64),
        )
        masks = torch.ones(
            n, *2 * [4 * (side // config.vision_config.patch_size)]
        )  # each patch's answer is 4 x 4 numbers
        return {
            "pixel_values": pixels,
            "input_points": points,
            "input_labels": kinds,
            "masks": masks,
        }

    def forward(model: Any, batch: Any) -> Any:
        return model(**{key: value for key, value in batch.items() if key != "masks"})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out = forward(model, batch)
        wanted = batch["masks"][:, None, None].expand_as(out.pred_masks).to(out.pred_masks.dtype)
        return (
            F.binary_cross_entropy_with_logits(out.pred_masks, wanted)
            + out.iou_scores.float().square().mean()
        )

    note = (
        "A step is one round with one point and binary cross-entropy of all masks: SAM's further"
        " rounds, whose points are drawn from the errors of the round before, and its choice of the"
        " best mask are left out."
    )
    return Inputs(make_batch, forward, loss, f"{side} x {side} image", (note,))


def detected_boxes(config: Any, side: int) -> Inputs:
    """RT-DETR: boxes and classes of each decoder layer's queries."""

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        kinds = torch.randint(0, config.num_labels, (n, OBJECTS))
        return {
            "pixel_values": torch.randn(n, 3, side, side),
            "classes": kinds,
            "boxes": torch.rand(n, OBJECTS, 4),
        }

    def forward(model: Any, batch: Any) -> Any:
        return model(batch["pixel_values"])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out = forward(model, batch)
        logits, boxes = out.intermediate_logits, out.intermediate_reference_points
        matched = torch.nn.functional.one_hot(batch["classes"], config.num_labels)[:, None].to(
            logits.dtype
        )
        wanted = F.pad(matched, (0, 0, 0, logits.shape[2] - OBJECTS)).expand_as(logits)
        classes = F.binary_cross_entropy_with_logits(logits, wanted)
        targets = batch["boxes"][:, None].to(boxes.dtype)
        return classes + F.l1_loss(
            boxes[:, :, :OBJECTS], targets.expand(-1, boxes.shape[1], -1, -1)
        )

    note = (
        "Left out, since it depends on the labels' values: the Hungarian matching of predictions"
        f" and objects, which SciPy runs on the host, and the denoising queries. {OBJECTS} objects"
        " an image are matched with the first queries, and the loss is cross-entropy of all"
        " classes with L1 of the matched boxes, in every decoder layer."
    )
    return Inputs(make_batch, forward, loss, f"3 x {side} x {side} image", (note,))


def side_of(config: Any, image_size: int | None, default: int | None = None) -> int:
    """Pixels of a side: what was asked for, what the configuration says, or the default. Raises TrainpaceError without any."""
    holders = (config, getattr(config, "vision_config", None))
    stated = next(
        (size for holder in holders if (size := getattr(holder, "image_size", None))), default
    )
    side = image_size or (stated if isinstance(stated, int | None) else stated[0])
    if side is None:
        raise TrainpaceError(
            f"the configuration of {config.model_type} names no image_size.",
            "Give one: --image-size 224, for example.",
        )
    return int(side)


def pictures_with_more(
    name: str, config: Any, image_size: int | None, length: int | None
) -> Inputs | None:
    """The inputs of a model that takes pictures and no class label; None for those that are not known here."""
    if name == "CLIPModel":
        longest = config.text_config.max_position_embeddings
        if length is not None and length > longest:
            raise TrainpaceError(
                f"the sequence length {length} is more than the {longest} positions of CLIP's text."
            )
        return contrastive(config, side_of(config, image_size), length or longest)
    if name == "SamModel":
        return prompted_masks(config, side_of(config, image_size))
    return (
        detected_boxes(config, side_of(config, image_size, DETECTION_SIDE))
        if name in SPECIAL
        else None
    )
