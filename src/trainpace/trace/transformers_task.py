"""A task from a configuration of Hugging Face's transformers."""

from typing import Any

import torch
from torch import nn

from trainpace.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.records import read_json
from trainpace.trace.cuda_mapping import fuse_mpt_attention
from trainpace.trace.task import Task, image_task, import_package


def transformers_task(path: str, sequence_length: int | None, image_size: int | None, fused_attention: bool) -> Task:
    transformers = import_package("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    values = read_json(path)
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableInput(f'{path} is not a transformers configuration: it has no "model_type".')
    try:
        config = transformers.AutoConfig.for_model(**values)
    except ValueError as error:
        raise UnreadableInput(f"{path}: {str(error).splitlines()[0]}") from None
    name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise UnknownName("transformers architecture", name, [n for n in dir(transformers) if n.startswith(name[:4])])
    build = getattr(architecture, "_from_config", None) or architecture.from_config
    _longer_positions(config, sequence_length)
    config._attn_implementation = "sdpa" if fused_attention else "eager"
    try:
        model = build(config)
    except (ValueError, ImportError):
        config._attn_implementation = "eager"  # this architecture has no other
        model = build(config)
    if fused_attention and config.model_type == "mpt":
        fuse_mpt_attention(model)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = image_size or (config.image_size if isinstance(config.image_size, int) else config.image_size[0])
        return image_task(f"transformers:{path}", model, (config.num_channels, size, size), config.num_labels)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 1024
    length = sequence_length or min(longest, 1024)
    if length > longest:
        raise TrainpaceError(f"the sequence length {length} is more than the {longest} positions of {path}.")
    vocabulary = config.vocab_size

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        batch = {"input_ids": torch.randint(0, vocabulary, (n, length))}
        if "QuestionAnswering" in name:
            return batch | {key: torch.randint(0, length, (n,)) for key in ("start_positions", "end_positions")}
        if "SequenceClassification" in name:
            return batch | {"labels": torch.randint(0, config.num_labels, (n,))}
        return batch | {"labels": torch.randint(0, vocabulary, (n, length))}

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(input_ids=batch["input_ids"])

    return Task(f"transformers:{path}", model, forward, loss, make_batch, None, f"{length} tokens", length)


def _longer_positions(config: Any, sequence_length: int | None) -> None:
    """Rotary and linear (ALiBi) positions have no table that ends: such a model takes any length."""
    endless = config.model_type in ("mpt", "bloom") or any(
        getattr(config, name, None) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    )
    for name in ("max_position_embeddings", "max_seq_len"):
        if endless and sequence_length and (getattr(config, name, None) or sequence_length) < sequence_length:
            setattr(config, name, sequence_length)
