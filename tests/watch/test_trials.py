"""Tests of the interventions of a diagnosis and of their agreement across ranks."""

import json
import os
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from trainpace.watch.inside import files, observers, ranks
from trainpace.watch.inside import trials as module
from trainpace.watch.inside.event_log import OF_TRIAL, PARTS, EventLogWriter, Step
from trainpace.watch.inside.loaders import size_of
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trials import (
    CACHED_BATCH,
    FEW_SAMPLES,
    NO_SYNC,
    PLAIN,
    SETTLING,
    Trials,
    skips_collective,
)

SETTINGS = {"block_steps": 4, "rounds": 1, "warm_up_steps": 4, "limit_s": 60, "without": []}
TRAINING, EVALUATION = torch.utils.data.TensorDataset(torch.zeros(80, 3)), ["an evaluation's"] * 8


class Batches:
    """A stand-in for the iterator of a DataLoader."""

    _num_workers = _num_yielded = _trainpace_given = 0
    _trainpace_length = None
    _trainpace_size = staticmethod(size_of)

    def __init__(self, dataset, sizes, make=torch.zeros):
        self._dataset, self._all = dataset, [make(n) for n in sizes]
        self._left = list(self._all)

    def __len__(self):
        return len(self._all)


def fetch(iterator):
    if not iterator._left:
        raise StopIteration
    iterator._num_yielded += 1
    return iterator._left.pop(0)


@pytest.fixture
def trials(tmp_path):
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.trials = Trials(recorder, SETTINGS)
    return recorder.trials


def step(trials, number):
    trials.at_step(Step(0, 1, number, 0, 1, 0, 0.0, 0.0, (0,) * len(PARTS)))


def warm_up(trials, *iterators):
    for number in range(4):
        for iterator in iterators:
            trials.fetched(iterator, fetch)
        step(trials, number)


def all_of(trials, iterator):
    given = []
    while True:
        try:
            given.append(trials.fetched(iterator, fetch))
        except StopIteration:
            return given


def test_cached_batch_is_not_the_small_last_batch(trials):
    warm_up(trials, Batches(TRAINING, [16, 16, 16, 3]))
    trials.recorder.active_trial = CACHED_BATCH
    assert trials.fetched(Batches(TRAINING, [16]), fetch).shape == (16,)
    trials.recorder.active_trial = FEW_SAMPLES
    assert trials.fetched(Batches(TRAINING, [16]), fetch).shape == (2,)


def test_evaluation_ends_in_a_cached_batch_block(trials):
    training, evaluation = Batches(TRAINING, [16] * 10), Batches(EVALUATION, [5] * 3)
    all_of(trials, Batches(EVALUATION, [5] * 3))
    warm_up(trials, training)
    trials.recorder.active_trial = CACHED_BATCH
    assert [len(b) for b in all_of(trials, evaluation)] == [5] * 3
    assert [len(b) for b in all_of(trials, Batches(TRAINING, [16] * 2))] == [
        16
    ] * 2  # also if the evaluation uses the training dataset


def test_two_loaders_each_repeat_their_own_batch(trials):
    other = object()
    warm_up(trials, Batches(TRAINING, [16] * 4), Batches(other, [8] * 4))
    trials.recorder.active_trial = CACHED_BATCH
    assert len(trials.fetched(Batches(TRAINING, [16]), fetch)) == 16
    assert len(trials.fetched(Batches(other, [8]), fetch)) == 8


class Odd:
    """A batch whose attributes cannot be read."""

    def __getattr__(self, name):
        raise KeyError(name)


def test_batches_that_cannot_be_copied_are_unchanged(trials):
    iterator = Batches(TRAINING, [0] * 10, make=lambda n: Odd())
    warm_up(trials, iterator)
    assert CACHED_BATCH not in [kind for kind, _, _ in trials.programme]
    trials.recorder.active_trial = FEW_SAMPLES
    assert isinstance(trials.fetched(iterator, fetch), Odd)


def test_dict_subclasses_are_copied(trials):
    def make(n):
        return defaultdict(list, x=torch.zeros(n))

    iterator = Batches(TRAINING, [16] * 10, make=make)
    warm_up(trials, iterator)
    trials.recorder.active_trial = FEW_SAMPLES
    given = trials.fetched(iterator, fetch)
    assert given["x"].shape == (2,)
    assert given["missing"] == []


def test_skipped_collective_returns_the_usual_type(trials):
    called = []

    def all_reduce(*args, **kwargs):
        called.append(args)

    watched = partial(skips_collective(trials.recorder), all_reduce)
    trials.recorder.active_trial = NO_SYNC
    assert watched(torch.zeros(2000)) is None
    assert watched(tensor=torch.zeros(2000)) is None
    assert watched(torch.zeros(2000), None, None, True).wait()
    assert not called
    trials.recorder.active_trial = PLAIN
    watched(torch.zeros(2000))
    assert len(called) == 1


def test_all_ranks_follow_rank_0(trials, monkeypatch):
    store = torch.distributed.HashStore()
    rank = SimpleNamespace(now=0)
    monkeypatch.setattr(ranks, "process_group", lambda: torch.distributed)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank.now)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    second = Trials(trials.recorder, SETTINGS)
    warm_up(trials, Batches(TRAINING, [16] * 4))
    rank.now = 1
    warm_up(
        second, Batches(TRAINING, [3] * 4)
    )  # too few samples to reduce, and no remembered batch
    second.remembered.clear()
    assert (second.programme, second.last) == (trials.programme, trials.last)
    assert FEW_SAMPLES in [kind for kind, _, _ in second.last]
    ended = []
    monkeypatch.setattr(module, "end", ended.append)
    rank.now = 0
    trials.advance()
    rank.now, second.deadline_ns = 1, 0  # the second rank has reached its deadline
    second.advance()
    assert not ended
    assert second.left == trials.left
    assert json.loads(store.get(f"trainpace-trials-end-{second.changes}")) is False


def test_the_time_limit_ends_the_script_within_a_block(trials, monkeypatch):
    warm_up(trials, Batches(TRAINING, [16] * 4))
    ended = []
    monkeypatch.setattr(module, "end", ended.append)
    trials.left, trials.deadline_ns = 100, 0
    step(trials, 4)
    assert ended == [trials.recorder]


def diagnosed(trials, took_ms, budget_s=100.0, **settings):
    """Run a diagnosis to its end and return its counted trials, its seconds and its state.

    `took_ms` is a function of trial and step number that returns the step time.
    """
    t = Trials(
        trials.recorder,
        {**SETTINGS, "rounds": 2, "warm_up_steps": 10, **settings, "budget_s": budget_s},
    )
    trials.recorder.trials = t
    ended, counted, clock = [], [], 0

    def now():
        return clock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "end", ended.append)
        patch.setattr(module, "now_ns", now)
        number = 0
        while not ended and number < 5000:
            if t.programme is None:
                t.fetched(Batches(TRAINING, [16]), fetch)
            trial, begun = trials.recorder.trial, clock
            clock += int(1e6 * took_ms(trials.recorder.active_trial, number))
            if trial != SETTLING and t.programme is not None:
                counted.append(trial)
            t.at_step(Step(trial, 1, number, begun, clock, 16, 0.0, 0.0, (0,) * len(PARTS)))
            number += 1
    assert ended, "it never ended"
    return counted, clock / 1e9, t


def test_quiet_machine_uses_the_requested_rounds(trials):
    counted, _, t = diagnosed(trials, lambda trial, n: 10.0 if trial == CACHED_BATCH else 20.0)
    assert t.rounds_made == 2
    assert counted[:16] == ([PLAIN] * 4 + [CACHED_BATCH] * 4) * 2
    assert FEW_SAMPLES in counted


def test_operators_are_counted_only_if_the_budget_allows(trials, monkeypatch):
    began = []
    monkeypatch.setattr(
        observers,
        "count_one_step",
        lambda recorder, name="counted": began.append(name) or (lambda: None),
    )
    for budget_s, steps, counts in ((60.0, 3, False), (150.0, 7, False), (300.0, 13, True)):
        _, took_s, _ = diagnosed(trials, lambda trial, n: 25_000.0, budget_s=budget_s)
        assert took_s == 25 * steps
        assert bool(began) == counts


def test_noise_increases_the_number_of_rounds(trials):
    noise = [0.0, 90.0, 10.0, 60.0, 5.0]
    _, _, t = diagnosed(trials, lambda trial, n: 20.0 + noise[n // 6 % 5])
    assert 2 < t.rounds_made <= 8


def test_long_steps_use_fewer_and_shorter_blocks(trials):
    counted, took_s, t = diagnosed(trials, lambda trial, n: 4000.0, warm_up_steps=10, block_steps=8)
    assert 2 <= t.block < 8
    assert t.rounds_made >= 1
    assert took_s <= 4 + 100 + 2  # one step before the budget starts and half a step after it
    assert {PLAIN, CACHED_BATCH} <= set(counted)


def test_script_under_trials_can_load_its_own_checkpoint(tmp_path):
    written, trials = str(tmp_path / "best.pt"), SimpleNamespace(checkpoints=set())
    recorder = Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))
    recorder.trials = trials
    torch.save({"weight": 0}, f"{tmp_path}/older.pt{OF_TRIAL}")
    os.utime(f"{tmp_path}/older.pt{OF_TRIAL}", (0, 0))
    own = SimpleNamespace(load=torch.load, save=torch.save, serialization=SimpleNamespace())
    files.loads(own)
    files.checkpoints(recorder, own, "save", "f")
    load = own.load
    own.save({"weight": 1}, written)
    assert not (tmp_path / "best.pt").exists()
    assert load(written) == load(f=written) == {"weight": 1}  # any rank may have saved it
    for name in ("pretrained.pt", "older.pt"):
        torch.save({"weight": 2}, tmp_path / name)
        assert load(tmp_path / name) == {"weight": 2}


@pytest.mark.parametrize("under_trials", [True, False])
def test_scheduler_accepts_extra_steps_only_under_trials(under_trials):
    class Schedule(torch.optim.lr_scheduler.OneCycleLR):
        pass

    recorder = SimpleNamespace(trials=object() if under_trials else None)
    module.steps_beyond(SimpleNamespace(OneCycleLR=Schedule), recorder)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    schedule = Schedule(optimizer, 0.1, total_steps=10)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    if under_trials:
        schedule.step()
        assert schedule.last_epoch == 10
    else:
        with pytest.raises(ValueError, match="total steps is 10"):
            schedule.step()
