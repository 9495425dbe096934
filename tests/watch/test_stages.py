"""Tests of training stages with models of different classes."""

import os
import sys

import pytest

from trainpace.watch import Step, read_recording, records_of, watch
from trainpace.watch.inside.event_log import FORWARD, Span

LAYER = """
import os, torch
torch.manual_seed(0)
class Layer(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))
x = torch.randn(256, 256)
losses = []
def step(layer, optimizer, loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
"""
AT_LAST = """
with open(os.environ["LOSSES"], "w") as file:
    file.write(repr(losses))
"""
ANOTHER_CLASS_LATER = """
class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(256, 256)
    def forward(self, x):
        return self.inner(x).sigmoid()
for model in (Layer(256, 256), Other()):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(60):
        step(model, optimizer, model(x).square().mean())
"""


def watched(tmp_path, monkeypatch, text):
    path = tmp_path / "train.py"
    path.write_text(LAYER + text + AT_LAST)
    monkeypatch.setenv("LOSSES", str(tmp_path / "alone"))
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(path)]) == 0
    monkeypatch.setenv("LOSSES", str(tmp_path / "watched"))
    assert watch([sys.executable, str(path)], tmp_path / "recording") == 0
    assert (tmp_path / "alone").read_text() == (tmp_path / "watched").read_text()
    return read_recording(tmp_path / "recording").ranks[0]


@pytest.mark.slow
def test_later_stage_with_another_model_class_is_recorded(tmp_path, monkeypatch):
    """Each stage watches the classes of its first two steps."""
    watched(tmp_path, monkeypatch, ANOTHER_CLASS_LATER)
    (log,) = (tmp_path / "recording").glob("process-*.trail")
    records = list(records_of(log))
    steps = [r for r in records if isinstance(r, Step)]
    assert min(s.parts_ns[FORWARD] for s in steps[-10:]) > 0
    assert any(
        isinstance(r, Span) and r.part == FORWARD and r.start_ns > steps[70].start_ns
        for r in records
    )
