"""Tests of reading notes from event logs by name."""

from trainpace.watch.event_logs import Notes, lines_of, training_loader
from trainpace.watch.inside.event_log import PARTS, Step


def step(number):
    return Step(0, 1, number, 0, 1, 8, 0.0, 0.0, (0,) * len(PARTS))


def loader(number, batch_size):
    return {
        "loader": number,
        "dataset": f"Data{number}",
        "samples_in_dataset": None,
        "batches": None,
        "batch_size": batch_size,
        "workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
    }


def test_notes_are_found_by_name_and_by_step():
    notes = Notes(
        [
            {"input_elements": 1, "a": 2},
            step(0),
            {"input_elements": 5},
            step(1),
            step(2),
            {"input_elements": 7},
        ]
    )
    assert notes.values("input_elements") == [1, 5, 7]
    assert notes.by_step("input_elements") == {-1: 1, 0: 5, 2: 7}
    assert notes.last_of_each() == {"input_elements": 7, "a": 2}
    assert (notes.last("a"), notes.last("b"), notes.last("b", 0), notes.values("b")) == (
        2,
        None,
        0,
        [],
    )


def fed(samples):
    return [step(1)._replace(samples=samples)]


def test_training_loader_is_chosen_by_its_batch_size():
    first, second, third = (loader(n, size) for n, size in ((1, 8), (2, 16), (3, 8)))
    assert training_loader(Notes(), fed(8)) is None
    assert training_loader(Notes([first, second]), fed(16)).dataset == "Data2"
    assert training_loader(Notes([first, second]), fed(99)).dataset == "Data1"
    assert (
        training_loader(Notes([first, second, third, {"feeds": 3}, {"feeds": 2}]), fed(8)).dataset
        == "Data3"
    )


def test_rarely_sampled_lines_are_ignored():
    samples = [["data", "a.py:1", "read", 6], ["data", "a.py:2", "", 2], ["data", "", "", 4]]
    assert [(line.line, line.share) for line in lines_of(Notes([{"samples": samples}]))] == [
        ("a.py:1", 0.5)
    ]
