"""Attention of transformers' models that is trained fused and that transformers writes as plain products."""

import types
from typing import Any

import torch
from torch import nn


def fuse_mpt_attention(model: nn.Module) -> None:
    """MPT is trained by llm-foundry with FlashAttention, which adds ALiBi's bias inside; transformers has only plain products."""
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
