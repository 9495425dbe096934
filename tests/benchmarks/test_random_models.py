"""Random architectures are reproducible on every machine, train and can be traced."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from random_models import FAMILIES, STEP_MS, Transformer, architecture, build

from trainpace.core.records import to_json
from trainpace.workload import load_workload

# stored measurements use these names, so the meaning of a seed must never change
GOLDEN = {
    ("mlp", 0): "cf6e4f7b1cf2c8d8",
    ("mlp", 1234567): "7b627b568f531e35",
    ("cnn", 0): "5fce5353e1a1f0a3",
    ("cnn", 1234567): "45f597070ba2754f",
    ("rnn", 0): "268a8d9ed39c962d",
    ("rnn", 1234567): "c2fa1d9eaa6860af",
    ("transformer", 0): "12f8536d877bf9c8",
    ("transformer", 1234567): "463d0738cf87c125",
}


@pytest.mark.parametrize("drawn", GOLDEN)
def test_seed_gives_same_architecture_on_every_machine(drawn):
    text = to_json(architecture(*drawn))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[drawn]


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_differ_and_stay_within_step_time(family):
    drawn = [architecture(family, seed) for seed in range(300)]
    assert len(set(map(repr, drawn))) > 290
    assert all(STEP_MS[0] <= a.rough_step_ms() <= STEP_MS[1] for a in drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_model_trains(family):
    torch.manual_seed(0)
    for seed in range(3):
        parts = build(family, seed)
        model, samples = parts["model"].train(), parts["dataset"]
        x, y = (torch.stack(some) for some in zip(samples[0], samples[1], strict=True))
        loss = parts["loss"](model(x), y)
        loss.backward()
        assert math.isfinite(loss.item())
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_model_can_be_loaded_by_name(family):
    file = Path(__file__).parents[2] / "benchmarks" / "random_models.py"
    workload = load_workload(f"{file}:{family}_1", ("fp32",))
    assert workload.model == f"random_models.py:{family}_1"
    model = build(family, 1)["model"]
    assert workload.parameters == sum(p.numel() for p in model.parameters())


def test_decoder_does_not_attend_to_later_tokens():
    drawn = (architecture("transformer", seed) for seed in range(100))
    seed, a = next(
        (seed, a)
        for seed, a in enumerate(drawn)
        if a.kind == "decoder" and a.positions == "rotary" and a.width * a.layers < 2000
    )
    assert isinstance(a, Transformer)
    model = build("transformer", seed)["model"].eval()
    tokens = torch.randint(0, a.vocabulary, (1, a.sequence_length))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % a.vocabulary
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-5)
