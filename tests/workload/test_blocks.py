"""Repeated blocks of real models: detected, divided as in Megatron, and their bytes compared with known formulas."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from nouns import at_peak
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.workload import Variant, at_batch
from trainpace.workload.blocks import SHORTEST, longest_chain
from trainpace.workload.task import Task
from trainpace.workload.trace import trace, trace_task

STEP = Variant(mode="forward_backward")
TOKENS, WIDTH, HEADS, LAYERS, WORDS = 64, 48, 4, 6, 97


class Block(nn.Module):
    """A pre-norm GPT-2 layer with attention as plain matmuls and all three kinds of dropout."""

    def __init__(
        self, fused_qkv=True, parallel=False, gated=False, key_value_heads=HEADS, post_norm=False
    ):
        super().__init__()
        self.fused_qkv, self.parallel, self.gated, self.post_norm = (
            fused_qkv,
            parallel,
            gated,
            post_norm,
        )
        self.key_value_heads, self.num_heads = key_value_heads, HEADS
        head = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        widths = (WIDTH, key_value_heads * head, key_value_heads * head)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, n) for n in ((sum(widths),) if fused_qkv else widths)
        )
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if gated else None

    def attend(self, x):
        head = WIDTH // HEADS
        kv = self.key_value_heads * head
        parts = (
            self.qkv[0](x).split([WIDTH, kv, kv], -1)
            if self.fused_qkv
            else [linear(x) for linear in self.qkv]
        )
        q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(HEADS // self.key_value_heads, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(head)
        mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)

    def mlp(self, x):
        up = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return F.dropout(self.down(up), 0.1, self.training)

    def forward(self, x):
        if self.parallel:
            return x + self.attend(self.norm1(x)) + self.mlp(self.norm2(x))
        if self.post_norm:
            x = self.norm1(x + self.attend(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, layers, tied=True, recompute=False, words=WORDS):
        super().__init__()
        self.recompute = recompute
        self.words, self.layers = nn.Embedding(words, WIDTH), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
                if self.recompute
                else layer(x)
            )
        return self.head(self.norm(x))


def language_task(model):
    def loss(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return Task(
        "language",
        model,
        lambda m, b: m(b),
        loss,
        lambda n: torch.randint(0, WORDS, (n, TOKENS)),
        None,
        "tokens",
        TOKENS,
    )


def blocks_of(model, form="fp32", variant=STEP):
    traced = trace_task(language_task(model), (form,), variant).forms[form]
    return traced, traced.blocks


def language(layers=LAYERS, tied=True, recompute=False, **options):
    return Language([Block(**options) for _ in range(layers)], tied, recompute)


def products(traced, phase="forward"):
    """Return {(n, k): role} of the matmuls with a weight."""
    table = traced.operators
    return {
        tuple(int(size) for size in table.dims[i, 2:4, 0]): traced.blocks.roles[i]
        for i in range(len(table))
        if table.kind[i] == "gemm" and table.phase[i] == phase and table.function[i] != "bmm"
    }


def numbers(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_block_and_outside_parameters_sum_to_model(tied):
    model = language(tied=tied)
    _, blocks = blocks_of(model)
    assert (blocks.module, blocks.count, blocks.parameters) == (
        "layers",
        LAYERS,
        numbers(model.layers[0]),
    )
    assert blocks.count * blocks.parameters + blocks.outside_parameters == numbers(model)
    assert blocks.outside_tensor_parameters == WORDS * WIDTH * (1 if tied else 2)
    assert blocks.tied_parameters == (WORDS * WIDTH if tied else 0)


OPTIONS = [
    {},
    {"fused_qkv": False},
    {"parallel": True},
    {"gated": True},
    {"post_norm": True},
    {"key_value_heads": 1},
    {"key_value_heads": 2, "fused_qkv": False, "gated": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["fp32", "amp"])
def test_matmuls_are_divided_like_megatron(options, form):
    model = language(**options)
    traced, blocks = blocks_of(model, form)
    assert (blocks.heads, blocks.key_value_heads) == (HEADS, options.get("key_value_heads", HEADS))
    block = model.layers[0]
    column = [*block.qkv, block.up, *([block.gate] if block.gate else [])]
    divided = (
        sum(numbers(linear) for linear in column)
        + block.out.weight.numel()
        + block.down.weight.numel()
    )
    assert blocks.tensor_parameters == divided
    table = traced.operators
    for phase, times in (("forward", 1), ("backward", 2)):
        rows = [i for i in range(len(table)) if table.kind[i] == "gemm" and table.phase[i] == phase]
        flops = at_batch(table.flops, 3) * blocks.operator_counts
        by_role = {
            role: sum(flops[i] for i in rows if blocks.roles[i] == role)
            for role in ("column", "row")
        }
        tokens = 2 * 3 * TOKENS * LAYERS * times
        assert by_role["column"] == tokens * sum(linear.weight.numel() for linear in column)
        assert by_role["row"] == tokens * (block.out.weight.numel() + block.down.weight.numel())


def test_operators_between_matmuls_have_tensor_parallel_roles():
    traced, blocks = blocks_of(language())
    table = traced.operators
    role = {}
    for i in range(len(table)):
        role.setdefault(
            (table.function[i], table.phase[i], bool(blocks.operator_counts[i])), set()
        ).add(blocks.roles[i])
    assert (
        role["_softmax", "forward", True]
        == role["_softmax_backward_data", "backward", True]
        == {"sharded"}
    )
    assert role["gelu", "forward", True] == role["gelu_backward", "backward", True] == {"sharded"}
    assert (
        role["native_layer_norm", "forward", True]
        == role["native_layer_norm_backward", "backward", True]
        == {"replicated"}
    )
    assert role["native_dropout", "forward", True] == {
        "sharded",
        "replicated",
    }  # of attention; of the residual
    assert role["sum", "backward", True] == {
        "sharded",
        "replicated",
    }  # biases of column products; of row products
    assert role["add", "backward", True] == {"replicated"}  # gradients of the hidden state
    assert role["embedding", "forward", False] == {"row"}
    assert role["embedding_dense_backward", "backward", False] == {"sharded"}
    assert role["_log_softmax", "forward", False] == {"sharded"}
    assert role["native_layer_norm", "forward", False] == {""}
    assert products(traced)[WORDS, WIDTH] == "column"


def test_every_operator_is_inside_or_outside_blocks():
    traced, blocks = blocks_of(language(), variant=Variant("adamw"))
    table = traced.operators
    assert set(blocks.operator_counts - table.count) | {0} == {0} | set(
        -table.count[blocks.operator_counts == 0]
    )
    assert not (blocks.operator_counts[np.array(table.phase) == "optimizer"]).any()
    inside = blocks.operator_counts[
        (np.array(table.kind) != "module") & (blocks.operator_counts > 0)
    ]
    assert (inside % LAYERS == 0).all()


@pytest.mark.parametrize("batch", [1, 8])
def test_saved_bytes_per_layer_match_korthikanti(batch):
    """Korthikanti et al. 2022 (arXiv:2205.05198): s b h (34 + 5 a s / h) bytes in 16 bits.

    10 are replicated, 24 are divided, and selective recomputation saves 5 a s / h. Torch also saves mean and deviation of each
    normalized row.
    """
    _, blocks = blocks_of(language(), "half")
    unit = TOKENS * batch * WIDTH
    core = 5 * HEADS * TOKENS / WIDTH
    statistics = 2 * 2 * 4 * TOKENS * batch
    assert at(blocks.attention_saved_bytes, batch) == unit * core
    assert at(blocks.sharded_saved_bytes, batch) == pytest.approx(unit * (24 + core), rel=1e-3)
    assert unit * (34 + core) <= at(blocks.saved_bytes, batch) <= unit * (34 + core) + statistics
    assert at(blocks.input_bytes, batch) == 2 * unit


def at(pair, batch):
    return pair[0] + pair[1] * batch


def peak(blocks, batch):
    """Peak memory at the head's backward pass, or at the start of the last block's."""
    saved = blocks.count * at(blocks.saved_bytes, batch)
    outside, after = at(blocks.outside_saved_bytes, batch), at(blocks.after_saved_bytes, batch)
    head = outside + at(blocks.after_working_bytes, batch)
    return saved + max(head, outside - after + at(blocks.working_bytes, batch))


@pytest.mark.parametrize("form", ["fp32", "amp", "half"])
@pytest.mark.parametrize("recompute", [False, True])
def test_block_bytes_sum_to_peak_memory(form, recompute):
    traced, blocks = blocks_of(language(recompute=recompute), form)
    for batch in (16, 64):
        gradient, activation = at_peak(traced.memory, batch)
        assert peak(blocks, batch) == pytest.approx(gradient + activation, rel=0.03)
    if recompute:
        assert at(blocks.saved_bytes, 16) - blocks.saved_bytes[0] == 16 * blocks.input_bytes[1]


SIZES = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 8,
        "n_embd": 128,
        "n_head": 4,
        "vocab_size": 512,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 512,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "image_size": 64,
        "patch_size": 8,
    },
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("fp32", marks=pytest.mark.slow),
        "amp",
        pytest.param("half", marks=pytest.mark.slow),
    ],
)
def test_block_bytes_of_known_models_sum_to_peak(tmp_path, name, form):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **SIZES[name]}))
    length = None if name == "vit" else 64
    workload = trace(f"transformers:{path}", (form,), STEP._replace(sequence_length=length))
    traced = workload.forms[form]
    blocks = traced.blocks
    assert (blocks.count, blocks.heads, blocks.key_value_heads) == (
        8,
        4,
        2 if name == "llama" else 4,
    )
    assert blocks.count * blocks.parameters + blocks.outside_parameters == workload.parameters
    gradient, activation = at_peak(traced.memory, 64)
    assert peak(blocks, 64) == pytest.approx(gradient + activation, rel=0.03)


def test_recomputed_operators_keep_their_roles():
    plain, _ = blocks_of(language())
    repeated, blocks = blocks_of(language(recompute=True))
    flops = at_batch(repeated.operators.flops, 2) * blocks.operator_counts
    plain_flops = at_batch(plain.operators.flops, 2) * plain.blocks.operator_counts
    for role in ("column", "row"):
        rows = np.array([r == role for r in blocks.roles]) & (
            np.array(repeated.operators.kind) == "gemm"
        )
        plain_rows = np.array([r == role for r in plain.blocks.roles]) & (
            np.array(plain.operators.kind) == "gemm"
        )
        assert 1.1 < flops[rows].sum() / plain_flops[plain_rows].sum() <= 4 / 3


def test_inference_trace_has_blocks():
    _, blocks = blocks_of(language(), variant=Variant(mode="inference"))
    assert blocks.count == LAYERS
    assert blocks.saved_bytes[1] <= blocks.input_bytes[1]


def test_torch_transformer_encoder_has_blocks():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.TransformerEncoder(layer, 5), nn.Linear(WIDTH, 2))
    task = Task(
        "encoder",
        model,
        lambda m, b: m(b),
        lambda m, b: m(b).sum(),
        lambda n: torch.randn(n, TOKENS, 8),
        None,
        "x",
    )
    blocks = trace_task(task, variant=STEP).forms["fp32"].blocks
    assert (blocks.module, blocks.count, blocks.heads, blocks.key_value_heads) == (
        "1.layers",
        5,
        HEADS,
        HEADS,
    )
    norms = 4 * WIDTH
    row_biases = 2 * WIDTH
    assert blocks.tensor_parameters == numbers(layer) - norms - row_biases
    assert blocks.outside_tensor_parameters == 0


class Experts(nn.Module):
    """Identical modules that all get the same input."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 8000))

    def forward(self, x):
        return x @ self.weight @ self.weight.T / 1000


@pytest.mark.parametrize(
    "model",
    [
        Experts(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)),
        nn.Sequential(Wide(), *(nn.Linear(WIDTH, WIDTH) for _ in range(5))),
    ],
    ids=["experts", "two layers", "a small part"],
)
def test_models_without_repeated_layers_have_no_blocks(model):
    task = Task(
        "no blocks",
        model,
        lambda m, b: m(b),
        lambda m, b: m(b).sum(),
        lambda n: torch.randn(n, WIDTH),
        None,
        "x",
    )
    assert trace_task(task, variant=STEP).forms["fp32"].blocks is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["fp32", "amp"])
def test_a_large_vocabulary_does_not_hide_the_layers(tied, form):
    model = Language([Block() for _ in range(4)], tied, words=50_000)
    layers = sum(p.numel() for p in model.layers.parameters())
    assert layers < 0.1 * numbers(model)
    _, blocks = blocks_of(model, form)
    assert (blocks.module, blocks.count) == ("layers", 4)


def test_all_stages_of_resnet50_are_recomputed_but_none_is_divided():
    blocks = trace("resnet50", variant=STEP).forms["fp32"].blocks
    assert blocks.count + sum(one.count for one in blocks.others) == 16
    assert not blocks.are_most


def test_chain_of_single_matmuls_is_not_divided():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))
    assert len(longest_chain(model).modules) == 6
    task = Task(
        "chain",
        model,
        lambda m, b: m(b),
        lambda m, b: m(b).sum(),
        lambda n: torch.randn(n, WIDTH),
        None,
        "x",
    )
    blocks = trace_task(task, variant=STEP).forms["fp32"].blocks
    assert set(blocks.roles) == {"", "replicated"}
    assert blocks.tensor_parameters == blocks.heads == 0


class LowRank(nn.Module):
    """Low-rank queries as in DeepSeek, a gate on the branch, and three layers in the other branch."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.value, self.out = (
            nn.Linear(*n) for n in ((WIDTH, 8), (8, 52), (WIDTH, 52), (52, WIDTH))
        )
        self.gate = nn.Linear(WIDTH, 1)
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, 56),
            nn.Linear(56, 60),
            nn.Linear(60, WIDTH),
        )

    def forward(self, x):
        x = x + self.gate(x).sigmoid() * self.out(self.high(self.low(x)) * self.value(x))
        return x + self.third(self.second(self.first(x).relu()).relu())


def test_only_last_two_matmuls_of_branch_are_divided():
    traced, _ = blocks_of(Language([LowRank() for _ in range(5)]))
    roles = products(traced)
    assert {size for size, role in roles.items() if role == "column"} == {
        (52, 8),
        (52, WIDTH),
        (60, 56),
        (WORDS, WIDTH),
    }
    assert {size for size, role in roles.items() if role == "row"} == {(WIDTH, 52), (WIDTH, 60)}
    assert {size for size, role in roles.items() if role == "replicated"} == {
        (8, WIDTH),
        (1, WIDTH),
        (56, WIDTH),
    }


class TwoChains(Language):
    """A small language model whose input runs through a second chain of wider blocks."""

    def __init__(self, recompute=False):
        super().__init__([Block() for _ in range(LAYERS)], recompute=recompute)
        self.encoder = nn.ModuleList(Block(fused_qkv=False) for _ in range(SHORTEST))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in (*self.encoder, *self.layers):
            x = (
                checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
                if self.recompute
                else layer(x)
            )
        return self.head(self.norm(x))


def test_blocks_outside_the_chain_are_found():
    _, blocks = blocks_of(TwoChains())
    assert (blocks.module, blocks.count) == ("layers", LAYERS)
    (other,) = blocks.others
    assert (other.module, other.count, other.is_after) == ("encoder", SHORTEST, False)
    assert other.left_bytes == blocks.input_bytes == (0.0, 4.0 * TOKENS * WIDTH)
    assert other.saved_bytes == pytest.approx(blocks.saved_bytes, rel=0.02)
    assert other.operator_counts.sum() > 0


@pytest.mark.parametrize("model", [language, TwoChains])
def test_full_recomputation_is_forecast_as_traced(model):
    """Peak with the forecast's recomputation, beside the peak of a model that recomputes itself."""
    plain, own = (
        trace_task(language_task(model(recompute=recompute)), ("fp32",), STEP)
        for recompute in (False, True)
    )
    target = Target(Cluster(device=find_device("A100")))
    forecast, traced = (
        Forecaster(w, target).memory(Execution(micro_batch=64, activation_checkpointing=how))
        for w, how in ((plain, "full"), (own, "none"))
    )
    assert forecast.allocated_gib == pytest.approx(traced.allocated_gib, rel=0.05)
