"""A task from the configuration of a diffusion model in Hugging Face's diffusers: a UNet or a transformer that predicts noise.

The model alone is trained: latents and text embeddings are inputs, as if computed beforehand. A task of one's own holds the
frozen VAE and text encoders too (examples/tasks/diffusion.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.intake import read_json
from trainpace.workload.optional_packages import import_package
from trainpace.workload.task import Task

PIXELS_A_LATENT = 8
"""The VAEs of Stable Diffusion and Flux make one latent of 8 x 8 pixels (Rombach et al. 2022, arXiv:2112.10752: f = 8)."""
Inputs = Callable[[Any, int, int, int | None], dict[str, Any]]
"""(configuration, samples, side in latents, tokens of text or None for the model's usual number) -> arguments of the model."""


def diffusers_task(path: str, sequence_length: int | None, image_size: int | None) -> Task:
    diffusers = import_package("diffusers", "diffusers")
    diffusers.logging.set_verbosity_error()
    values = read_json(path)
    name = values.get("_class_name") if isinstance(values, dict) else None
    if not isinstance(name, str):
        raise UnreadableInput(
            f'{path} is not a configuration of a diffusers model: it has no "_class_name".'
        )
    if name not in _INPUTS:
        raise UnknownName(
            "diffusion model",
            name,
            _INPUTS,
            f"Known: {', '.join(_INPUTS)}. Any other: FILE.py:FUNCTION.",
        )
    model: nn.Module = getattr(diffusers, name).from_config(values)
    config: Any = model.config
    if image_size is not None and image_size % PIXELS_A_LATENT:
        raise TrainpaceError(
            f"an image size of {image_size} is no multiple of {PIXELS_A_LATENT}, a latent's pixels."
        )
    side = (
        image_size // PIXELS_A_LATENT if image_size else getattr(config, "sample_size", None) or 128
    )
    inputs = _INPUTS[name]

    def make_batch(n: int) -> dict[str, Any]:
        return inputs(config, n, side, sequence_length)

    sample = f"{side * PIXELS_A_LATENT} x {side * PIXELS_A_LATENT} image"
    note = (
        "Latents and text embeddings are inputs: no VAE and no text encoder is in the step"
        " (docs/tasks.md shows how)."
    )
    return Task(
        f"diffusers:{path}",
        model,
        _forward,
        _noise_loss,
        make_batch,
        None,
        sample,
        sequence_length,
        loss_name="mse_loss",
        notes=(note,),
    )


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(**batch, return_dict=False)[0]


def _noise_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The squared error of predicting the noise that was mixed into the latents (Ho et al. 2020, arXiv:2006.11239, eq. 14)."""
    name = "sample" if "sample" in batch else "hidden_states"
    latents = batch[name]
    noise = torch.randn_like(latents)
    share = batch["timestep"].to(latents.dtype).div(1000).reshape(-1, *[1] * (latents.dim() - 1))
    predicted = _forward(model, {**batch, name: share * noise + (1 - share) * latents})
    if predicted.shape != noise.shape:  # of models that predict the noise's variance too
        predicted = predicted.chunk(2, dim=1)[0]
    return nn.functional.mse_loss(predicted.float(), noise.float())


def _latents(c: Any, n: int, side: int) -> torch.Tensor:
    return torch.randn(n, c.in_channels, side, side)


def _times(n: int) -> torch.Tensor:
    return torch.randint(0, 1000, (n,))


def _unet(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    return {"sample": _latents(c, n, side), "timestep": _times(n)}


def _conditioned_unet(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    width = c.encoder_hid_dim or c.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    batch = _unet(c, n, side, tokens) | {
        "encoder_hidden_states": torch.randn(n, tokens or 77, width)
    }
    if (
        c.addition_embed_type == "text_time"
    ):  # of SDXL: six numbers of size and crop, each embedded, beside the text
        text = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        batch["added_cond_kwargs"] = {
            "text_embeds": torch.randn(n, text),
            "time_ids": torch.randn(n, 6),
        }
    return batch


def _dit(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    classes = torch.randint(0, c.num_embeds_ada_norm, (n,))
    return {"hidden_states": _latents(c, n, side), "timestep": _times(n), "class_labels": classes}


def _pixart(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    text = torch.randn(n, tokens or 120, c.caption_channels)
    added = {"resolution": torch.randn(n, 2), "aspect_ratio": torch.randn(n, 1)}
    return {
        "hidden_states": _latents(c, n, side),
        "timestep": _times(n),
        "encoder_hidden_states": text,
        "added_cond_kwargs": added,
    }


def _sd3(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    return {
        "hidden_states": _latents(c, n, side),
        "timestep": _times(n),
        "encoder_hidden_states": torch.randn(
            n, tokens or 333, c.joint_attention_dim
        ),  # 77 of CLIP, 256 of T5
        "pooled_projections": torch.randn(n, c.pooled_projection_dim),
    }


def _flux(c: Any, n: int, side: int, tokens: int | None) -> dict[str, Any]:
    patches, text = (side // 2) ** 2, tokens or 512
    batch = {
        "hidden_states": torch.randn(n, patches, c.in_channels),
        "timestep": _times(n),
        "encoder_hidden_states": torch.randn(n, text, c.joint_attention_dim),
        "pooled_projections": torch.randn(n, c.pooled_projection_dim),
        "img_ids": torch.zeros(patches, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    return batch | {"guidance": torch.ones(n)} if c.guidance_embeds else batch


_INPUTS: dict[str, Inputs] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditioned_unet,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
