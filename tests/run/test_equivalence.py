"""`trainpace verify` finds planted causes by intervention and reports equal trainings as equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.core.errors import TrainpaceError
from trainpace.run import Question
from trainpace.run.equivalence import CHANGES, Facts, Variant, candidates

ENGINES = Path(__file__).parents[2] / ".engines"

TASKS = """
import os, torch
from torch import nn
from torch.nn import functional as F

class Data:
    def __init__(self, ignored=False):
        self.ignored = ignored
    def __len__(self):
        return 50
    def __getitem__(self, i):
        x, y = torch.randn(12), int(torch.randint(0, 3, ()))
        return x, torch.tensor([y, -100 if i % 3 else y]) if self.ignored else y

class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 3, 2)

def task(*between, loss=None, lr=0.05):
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), *between, nn.Linear(16, 3))
    return model, loss or nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), Data()

def plain():
    return task()
def batch_norm():
    return task(nn.BatchNorm1d(16))
# one layer draws the same masks in parts as at once, one after the other; two layers take turns
def dropout():
    return task(nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3))
class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3)
def functional_dropout():
    return task(Functional(), nn.Linear(16, 16), Functional())
def both():
    return task(nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3))
def summed():
    return task(loss=nn.CrossEntropyLoss(reduction="sum"), lr=0.005)
def clipped():
    parts = task()
    for p in parts[0].parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return parts
def ignored():
    model = Twice(12, 6)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05), Data(ignored=True)
def contrastive():
    return task(loss=lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out))))
class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.01 * int.from_bytes(os.urandom(1), "big")
def unseeded():
    return task(Noisy())
def still():
    return task(lr=1e-12)
class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)
    def forward(self, batch):
        return {"loss": F.cross_entropy(self.layer(batch["x"]), batch["y"])}
def own_loss():
    model = OwnLoss()
    loss = lambda out, y: out["loss"]
    class Pairs(Data):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return {"x": x, "y": y}, y
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.05), Pairs()
class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 6))
    def forward(self, x, y):
        return {"loss": F.cross_entropy(self.layers(x).view(-1, 3, 2), y)}
def answers():
    model = Answers()
    class Batch(nn.Module):
        def __init__(self):
            super().__init__()
            self.answers = model
        def forward(self, batch):
            return self.answers(batch["x"], batch["y"])
    batch = Batch()
    loss = lambda out, y: out["loss"]
    class Pairs(Data):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return {"x": x, "y": y}, y
    return batch, loss, torch.optim.AdamW(batch.parameters(), lr=1e-3), Pairs(ignored=True)
def broken():
    return task(loss=lambda out, y: 1 / 0)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TASKS)
    return tmp_path


def verify(folder, *arguments, code):
    command = [sys.executable, "-m", "trainpace", "verify", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    return done


def ask(folder, *arguments, code):
    return json.loads(verify(folder, *arguments, "--json", code=code).stdout)


@pytest.mark.slow
def test_verify_reports_equivalent_training(folder):
    said = ask(folder, "mine.py:plain", code=0)
    assert [way["way"] for way in said["ways"]] == ["accumulate", "data_parallel", "ddp", "fsdp2"]
    for way in said["ways"]:
        assert 0 < way["difference"] <= 1e-5
        assert way["moved"] > 0.01
    assert "Equivalent training" in said["verdict"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cause"),
    [
        pytest.param("batch_norm", "whole_batch_norm", marks=pytest.mark.long),
        ("clipped", "no_hooks"),
    ],
)
def test_verify_finds_cause_for_every_way(folder, task, cause):
    said = ask(folder, f"mine.py:{task}", code=1)
    # DataParallel replicas share one backward pass, so hooks act on the gradient of the whole batch.
    as_one = {"data_parallel"} if task == "clipped" else set()
    assert {way["way"] for way in said["ways"] if way["equal"]} == as_one
    for way in said["ways"]:
        if way["equal"]:
            continue
        assert way["cause"] == [cause]
        tried = {tuple(t["changes"]): t["difference"] for t in way["tried"]}
        assert tried[cause,] <= 1e-5 < way["difference"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cause"),
    [
        ("functional_dropout", ["no_dropout"]),
        ("both", ["whole_batch_norm", "no_dropout"]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("dropout", ["no_dropout"]),
                ("summed", ["sum"]),
                ("ignored", ["weight_by_targets"]),
            )
        ),
    ],
)
def test_verify_finds_planted_cause_of_accumulation(folder, task, cause):
    (way,) = ask(folder, f"mine.py:{task}", "--way", "accumulate", code=1)["ways"]
    assert way["cause"] == cause


@pytest.mark.long
@pytest.mark.parametrize("way", ["accumulate", "data_parallel"])
def test_means_over_unequal_targets_are_found_under_adamw(folder, way):
    asked = ("mine.py:answers", "--batch", "16", "--way", way)
    said = ask(folder, *asked, code=1)
    assert said["ways"][0]["cause"] in (["weight_by_targets"], ["weight_by_targets", "fp64"])
    assert "contrastive" not in said["verdict"][0]


@pytest.mark.long
def test_verify_finds_deepspeed_equivalent(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENGINES))
    (way,) = ask(folder, "mine.py:plain", "--way", "deepspeed", code=0)["ways"]
    assert 0 < way["difference"] <= 1e-5 < way["moved"]


def test_data_parallel_splits_batch_like_torch_chunk():
    """Five samples on four GPUs are 2 + 2 + 1: torch.chunk gives the fourth GPU none."""
    assert Question(model="m", batch=5, ranks=4).sizes("data_parallel") == (2, 2, 1)


@pytest.mark.long
def test_verify_finds_unequal_parts_and_precision_causes(folder):
    (way,) = ask(folder, "mine.py:plain", "--batch", "10", "--way", "accumulate", code=1)["ways"]
    assert (way["sizes"], way["cause"]) == ([3, 3, 2, 2], ["weight_by_samples"])
    (replicas,) = ask(folder, "mine.py:plain", "--batch", "9", "--way", "data_parallel", code=0)[
        "ways"
    ]
    assert replicas["sizes"] == [5, 4]  # and the loss is of all outputs at once
    (replicas,) = ask(folder, "mine.py:own_loss", "--way", "data_parallel", code=0)["ways"]
    assert replicas["equal"]  # a model's own losses come one a replica, and are averaged
    (way,) = ask(folder, "mine.py:plain", "--precision", "bf16", "--way", "accumulate", code=1)[
        "ways"
    ]
    assert way["cause"] == ["fp32"]


@pytest.mark.long
def test_verify_reports_unexplained_differences(folder):
    said = ask(folder, "mine.py:contrastive", "--way", "accumulate", code=1)
    assert "not the mean of its parts" in said["verdict"][0]
    said = ask(folder, "mine.py:unseeded", "--way", "accumulate", code=1)
    assert "does not train the same way twice" in said["verdict"][0]
    said = ask(folder, "mine.py:still", "--way", "accumulate", code=1)
    assert "too little to tell" in said["verdict"][0]


@pytest.mark.slow
def test_verify_misuse_gives_one_line_error(folder):
    assert "ZeroDivisionError" in verify(folder, "mine.py:broken", code=2).stderr
    assert "cannot be divided" in verify(folder, "mine.py:plain", "--batch", "3", code=2).stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": 1},
        {"ranks": 0},
        {"batch": 3},
        {"ways": ()},
        {"ways": ("whole",)},
        {"tolerance": 0.0},
    ],
)
def test_question_rejects_invalid_values(wrong):
    with pytest.raises(TrainpaceError):
        Question(model="resnet18", **wrong)


def test_batch_parts_hold_every_sample_once():
    q = Question(model="m", batch=10, parts=4)
    assert q.sizes("accumulate") == (3, 3, 2, 2)
    assert q.sizes("ddp") == (5, 5)
    assert q.sizes("whole") == (10,)


def test_candidate_changes_follow_observed_facts():
    q = Question(model="m", batch=10, parts=4)
    assert candidates(q, Facts(losses=()), "ddp") == ("sum", "fp64")
    assert candidates(q, Facts(losses=()), "accumulate") == ("weight_by_samples", "sum", "fp64")
    seen = Facts(losses=(), batch_norms=1, random=True, hooks=1, uneven_targets=True)
    every = candidates(Question(model="m", batch=10, parts=4, precision="bf16"), seen, "accumulate")
    assert every == CHANGES


def test_replicas_are_weighted_only_if_each_has_its_own_loss():
    q, seen = Question(model="m", batch=9), Facts(losses=(), uneven_targets=True, divided=False)
    assert candidates(q, seen, "data_parallel") == ("fp64",)
    own = Facts(losses=(), uneven_targets=True)
    weights = ("weight_by_samples", "weight_by_targets", "sum", "fp64")
    assert candidates(q, own, "data_parallel") == weights


def test_whole_batch_variant_drops_weighting_changes():
    assert Variant(way="ddp", changes=("sum", "no_dropout")).whole == Variant(
        way="whole", changes=("no_dropout",)
    )
