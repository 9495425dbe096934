"""Tests of the execution that the Trainer callback stores in the journal."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from trainpace.callbacks.huggingface import _execution_of


@pytest.mark.parametrize(("local", "nodes", "each"), [("4", 2, 4), (None, 1, 8)])
def test_nodes_follow_from_local_world_size(monkeypatch, local, nodes, each):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "bf16": True}
    found = _execution_of(SimpleNamespace(world_size=8, to_dict=lambda: settings))
    assert (found.nnodes, found.nproc_per_node) == (nodes, each)
    assert found.global_batch == 16 * 2 * 8
