"""Tests of reading the number of epochs or steps from a command line."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.watch import stated_length


@pytest.mark.parametrize(
    ("command", "epochs", "steps", "words"),
    [
        ("python train.py --epochs 30 --lr 0.1", 30, None, "--epochs 30"),
        ("python run_glue.py --num_train_epochs=3.0 --bf16", 3, None, "--num_train_epochs=3.0"),
        ("python train.py trainer.max_epochs=5", 5, None, "trainer.max_epochs=5"),
        ("python train.py config/gpt2.py --max_iters=600000", None, 600_000, "--max_iters=600000"),
        ("python train.py --epochs 3 --max-steps 1_000", None, 1000, "--max-steps 1_000"),
        ("python train.py --epochs 3 --epochs 4", 4, None, "--epochs 4"),
    ],
)
def test_training_length_is_read_from_the_arguments(command, epochs, steps, words):
    found = stated_length(shlex.split(command))
    assert (found.epochs, found.steps, found.words) == (epochs, steps, words)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python train.py --epochs",
        "python train.py --epochs many",
        "python train.py --warmup_epochs 3",
        "python train.py --epochs 0",
        "python train.py --max_steps=-1",
        "python train.py --max-steps 2.5",
        "python epochs 3",
    ],
)
def test_unrelated_arguments_give_no_length(command):
    assert stated_length(shlex.split(command)) is None


@given(st.lists(st.text(max_size=12), max_size=6), st.integers(1, 10**6))
def test_other_arguments_do_not_hide_the_length(words, epochs):
    assert stated_length(["python", *words, "--", f"--epochs={epochs}"]) is not None
