"""Scripts are captured with the FLOPs of their real step, or not at all."""

import sys
import warnings

import pytest
import torch

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import load
from trainpace.watch import read_recording, untraced_in_words, watch
from trainpace.watch.inside.capture import Capture, Untraceable, in_words
from trainpace.workload import Workload
from watch.kinds_of_models import KINDS, script_of

ANY, OWN = (2, 3, 5), None
FIRST_STATE = "cuDNN computes the gradient of the first hidden state, which the CPU leaves out"
NOT_THERE = "torch's formula takes a sparse matrix for a dense one"
AGAIN = "fused attention makes the product of queries and keys again in its backward pass"
ASIDE = "work without gradients, of which the workload says that it is not counted"
TRACED = {
    "LANGUAGE_RNN": (7, 2 * 2 * 6 * 16 * 64, FIRST_STATE),
    "LANGUAGE_RNN_ADAM": (7, 2 * 2 * 6 * 16 * 64, FIRST_STATE),
    "CHARACTERS_RNN": (9, 2 * 24 * 72, FIRST_STATE),
    "CELL_CALLED_BY_THE_SCRIPT": (ANY, 0, ""),
    "TCN": (ANY, 0, ""),
    "SPARSE_GRAPH": (60, -2 * 2 * 60 * 60 * (16 + 4), NOT_THERE),
    "EDGES_GRAPH": (60, 0, ""),
    "DENSE_GRAPH": (60, 0, ""),
    "GRAPH_OBJECT": (600, 0, ""),
    "VIT": (ANY, 2 * 6 * 2 * 17 * 17 * 8, AGAIN),
    "LAMBDAS": (ANY, 0, ""),
    "ODE": (ANY, 0, ""),
    "ODE_OF_FUNCTION": (ANY, 0, ""),
    "DQN": (ANY, -(1 + 16) * 2 * (4 * 32 + 32 * 32 + 32 * 2), ASIDE),
    "REINFORCE": (ANY, 0, ""),
    "PPO": (ANY, 0, ""),
    "SIAMESE": (ANY, 0, ""),
    "SIAMESE_CALLED_TWICE": (ANY, 0, ""),
    "SEQ2SEQ": (1, 2 * 16 * 48, FIRST_STATE),
    "SEQ2SEQ_IN_ONE": (5, 2 * 16 * 48, FIRST_STATE),
    "DICTS": (ANY, 0, ""),
    "ADVERSARIAL": (ANY, 0, ""),
    "DISTILLED": (ANY, 0, ""),
}
"""For each kind: traced batch sizes, expected FLOPs beyond torch's count, and the reason."""
NOT_TRACED = {
    "TWO_LOSSES": "backward passes",
    "MANY_CALLS": "200 times",
    "DCGAN": "backward passes",
    "GRADIENT_PENALTY": "torch.autograd.grad",
    "VALUES_DECIDE": "line 14",
}
"""A part of the reason, by kind."""
ONCE = {"ACCUMULATES": 3}
"""Kinds whose workload is one of several micro-batches, with their number."""


def watched(folder, kind):
    path = folder / "train.py"
    path.write_text(script_of(kind))
    assert watch([sys.executable, str(path)], folder / "recording") == 0
    return read_recording(folder / "recording").ranks[0]


def real_flops(kind, file, monkeypatch):
    monkeypatch.setenv("FLOPS", str(file))
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        exec(compile(script_of(kind), kind, "exec"), {"__name__": "__main__"})
    return float(file.read_text())


def flops_of(workload, batch):
    table = workload.form("fp32").operators
    return float(
        ((table.flops[:, 0] + table.flops[:, 1] * batch) * table.count)[table.is_matrix].sum()
    )


def test_every_kind_of_model_has_an_expectation():
    assert KINDS.keys() == TRACED.keys() | NOT_TRACED.keys() | ONCE.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TRACED, *ONCE])
def test_captured_flops_match_the_real_step(kind, tmp_path, monkeypatch):
    rank = watched(tmp_path, kind)
    assert rank.no_workload == ""
    workload = load(tmp_path / "recording" / "workload.json", Workload)
    batches, more, why = TRACED.get(kind, (ANY, 0, ""))
    assert workload.traced_batches == (batches if batches == ANY else (batches,))
    assert workload.only_batch == (None if batches == ANY else batches)
    assert any("own batch" in note for note in workload.notes) == (batches != ANY)
    assert any("without gradients" in note for note in workload.notes) == (why == ASIDE)
    found = flops_of(workload, rank.model_batch)
    real = real_flops(kind, tmp_path / "flops", monkeypatch)
    assert found == pytest.approx(real / ONCE.get(kind, 1) + more, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_TRACED)
def test_untraceable_model_leaves_a_reason_and_no_workload(kind, tmp_path):
    rank = watched(tmp_path, kind)
    assert NOT_TRACED[kind] in rank.no_workload
    assert not (tmp_path / "recording" / "workload.json").exists()
    assert rank.no_workload in untraced_in_words(rank)


@pytest.mark.parametrize("mark", ["placements", "ds_id", "_is_flat_param"])
def test_sharded_parameters_are_rejected(mark):
    model = torch.nn.Linear(2, 2)
    setattr(model.weight, mark, 0)
    with pytest.raises(Untraceable):
        Capture(None).copied(model)


def test_reason_for_no_workload_is_short():
    assert (
        in_words(TimeoutError("tracing the model takes longer than 20 s"))
        == "tracing the model takes longer than 20 s"
    )
    assert (
        in_words(TrainpaceError("the operator x::y is not counted.", "Measure it."))
        == "the operator x::y is not counted"
    )
    assert in_words(ModuleNotFoundError("No module named 'msgspec'")).startswith(
        "the script's Python lacks a module"
    )
    assert in_words(KeyError("a")) == "KeyError: 'a'"
