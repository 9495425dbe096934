"""Build tasks from configuration files of Hugging Face's transformers and diffusers.

If a key of a transformers configuration affects a step, it is either used or listed in the task's
notes as unused.

The Llama 4 layers of transformers run every expert on every token, and most inputs are zero
("should not be run on a single machine", says the code). Trainers such as Megatron-LM and
torchtitan sort the tokens by expert and run one grouped matmul. The key "experts_implementation":
"grouped_mm" in the configuration selects that here.

For a diffusion model, only the UNet or transformer is trained. Latents and text embeddings are
inputs, as if they were computed beforehand. A user-defined task can include the frozen VAE and text
encoders (examples/tasks/diffusion.py).
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput, message_of
from trainpace.core.intake import read_json
from trainpace.core.worker import explain
from trainpace.workload.model_spec import import_package
from trainpace.workload.own_operators import offer_to_transformers
from trainpace.workload.task import Task, image_task
from trainpace.workload.workloads import STORAGE_KEYS, stored_precision

_OF_SAMPLES = ("next_sentence_label", "sentence_order_label")
"""Arguments for labels of whole samples, with two classes, beside the labels of tokens."""
_CHARACTERS = 256
"""Size of the vocabulary of a model that reads characters and has no table of tokens."""
_OF_LABELS = ("labels", "start_positions", "end_positions", *_OF_SAMPLES)
_WITH_A_LOSS = (
    'Choose an architecture that does in "architectures" (...ForCausalLM,'
    " ...ForSequenceClassification), or write a function of your own (FILE.py:FUNCTION)."
)


def words_or_speech(spec: str, name: str, model: nn.Module, config: Any, length: int) -> Task:
    """Return the task of a text or speech model that computes its loss from labels."""
    vocabulary = getattr(_text_of(config), "vocab_size", _CHARACTERS)
    speech = getattr(model, "main_input_name", "input_ids") == "input_features"
    frames = 2 * getattr(config, "max_source_positions", 1500)
    parameters = inspect.signature(model.forward).parameters
    sample_labels = [key for key in _OF_SAMPLES if key in parameters]

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        if speech:
            features = torch.randn(n, config.num_mel_bins, frames)
            return {"input_features": features, "labels": torch.randint(0, vocabulary, (n, length))}
        batch = {"input_ids": torch.randint(0, vocabulary, (n, length))}
        if "QuestionAnswering" in name:
            return batch | {
                key: torch.randint(0, length, (n,)) for key in ("start_positions", "end_positions")
            }
        if "SequenceClassification" in name or "NextSentencePrediction" in name:
            return batch | {"labels": torch.randint(0, config.num_labels, (n,))}
        batch |= {key: torch.randint(0, 2, (n,)) for key in sample_labels}
        classes = config.num_labels if "TokenClassification" in name else vocabulary
        return batch | {"labels": torch.randint(0, classes, (n, length))}

    def forward(model: nn.Module, batch: Any) -> Any:
        inputs = {key: value for key, value in batch.items() if key not in _OF_LABELS}
        labels = batch.get("labels")
        if (
            getattr(config, "is_encoder_decoder", False)
            and labels is not None
            and labels.dim() == 2
        ):
            inputs["decoder_input_ids"] = labels
        return model(**inputs)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor | None = model(**batch).loss
        if out is None:
            raise _no_loss(name)
        return out

    return Task(spec, model, forward, loss, make_batch, None, f"{length} tokens", length)


def _no_loss(name: str) -> TrainpaceError:
    return TrainpaceError(f"{name} computes no loss from labels.", _WITH_A_LOSS)


def contrastive(
    spec: str, model: nn.Module, config: Any, image_size: int | None, sequence_length: int | None
) -> Task:
    """Return the task of CLIP. A sample is an image with its caption.

    Raises:
        TrainpaceError: If the sequence length exceeds the positions of CLIP's text.
    """
    side, longest = side_of(config, image_size), config.text_config.max_position_embeddings
    length: int = sequence_length or longest
    if length > longest:
        raise TrainpaceError(
            f"the sequence length {length} is more than the {longest} positions of CLIP's text."
        )

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, config.text_config.vocab_size, (n, length))
        return {
            "input_ids": words,
            "pixel_values": torch.randn(n, config.vision_config.num_channels, side, side),
        }

    def forward(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text = model.get_text_features(batch["input_ids"])
        image = model.get_image_features(batch["pixel_values"])
        text, image = (getattr(features, "pooler_output", features) for features in (text, image))
        return F.normalize(text, dim=-1), F.normalize(image, dim=-1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        text, image = forward(model, batch)
        return -(text * image).sum(-1).mul(model.logit_scale.exp()).mean()

    note = (
        "The contrastive loss covers only matching pairs. The matrix of batch x batch logits is"
        f" not traced: {6 * config.projection_dim} FLOPs per training step (a third of them"
        " forward) and about 12 bytes, times the square of the batch of all GPUs together."
    )
    sample = f"{side} x {side} image with a text of {length} tokens"
    task = Task(spec, model, forward, loss, make_batch, None, sample, sequence_length)
    return task._replace(notes=(note,))


def side_of(config: Any, image_size: int | None) -> int:
    """Return the image side in pixels: the requested or the configured one.

    Raises:
        TrainpaceError: If neither is given.
    """
    holders = (config, getattr(config, "vision_config", None))
    stated = next((size for one in holders if (size := getattr(one, "image_size", None))), None)
    side = image_size or (stated if isinstance(stated, int | None) else stated[0])
    if side is None:
        raise TrainpaceError(
            f"the configuration of {config.model_type} has no image_size.",
            "Pass one, for example --image-size 224.",
        )
    return int(side)


def fuse_mpt_attention(model: nn.Module) -> None:
    """Replace MPT's attention by a fused kernel, as in llm-foundry.

    transformers computes it with plain matmuls. llm-foundry uses FlashAttention, which adds the
    ALiBi bias inside the kernel.
    """
    for module in model.modules():
        if type(module).__name__ == "MptAttention":
            module.forward = types.MethodType(_mpt_attention, module)


def _mpt_attention(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    batch, length = hidden_states.shape[:2]
    parts = self.Wqkv(hidden_states).chunk(3, dim=2)
    q, k, v = (
        part.reshape(batch, length, self.n_heads, self.head_dim).transpose(1, 2) for part in parts
    )
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
    return out, None


def classify_last_token(model: nn.Module) -> None:
    """Let an encoder-decoder classifier use the last token, where its samples end.

    Its own head searches for the end token, whose position is unknown without values. Other models
    stay as they are.
    """
    config: Any = model.config
    if hasattr(model, "classification_head") and getattr(config, "is_encoder_decoder", False):
        model.forward = types.MethodType(_classified, model)


def _classified(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None
) -> types.SimpleNamespace:
    base = getattr(self, self.base_model_prefix)
    hidden = base(input_ids=input_ids, decoder_input_ids=input_ids)[0]
    logits = self.classification_head(hidden[:, -1])
    loss = None if labels is None else F.cross_entropy(logits, labels)
    return types.SimpleNamespace(loss=loss, logits=logits)


ALL_EXPERTS = (
    "transformers computes all experts of a Llama 4 layer for every token, and the forecast counts"
    ' them all. "experts_implementation": "grouped_mm" in the configuration sends each token only'
    " to its own experts, as other trainers do."
)


def send_to_own_experts(model: nn.Module) -> None:
    """Let Llama 4's layers run each expert only on its own tokens, by grouped matmuls."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            module.forward = types.MethodType(_llama4_layer, module)
            experts: Any = module.experts
            experts.forward = types.MethodType(_llama4_experts, experts)


def _llama4_experts(self: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    gate, up = nn.functional.grouped_mm(
        rows.to(self.gate_up_proj.dtype), self.gate_up_proj, offs=ends
    ).chunk(2, dim=-1)
    out: torch.Tensor = nn.functional.grouped_mm(up * self.act_fn(gate), self.down_proj, offs=ends)
    return out


def _llama4_layer(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    _, logits = self.router(hidden_states)
    scores, chosen = logits.topk(self.top_k, dim=-1)
    chosen, order = chosen.flatten().sort()
    counts = torch.histc(chosen.int(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    # Llama 4 scales the input of an expert, not its output
    rows = (
        hidden_states[order // self.top_k]
        * torch.sigmoid(scores.float()).to(hidden_states.dtype).flatten()[order, None]
    )
    results = self.experts(rows, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    out: torch.Tensor = self.shared_expert(hidden_states)
    out.add_(results[back].view(-1, self.top_k, self.hidden_dim).sum(1))
    return out, logits


_DEFAULT_LENGTH = 1024
_OF_NO_STEP = frozenset(
    """
    _name_or_path _commit_hash architectures auto_map transformers_version model_type
    task_specific_params num_labels rope_theta rope_scaling partial_rotary_factor rotary_pct
    rotary_emb_base use_cache tie_word_embeddings is_decoder cross_attention_hidden_size
    finetuning_task decoder_start_token_id forced_bos_token_id forced_eos_token_id sep_token_id
    prefix bad_words_ids attn_implementation _attn_implementation dtype torch_dtype
    """.split()
)
"""Configuration keys that do not affect a step: names, decoding, storage, and duplicates."""
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
_SKIPPING = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Attention implementations that skip masked blocks."""
_SLOW_PATHS = (
    "mamba",
    "bamba",
    "zamba",
    "nemotron_h",
    "qwen3_next",
    "granitemoehybrid",
    "falcon_h1",
)
"""Prefixes of model types with slow plain torch code, used if their CUDA kernels are missing."""


def transformers_task(
    path: str, sequence_length: int | None, image_size: int | None, fused_attention: bool
) -> Task:
    """Return the task of a transformers configuration file. Its weights are in fp32.

    Args:
        path: The configuration file.
        sequence_length: Tokens per sample. None means the model's usual length.
        image_size: Side of images in pixels. None means the configured one.
        fused_attention: Use fused attention kernels.

    Raises:
        TrainpaceError: If transformers cannot build or train the model.
    """
    transformers = import_package("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    values, own_experts = _read(path)
    config = _config_of(transformers, values, path, sequence_length)
    wanted = next(filter(None, map(values.get, _ATTENTION_KEYS)), "sdpa")
    name, architecture = _architecture(transformers, config)
    model, attention = _build(transformers, architecture, config, fused_attention, wanted)
    notes = _notes(config, values, wanted)
    if wanted in _SKIPPING and fused_attention and attention != wanted:
        notes += (
            f"transformers' {name} cannot be built with {wanted} here, so its attention is traced"
            f" as {attention}.",
        )
        wanted = attention
    if own_experts:
        send_to_own_experts(model)
    elif _text_of(config).model_type == "llama4_text":
        notes += (ALL_EXPERTS,)
    classify_last_token(model)
    spec = f"transformers:{path}"
    if name == "CLIPModel":
        task = contrastive(spec, model, config, image_size, sequence_length)
    elif getattr(model, "main_input_name", "input_ids") == "pixel_values":
        task = _image_classifier(spec, name, model, config, image_size, sequence_length)
    else:
        _check_loss(name, model)
        length, about_length = _length(_text_of(config), path, sequence_length)
        notes += (*about_length, *_windows(_text_of(config), wanted, length))
        task = words_or_speech(spec, name, model, config, length)
    stored = stored_precision(spec)
    settings = {} if stored is None else {"precision": stored}
    return task._replace(notes=(*notes, *task.notes), settings=settings)


def _read(path: str) -> tuple[dict[str, Any], bool]:
    """Return (values, is_grouped) of a configuration file.

    `is_grouped` is True if the file selects grouped matmuls for Llama 4's experts.
    """
    values = read_json(path)
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableInput(f'{path} is not a transformers configuration: no "model_type".')
    is_llama4 = str(values["model_type"]).startswith("llama4")
    if is_llama4 and values.get("experts_implementation") == "grouped_mm":
        # transformers has no such experts for Llama 4 and rejects the key
        return {k: v for k, v in values.items() if k != "experts_implementation"}, True
    return values, False


def _config_of(
    transformers: Any, values: dict[str, Any], path: str, sequence_length: int | None
) -> Any:
    try:
        config = transformers.AutoConfig.for_model(**_without_storage(values))
    except (ValueError, TypeError) as error:
        raise UnreadableInput(f"{path}: {message_of(error)}") from None
    text = _text_of(config)
    _longer_positions(text, sequence_length)
    # The Trainer sets use_cache=False since major version 5 (5.23, but not 4.45). With an older one
    # the key-value cache stays alive until the forward pass ends. Some models turn it off
    # themselves under activation checkpointing.
    if int(transformers.__version__.split(".")[0]) >= 5:
        config.use_cache = text.use_cache = False
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # encoder-decoder models need this token to shift their labels
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if "SequenceClassification" in str(config.architectures):
        _complete_classifier(config, text)
    return config


def _complete_classifier(config: Any, text: Any) -> None:
    if getattr(text, "pad_token_id", 0) is None:
        text.pad_token_id = 0  # a model that classifies the last token needs it
    if config.num_labels > 1:  # otherwise DeBERTa reads the values of the labels
        config.problem_type = config.problem_type or "single_label_classification"


def _text_of(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _architecture(transformers: Any, config: Any) -> tuple[str, Any]:
    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        similar = [n for n in dir(transformers) if n.startswith(name[:4])]
        raise UnknownName("transformers architecture", name, similar)
    return name, architecture


def _image_classifier(
    spec: str,
    name: str,
    model: nn.Module,
    config: Any,
    image_size: int | None,
    sequence_length: int | None,
) -> Task:
    if "ImageClassification" not in name:
        raise TrainpaceError(
            f"{name} takes images, and its loss needs more than class labels (boxes, masks).",
            "Choose an image classifier (...ForImageClassification) or CLIPModel, or write the task"
            " as a function (FILE.py:FUNCTION).",
        )
    if sequence_length is not None:
        raise TrainpaceError(
            f"{name} takes no tokens and has no sequence length.", "Omit --sequence-length."
        )
    size = side_of(config, image_size)
    return image_task(spec, model, (config.num_channels, size, size), config.num_labels)


def _check_loss(name: str, model: nn.Module) -> None:
    arguments = inspect.signature(model.forward).parameters
    if "labels" not in arguments and "start_positions" not in arguments:
        raise _no_loss(name)
    if "MultipleChoice" in name:
        raise TrainpaceError(
            f"{name} reads several choices per sample, and a configuration does not say how many.",
            "Write a function of your own (FILE.py:FUNCTION).",
        )


def _length(text: Any, path: str, sequence_length: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the sequence length, and notes: one note if the length is assumed."""
    longest = next((n for n in map(text.__dict__.get, _LENGTHS) if n), None)
    length = sequence_length or min(longest or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if longest is not None and length > longest:
        raise TrainpaceError(
            f"the sequence length {length} exceeds the {longest} positions of {path}."
        )
    if sequence_length is None and (longest or 0) > length:
        note = (
            f"Samples of {length:,} tokens are assumed; the model takes up to {longest:,}"
            " (--sequence-length)."
        )
        return length, (note,)
    return length, ()


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def _without_storage(values: Any) -> Any:
    # the stored dtype of the weights is ignored, because the precision of an execution decides
    if not isinstance(values, dict):
        return values
    return {
        key: _without_storage(value) for key, value in values.items() if key not in STORAGE_KEYS
    }


def _build(
    transformers: Any, architecture: Any, config: Any, fused_attention: bool, wanted: str
) -> tuple[nn.Module, str]:
    """Return the model and the name of its attention implementation.

    If the model does not support the requested implementation, sdpa is used, or else eager.
    """
    build = getattr(architecture, "_from_config", None) or architecture.from_config
    ways = {"eager": "eager"}
    if fused_attention and wanted != "eager":
        ways = {"sdpa": "sdpa"} | ways
        if wanted in _SKIPPING:
            ways = {wanted: offer_to_transformers(transformers)} | ways
    for way, implementation in ways.items():
        config._attn_implementation = implementation
        try:
            model: nn.Module = build(config)
            break
        except Exception as error:  # models do not check the sizes of their configuration
            # a model with one class per implementation raises KeyError
            if way == "eager" or not isinstance(error, ValueError | ImportError | KeyError):
                reason = explain(error, f"transformers cannot build {architecture.__name__}: it")
                raise UnreadableInput(reason) from error
    if len(ways) > 1 and config.model_type == "mpt":
        fuse_mpt_attention(model)
    return model, way


def _notes(config: Any, values: Mapping[str, Any], attention: str) -> tuple[str, ...]:
    """Return notes about keys of the file that do not affect the trace."""
    notes = [note for key, note in _UNUSED.items() if values.get(key)]
    if attention not in ("sdpa", "eager", *_SKIPPING):
        notes.append(
            f"The configuration's attn_implementation {attention} is unknown; sdpa is assumed."
        )
    known = _known_keys(config, values)
    unknown = sorted(key for key in values if key not in known and not key.endswith("_token_id"))
    if unknown:
        notes.append(
            f"{type(config).__name__} does not know these keys, and they are not used:"
            f" {', '.join(unknown)}."
        )
    if config.model_type.startswith(_SLOW_PATHS):
        notes.append(
            f"The state-space layers of {config.model_type} are forecast as transformers' plain"
            " torch code, but Mamba's scan as one kernel. The other kernels of mamba-ssm,"
            " causal-conv1d or flash-linear-attention are faster and need less memory."
        )
    return tuple(notes)


def _known_keys(config: Any, values: Mapping[str, Any]) -> set[str]:
    own: Any = set(values)
    if dataclasses.is_dataclass(config):
        own = (field.name for field in dataclasses.fields(config))
    others = (getattr(config, name, ()) for name in ("attribute_map", "sub_configs"))
    return {*own, *_OF_NO_STEP, *_UNUSED}.union(*others)


_UNUSED = {
    "quantization_config": (
        "The configuration's quantization_config is not used: weights are forecast in the number"
        " format of the precision."
    ),
    "gradient_checkpointing": (
        "The configuration's gradient_checkpointing is not used: pass --checkpointing full."
    ),
}
"""Keys that are not used although users may expect it, with the note to print."""


def _windows(config: Any, attention: str, length: int) -> tuple[str, ...]:
    """Return a note if layers have sliding windows, but their attention computes all scores."""
    sizes = [
        getattr(config, name, None)
        for name in ("sliding_window", "attention_chunk_size", "local_attention")
    ]
    window = min((size for size in sizes if isinstance(size, int) and size > 0), default=length + 1)
    if attention in _SKIPPING or window > length or not getattr(config, "use_sliding_window", True):
        return ()
    note = (
        f"Windows of {window} tokens save nothing with {attention}, which computes all scores and"
        ' masks them. "attn_implementation": "flash_attention_2" or "flex_attention" in the'
        " configuration skips masked blocks."
    )
    return (note,)


def _longer_positions(config: Any, sequence_length: int | None) -> None:
    # rotary and ALiBi positions have no table of embeddings, so the model accepts any length
    endless = config.model_type in ("mpt", "bloom") or any(
        getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    )
    for name in ("max_position_embeddings", "max_seq_len"):
        if (
            endless
            and sequence_length
            and (getattr(config, name, None) or sequence_length) < sequence_length
        ):
            setattr(config, name, sequence_length)


PIXELS_PER_LATENT = 8
"""Pixels per latent along each side, in the VAEs of Stable Diffusion and Flux.

Source: Rombach et al. 2022, arXiv:2112.10752 (f = 8).
"""
Shapes = dict[str, Any]
"""{argument of a diffusion model: shape of one sample}.

A number stands for an integer below it, and a tensor for itself.
"""


def diffusers_task(path: str, sequence_length: int | None, image_size: int | None) -> Task:
    """Return the task of a diffusers configuration file.

    Args:
        path: The configuration file of a UNet or transformer.
        sequence_length: Tokens of the text per sample. None means the model's usual number.
        image_size: Side of images in pixels. None means the configured size.

    Raises:
        TrainpaceError: If the file or the image size is invalid, or the model class is unknown.
    """
    diffusers = import_package("diffusers", "diffusers")
    diffusers.logging.set_verbosity_error()
    values = read_json(path)
    name = values.get("_class_name") if isinstance(values, dict) else None
    if not isinstance(name, str):
        raise UnreadableInput(
            f'{path} is not a configuration of a diffusers model: no "_class_name".'
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
    if image_size is not None and image_size % PIXELS_PER_LATENT:
        raise TrainpaceError(
            f"the image size {image_size} is not a multiple of {PIXELS_PER_LATENT} pixels."
        )
    side = (
        image_size // PIXELS_PER_LATENT
        if image_size
        else getattr(config, "sample_size", None) or 128
    )

    def make_batch(n: int) -> dict[str, Any]:
        return _filled({"timestep": 1000, **_INPUTS[name](config, side, sequence_length)}, n)

    sample = f"{side * PIXELS_PER_LATENT} x {side * PIXELS_PER_LATENT} image"
    note = (
        "Latents and text embeddings are inputs: the step has no VAE and no text encoder"
        " (docs/tasks.md shows how to add them)."
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
    """Return the mean squared error of the predicted noise (Ho 2020, arXiv:2006.11239, eq. 14)."""
    name = "sample" if "sample" in batch else "hidden_states"
    latents = batch[name]
    noise = torch.randn_like(latents)
    share = batch["timestep"].to(latents.dtype).div(1000).reshape(-1, *[1] * (latents.dim() - 1))
    predicted = _forward(model, {**batch, name: share * noise + (1 - share) * latents})
    if predicted.shape != noise.shape:  # some models predict the variance of the noise too
        predicted = predicted.chunk(2, dim=1)[0]
    return nn.functional.mse_loss(predicted.float(), noise.float())


def _filled(shapes: Shapes, n: int) -> dict[str, Any]:
    """Return arguments for n samples."""
    batch: dict[str, Any] = {}
    for name, shape in shapes.items():
        if isinstance(shape, dict):
            batch[name] = _filled(shape, n)
        elif isinstance(shape, int):
            batch[name] = torch.randint(0, shape, (n,))
        else:
            batch[name] = torch.randn(n, *shape) if isinstance(shape, tuple) else shape
    return batch


def _unet(c: Any, side: int, tokens: int | None) -> Shapes:
    return {"sample": (c.in_channels, side, side)}


def _conditioned_unet(c: Any, side: int, tokens: int | None) -> Shapes:
    width = c.encoder_hid_dim or c.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    shapes = _unet(c, side, tokens) | {"encoder_hidden_states": (tokens or 77, width)}
    if c.addition_embed_type == "text_time":
        # SDXL embeds six numbers (sizes and crop) together with the text
        text = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        shapes["added_cond_kwargs"] = {"text_embeds": (text,), "time_ids": (6,)}
    return shapes


def _dit(c: Any, side: int, tokens: int | None) -> Shapes:
    return {"hidden_states": (c.in_channels, side, side), "class_labels": c.num_embeds_ada_norm}


def _pixart(c: Any, side: int, tokens: int | None) -> Shapes:
    return {
        "hidden_states": (c.in_channels, side, side),
        "encoder_hidden_states": (tokens or 120, c.caption_channels),
        "added_cond_kwargs": {"resolution": (2,), "aspect_ratio": (1,)},
    }


def _sd3(c: Any, side: int, tokens: int | None) -> Shapes:
    return {
        "hidden_states": (c.in_channels, side, side),
        # 77 tokens for CLIP, 256 for T5
        "encoder_hidden_states": (tokens or 333, c.joint_attention_dim),
        "pooled_projections": (c.pooled_projection_dim,),
    }


def _flux(c: Any, side: int, tokens: int | None) -> Shapes:
    patches, text = (side // 2) ** 2, tokens or 512
    shapes = {
        "hidden_states": (patches, c.in_channels),
        "encoder_hidden_states": (text, c.joint_attention_dim),
        "pooled_projections": (c.pooled_projection_dim,),
        "img_ids": torch.zeros(patches, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    return shapes | {"guidance": ()} if c.guidance_embeds else shapes


_INPUTS: dict[str, Callable[[Any, int, int | None], Shapes]] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditioned_unet,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
"""Functions of (configuration, side in latents, tokens of text or None), by class of the model."""
