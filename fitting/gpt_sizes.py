"""Models that a run names by their sizes alone, such as ``layers=24 hidden=2304 heads=24
vocab=51200``.

They become a transformers configuration: GPT-2 with one-kernel GELU, as Megatron-LM's GPT fuses it,
or the published configuration where the name is one that everybody knows. What a text leaves open
is filled in and said: Megatron's padded GPT-2 vocabulary; the number of layers that makes the named
size (12 h^2 parameters a layer, Narayanan et al. 2021).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import write_whole

MEGATRON_VOCABULARY = 51200
"""GPT-2's 50257 padded to a multiple of 128 x 8, as the Megatron papers count it."""
BLOOM_VOCABULARY = 250880
"""250680 tokens padded, as bigscience's configuration has it; its notes write 250k."""
BIGSCIENCE_HEADS = {14400: 96}
"""Heads where bigscience's notes give a hidden size alone: 96 is stated at the top of its section
for 14400; runs of its final round that state 64 have the same time as those that state nothing.
"""
BIGSCIENCE_USUAL_HEADS = 64
LLAMA_2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}
QWEN_3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2-7b": LLAMA_2
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama2-13b": LLAMA_2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama3-70b": LLAMA_2
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "bigcode/gptbigcode-santacoder": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "n_layer": 24,
        "n_embd": 2048,
        "n_head": 16,
        "n_inner": 8192,
        "n_positions": 2048,
        "vocab_size": 49280,
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
    },
    "ibm/powerlm-3b": {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 9.0,
        "residual_multiplier": 0.22,
    },
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv3671b": DEEPSEEK_V3,
    "kimik2": DEEPSEEK_V3
    | {
        "vocab_size": 163840,
        "first_k_dense_replace": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
    },
    "gptoss120b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attn_implementation": "flash_attention_3",
    },
    "qwen330ba3b": QWEN_3_MOE,
    "qwen3moe30b": QWEN_3_MOE,
    "qwen3235ba22b": QWEN_3_MOE
    | {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}
"""Touvron et al. 2023, table 1 and the released configurations; Llama team 2024, table 3.
SantaCoder: Ben Allal et al. 2023, section 5, and its released configuration; PowerLM-3B: Shen et
al. 2024 and its released configuration, 3.51 B parameters; DeepSeek-V3, Kimi K2, GPT-OSS and Qwen3:
their released configurations.
"""
LANGUINI = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
}
"""What languini's GPT has in place of GPT-2's (languini/projects/gpt/model.py and lib.py): no
dropout, a head of its own, GELU written out.
"""
GPT_3 = {"gpt3-175b": (96, 12288, 96), "gpt3-20b": (44, 6144, 48)}
"""Layers, hidden, heads. 175B: Brown et al. 2020, table 2.1; 20B: NeMo's own configuration of that name."""


class GptSize(NamedTuple):
    """A GPT of the usual shape; `feedforward` is the width of its hidden layer, 4 x hidden as a rule."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    feedforward: int

    def step_flops(self, batch: int, length: int, passes: int = 4) -> float:
        """FLOPs of `batch` sequences of `length` tokens: 24 B s L h^2 a pass (1 + s / 6h + V /
        16Lh), Narayanan et al. 2021.

        `passes` is 4 with full recomputation (one forward, one again, a backward that counts
        twice), as that paper and bigscience count, and 3 without.
        """
        share = 1 + length / (6 * self.hidden) + self.vocabulary / (16 * self.layers * self.hidden)
        return 24.0 * passes * batch * length * self.layers * self.hidden**2 * share

    def configuration(self, length: int) -> dict[str, Any]:
        """The keys of a transformers configuration."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": self.layers,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "vocab_size": self.vocabulary,
            "n_inner": self.feedforward,
            "n_positions": length,
            "activation_function": "gelu_pytorch_tanh",
        }


class Named(NamedTuple):
    """A model of stated sizes:

    its configuration, its GPT sizes where it is one, and what had to be assumed.
    """

    name: str
    configuration: dict[str, Any]
    size: GptSize | None
    assumed: str


def named_model(model: str, text: str, length: int, pp: int = 1) -> Named | None:
    """The model that sizes in `text`, or a well-known name, make; None where neither says enough."""
    if re.search(r"\b(?i:LoRA)\b|\bAdapter\b|quantization=|\bexperts=", text):
        return None
    key = re.sub(r"\((tokendrop|dropless|w/o? MTP)\)|[ _]", "", model).lower()
    if key in PUBLISHED and not re.search(
        r"framework=(?!none;)", text
    ):  # other frameworks exchange kernels for their own
        return Named(key.replace("/", "-"), PUBLISHED[key], None, "")
    if model.startswith("languini-"):
        return _languini(model, text, length)
    sized = gpt_size(model, text, pp)
    if sized is None and key in GPT_3:
        layers, hidden, heads = GPT_3[key]
        sized = GptSize(layers, hidden, heads, MEGATRON_VOCABULARY, 4 * hidden), ""
    if sized is None:
        return None
    size, assumed = sized
    name = f"gpt-{size.layers}x{size.hidden}-{size.heads}-{size.vocabulary}-{size.feedforward}-{length}"
    return Named(name, size.configuration(length), size, assumed)


def _languini(model: str, text: str, length: int) -> Named | None:
    """languini's GPT where GPT-2's configuration can say it:

    heads x head_dim is the hidden size. Its LSTM is no GPT.
    """
    heads, width, hidden = (
        _number(rf"\b{name}=(\d+)", text) or 0 for name in ("heads", "head_dim", "h")
    )
    if not model.startswith("languini-gpt-") or heads * width != hidden:
        return None
    found = gpt_size(model, text)
    if found is None:
        return None
    return Named(f"{model}-{length}", found[0].configuration(length) | LANGUINI, found[0], found[1])


def gpt_size(model: str, text: str, pp: int = 1) -> tuple[GptSize, str] | None:
    """(sizes, what was assumed), or None where the hidden size, or both layers and parameters, are
    missing.
    """
    billions = _number(r"(\d+(?:\.\d+)?)\s*[Bb]\b", model)
    # "20B: NLAYERS=8 NHEADS=32; 200B: NLAYERS=80 NHEADS=96": of several models the part of this one
    # alone
    parts = dict(re.findall(r"\b(\d+)B\s*[:=]\s*(.*?)(?=;|\)| vocab=|$)", text))
    text = (
        re.sub(r"\b\d+B\s*[:=]\s*.*?(?=;|\)| vocab=|$)", "", text)
        + " "
        + parts.get(f"{billions or 0:g}", "")
    )
    hidden = _number(r"\b(?:hidden|NHIDDEN|n_embd|h)=(\d+)", text)
    if hidden is None:
        return None
    assumed = []
    vocabulary = _number(r"vocab=(\d+)", text)
    if vocabulary is None and "BLOOM" in model:
        vocabulary = BLOOM_VOCABULARY
    elif vocabulary is None:
        vocabulary = MEGATRON_VOCABULARY
        assumed.append(f"a vocabulary of {MEGATRON_VOCABULARY}")
    elif re.search(r"vocab=\d+k", text):
        vocabulary = BLOOM_VOCABULARY if vocabulary == 250 else 1000 * vocabulary
    layers = _number(r"\b(?:n_?layers?|num_blocks|layers|L)=(\d+)", text, re.IGNORECASE)
    layers = layers or _number(r"(\d+) layers\b", text)
    if layers is None and billions is not None:
        exact = (1e9 * billions - vocabulary * hidden) / (12 * hidden**2)
        layers = max(1, round(exact / pp)) * pp
        assumed.append(f"{layers:g} layers, which make {billions:g} billion parameters")
    if layers is None:
        return None
    heads = _number(r"\b(?:heads|NHEADS|attn_heads|n_head)=(\d+)", text)
    if heads is None:
        if not re.search(r"NHIDDEN", text):
            return None
        heads = BIGSCIENCE_HEADS.get(int(hidden), BIGSCIENCE_USUAL_HEADS)
        assumed.append(f"{heads} heads")
    feedforward = _number(r"\b(?:feedforward|mlp)=(\d+)", text) or 4 * hidden
    sizes = GptSize(*(int(x) for x in (layers, hidden, heads, vocabulary, feedforward)))
    if min(sizes) < 1 or sizes.hidden % sizes.heads:
        raise TrainpaceError(f"{sizes.heads} heads do not divide the hidden size {sizes.hidden}.")
    return sizes, ", ".join(assumed)


def write_configuration(named: Named, folder: Path) -> str:
    """Write the configuration into `folder` unless it is there; the spec that names it."""
    file = folder / f"{named.name}.json"
    text = json.dumps(named.configuration, indent=1)
    if not file.is_file() or file.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    return f"transformers:{file}"


def _number(pattern: str, text: str, flags: int = 0) -> float | None:
    """The last number: notes put what a table's own column says behind what its section says."""
    numbers = re.findall(pattern, text, flags)
    return float(numbers[-1]) if numbers else None
