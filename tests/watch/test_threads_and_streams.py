"""Tests of training threads, killed processes, iterable datasets and installed packages."""

import os
import sys
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from trainpace.watch import read_recording, watch
from trainpace.watch.inside import loaders, script, start
from trainpace.watch.inside.event_log import DATA, EventLogWriter
from trainpace.watch.inside.loaders import size_of_uncollated
from trainpace.watch.inside.recorder import Recorder

STEPS = """
import os, signal, threading, time, torch
def train(steps):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)\n"


def recorded(folder, text):
    (folder / "train.py").write_text(STEPS + text)
    code = watch([sys.executable, str(folder / "train.py")], folder / "recording")
    return code, read_recording(folder / "recording").ranks


def test_training_thread_is_complete_although_its_process_is_killed(tmp_path):
    alive = "assert thread not in threading.enumerate() and not thread.is_alive()\n"
    begin = "thread = threading.Thread(target=train, args=(12,)); thread.start(); thread.join()\n"
    code, (rank,) = recorded(tmp_path, begin + alive + KILL)
    assert code == 128 + 9
    assert (rank.warm_up + rank.steps, rank.complete) == (12, True)


def test_ray_worker_saves_its_workload_before_it_is_killed(tmp_path):
    worker = f"import sys; sys.argv[0] = {start.RAY_WORKER!r}\n"
    thread = "thread = threading.Thread(target=train, args=(12,)); thread.start(); thread.join()\n"
    code, _ = recorded(tmp_path, worker + thread + KILL)
    assert code == 128 + 9
    assert (tmp_path / "recording" / "workload.json").is_file()


def test_consecutive_training_threads_all_count(tmp_path):
    code, (rank,) = recorded(
        tmp_path,
        """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def epoch():
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
kept = []  # else one may get the number of the one before
for _ in range(3):
    thread = threading.Thread(target=epoch)
    thread.start(); thread.join()
    kept.append(thread)
""",
    )
    assert code == 0
    assert rank.warm_up + rank.steps == 90
    assert (tmp_path / "recording" / "workload.json").is_file()


def test_steps_are_kept_if_the_process_is_killed_later(tmp_path):
    code, (rank,) = recorded(tmp_path, "train(12)\ntime.sleep(1)\n" + KILL)
    assert code == 128 + 9
    assert (rank.warm_up + rank.steps, rank.complete) == (12, False)


def test_time_between_two_trainings_is_not_counted_as_step_time(tmp_path):
    code, (rank,) = recorded(tmp_path, "train(12)\ntime.sleep(0.5)\ntrain(12)\n")
    assert code == 0
    assert rank.warm_up + rank.steps == 23
    assert rank.parts_ms["other"] < 20


def test_custom_iterator_is_attributed_to_its_loader(tmp_path):
    code, (rank,) = recorded(
        tmp_path,
        """
class Loader(torch.utils.data.DataLoader):
    def __iter__(self):
        return torch.utils.data.dataloader._SingleProcessDataLoaderIter(loader=self)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in Loader(torch.ones(48, 2), batch_size=4):
    model(x).sum().backward()
    optimizer.step()
""",
    )
    assert code == 0
    assert rank.loader is not None
    assert (rank.warm_up + rank.steps, rank.loader.batches, rank.samples_per_step) == (12, 12, 4)


@pytest.mark.parametrize(
    ("item", "samples"),
    [
        ((torch.rand(4, 8), torch.zeros(4)), 4),
        ({"x": torch.rand(4, 3, 8, 8)}, 4),
        ((torch.rand(3, 8, 8), 1), 1),
        ((torch.rand(3, 8, 8), torch.tensor(1)), 1),
        ((torch.rand(3, 8, 8), torch.zeros(8, 8)), 1),
        ({"input_ids": torch.zeros(16), "labels": torch.zeros(16)}, 1),
        ((torch.rand(4, 8), ["a", "b", "c", "d"]), 4),
        ((torch.rand(8, 4), [1, 2, 3, 4, 5, 6, 7, 8]), 8),
        (UserDict({"input_ids": torch.zeros(4, 16), "labels": torch.zeros(4)}), 4),
        (["a", "b"], 0),
    ],
)
def test_size_of_uncollated_items_counts_samples(item, samples):
    assert size_of_uncollated(item) == samples


def test_fetch_counts_samples_of_dataset_batches(tmp_path):
    fetched = []
    recorder = SimpleNamespace(
        spans_on=True,
        steps=1,
        thread=loaders.get_ident(),
        log=SimpleNamespace(fetch=fetched.append),
    )
    made = iter([(torch.rand(4, 8), torch.zeros(4)), (torch.rand(2, 8), torch.zeros(2))])
    fetch = loaders.timed_fetch(lambda self, indices: next(made), recorder, str(tmp_path))
    fetcher = SimpleNamespace(collate_fn=list, auto_collation=False)
    for _ in range(2):
        fetch(fetcher, None)
    with pytest.raises(StopIteration):
        fetch(fetcher, None)
    assert [one.samples for one in fetched] == [4, 2]


def test_waiting_for_ray_data_counts_as_data(tmp_path):
    recorder = Recorder(EventLogWriter(str(tmp_path / "process.trail"), {}))

    class Iterable:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    loaders.ray_data(SimpleNamespace(_IterableFromIterator=Iterable), recorder)
    inner = Iterable([{"x": torch.ones(4, 2)}] * 3)
    entered = []
    recorder.enters_batch = lambda part, enters=recorder.enters_batch: (
        entered.append(part),
        enters(part),
    )[1]
    for batch in Iterable(one for one in inner):
        assert recorder.part != DATA
        assert recorder.fetched_samples == len(batch["x"]) == 4
        recorder.leave(recorder.enters_training(), "model")
    # one per batch and one for the end, also through a generator
    assert entered == [DATA] * 4
    assert recorder.samples == 12


def test_code_with_a_bare_file_name_belongs_to_the_script(tmp_path, monkeypatch):
    """This happens under cProfile in a folder that is a package."""
    (tmp_path / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert not script.is_installed("some_script.py")
    assert script.top_of("/") == "/"


def test_package_with_dist_info_counts_as_installed(tmp_path, monkeypatch):
    beside, own = tmp_path / "beside", tmp_path / "own"
    for folder in (beside, own):
        (folder / "package" / "inner").mkdir(parents=True)
        for name in ("package/__init__.py", "package/inner/__init__.py", "package/inner/code.py"):
            (folder / name).touch()
    (beside / "package-1.0.dist-info").mkdir()
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    assert script.is_installed(str(beside / "package/inner/code.py"))
    assert script.is_installed(os.__file__)
    assert not script.is_installed("<ipython-input-1-0a1b2c>")
    assert script.is_installed(torch.__file__)
    assert not script.is_installed(str(own / "package/inner/code.py"))


def test_omegaconf_settings_are_read_without_running_its_code():
    class Node:
        def __init__(self, **held):
            self.__dict__.update(held)

        def __getattr__(self, name):
            raise AssertionError("code of the script ran")

    Node.__module__ = "omegaconf.dictconfig"
    whole = Node(
        _content={
            "trainer": Node(
                _content={"max_epochs": Node(_val=7), "name": Node(_val="x")}, _parent=None
            )
        }
    )
    whole.__dict__["_content"]["trainer"].__dict__["_parent"] = whole
    found = {name: value for name, value, _ in script._named({"cfg": whole}, "train.py")}
    assert (found["max_epochs"], found["name"]) == (7, "x")
