"""The update is traced with the first batch size and reused for others, unless it depends on the batch."""

import sys

import pytest
import torch
from torch import nn

from trainpace.core import records
from trainpace.workload import Variant, at_batch
from trainpace.workload.task import Task
from trainpace.workload.trace import trace_task

MODULE = sys.modules[trace_task.__module__]


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(1000, 8, sparse=sparse), nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.table(ids))


def task(sparse):
    return Task(
        "words",
        Words(sparse),
        lambda m, x: m(x),
        lambda m, x: m(x).sum(),
        lambda n: torch.zeros(n, 4, dtype=torch.int64),
        None,
        "ids",
    )


@pytest.mark.parametrize(("sparse", "steps"), [(False, 1), (True, 3)])
def test_optimizer_update_is_traced_again_only_if_sparse(monkeypatch, sparse, steps):
    step, runs = MODULE.step_once, []
    monkeypatch.setattr(MODULE, "step_once", lambda *args: (runs.append(1), step(*args)))
    workload = trace_task(task(sparse), ("fp32",), Variant("sgd"))
    assert len(runs) == steps
    monkeypatch.setattr(
        MODULE, "step_like", lambda first, recorder: pytest.fail("not of a sparse gradient")
    )
    table = workload.forms["fp32"].operators
    written = [i for i in range(len(table)) if table.function[i] == "sparse_add_"]
    assert bool(written) == sparse
    assert all(
        at_batch(table.written_bytes[i], 8) == 2 * at_batch(table.written_bytes[i], 4)
        for i in written
    )


def test_copied_update_equals_a_recorded_one(monkeypatch):
    once = trace_task(task(False), ("amp",), Variant("adamw"))

    def again(first, recorder):
        raise AssertionError

    step = MODULE._Passes.step

    def from_scratch(passes, size, chain, first=None, with_steps=False):
        return step(passes, size, chain, None, with_steps)

    monkeypatch.setattr(MODULE._Passes, "step", from_scratch)
    monkeypatch.setattr(MODULE, "step_like", again)
    assert records.to_json(trace_task(task(False), ("amp",), Variant("adamw"))) == records.to_json(
        once
    )
