"""Steps are found in scripts that do not use exactly one torch optimizer."""

import subprocess
import sys

import pytest

from trainpace.core.records import load
from trainpace.report.watch import step_in_words
from trainpace.watch import read_recording, watch
from trainpace.workload import Workload

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
"""
LOOP = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
data = [(torch.randn(5, 8), torch.randint(0, 3, (5,))) for _ in range(24)]
"""
SCRIPTS = {
    # pytorch/examples, word_language_model
    "data": LOOP
    + """
for x, y in data:
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
""",
    "accumulated": LOOP
    + """
for i, (x, y) in enumerate(data):
    loss = nn.functional.cross_entropy(model(x), y) / 4
    loss.backward()
    if i % 4 == 3:
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
""",
    "autograd.grad": LOOP
    + """
for x, y in data:
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients):
            p -= 0.1 * g
""",
    # pytorch/examples, time_sequence_prediction
    "LBFGS": LOOP
    + """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x, y = data[0]
for _ in range(8):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    loss = optimizer.step(closure)
""",
    "two optimizers": LOOP
    + """
critic = nn.Linear(8, 1)
optimizers = [torch.optim.Adam(m.parameters()) for m in (model, critic)]
for x, y in data:
    loss = nn.functional.cross_entropy(model(x), y) + critic(x).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
""",
    "only looking": LOOP
    + """
for x, y in data:
    x.requires_grad_(True)
    loss = nn.functional.cross_entropy(model(x), y)
    torch.autograd.grad(loss, x)  # adversarial examples, of a model that stays as it is
""",
}
STEPS = {"accumulated": 6, "LBFGS": 8, "two optimizers": 24}
IN_WORDS = {
    "accumulated": "4 micro-batches and an update by the script's own code",
    "LBFGS": "an update by LBFGS, which evaluates the loss",
    "two optimizers": "updates by 2 optimizers",
}


def _watched(folder, name):
    path = folder / "train.py"
    path.write_text(HEAD + SCRIPTS[name] + "\nprint(repr(loss.item()))\n")
    command = [sys.executable, str(path)]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with (folder / "said").open("w+") as said:
        assert watch(command, folder / "recording", output=said.fileno()) == 0
        said.seek(0)
        return alone, said.read(), read_recording(folder / "recording")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "only looking"])
def test_steps_are_found_for_every_way_of_updating(name, tmp_path):
    alone, under_watch, recording = _watched(tmp_path, name)
    assert under_watch == alone
    (rank,) = recording.ranks
    whole = STEPS.get(name, 24)
    by_hand = rank.optimizers == 0
    # the first steps are warm-up, and nothing is called after the last manual update
    assert whole - 3 - by_hand <= rank.steps < whole
    assert step_in_words(rank).startswith(IN_WORDS.get(name, "an update by the script's own code"))
    assert sum(rank.parts_ms.values()) == pytest.approx(rank.step_ms, rel=1e-6)
    assert rank.parts_ms["backward"] > 0


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("data", "sgd", marks=pytest.mark.slow),
        pytest.param("LBFGS", "sgd", marks=pytest.mark.slow),
        ("two optimizers", "adam"),
    ],
)
def test_manual_updates_still_give_a_workload(name, optimizer, tmp_path):
    _watched(tmp_path, name)
    workload = load(tmp_path / "recording" / "workload.json", Workload)
    critic = 8 + 1 if name == "two optimizers" else 0  # the loss depends on the critic too
    assert workload.parameters == 8 * 16 + 16 + 16 * 3 + 3 + critic
    assert workload.optimizer == optimizer
    assert workload.assumes_optimizer == (name == "LBFGS")  # SGD stands for it
    assert any(
        "LBFGS evaluates the loss several times a step" in note for note in workload.notes
    ) == (name == "LBFGS")


def test_gradients_without_an_update_are_not_a_step(tmp_path):
    *_, recording = _watched(tmp_path, "only looking")
    assert recording.ranks == ()
