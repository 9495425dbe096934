"""The architectures that `benchmarks.architectures` traces, each in full size and in a tiny one that tests trace.

Full sizes are those of the configuration classes' defaults, or published ones where they are given here. Those of diffusers are
of SDXL base, FLUX.1-dev, DiT-XL/2 at 256 pixels, PixArt-alpha at 1024 pixels and Stable Diffusion 3 medium.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Values = dict[str, Any]


class Architecture(NamedTuple):
    """A model: its spec, and the tokens of a sample (None: the model's own)."""

    name: str
    spec: str
    tokens: int | None


TOKENS, TINY_TOKENS = 512, 16
LONG, TINY_LONG = 8192, 64
"""Tokens where windows and chunks of attention are to be seen."""
FLASH, SINKS = (
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": "flash_attention_3"},
)
OWN_EXPERTS = {"experts_implementation": "grouped_mm"}

_WIDTHS: Values = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_GROUPED: Values = _WIDTHS | {"num_key_value_heads": 2, "pad_token_id": 0}
_HEADS: Values = _GROUPED | {"head_dim": 8}
_EXPERTS: Values = _HEADS | {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_LLAMA4: Values = _HEADS | {
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "num_hidden_layers": 8,
}
_LATENT: Values = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_SWITCHED: Values = _HEADS | {"num_hidden_layers": 6, "sliding_window": 8}
_STATES: Values = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
_LINEAR: Values = _EXPERTS | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 16,
}
_T5: Values = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 4,
    "num_heads": 4,
    "vocab_size": 128,
}
_PAIR: Values = {
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
_WHISPER: Values = _PAIR | {
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
_PICTURE: Values = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_CLIP: Values = {
    "projection_dim": 16,
    "vision_config": _PICTURE,
    "text_config": _WIDTHS | {"max_position_embeddings": 16, "eos_token_id": 2},
}

TRANSFORMERS: dict[str, tuple[str, Values, Values]] = {
    "llama": ("LlamaForCausalLM", {}, _GROUPED),
    "llama4_text": ("Llama4ForCausalLM", {}, _LLAMA4),
    "llama4_text maverick": (
        "Llama4ForCausalLM",
        {"num_local_experts": 128, "interleave_moe_layer_step": 2},
        _LLAMA4 | {"interleave_moe_layer_step": 2},
    ),
    "llama4_text maverick, each token with its own experts": (
        "Llama4ForCausalLM",
        OWN_EXPERTS | {"num_local_experts": 128, "interleave_moe_layer_step": 2},
        OWN_EXPERTS | _LLAMA4 | {"interleave_moe_layer_step": 2},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}, _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {}, _HEADS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}, _EXPERTS),
    "qwen3_next": ("Qwen3NextForCausalLM", {}, _LINEAR),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {},
        _EXPERTS | {"num_key_value_heads": 4, "head_dim": None} | _LATENT,
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {},
        _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "gemma2": ("Gemma2ForCausalLM", {}, _SWITCHED),
    "gemma3_text": ("Gemma3ForCausalLM", {}, _SWITCHED),
    "mistral": ("MistralForCausalLM", {}, _HEADS),
    "mixtral": ("MixtralForCausalLM", {}, _HEADS | {"num_local_experts": 4}),
    "mamba2": ("Mamba2ForCausalLM", {}, _STATES),
    "phi3": ("Phi3ForCausalLM", {}, _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", {}, _GROUPED),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {},
        _EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "gpt2": ("GPT2LMHeadModel", {}, {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}, _WIDTHS),
    "falcon": ("FalconForCausalLM", {}, _WIDTHS),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 4096, "n_layer": 30, "n_head": 32},
        {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128},
    ),
    "opt": (
        "OPTForCausalLM",
        {},
        _WIDTHS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "bert": ("BertForMaskedLM", {}, _WIDTHS),
    "roberta": (
        "RobertaForMaskedLM",
        {"max_position_embeddings": 514},
        _WIDTHS | {"max_position_embeddings": 66},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {},
        _WIDTHS | {"local_attention": 8, "num_hidden_layers": 6, "pad_token_id": 0},
    ),
    "t5": ("T5ForConditionalGeneration", {}, _T5),
    "bart": ("BartForConditionalGeneration", {}, _PAIR),
    "whisper": ("WhisperForConditionalGeneration", {}, _WHISPER),
    "vit": ("ViTForImageClassification", {}, _PICTURE),
    "clip": ("CLIPModel", {}, _CLIP),
    "mistral, flash attention": (
        "MistralForCausalLM",
        FLASH,
        FLASH | _HEADS | {"sliding_window": 8},
    ),
    "gemma2, flash attention": ("Gemma2ForCausalLM", FLASH, FLASH | _SWITCHED),
    "gemma3_text, flash attention": ("Gemma3ForCausalLM", FLASH, FLASH | _SWITCHED),
    "modernbert, flash attention": (
        "ModernBertForMaskedLM",
        FLASH,
        FLASH | _WIDTHS | {"local_attention": 8, "num_hidden_layers": 6, "pad_token_id": 0},
    ),
    "gpt_oss, flash attention": (
        "GptOssForCausalLM",
        SINKS,
        SINKS | _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "llama4_text, flex attention": (
        "Llama4ForCausalLM",
        {"attn_implementation": "flex_attention", "attention_chunk_size": 2048},
        _LLAMA4 | {"attn_implementation": "flex_attention"},
    ),
}
"""By the type of transformers' configuration, after which a comma or a space begins a remark: the class that is trained, the
values of the full size beside the class's defaults, those of the tiny one."""

_XL: Values = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
}
_SMALL: Values = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "sample_size": 8,
}
DIFFUSERS: dict[str, tuple[str, Values, Values]] = {
    "SDXL UNet": (
        "UNet2DConditionModel",
        {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "in_channels": 4,
            "layers_per_block": 2,
            "projection_class_embeddings_input_dim": 2816,
            "sample_size": 128,
            "transformer_layers_per_block": [1, 2, 10],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "use_linear_projection": True,
        },
        {
            "attention_head_dim": [1, 2, 4],
            "block_out_channels": [32, 64, 64],
            "cross_attention_dim": 32,
            "sample_size": 16,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
            "transformer_layers_per_block": [1, 1, 2],
            "layers_per_block": 1,
        },
    ),
    "FLUX.1": (
        "FluxTransformer2DModel",
        {
            "attention_head_dim": 128,
            "guidance_embeds": True,
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 19,
            "num_single_layers": 38,
            "patch_size": 1,
            "pooled_projection_dim": 768,
        },
        {
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_layers": 4,
            "num_single_layers": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 16,
            "axes_dims_rope": [4, 6, 6],
            "in_channels": 8,
            "sample_size": 8,
        },
    ),
    "DiT-XL/2": (
        "DiTTransformer2DModel",
        _XL | {"sample_size": 32, "norm_type": "ada_norm_zero"},
        _SMALL,
    ),
    "PixArt-alpha": (
        "PixArtTransformer2DModel",
        _XL
        | {
            "sample_size": 128,
            "norm_type": "ada_norm_single",
            "caption_channels": 4096,
            "cross_attention_dim": 1152,
            "interpolation_scale": 2,
        },
        _SMALL | {"caption_channels": 32, "cross_attention_dim": 32},
    ),
    "Stable Diffusion 3": (
        "SD3Transformer2DModel",
        {
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "in_channels": 16,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 24,
            "out_channels": 16,
            "patch_size": 2,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
            "sample_size": 128,
        },
        _SMALL
        | {
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
    ),
}
"""The class of diffusers, the values of the full size, and what is otherwise in the tiny one."""

_MODELS = str(Path(__file__).parents[1] / "examples" / "tasks" / "architectures.py")
OTHERS: dict[str, tuple[str, str]] = {
    "ViT-L/16": ("timm:vit_large_patch16_224", "timm:test_vit"),
    "ConvNeXt-B": ("timm:convnext_base", "timm:test_convnext"),
    "Swin-B": ("timm:swin_base_patch4_window7_224", "timm:swin_tiny_patch4_window7_224"),
    "EfficientNetV2-M": ("timm:efficientnetv2_m", "timm:test_efficientnet"),
    "MaxViT-B": ("timm:maxvit_base_tf_224", "timm:maxvit_pico_rw_256"),
    "MLP-Mixer-B/16": ("timm:mixer_b16_224", "timm:mixer_s32_224"),
    "ResNet-50": ("torchvision:resnet50", "timm:test_resnet"),
    "YOLO": (f"{_MODELS}:yolo", f"{_MODELS}:tiny_yolo"),
    "LSTM": (f"{_MODELS}:lstm", f"{_MODELS}:tiny_lstm"),
    "DLRM": (f"{_MODELS}:dlrm", f"{_MODELS}:tiny_dlrm"),
    "GraphSAGE": (f"{_MODELS}:graph_sage", f"{_MODELS}:tiny_graph_sage"),
    "DCGAN, whole step": (f"{_MODELS}:dcgan", f"{_MODELS}:tiny_dcgan"),
}
"""Specs of the full size and of the tiny one."""

REFUSED = {"qwen3_next": "linalg_solve_triangular"}
"""What a trace refuses, and the operator that it names."""


def architectures(folder: Path, tiny: bool = False) -> Iterator[Architecture]:
    """Every architecture, whose configuration is written into the folder."""
    for name, (trained, full, small) in TRANSFORMERS.items():
        kind = name.replace(",", " ").split()[0]
        file = _written(
            folder,
            name,
            {"model_type": kind, "architectures": [trained], **(small if tiny else full)},
        )
        yield Architecture(name, f"transformers:{file}", _tokens(name, tiny))
    for name, (trained, full, small) in DIFFUSERS.items():
        file = _written(folder, name, {"_class_name": trained, **full, **(small if tiny else {})})
        yield Architecture(name, f"diffusers:{file}", None)
    for name, specs in OTHERS.items():
        yield Architecture(name, specs[tiny], None)


def _tokens(name: str, tiny: bool) -> int | None:
    if name in ("vit", "clip"):
        return None
    if "attention" in name:
        return TINY_LONG if tiny else LONG
    if name == "whisper":
        return TINY_TOKENS if tiny else 448
    return TINY_TOKENS if tiny else TOKENS


def _written(folder: Path, name: str, values: Values) -> Path:
    file = folder / ("".join(c if c.isalnum() else "_" for c in name) + ".json")
    file.write_text(json.dumps(values))
    return file
