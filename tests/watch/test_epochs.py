"""Epochs that end before their loader does, lists in samples, and the rhythm of rare events."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainpace.watch.inside.event_log import PARTS, Step
from trainpace.watch.inside.loaders import Epochs, _Collate
from trainpace.watch.ranks import per_step


class Recorder:
    def __init__(self):
        self.steps, self.training_loaders, self.notes = 0, set(), []
        self.log = SimpleNamespace(note=lambda **note: self.notes.append(note))


def trained(recorder, epochs, loader, steps):
    epochs.begins(loader)
    recorder.training_loaders.add(id(loader))
    recorder.steps += steps


def test_an_epoch_left_early_is_as_long_as_its_steps():
    recorder, loader = Recorder(), SimpleNamespace(dataset=[1])
    epochs = Epochs(recorder)
    for _ in range(3):
        trained(recorder, epochs, loader, 20)
    assert recorder.notes == [{"epoch_steps": 20}] * 2


def test_an_epoch_that_ends_with_its_loader_is_not_logged():
    recorder, loader = Recorder(), SimpleNamespace(dataset=[1])
    epochs = Epochs(recorder)
    for _ in range(3):
        trained(recorder, epochs, loader, 20)
        epochs.ends(loader.dataset)
    assert recorder.notes == []


def test_a_new_loader_of_the_same_dataset_begins_the_next_epoch():
    recorder, dataset = Recorder(), [1]
    epochs, loaders = Epochs(recorder), [SimpleNamespace(dataset=dataset) for _ in range(2)]
    for loader in loaders:
        trained(recorder, epochs, loader, 20)
    assert recorder.notes == [{"epoch_steps": 20}]


def test_an_evaluation_left_early_and_single_batches_make_no_epoch():
    recorder, evaluated = Recorder(), SimpleNamespace(dataset=[1])
    epochs, single = Epochs(recorder), SimpleNamespace(dataset=[2])
    for _ in range(3):
        epochs.begins(evaluated)
        trained(recorder, epochs, single, 1)
    assert recorder.notes == []


def facts(samples, draws=lambda: None, collate=len):
    """Return (samples draw random numbers, numbers in long lists), as the first fetch logs them."""
    recorder, timed = Recorder(), _Collate(collate, examines=True)
    recorder.log.fetch = lambda fetch: None
    draws()
    timed(samples)
    for _ in range(2):
        timed.log_fetch(recorder.log, None)
    (note,) = recorder.notes
    return note["random_samples"], note["listed_numbers"]


def test_samples_are_random_if_making_them_draws_a_random_number():
    assert facts([1.0], lambda: torch.rand(1)) == (True, 0)
    assert facts([1.0], random.random) == (True, 0)
    assert facts([1.0], np.random.rand) == (True, 0)
    assert facts([1.0], collate=lambda samples: random.random()) == (False, 0)


def test_long_lists_of_numbers_in_a_sample_are_counted():
    assert facts([{"values": [0.5] * 2000, "label": 1, "words": ["a"] * 2000}]) == (False, 2000)
    assert facts([([1, 2, 3], 4)]) == (False, 0)


def steps(count):
    return [
        Step(0, 1, i, i, i + 1, 1, 0.0, 0.0, (1,) + (0,) * (len(PARTS) - 1)) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("numbers", "count", "expected"),
    [([], 30, 0), ([10, 20], 25, 1 / 10), ([10], 15, 1 / 10), ([2, 3, 4, 12], 20, 3 / 10)],
)
def test_events_count_by_whole_periods(numbers, count, expected):
    assert per_step(numbers, steps(count)) == pytest.approx(expected)
