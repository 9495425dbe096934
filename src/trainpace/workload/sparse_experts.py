"""Experts that transformers computes for every token, by the tokens that are sent to them alone.

Llama 4's layers in transformers multiply each token with every expert's weights, most of them by zero ("should not be run on a
single machine", it says itself). Trainers of it (Megatron-LM, torchtitan) sort the tokens and make one grouped product of them.
"""

import types
from typing import Any

import torch
from torch import nn

ALL_EXPERTS = (
    "transformers computes all experts of a Llama 4 layer for every token, and so they are counted."
    ' "experts_implementation": "grouped_mm" in the configuration sends each token to its own, as'
    " other trainers do."
)


def send_to_own_experts(model: nn.Module) -> None:
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
    # Llama 4 weighs what goes into an expert, not what comes out
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
