"""Tracing five blocks of a long uniform chain gives the same result as tracing all of them."""

import json

import pytest
import torch
from torch import nn

from trainpace.core import records
from trainpace.workload import Variant, blocks
from trainpace.workload import trace as trace_module
from trainpace.workload.blocks import longest_chain
from trainpace.workload.task import Task
from trainpace.workload.trace import trace, trace_task

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = SMALL | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 9,
    "num_key_value_heads": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 9,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 100,
}
MIXTRAL = SMALL | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 9,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
GEMMA = SMALL | {  # every sixth layer attends to all tokens
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
}
DEEPSEEK = SMALL | {  # dense layers, then experts
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 10,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


def both(monkeypatch, make):
    """Return the workload of the shortened chain and of the whole one."""
    short = make()
    monkeypatch.setattr(blocks, "SHORTEST_CUT", 10**9)
    return short, make()


@pytest.mark.parametrize(
    ("values", "variant"),
    [
        (LLAMA, Variant("adamw", 16)),
        (GPT2, Variant("sgd", 16, checkpointing=True)),
        (MIXTRAL, Variant("adamw", 16)),
        (DEEPSEEK, Variant("sgd_momentum", 16)),
    ],
)
def test_trace_of_five_blocks_equals_whole_model(tmp_path, monkeypatch, values, variant):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    short, whole = both(monkeypatch, lambda: trace(f"transformers:{path}", ("amp",), variant))
    assert (
        short.forms["amp"].blocks.count
        == values.get("n_layer", values.get("num_hidden_layers", 0)) - (values is DEEPSEEK) * 2
    )
    assert records.to_json(short) == records.to_json(whole)


class Residual(nn.Module):
    def __init__(self, number, dropout=0.0):
        super().__init__()
        self.linear, self.layer_idx, self.dropout = nn.Linear(8, 8), number, dropout

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x), self.dropout, self.training)


def task(blocks):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*blocks), nn.Linear(8, 2))
    return Task(
        "residuals",
        model,
        lambda m, x: m(x),
        lambda m, x: m(x).sum(),
        lambda n: torch.randn(n, 8),
        None,
        "a vector",
    )


@pytest.mark.parametrize(
    ("layers", "ran"),
    [
        ([Residual(i) for i in range(10)], blocks.KEPT),
        ([Residual(i) for i in range(7)], 7),
        ([Residual(i, 0.1 * (i == 6)) for i in range(10)], 10),  # another setting
    ],
)
def test_only_long_uniform_chains_are_shortened(layers, ran):
    model = task(layers).model
    chain = blocks.shortened(model, longest_chain(model))
    assert (len(chain.modules), chain.length) == (ran, len(layers))
    with blocks.only_these_blocks(model, chain):
        assert [*model[1]] == list(chain.modules)
    assert [*model[1]] == layers
    assert len(blocks.idle_parameters(model, chain)) == 2 * (len(layers) - ran)


def test_blocks_with_different_behavior_are_traced_whole(monkeypatch):
    """A hidden setting makes every second block square its output."""

    class Hidden(Residual):
        def forward(self, x):
            return super().forward(x) ** (1 + self.layer_idx % 2)

    blocks = [Hidden(i) for i in range(10)]
    short, whole = both(monkeypatch, lambda: trace_task(task(blocks), ("fp32",), Variant("sgd")))
    assert records.to_json(short) == records.to_json(whole)


MAVERICK = SMALL | {  # experts in every second layer
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1] * 16,
    "layer_types": ["full_attention"] * 16,
    "experts_implementation": "grouped_mm",
    "pad_token_id": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "period", "ran"),
    [
        (GEMMA, 6, 12),
        (GEMMA | {"num_hidden_layers": 13}, 1, 13),
        (GEMMA | {"sliding_window_pattern": 2, "num_hidden_layers": 16}, 2, 10),
        (MAVERICK, 2, 10),
    ],
)
def test_alternating_layers_are_shortened_by_whole_periods(
    tmp_path, monkeypatch, values, period, ran
):
    pytest.importorskip("transformers")
    if "sliding_window_pattern" in values:
        kinds = ["sliding_attention", "full_attention"] * 8
        values = {
            key: value for key, value in values.items() if key != "sliding_window_pattern"
        } | {"layer_types": kinds}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    chains = []

    def noted(model, chain):
        chains.append(short := shortened(model, chain))
        return short

    shortened = trace_module.shortened
    monkeypatch.setattr(trace_module, "shortened", noted)
    short, whole = both(
        monkeypatch, lambda: trace(f"transformers:{path}", ("half",), Variant("sgd", 16))
    )
    assert records.to_json(short) == records.to_json(whole)
    assert (chains[0].period, len(chains[0].modules)) == (period, ran)
    assert short.forms["half"].blocks.count == values["num_hidden_layers"]


@pytest.mark.slow
def test_alternating_block_counts_are_averaged_over_a_period(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MAVERICK))
    blocks = trace(f"transformers:{path}", ("amp",), Variant("sgd", 16)).forms["amp"].blocks
    in_a_layer = 4 * 3 * 32 * 64
    assert (blocks.experts, blocks.expert_parameters) == (4, in_a_layer // 2)
    assert blocks.dispatched_bytes == (
        0.0,
        16 * 32 * 2 / 2,
    )  # 16 tokens of 32 numbers, in every second layer


def forms(*numbers):
    return [nn.Linear(8, n) for n in numbers]


@pytest.mark.parametrize(
    ("widths", "found"),
    [
        ((8,) * 6, (6, 1)),
        ((8, 9) * 3, (6, 2)),
        ((7, 8, 9, 8, 9, 8, 9, 6), (6, 2)),
        ((7, 8, 8, 8, 9) * 2, (10, None)),
        ((7, 8, 9, 6, 5), None),
    ],
)
def test_longest_chain_can_alternate(widths, found):
    chain = longest_chain(nn.ModuleList(forms(*widths)))
    if found is None:
        assert chain is None
    elif found[1] is None:
        assert chain is None or chain.period == 1  # No chain has a period of five.
    else:
        assert (chain.length, chain.period) == found
    assert (
        longest_chain(nn.Sequential(*forms(8, 9, 8, 9, 8, 9))) is None
    )  # Only layers of a ModuleList count.
