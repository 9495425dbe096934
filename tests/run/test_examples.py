"""Ladders of examples/: every rung is a change that the script's files or command accept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["characters", "photographs", "docstrings"])
def test_dry_run_of_example_ladders_has_no_impossible_rung(name, tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "run",
        str(EXAMPLES / name / "ladder.toml"),
        "--dry-run",
        "--no-forecast",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert len(answer["rungs"]) > 4
    for rung in answer["rungs"]:
        assert {tried["forecast"]["reason"] for tried in rung["alternatives"]} == {"--no-forecast"}
        assert len(rung["started"]) == len(rung["alternatives"])


def test_characters_step_uses_same_sequences_for_any_division():
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(EXAMPLES / "characters"))
    import train

    data = train.Sequences()
    places = torch.randint(len(data), (480,), generator=torch.Generator().manual_seed(0))
    parts = [places[rank::2].split(60) for rank in range(2)]
    assert sorted(int(p) for rank in parts for part in rank for p in part) == sorted(
        map(int, places)
    )
    x, target = data[int(places[0])]
    assert torch.equal(x[1:], target[:-1])


def test_byte_dropout_keeps_rate_and_mean():
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(EXAMPLES / "characters"))
    import train

    torch.manual_seed(0)
    dropout, x = train.DropoutByBytes(), torch.ones(300, 333)
    dropped = dropout(x)
    assert (dropped != 0).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(dropout.eval()(x), x)


def test_byte_attention_matches_torch_without_dropout():
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(EXAMPLES / "characters"))
    import train

    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, train.HEADS, train.CONTEXT, 8)
    own = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    torch.testing.assert_close(train.Attention().eval()(queries, keys, values), own)
