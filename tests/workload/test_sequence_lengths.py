"""Workloads at several sequence lengths."""

import json

import pytest

from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.workload import Variant, load_workload, load_workloads, workloads

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 3000,
    "n_positions": 4096,
}


def test_several_lengths_are_traced_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINPACE_TRACES", str(tmp_path / "cache"))
    (tmp_path / "gpt2.json").write_text(json.dumps(GPT2))
    spec = f"transformers:{tmp_path}/gpt2.json"
    started = []
    isolated = workloads.run_isolated
    monkeypatch.setattr(
        workloads, "run_isolated", lambda *a: started.append(len(a[1]["requests"])) or isolated(*a)
    )
    found = load_workloads(spec, ("fp32",), Variant(), (64, 96))
    assert [workload.sample for workload in found.values()] == ["64 tokens", "96 tokens"]
    again = load_workloads(spec, ("fp32",), Variant(), (96, 128))
    assert records.to_json(again[96]) == records.to_json(found[96])
    assert started == [2, 1]
    monkeypatch.setattr(workloads, "run_isolated", None)  # No tracing happens from here on.
    assert load_workload(spec, ("fp32",), Variant(sequence_length=128)).sample == "128 tokens"


def test_fixed_length_model_rejects_other_lengths(tmp_path):
    with pytest.raises(TrainpaceError, match="sequence length"):
        load_workloads(f"{tmp_path}/train.py:task", ("fp32",), Variant(), (64, 96))
