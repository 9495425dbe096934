"""Mixture-of-experts models: grouped matmuls have FLOPs in every precision; value-dependent modules are rejected by name."""

import json

import numpy as np
import pytest

from expert_models import CHOSEN, EXPERTS, INNER, LAYERS, TOKENS, WIDTH, WORDS, Loop, language_task
from trainpace.core.errors import UserCodeError
from trainpace.workload import GEMM, GROUPED, Variant, at_batch
from trainpace.workload.trace import trace, trace_task

STEP = Variant(mode="forward_backward")


def product_flops(form, phase, batch=1):
    table = form.operators
    rows = table.is_matrix & (np.array(table.phase) == phase)
    return float((at_batch(table.flops, batch) * table.count)[rows].sum())


@pytest.mark.parametrize("form", ["fp32", "half", "amp"])
def test_grouped_matmuls_are_counted_forward_and_backward(form):
    traced = trace_task(language_task(), (form,), STEP).forms[form]
    each_token = LAYERS * (EXPERTS * WIDTH + CHOSEN * 3 * WIDTH * INNER) + WIDTH * WORDS
    assert product_flops(traced, "forward") == pytest.approx(2 * TOKENS * each_token)
    # The router's input gets gradients from the router and from the experts.
    assert product_flops(traced, "backward") == pytest.approx(4 * TOKENS * each_token)
    table = traced.operators
    grouped = [i for i in range(len(table)) if table.function[i] == GROUPED]
    rows = {tuple(at_batch(table.dims[i, GEMM], 3)) for i in grouped}
    each = 3 * TOKENS * CHOSEN / EXPERTS
    assert rows == {
        (EXPERTS, each, 2 * INNER, WIDTH),
        (EXPERTS, each, WIDTH, INNER),
        (EXPERTS, each, INNER, WIDTH),
        (EXPERTS, each, WIDTH, 2 * INNER),
        (EXPERTS, WIDTH, 2 * INNER, each),
        (EXPERTS, INNER, WIDTH, each),
    }
    assert {bool(table.half[i]) for i in grouped} == {form != "fp32"}
    # bf16 has one kernel for all groups, other precisions one per group.
    assert {int(table.launches[i]) for i in grouped} == {1 if form != "fp32" else EXPERTS}


def test_blocks_record_expert_counts_and_bytes():
    blocks = trace_task(language_task(), ("half",), STEP).forms["half"].blocks
    weights = EXPERTS * 3 * WIDTH * INNER
    assert (blocks.experts, blocks.expert_parameters, blocks.tensor_parameters) == (
        EXPERTS,
        weights,
        0,
    )
    assert blocks.parameters == weights + WIDTH * EXPERTS + EXPERTS + 2 * WIDTH
    assert blocks.dispatched_bytes == (0.0, 2.0 * CHOSEN * TOKENS * WIDTH)
    # Both halves of the first matmul's output, the activated gate, their product, and the second matmul's output.
    assert blocks.expert_saved_bytes == (0.0, 2.0 * CHOSEN * TOKENS * (4 * INNER + WIDTH))
    assert "expert" in blocks.roles


def test_loop_over_experts_is_rejected_by_module_name():
    with pytest.raises(UserCodeError, match=r"layers\.0\.experts \(Loop\)") as refused:
        trace_task(language_task(Loop), ("half",), STEP)
    assert "grouped_mm" in refused.value.hint


MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 64,
}
LATENT = {
    **MIXTRAL,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": INNER,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def configuration(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return f"transformers:{path}"


def test_mixtral_has_expected_flops(tmp_path):
    pytest.importorskip("transformers")
    traced = trace(
        configuration(tmp_path, **MIXTRAL), ("half",), STEP._replace(sequence_length=TOKENS)
    ).forms["half"]
    attention = (
        WIDTH * (WIDTH + 2 * WIDTH // 2 + WIDTH) + TOKENS * WIDTH
    )  # causal: half of two products with all tokens
    each_token = LAYERS * (attention + EXPERTS * WIDTH + CHOSEN * 3 * WIDTH * INNER) + WIDTH * WORDS
    assert product_flops(traced, "forward") == pytest.approx(2 * TOKENS * each_token)
    assert traced.blocks.expert_parameters == EXPERTS * 3 * WIDTH * INNER
    with pytest.raises(UserCodeError, match=r"reads the values.*MixtralExperts") as refused:
        trace(configuration(tmp_path, **MIXTRAL, experts_implementation="eager"), ("half",), STEP)
    assert 'experts_implementation="grouped_mm"' in refused.value.hint


def test_autocast_inference_of_experts_finds_all_blocks(tmp_path):
    """Without gradients, a transposed weight looks like a weight, is freed at once, and another tensor reuses its id."""
    pytest.importorskip("transformers")
    inference = Variant(mode="inference", sequence_length=TOKENS)
    for layers in (LAYERS, 9, 12):
        traced = trace(
            configuration(tmp_path, **MIXTRAL | {"num_hidden_layers": layers}), ("amp",), inference
        ).forms["amp"]
        assert traced.blocks.count == layers


def test_deepseek_latent_attention_has_expected_flops(tmp_path):
    """Queries and keys have size 24, values size 16; flash attention needs equal sizes."""
    pytest.importorskip("transformers")
    traced = trace(
        configuration(tmp_path, **LATENT), ("half",), STEP._replace(sequence_length=TOKENS)
    ).forms["half"]
    table = traced.operators
    attention = {
        table.kind[i]: i for i in range(len(table)) if table.kind[i].startswith("attention")
    }
    assert {table.function[i] for i in attention.values()} == {
        "scaled_dot_product_attention",
        "scaled_dot_product_attention_backward",
    }
    scores = 4 * TOKENS**2 / 2
    forward, backward = (
        at_batch(table.flops[attention[kind]], 1) for kind in ("attention", "attention_backward")
    )
    assert forward == 2 * scores * (24 + 16)
    assert backward == 2 * scores * (3 * 24 + 2 * 16)


def test_gpt_oss_sinks_use_fused_attention(tmp_path):
    pytest.importorskip("transformers")
    config = {
        **MIXTRAL,
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 8,
        "sliding_window": 8,
    }
    kinds = {}
    for way in ("eager", "flash_attention_3"):
        spec = configuration(tmp_path, **config, attn_implementation=way)
        form = trace(spec, ("half",), STEP._replace(sequence_length=TOKENS)).forms["half"]
        kinds[way] = set(form.operators.kind)
        assert form.blocks.experts == EXPERTS
    assert {way: "attention" in found for way, found in kinds.items()} == {
        "eager": False,
        "flash_attention_3": True,
    }
