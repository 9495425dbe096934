"""A task from a configuration of Hugging Face's transformers.

Every key of the file that changes a step is used, or named in the task's notes as one that is not.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.intake import read_json
from trainpace.workload.fused_attention import fuse_mpt_attention
from trainpace.workload.optional_packages import import_package
from trainpace.workload.skipping_attention import offer_to_transformers
from trainpace.workload.sparse_experts import ALL_EXPERTS, send_to_own_experts
from trainpace.workload.stored import STORAGE_KEYS
from trainpace.workload.task import Task, image_task
from trainpace.workload.transformers_inputs import (
    SPECIAL,
    Inputs,
    pictures_with_more,
    side_of,
    words_or_speech,
)

_DEFAULT_LENGTH = 1024
_OF_NO_STEP = frozenset(
    """_name_or_path _commit_hash architectures auto_map transformers_version model_type task_specific_params num_labels
    rope_theta rope_scaling partial_rotary_factor rotary_pct rotary_emb_base use_cache tie_word_embeddings is_decoder
    cross_attention_hidden_size finetuning_task
    decoder_start_token_id forced_bos_token_id forced_eos_token_id sep_token_id prefix bad_words_ids attn_implementation
    _attn_implementation dtype torch_dtype""".split()
)
"""Keys that any configuration may have: names, what decodes or stores, and what is used under another name."""
_SKIPPING = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Attention that skips what a window leaves out."""
_FUSED = ("sdpa", *_SKIPPING)
TRAINER_WITHOUT_CACHE = 5
"""Major version of transformers whose Trainer sets use_cache to False (5.23 does, 4.45 does not). Without that, keys and values
for generating stay until a forward pass ends, in models that do not switch it off themselves under activation checkpointing."""
_SLOW_PATHS = (
    "mamba",
    "bamba",
    "zamba",
    "nemotron_h",
    "qwen3_next",
    "granitemoehybrid",
    "falcon_h1",
)
"""Beginnings of the types of models whose layers run in plain torch operations where their own CUDA kernels are not installed."""


def transformers_task(
    path: str, sequence_length: int | None, image_size: int | None, fused_attention: bool
) -> Task:
    """The task of a configuration file, in fp32. Without `fused_attention` it is computed from plain products."""
    transformers = import_package("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    values = read_json(path)
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableInput(
            f'{path} is not a transformers configuration: it has no "model_type".'
        )
    own_experts = (
        str(values["model_type"]).startswith("llama4")
        and values.get("experts_implementation") == "grouped_mm"
    )
    if own_experts:  # transformers has no such experts of Llama 4, and refuses the key
        values = {key: value for key, value in values.items() if key != "experts_implementation"}
    try:
        config = transformers.AutoConfig.for_model(**_without_storage(values))
    except (ValueError, TypeError) as error:
        raise UnreadableInput(f"{path}: {str(error).splitlines()[0]}") from None
    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise UnknownName(
            "transformers architecture",
            name,
            [n for n in dir(transformers) if n.startswith(name[:4])],
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _longer_positions(text, sequence_length)
    if int(transformers.__version__.split(".")[0]) >= TRAINER_WITHOUT_CACHE:
        config.use_cache = text.use_cache = False
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = (
            getattr(config, "pad_token_id", None) or 0
        )  # models shift their labels by it
    wanted = values.get("attn_implementation") or values.get("_attn_implementation") or "sdpa"
    model, taken_attention = _build(
        transformers, architecture, config, fused_attention and wanted != "eager", wanted
    )
    notes = _notes(config, values, wanted)
    if wanted in _SKIPPING and fused_attention and taken_attention != wanted:
        notes += (
            (
                f"transformers' {name} cannot be built with {wanted} here, and its attention is"
                f" traced as {taken_attention}."
            ),
        )
        wanted = taken_attention
    if own_experts:
        send_to_own_experts(model)
    elif text.model_type == "llama4_text":
        notes += (ALL_EXPERTS,)
    spec = f"transformers:{path}"
    special = pictures_with_more(name, config, image_size, sequence_length)
    if special is not None:
        if name != "CLIPModel":
            _refuse_length(name, sequence_length)
        return _task(spec, model, special, sequence_length, notes)
    taken = _arguments(model)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if "ImageClassification" not in name:
            raise TrainpaceError(
                f"{name} takes images, and its loss needs more than their classes.",
                "Name an architecture for classes (...ForImageClassification), or"
                f" {', '.join(SPECIAL)}, or write a function of your own (FILE.py:FUNCTION).",
            )
        _refuse_length(name, sequence_length)
        size = side_of(config, image_size)
        return image_task(
            spec, model, (config.num_channels, size, size), config.num_labels
        )._replace(notes=notes)
    if "labels" not in taken and "start_positions" not in taken:
        raise TrainpaceError(
            f"{name} computes no loss from labels.",
            'Name an architecture that does in "architectures" (...ForCausalLM,'
            " ...ForSequenceClassification), or write a function of your own (FILE.py:FUNCTION).",
        )
    longest = next((n for n in map(text.__dict__.get, _LENGTHS) if n), None)
    length = sequence_length or min(longest or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if longest is not None and length > longest:
        raise TrainpaceError(
            f"the sequence length {length} is more than the {longest} positions of {path}."
        )
    if sequence_length is None and (longest or 0) > length:
        notes += (
            (
                f"Samples of {length:,} tokens are assumed, of the {longest:,} that the model takes"
                " (--sequence-length)."
            ),
        )
    notes += _windows(text, wanted, length)
    return _task(
        spec, model, words_or_speech(name, model, config, text.vocab_size, length), length, notes
    )


def _refuse_length(name: str, sequence_length: int | None) -> None:
    if sequence_length is not None:
        raise TrainpaceError(
            f"{name} takes no tokens, and has no sequence length.", "Leave --sequence-length out."
        )


def _task(
    spec: str, model: nn.Module, inputs: Inputs, length: int | None, notes: tuple[str, ...]
) -> Task:
    return Task(
        spec,
        model,
        inputs.forward,
        inputs.loss,
        inputs.make_batch,
        None,
        inputs.sample,
        length,
        notes=(*notes, *inputs.notes),
    )


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def _without_storage(values: Any) -> Any:
    """The values without the keys that say how weights are stored, in their parts too: `Execution.precision` says the format."""
    if not isinstance(values, dict):
        return values
    return {
        key: _without_storage(value) for key, value in values.items() if key not in STORAGE_KEYS
    }


def _build(
    transformers: Any, architecture: Any, config: Any, fused_attention: bool, wanted: str
) -> tuple[nn.Module, str]:
    """The model, and its attention: what is `wanted`, or else sdpa or eager, as far as the architecture has it."""
    build = getattr(architecture, "_from_config", None) or architecture.from_config
    ways = {"eager": "eager"}
    if fused_attention:
        ways = {"sdpa": "sdpa"} | ways
        if wanted in _SKIPPING:
            ways = {wanted: offer_to_transformers(transformers)} | ways
    for way, implementation in ways.items():
        config._attn_implementation = implementation
        try:
            model: nn.Module = build(config)
        except (
            ValueError,
            ImportError,
            KeyError,
        ):  # a model with classes of its own for each way looks it up by name
            if way == "eager":
                raise
            continue
        break
    if fused_attention and config.model_type == "mpt":
        fuse_mpt_attention(model)
    return model, way


def _arguments(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _notes(config: Any, values: Mapping[str, Any], attention: str) -> tuple[str, ...]:
    """Sentences about the keys of the file that change nothing here."""
    notes = []
    known = {
        *_OF_NO_STEP,
        *getattr(config, "attribute_map", ()),
        *getattr(config, "sub_configs", ()),
    }
    known |= (
        {field.name for field in dataclasses.fields(config)}
        if dataclasses.is_dataclass(config)
        else set(values)
    )
    if "quantization_config" in values:
        known.add("quantization_config")
        notes.append(
            "The configuration's quantization_config is not used: weights are forecast in the"
            " number format of the precision."
        )
    if values.get("gradient_checkpointing"):
        known.add("gradient_checkpointing")
        notes.append(
            "The configuration's gradient_checkpointing is not used: --checkpointing full"
            " recomputes activations."
        )
    if attention not in (*_FUSED, "eager"):
        notes.append(
            f"The configuration's attn_implementation {attention} is not known, and was taken as"
            " sdpa."
        )
    unknown = sorted(key for key in values if key not in known and not key.endswith("_token_id"))
    if unknown:
        notes.append(
            f"{type(config).__name__} does not know these keys, and they are not used:"
            f" {', '.join(unknown)}."
        )
    if config.model_type.startswith(_SLOW_PATHS):
        notes.append(
            f"The state-space layers of {config.model_type} are forecast as transformers' plain"
            " torch code runs them. With the kernels of mamba-ssm, causal-conv1d or"
            " flash-linear-attention installed they are faster and need less memory."
        )
    return tuple(notes)


def _windows(config: Any, attention: str, length: int) -> tuple[str, ...]:
    """A sentence where layers have windows of fewer tokens, of which their attention makes no use."""
    sizes = [
        getattr(config, name, None)
        for name in ("sliding_window", "attention_chunk_size", "local_attention")
    ]
    window = min((size for size in sizes if isinstance(size, int) and size > 0), default=length + 1)
    if attention in _SKIPPING or window > length or not getattr(config, "use_sliding_window", True):
        return ()
    return (
        (
            f"Its windows of {window} tokens save nothing under {attention}, which computes all"
            ' scores and masks them: "attn_implementation": "flash_attention_2" or'
            ' "flex_attention" in the configuration skips what they leave out.'
        ),
    )


def _longer_positions(config: Any, sequence_length: int | None) -> None:
    """Rotary and linear (ALiBi) positions have no table that ends: such a model takes any length."""
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
