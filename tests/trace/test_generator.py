"""Random architectures: the same everywhere, alike to what people train, and they train and trace."""

import collections
import math
import subprocess
import sys

import pytest
import torch

from trainpace.errors import TrainpaceError
from trainpace.trace.architectures import Cnn, Mlp, Rnn, Transformer
from trainpace.trace.generator import FAMILIES, STEP_MS, architecture, describe, is_random, parse
from trainpace.trace.task import build_task, make_optimizer
from trainpace.trace.trace import trace

# what a seed means is kept for ever: measurements are stored under it
GOLDEN = {
    "random:mlp:0": "mlp: 512-4096-2048-1024-100 classes, gelu, no norm, dropout 0.5",
    "random:mlp:7": "mlp: 512-3072-1536-768-10 classes, gelu, no norm, dropout 0.5",
    "random:mlp:1234567": "mlp: 256-1536-1536-1536-1536-1536-1536-1536-1536-1536-1536-1536-1536-10 classes, relu, no norm, dropout 0.1",
    "random:cnn:0": "cnn: 3x128x128, stem 16 (4x4 stride 4), 3 stages of convnext x4 7x7 blocks (1 x 16, 3 x 32 stride 2, 2 x 64 stride 2), relu, layer norm, dropout 0.1, 1000 classes",
    "random:cnn:7": "cnn: 3x64x64, stem 48 (7x7 stride 2), 4 stages of plain 3x3 blocks (1 x 48, 1 x 96 after max pool, 2 x 192 after max pool, 3 x 384 after max pool), silu, group norm, hidden 128, dropout 0.1, 1000 classes",
    "random:cnn:1234567": "cnn: 3x96x96, stem 64 (5x5 stride 2), 5 stages of plain 5x5 blocks (2 x 64, 1 x 96 after max pool, 1 x 144 after max pool, 4 x 208 after max pool, 2 x 304), hardswish, batch norm, dropout 0.2, 100 classes",
    "random:rnn:0": "rnn: 40 numbers a step, 2 x rnn_tanh 650, 16 steps, regress 40, dropout 0.2",
    "random:rnn:7": "rnn: embedding 10000x32, 1 x bidirectional lstm 1024, 48 steps, tag 17, dropout 0.1",
    "random:rnn:1234567": "rnn: embedding 10000x128, 2 x gru 128, 96 steps, last state, classify 20, dropout 0.2",
    "random:transformer:0": "transformer encoder: 64 of 16000 tokens, 12 x 240 torch.nn.TransformerEncoder layers, 3 heads, feed-forward 960 relu, pre-layer norm, sinusoidal positions, 2 classes, dropout 0.1",
    "random:transformer:7": "transformer decoder: 64 of 30000 tokens, 1 x 768 layers, 6 heads, feed-forward 3072 relu, pre-rms norm, learned positions, tied language model, dropout 0.1",
    "random:transformer:1234567": "transformer decoder: 256 of 256 tokens, 12 x 64 layers, 2 heads, feed-forward 256 gelu, post-layer norm, rotary positions, tied language model",
}  # fmt: skip


@pytest.mark.parametrize("spec", GOLDEN)
def test_a_seed_is_the_same_architecture_on_every_machine(spec):
    assert describe(spec) == GOLDEN[spec]


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_differ_and_stay_within_the_time(family):
    drawn = [architecture(f"random:{family}:{seed}") for seed in range(300)]
    assert len(set(map(repr, drawn))) > 290
    assert all(STEP_MS[0] <= a.rough_step_ms() <= STEP_MS[1] for a in drawn)


@pytest.mark.parametrize(
    ("family", "field", "least"),
    [("mlp", "norm", 3), ("mlp", "residual", 2), ("mlp", "regression", 2), ("cnn", "block", 6), ("cnn", "norm", 4),
     ("cnn", "groups", 4), ("cnn", "squeeze", 2), ("cnn", "stem_stride", 3), ("rnn", "cell", 4), ("rnn", "task", 4),
     ("rnn", "bidirectional", 2), ("transformer", "kind", 2), ("transformer", "positions", 3), ("transformer", "norm", 2),
     ("transformer", "builtin", 2), ("transformer", "gated", 2), ("transformer", "tied", 2)],
)  # fmt: skip
def test_every_choice_comes_up(family, field, least):
    drawn = [architecture(f"random:{family}:{seed}") for seed in range(300)]
    seen = collections.Counter(getattr(a, field) for a in drawn)
    assert len(seen) >= least
    assert min(seen.values()) >= 3


# drawn seeds with something that only some have, so that every branch of the builder is run
SAMPLE = [f"random:{family}:{seed}" for family in FAMILIES for seed in range(10)]


@pytest.mark.parametrize("spec", SAMPLE)
def test_it_trains(spec):
    torch.manual_seed(0)
    task = build_task(spec)
    model = task.model.train()
    optimizer = make_optimizer("sgd_momentum", model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = task.loss(model, task.make_batch(2))
        loss.backward()
        assert math.isfinite(loss.item())
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()


# the traced ones are few, for each step of a recurrent cell is traced: 200 of each family were tried by hand
@pytest.mark.parametrize("spec", [f"random:{family}:{seed}" for family in FAMILIES for seed in (1, 2, 3)])
def test_it_traces(spec):
    workload = trace(spec)
    with torch.device("meta"):
        assert workload.parameters == sum(p.numel() for p in build_task(spec).model.parameters())
    assert workload.model == spec


def first(family, wanted):
    return next(s for s in (f"random:{family}:{i}" for i in range(500)) if wanted(architecture(s)))


def test_the_described_layers_are_the_built_ones():
    spec = first("mlp", lambda a: a.norm == "none" and not a.residual)
    a = architecture(spec)
    assert isinstance(a, Mlp)
    linear = [m for m in build_task(spec).model.modules() if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [*a.widths, a.outputs]
    spec = first("cnn", lambda a: a.block == "residual" and a.groups > 1)
    a = architecture(spec)
    assert isinstance(a, Cnn)
    with torch.device("meta"):
        convolutions = [m for m in build_task(spec).model.modules() if isinstance(m, torch.nn.Conv2d)]
    grouped = [m for m in convolutions if m.groups == a.groups]
    assert len(grouped) == 2 * sum(s.blocks for s in a.stages)
    spec = first("rnn", lambda a: a.bidirectional and a.cell == "gru" and a.layers > 1)
    a = architecture(spec)
    assert isinstance(a, Rnn)
    with torch.device("meta"):
        (gru,) = [m for m in build_task(spec).model.modules() if isinstance(m, torch.nn.GRU)]
    assert (gru.hidden_size, gru.num_layers, gru.bidirectional) == (a.hidden, a.layers, True)


def test_a_decoder_sees_no_later_token():
    spec = first("transformer", lambda a: a.kind == "decoder" and a.positions == "rotary" and a.width * a.layers < 2000)
    a = architecture(spec)
    assert isinstance(a, Transformer)
    model = build_task(spec).model.eval()
    tokens = torch.randint(0, a.vocabulary, (1, a.sequence_length))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % a.vocabulary
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-5)


def test_another_length_or_size_keeps_the_widths():
    spec = first("transformer", lambda a: a.positions == "learned" and not a.patch)
    with torch.device("meta"):
        assert build_task(spec, sequence_length=24).make_batch(2)[0].shape == (2, 24)
        assert build_task("random:rnn:1", sequence_length=5).sequence_length == 5
        assert build_task("random:cnn:1", image_size=96).make_batch(2)[0].shape[-1] == 96


@pytest.mark.parametrize(
    ("spec", "options", "word"),
    [("random:cnn", {}, "names no random model"), ("random:transfomer:1", {}, "Nearest: transformer"), ("random:cnn:-1", {}, "seed '-1'"),
     ("random:cnn:x", {}, "seed 'x'"), ("random:cnn:1:2", {}, "names no"), ("random:cnn:1", {"sequence_length": 4}, "no sequence length"),
     ("random:mlp:1", {"image_size": 32}, "takes no images"), ("random:cnn:1", {"image_size": 8}, "side 8")],
)  # fmt: skip
def test_mistakes_are_one_sentence(spec, options, word):
    with pytest.raises(TrainpaceError, match=word), torch.device("meta"):
        build_task(spec, **options)


def test_parse():
    assert parse("random:rnn:12") == ("rnn", 12)
    assert is_random("random:rnn:12")
    assert not is_random("randomnet")


def test_drawing_needs_no_torch():
    code = "import sys; from trainpace.trace.generator import describe; describe('random:cnn:7'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
