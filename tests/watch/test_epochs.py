"""Epochs that end before their loader does, lists in samples, and the rhythm of rare events."""

from types import SimpleNamespace

import pytest

from trainpace.watch.inside.event_log import PARTS, Step
from trainpace.watch.inside.loaders import Epochs, _note_lists
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


def test_long_lists_of_numbers_in_a_sample_are_counted():
    recorder = Recorder()
    _note_lists(recorder, [{"values": [0.5] * 2000, "label": 1, "words": ["a"] * 2000}])
    _note_lists(recorder, [([1, 2, 3], 4)])
    assert recorder.notes == [{"listed_numbers": 2000}]


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
