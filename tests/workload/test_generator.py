"""Random architectures: the same everywhere, alike to what people train, and they train and trace."""

import collections
import hashlib
import math
import subprocess
import sys

import pytest
import torch

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import to_json
from trainpace.workload.generator import (
    RANDOM_FAMILIES,
    STEP_MS,
    Cnn,
    Mlp,
    Rnn,
    Transformer,
    architecture,
    is_random,
    parse_random,
)
from trainpace.workload.specs import build_task
from trainpace.workload.task_optimizers import make_optimizer
from trainpace.workload.trace import trace

# what a seed means is kept for ever: measurements are stored under it
GOLDEN = {
    "random:mlp:0": "cf6e4f7b1cf2c8d8",
    "random:mlp:7": "596a44a1ac6dbff9",
    "random:mlp:1234567": "7b627b568f531e35",
    "random:cnn:0": "5fce5353e1a1f0a3",
    "random:cnn:7": "b0a001270244e75c",
    "random:cnn:1234567": "45f597070ba2754f",
    "random:rnn:0": "268a8d9ed39c962d",
    "random:rnn:7": "61100b285256f821",
    "random:rnn:1234567": "c2fa1d9eaa6860af",
    "random:transformer:0": "12f8536d877bf9c8",
    "random:transformer:7": "c6f06cdc1f6a5562",
    "random:transformer:1234567": "463d0738cf87c125",
}


@pytest.mark.parametrize("spec", GOLDEN)
def test_a_seed_is_the_same_architecture_on_every_machine(spec):
    assert hashlib.sha256(to_json(architecture(spec)).encode()).hexdigest()[:16] == GOLDEN[spec]


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_seeds_differ_and_stay_within_the_time(family):
    drawn = [architecture(f"random:{family}:{seed}") for seed in range(300)]
    assert len(set(map(repr, drawn))) > 290
    assert all(STEP_MS[0] <= a.rough_step_ms() <= STEP_MS[1] for a in drawn)


@pytest.mark.parametrize(
    ("family", "field", "least"),
    [
        ("mlp", "norm", 3),
        ("mlp", "residual", 2),
        ("mlp", "regression", 2),
        ("cnn", "block", 6),
        ("cnn", "norm", 4),
        ("cnn", "groups", 4),
        ("cnn", "squeeze", 2),
        ("cnn", "stem_stride", 3),
        ("rnn", "cell", 4),
        ("rnn", "task", 4),
        ("rnn", "bidirectional", 2),
        ("transformer", "kind", 2),
        ("transformer", "positions", 3),
        ("transformer", "norm", 2),
        ("transformer", "builtin", 2),
        ("transformer", "gated", 2),
        ("transformer", "tied", 2),
    ],
)
def test_every_choice_comes_up(family, field, least):
    drawn = [architecture(f"random:{family}:{seed}") for seed in range(300)]
    seen = collections.Counter(getattr(a, field) for a in drawn)
    assert len(seen) >= least
    assert min(seen.values()) >= 3


# drawn seeds with something that only some have, so that every branch of the builder is run
SAMPLE = [f"random:{family}:{seed}" for family in RANDOM_FAMILIES for seed in range(10)]


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
@pytest.mark.parametrize(
    "spec", [f"random:{family}:{seed}" for family in RANDOM_FAMILIES for seed in (1, 2, 3)]
)
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
        convolutions = [
            m for m in build_task(spec).model.modules() if isinstance(m, torch.nn.Conv2d)
        ]
    grouped = [m for m in convolutions if m.groups == a.groups]
    assert len(grouped) == 2 * sum(s.blocks for s in a.stages)
    spec = first("rnn", lambda a: a.bidirectional and a.cell == "gru" and a.layers > 1)
    a = architecture(spec)
    assert isinstance(a, Rnn)
    with torch.device("meta"):
        (gru,) = [m for m in build_task(spec).model.modules() if isinstance(m, torch.nn.GRU)]
    assert (gru.hidden_size, gru.num_layers, gru.bidirectional) == (a.hidden, a.layers, True)


def test_a_decoder_sees_no_later_token():
    spec = first(
        "transformer",
        lambda a: a.kind == "decoder" and a.positions == "rotary" and a.width * a.layers < 2000,
    )
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
    [
        ("random:cnn", {}, "names no random model"),
        ("random:transfomer:1", {}, "Nearest: transformer"),
        ("random:cnn:-1", {}, "seed '-1'"),
        ("random:cnn:x", {}, "seed 'x'"),
        ("random:cnn:1:2", {}, "names no"),
        ("random:cnn:1", {"sequence_length": 4}, "no sequence length"),
        ("random:mlp:1", {"image_size": 32}, "takes no images"),
        ("random:cnn:1", {"image_size": 8}, "side 8"),
    ],
)
def test_mistakes_are_one_sentence(spec, options, word):
    with pytest.raises(TrainpaceError, match=word), torch.device("meta"):
        build_task(spec, **options)


def test_parse():
    assert parse_random("random:rnn:12") == ("rnn", 12)
    assert is_random("random:rnn:12")
    assert not is_random("randomnet")


def test_drawing_needs_no_torch():
    code = "import sys; from trainpace.workload.generator import architecture; architecture('random:cnn:7'); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "False"
    )
