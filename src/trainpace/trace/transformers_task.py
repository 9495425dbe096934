"""A task from a configuration of Hugging Face's transformers.

Every key of the file that changes a step is used, or named in the task's notes as one that is not.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainpace.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.records import read_json
from trainpace.trace.cuda_mapping import fuse_gpt_oss_attention, fuse_mpt_attention
from trainpace.trace.packages import import_package
from trainpace.trace.stored import STORAGE_KEYS
from trainpace.trace.task import Task, image_task

_DEFAULT_LENGTH = 1024
_OF_NO_STEP = frozenset(
    """_name_or_path _commit_hash architectures auto_map transformers_version model_type task_specific_params num_labels
    rope_theta rope_scaling partial_rotary_factor rotary_pct rotary_emb_base use_cache tie_word_embeddings is_decoder
    cross_attention_hidden_size finetuning_task
    decoder_start_token_id forced_bos_token_id forced_eos_token_id sep_token_id prefix bad_words_ids attn_implementation
    _attn_implementation dtype torch_dtype""".split()
)
"""Keys that any configuration may have: names, what decodes or stores, and what is used under another name."""
_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_SLOW_PATHS = ("mamba", "bamba", "zamba", "nemotron_h", "qwen3_next", "granitemoehybrid", "falcon_h1")
"""Beginnings of the types of models whose layers run in plain torch operations where their own CUDA kernels are not installed."""


def transformers_task(path: str, sequence_length: int | None, image_size: int | None, fused_attention: bool) -> Task:
    """The task of a configuration file, in fp32. Without `fused_attention` it is computed from plain products."""
    transformers = import_package("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    values = read_json(path)
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableInput(f'{path} is not a transformers configuration: it has no "model_type".')
    try:
        config = transformers.AutoConfig.for_model(**_without_storage(values))
    except (ValueError, TypeError) as error:
        raise UnreadableInput(f"{path}: {str(error).splitlines()[0]}") from None
    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise UnknownName("transformers architecture", name, [n for n in dir(transformers) if n.startswith(name[:4])])
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _longer_positions(text, sequence_length)
    wanted = values.get("attn_implementation") or values.get("_attn_implementation") or "sdpa"
    model = _build(architecture, config, fused_attention and wanted != "eager", wanted)
    notes = _notes(config, values, wanted)
    spec = f"transformers:{path}"
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = image_size or (config.image_size if isinstance(config.image_size, int) else config.image_size[0])
        return image_task(spec, model, (config.num_channels, size, size), config.num_labels)._replace(notes=notes)
    if "labels" not in (taken := _arguments(model)) and "start_positions" not in taken:
        raise TrainpaceError(
            f"{name} computes no loss from labels.",
            'Name an architecture that does in "architectures" (...ForCausalLM, ...ForSequenceClassification), or write a'
            " function of your own (FILE.py:FUNCTION).",
        )
    longest = next((n for n in map(text.__dict__.get, _LENGTHS) if n), None)
    length = sequence_length or min(longest or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if longest is not None and length > longest:
        raise TrainpaceError(f"the sequence length {length} is more than the {longest} positions of {path}.")
    make_batch = _batches(name, model, config, text.vocab_size, length)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(**{key: value for key, value in batch.items() if key in ("input_ids", "input_features")})

    return Task(spec, model, forward, loss, make_batch, None, f"{length} tokens", length, notes=notes)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def _without_storage(values: Any) -> Any:
    """The values without the keys that say how weights are stored, in their parts too: `Execution.precision` says the format."""
    if not isinstance(values, dict):
        return values
    return {key: _without_storage(value) for key, value in values.items() if key not in STORAGE_KEYS}


def _build(architecture: Any, config: Any, fused_attention: bool, wanted: str) -> nn.Module:
    build = getattr(architecture, "_from_config", None) or architecture.from_config
    config._attn_implementation = "sdpa" if fused_attention else "eager"
    try:
        model: nn.Module = build(config)
    except (ValueError, ImportError):
        config._attn_implementation = "eager"  # this architecture has no other
        model = build(config)
    if fused_attention and config.model_type == "mpt":
        fuse_mpt_attention(model)
    if fused_attention and config.model_type == "gpt_oss" and wanted != "sdpa":
        fuse_gpt_oss_attention(model)
    return model


def _arguments(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _notes(config: Any, values: Mapping[str, Any], attention: str) -> tuple[str, ...]:
    """Sentences about the keys of the file that change nothing here."""
    notes = []
    known = {*_OF_NO_STEP, *getattr(config, "attribute_map", ()), *getattr(config, "sub_configs", ())}
    known |= {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set(values)
    if "quantization_config" in values:
        known.add("quantization_config")
        notes.append(
            "The configuration's quantization_config is not used: weights are forecast in the number format of the precision."
        )
    if values.get("gradient_checkpointing"):
        known.add("gradient_checkpointing")
        notes.append(
            "The configuration's gradient_checkpointing is not used: --checkpointing full recomputes activations."
        )
    if attention not in (*_FUSED, "eager"):
        notes.append(f"The configuration's attn_implementation {attention} is not known, and was taken as sdpa.")
    elif attention == "flex_attention":
        notes.append("The configuration's flex_attention was taken as fused attention without a mask of its own.")
    if config.model_type == "gpt_oss" and attention in _FUSED[1:]:
        notes.append("Its layers with a sliding window were taken to attend to all tokens before.")
    unknown = sorted(key for key in values if key not in known and not key.endswith("_token_id"))
    if unknown:
        notes.append(f"{type(config).__name__} does not know these keys, and they are not used: {', '.join(unknown)}.")
    if config.model_type.startswith(_SLOW_PATHS):
        notes.append(
            f"The state-space layers of {config.model_type} are forecast as transformers' plain torch code runs them. With the"
            " kernels of mamba-ssm, causal-conv1d or flash-linear-attention installed they are faster and need less memory."
        )
    return tuple(notes)


def _batches(name: str, model: nn.Module, config: Any, vocabulary: int, length: int) -> Callable[[int], dict[str, Any]]:
    """What makes batches of n samples with their labels."""
    speech = getattr(model, "main_input_name", "input_ids") == "input_features"
    frames = 2 * getattr(config, "max_source_positions", 1500)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        if speech:
            features = torch.randn(n, config.num_mel_bins, frames)
            return {"input_features": features, "labels": torch.randint(0, vocabulary, (n, length))}
        batch = {"input_ids": torch.randint(0, vocabulary, (n, length))}
        if "QuestionAnswering" in name:
            return batch | {key: torch.randint(0, length, (n,)) for key in ("start_positions", "end_positions")}
        if "SequenceClassification" in name:
            return batch | {"labels": torch.randint(0, config.num_labels, (n,))}
        classes = config.num_labels if "TokenClassification" in name else vocabulary
        return batch | {"labels": torch.randint(0, classes, (n, length))}

    return make_batch


def _longer_positions(config: Any, sequence_length: int | None) -> None:
    """Rotary and linear (ALiBi) positions have no table that ends: such a model takes any length."""
    endless = config.model_type in ("mpt", "bloom") or any(
        getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    )
    for name in ("max_position_embeddings", "max_seq_len"):
        if endless and sequence_length and (getattr(config, name, None) or sequence_length) < sequence_length:
            setattr(config, name, sequence_length)
