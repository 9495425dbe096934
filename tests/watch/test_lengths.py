"""Tests of reading the training length from the variables of active functions."""

from types import SimpleNamespace

import pytest

from trainpace.watch.inside import script
from trainpace.watch.inside.script import StatedLength


def stated(code):
    """Return the length that is noted when a script with this code calls `step()`."""
    notes = []
    recorder = SimpleNamespace(log=SimpleNamespace(note=lambda **note: notes.append(note)))
    exec(
        compile(code, "/home/a/train.py", "exec"),
        {"__name__": "__main__", "step": lambda: script.note_length(recorder)},
    )
    return StatedLength(*notes[0]["stated"]) if notes else None


IN_ARGUMENTS = """
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args([])
    step()
main()
"""
IN_A_SETTING = """
max_steps, num_train_epochs = -1, 3.0
class Trainer:
    def __init__(self):
        self.num_train_epochs, self.max_steps = 3.0, 500
    def train(self):
        step()
Trainer().train()
"""
INNER_FIRST = """
EPOCHS = 50
def train(num_epochs):
    step()
train(10)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (IN_ARGUMENTS, StatedLength(15, None, "epochs = 15 in train.py")),
        (IN_A_SETTING, StatedLength(None, 500, "max_steps = 500 in train.py")),
        (INNER_FIRST, StatedLength(10, None, "num_epochs = 10 in train.py")),
        (
            "EPOCHS = 50\ndef train():\n    step()\ntrain()",
            StatedLength(50, None, "EPOCHS = 50 in train.py"),
        ),
        (
            "cfg = {'max_iters': 2000}\nstep()",
            StatedLength(None, 2000, "max_iters = 2,000 in train.py"),
        ),
    ],
)
def test_training_length_is_read_from_variables(code, expected):
    assert stated(code) == expected


@pytest.mark.parametrize(
    "code",
    [
        "epochs = 0\nstep()",
        "epochs = True\nstep()",
        "num_steps = 128  # of a rollout\nstep()",
        "warmup_epochs = 3\nstep()",
        "max_steps = 2.5\nstep()",
        "class Config:\n    epochs = 3\nstep()",
        "epochs = 'many'\nstep()",
    ],
)
def test_unrelated_variables_give_no_length(code):
    assert stated(code) is None


def test_objects_that_raise_on_attribute_access_are_skipped():
    code = """
class Odd:
    def __getattribute__(self, name):
        raise RuntimeError(name)
odd, epochs = Odd(), 4
step()
"""
    assert stated(code).epochs == 4
