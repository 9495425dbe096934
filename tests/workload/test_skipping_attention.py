"""Windows, chunks and block masks: attention counts only visible keys if its kernel skips the others."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.workload import ATTENTION, Variant, at_batch
from trainpace.workload.own_operators import AT_ONCE, POSITIONS, UNKNOWN, keys_seen
from trainpace.workload.task import Task
from trainpace.workload.trace import trace, trace_task

HEADS, LENGTH, SIZE, WINDOW = 4, 64, 16, 8
WIDTH = HEADS * SIZE
STEP = Variant(mode="forward_backward")
SEEN_BY_WINDOW = WINDOW - WINDOW * (WINDOW - 1) / 2 / LENGTH
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "sliding_window": WINDOW,
}


def attention_rows(form):
    """Return (kind, FLOPs per sample, sizes) of each attention row."""
    table = form.operators
    chosen = [i for i in range(len(table)) if table.kind[i].startswith("attention")]
    return [(table.kind[i], float(at_batch(table.flops[i], 1)), table.dims[i]) for i in chosen]


def window(batch, head, query, key):
    return (key <= query) & (query - key < WINDOW)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (lambda b, h, q, k: k <= q, (LENGTH + 1) / 2),
        (window, SEEN_BY_WINDOW),
        (lambda b, h, q, k: (q // 16 == k // 16) & (k <= q), 8.5),
        (lambda b, h, q, k: q < 0, 0.0),
        (lambda b, h, q, k: torch.zeros(4, device="meta")[q] > k, UNKNOWN),
    ],
)
def test_keys_seen_is_counted_from_mask(mask, seen):
    assert keys_seen(mask, LENGTH, LENGTH) == pytest.approx(seen)


def test_long_mask_is_counted_on_sampled_queries():
    exact = WINDOW - WINDOW * (WINDOW - 1) / 2 / 100_000
    assert keys_seen(window, 100_000, 1_000) < WINDOW
    assert keys_seen(window, 20_000, 20_000) == pytest.approx(exact, rel=1e-3)


def test_mask_sampling_is_bounded_for_long_sequences():
    looked_at = []

    def counted(batch, head, query, key):
        seen = window(batch, head, query, key)
        looked_at.append(seen.numel())
        return seen

    assert keys_seen(counted, 131_072, 131_072) == pytest.approx(WINDOW, rel=1e-3)
    assert sum(looked_at) <= 2 * POSITIONS  # a whole number of queries, evenly spread
    assert max(looked_at) <= AT_ONCE
    looked_at.clear()
    chunk = 4096
    assert keys_seen(
        lambda b, h, q, k: (q // chunk == k // chunk) & (k <= q), 131_072, 131_072
    ) == pytest.approx(chunk / 2, rel=1e-3)


def mistral(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MISTRAL | values))
    return trace(f"transformers:{path}", ("half",), STEP._replace(sequence_length=LENGTH))


@pytest.mark.parametrize("way", ["flash_attention_2", "flex_attention"])
def test_sliding_window_reduces_flash_attention_flops(tmp_path, way):
    pytest.importorskip("transformers")
    workload = mistral(tmp_path, attn_implementation=way)
    assert workload.notes == ()
    rows = {kind: (flops, dims) for kind, flops, dims in attention_rows(workload.forms["half"])}
    scores = 2.0 * HEADS * LENGTH * SEEN_BY_WINDOW * SIZE
    assert rows["attention"][0] == pytest.approx(2 * scores)
    assert rows["attention_backward"][0] == pytest.approx(5 * scores)
    assert rows["attention"][1][ATTENTION.seen, 0] == pytest.approx(SEEN_BY_WINDOW)
    assert workload.forms["half"].blocks.key_value_heads == 2


def test_sliding_window_saves_nothing_with_sdpa(tmp_path):
    pytest.importorskip("transformers")
    workload = mistral(tmp_path)
    assert "sdpa" in workload.notes[0]
    assert attention_rows(workload.forms["half"])[0][1] == 4.0 * HEADS * LENGTH**2 * SIZE
    whole = mistral(tmp_path, sliding_window=2 * LENGTH)
    assert whole.notes == ()
    assert attention_rows(whole.forms["half"])[0][1] == 2.0 * HEADS * LENGTH**2 * SIZE


class Flex(nn.Module):
    def __init__(self, mask, compiled=False):
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.projection, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.make = mask, create_block_mask
        self.attend = torch.compile(flex_attention) if compiled else flex_attention

    def forward(self, x):
        q, k, v = (
            p.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for p in self.projection(x).chunk(3, -1)
        )
        blocks = (
            None
            if self.mask is None
            else self.make(self.mask, None, None, LENGTH, LENGTH, device=str(x.device))
        )
        return self.out(self.attend(q, k, v, block_mask=blocks).transpose(1, 2).flatten(2))


def flex_task(model):
    return Task(
        "flex",
        model,
        lambda m, x: m(x),
        lambda m, x: m(x).sum(),
        lambda n: torch.randn(n, LENGTH, WIDTH),
        None,
        "a sequence",
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["fp32", "amp"])
@pytest.mark.parametrize(("mask", "seen"), [(None, LENGTH), (window, SEEN_BY_WINDOW)])
def test_flex_attention_flops_follow_mask_sparsity(form, compiled, mask, seen):
    workload = trace_task(flex_task(Flex(mask, compiled)), (form,), STEP)
    rows = {kind: flops for kind, flops, _ in attention_rows(workload.forms[form])}
    assert rows["attention"] == pytest.approx(4.0 * HEADS * LENGTH * seen * SIZE)
    assert rows["attention_backward"] == pytest.approx(10.0 * HEADS * LENGTH * seen * SIZE)
    assert workload.notes == ()


@pytest.mark.slow
def test_data_dependent_mask_counts_in_full_with_note():
    documents = torch.zeros(LENGTH, dtype=torch.int64, device="meta")
    model = Flex(lambda b, h, q, k: documents[q] == documents[k])
    workload = trace_task(flex_task(model), ("half",), STEP)
    assert "depends on values" in workload.notes[0]
    assert attention_rows(workload.forms["half"])[0][1] == 4.0 * HEADS * LENGTH**2 * SIZE


@pytest.mark.slow
def test_flex_attention_is_restored_after_tracing():
    from torch.nn.attention.flex_attention import flex_attention

    code = flex_attention.__code__
    with pytest.raises(TrainpaceError):
        trace_task(flex_task(Flex(lambda b, h, q, k: 1 / 0)), ("half",), STEP)
    assert flex_attention.__code__ is code


def test_flex_attention_of_older_torch_is_supported(monkeypatch):
    """torch 2.6 has no return_aux."""
    from torch.nn.attention import flex_attention as module

    from trainpace.workload import cuda_mapping

    def older(
        query,
        key,
        value,
        score_mod=None,
        block_mask=None,
        scale=1.5,
        enable_gqa=False,
        return_lse=False,
    ):
        raise AssertionError("torch's own runs")

    monkeypatch.setattr(module, "flex_attention", older)
    q = torch.randn(1, HEADS, LENGTH, SIZE, device="meta")
    with cuda_mapping.answered(autocast=False, pads=False):
        assert older(q, q, q).shape == q.shape
    with pytest.raises(AssertionError, match="own runs"):
        older(q, q, q)
    assert (older.__defaults__, older.__kwdefaults__) == ((None, None, 1.5, False, False), None)


def test_any_and_all_with_keyword_input_are_traced():
    class Asks(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            torch.all(input=torch.logical_not(input=torch.any(input=y > 0)))
            return y

    assert trace_task(flex_task(Asks(WIDTH, WIDTH)), ("half",), STEP).parameters


def test_models_that_repair_non_finite_values_are_traced():
    class Mends(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if not torch.isfinite(y).all() or y.isnan().any() or (~y.isinf()).all().logical_not():
                y = y.clamp(-1, 1)
            return y

    task = Task(
        "mends",
        Mends(4, 4),
        lambda m, x: m(x),
        lambda m, x: m(x).sum(),
        lambda n: torch.randn(n, 4),
        None,
        "a vector",
    )
    functions = trace_task(task, ("fp32",), STEP).forms["fp32"].operators.function
    assert "clamp" not in functions
    assert np.isin("isnan", functions) or np.isin("ne", functions)
