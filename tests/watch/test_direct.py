"""Modules whose forward is called directly."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from trainpace.watch import Step, read_recording, records_of, watch
from trainpace.watch.inside import patches
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
ONE_BY_ONE = """
for layer in [Layer(256, 256), Layer(256, 256)]:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for i in range(40):
        step(layer, optimizer, layer.forward(x).square().mean())
"""
INSIDE_ANOTHER = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(256, 256), Layer(256, 256)])
    def loss(self, x):
        return self.layers[1].forward(self.layers[0].forward(x)).square().mean()
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for i in range(40):
    step(net, optimizer, net.loss(x))
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
BY_HAND = """
layer = Layer(256, 256)
for i in range(40):
    loss = layer.forward(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in layer.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    losses.append(loss.item())
"""
AS_USUAL = """
layer = Layer(256, 256)
scale = torch.nn.Parameter(torch.ones(1))  # of no module
optimizer = torch.optim.SGD([*layer.parameters(), scale], 0.1)
plain = Layer.forward
for i in range(40):
    step(layer, optimizer, (scale * layer(x)).square().mean())
assert Layer.forward is plain
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


@pytest.mark.parametrize(
    "text", [ONE_BY_ONE, INSIDE_ANOTHER, BY_HAND], ids=["one by one", "inside another", "by hand"]
)
def test_a_forward_that_is_called_directly_is_the_models(tmp_path, monkeypatch, text):
    rank = watched(tmp_path, monkeypatch, text)
    assert rank.parts_ms["forward"] > 0.1 * rank.step_ms
    assert rank.parts_ms["forward"] > rank.parts_ms["other"] / 10


def test_a_later_stage_may_train_a_model_of_another_class(tmp_path, monkeypatch):
    """Only the classes of the first two steps are watched through their calls."""
    watched(tmp_path, monkeypatch, ANOTHER_CLASS_LATER)
    (log,) = (tmp_path / "recording").glob("process-*.trail")
    records = list(records_of(log))
    steps = [r for r in records if isinstance(r, Step)]
    assert min(s.parts_ns[FORWARD] for s in steps[-10:]) > 0
    assert any(
        isinstance(r, Span) and r.part == FORWARD and r.start_ns > steps[70].start_ns
        for r in records
    )


def test_modules_that_are_called_as_usual_are_left_as_they_are(tmp_path, monkeypatch):
    """Parameters of no module are nobody's sign of a direct call; the script asserts that nothing was changed."""
    assert watched(tmp_path, monkeypatch, AS_USUAL).parts_ms["forward"] > 0


UNUSED = """
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 256) / 16)
    def forward(self, x):
        return x @ self.weight
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = Own(), torch.nn.Linear(256, 256), Own()
    def forward(self, x):
        return self.head(self.body(x))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for i in range(20):
    step(net, optimizer, net.head(net.body(x)).square().mean())
torch.jit.script(net)
"""
"""The network itself is never called, and one of its layers not at all."""


def test_what_nobody_calls_is_as_it_was_before_long(tmp_path, monkeypatch):
    watched(tmp_path, monkeypatch, UNUSED)


def test_a_script_with_an_optimizer_for_every_sample_pays_for_few_looks(monkeypatch):
    looked = []
    monkeypatch.setattr(patches, "holding", lambda parameters: looked.append(1) or [])
    calls = SimpleNamespace(models_called=list, classes=())
    recorder = SimpleNamespace(after_step=[], enter=lambda part: 0, leave=lambda depth, name: None)
    found = patches.DirectCalls(recorder, calls, list)
    for _ in range(10):
        found.another(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1))
    assert len(looked) == patches.MOST_LOOKS
