"""Tests of reading the training length from the variables of active functions."""

import itertools
import linecache
from types import SimpleNamespace

import pytest

from trainpace.watch.inside import script
from trainpace.watch.inside.script import StatedLength


def stated(code):
    """Return the last length that is noted when a script with this code calls `step()`."""
    notes, numbers, file = [], itertools.count(), "/home/a/train.py"
    log = SimpleNamespace(note=lambda **note: notes.append(note))
    recorder = SimpleNamespace(log=log, after_step=[])

    def step():
        if (number := next(numbers)) == 0:
            script.note_length(recorder)
        # A loop here would count as a loop of the script.
        callbacks = tuple(recorder.after_step) if number else ()
        _ = [callback(SimpleNamespace(number=number)) for callback in callbacks]

    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    script._loops_of.cache_clear()
    exec(compile(code, file, "exec"), {"__name__": "__main__", "step": step})
    return StatedLength(*notes[-1]["stated"]) if notes else None


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


NESTED = """
def train(loader):
    for batch in loader:
        step()
for fold in range(2):
    for epoch in range(1, 5):
        train("abc")
"""
ACCUMULATED = """
for i in range(1000):
    if i % 8 == 7:
        step()
"""
ROUNDS = """
class Args:
    def __init__(self):
        self.rounds = 12
args = Args()
for iteration in range(1, args.rounds + 1):
    for again in range(4):
        for start in range(0, 64, 16):
            step()
"""
WITH_BAR = """
def tqdm(iterable, **options):
    return iterable
for i in tqdm(range(50), desc="training"):
    step()
"""


OWN_BATCHES = """
import numpy
X = numpy.zeros((50, 3))
for epoch in range(3):
    for start in range(0, SIZE, 10):
        step()
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (OWN_BATCHES.replace("SIZE", "len(X)"), (None, 15)),
        (OWN_BATCHES.replace("SIZE", "X.shape[0]"), (None, 15)),
        ("for _ in range(10):\n    for x in 'ab':\n        step()", (10, 20)),
        (NESTED, (8, 24)),
        (ACCUMULATED, (None, 125)),
        (ROUNDS, (None, 12 * 4 * 4)),
        (WITH_BAR, (None, 50)),
        ("while True:\n    step()\n    break", None),
        ("for epoch in range(5):\n    while True:\n        step()\n        break", (5, 5)),
        ("while True:\n    for part in range(5):\n        step()\n    break", None),
        ("for i in range(10**9):\n    step()\n    break", None),
        ("n = 7\nfor i in range(n % 4):\n    step()", None),
        ("n = 2\nfor i in range(6 // n):\n    n = 0\n    step()", None),
        ("for i in range(10**30):\n    step()\n    break", None),
    ],
)
def test_training_length_is_read_from_loops_over_ranges(code, expected):
    found = stated(code)
    assert (found and (found.epochs, found.steps)) == expected
    assert found is None or "range(" in found.words


def test_epochs_of_whole_data_are_steps():
    code = "epochs = 200\nfor epoch in range(epochs):\n    step()"
    assert stated(code) == StatedLength(200, 200, "epochs = 200 in train.py")


AGENT = """
class Agent:
    def __init__(self):
        self.num_timesteps, self.n_epochs = 0, 10
    def train(self):
        for _ in range(3):
            step()
    def learn(self, total_timesteps):
        while self.num_timesteps < total_timesteps:
            self.num_timesteps += 20
            self.train()
Agent().learn({total})
"""
EVERY_TENTH = """
total_frames = 5000
for global_step in range(total_frames):
    if global_step > 1000 and global_step % 10 == 0:
        step()
"""


@pytest.mark.parametrize(
    ("code", "steps"), [(AGENT.replace("{total}", "2000"), 300), (EVERY_TENTH, 399)]
)
def test_experience_is_converted_to_steps_by_the_pace_of_updates(code, steps):
    assert stated(code).steps == pytest.approx(steps, rel=0.02)


def test_named_length_holds_until_the_pace_of_experience_is_known():
    assert stated(AGENT.replace("{total}", "20")).epochs == 10


def test_loop_of_a_library_makes_any_number_of_steps(monkeypatch):
    library = "def fit():\n    for x in 'ab':\n        step()"
    linecache.cache["/home/b/fit.py"] = len(library), None, library.splitlines(keepends=True), ""
    real = script.is_installed
    monkeypatch.setattr(script, "is_installed", lambda file: "/b/fit" in file or real(file))
    compiled = f"exec(compile({library!r}, '/home/b/fit.py', 'exec'))"
    found = stated(f"{compiled}\nfor seed in range(5):\n    fit()")
    assert (found.epochs, found.steps) == (5, 10)


def test_length_in_a_library_names_the_script_that_called_it(monkeypatch):
    code = "max_epochs = 10\nstep()"
    library = compile(code, "/home/b/fit_loop.py", "exec")
    monkeypatch.setattr(script, "is_installed", lambda file: "fit_loop" in file)
    notes = []
    recorder = SimpleNamespace(log=SimpleNamespace(note=lambda **note: notes.append(note)))
    inner = {"__name__": "fit_loop", "step": lambda: script.note_length(recorder)}
    outer = compile("exec(library, inner)", "/home/a/train.py", "exec")
    exec(outer, {"__name__": "__main__", "library": library, "inner": inner})
    assert notes[0]["stated"].words == "max_epochs = 10 in train.py"
