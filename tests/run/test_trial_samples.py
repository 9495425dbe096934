"""The samples of a step depend only on the seed and the global batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from torch.utils.data import default_collate as collate

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.run.trial import LoaderSettings, Trial
from trainpace.run.trial_worker import RankBatches, batches_of, of_rank, positions, steps_per_epoch
from trainpace.workload.task import Task

COUNTS = st.integers(1, 4)


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 60), st.integers(0, 3), st.integers(0, 20))
def test_ranks_and_micro_batches_partition_a_step(micro, accumulation, ranks, samples, seed, step):
    e = Execution(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    whole = positions(samples, seed, e.global_batch, step)
    parts = [of_rank(whole, e, rank) for rank in range(ranks)]
    assert all(part.shape == (accumulation, micro) for part in parts)
    assert np.concatenate([part.ravel() for part in parts]).tolist() == whole.tolist()


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3))
def test_epoch_uses_each_sample_at_most_once(samples, batch, seed):
    count = steps_per_epoch(samples, batch)
    taken = np.concatenate([positions(samples, seed, batch, step) for step in range(count)])
    assert set(taken.tolist()) <= set(range(samples))
    if samples >= batch:
        assert len(set(taken.tolist())) == len(taken) > samples - batch
    other = np.concatenate(
        [positions(samples, seed, batch, step) for step in range(count, 2 * count)]
    )
    assert samples < 8 or taken.tolist() != other.tolist()


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 60))
def test_rank_sampler_yields_steps_in_order(micro, accumulation, ranks, samples):
    e = Execution(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    for rank in range(ranks):
        sampler = RankBatches(samples, 7, e, rank)
        given_out = [batch for _ in range(2) for batch in sampler]
        assert len(given_out) == 2 * len(sampler)
        steps = range(2 * steps_per_epoch(samples, e.global_batch))
        expected = [
            b
            for s in steps
            for b in of_rank(positions(samples, 7, e.global_batch, s), e, rank).tolist()
        ]
        assert given_out == expected


def task(dataset=None, make_batch=None):
    return Task(
        "a task",
        torch.nn.Identity(),
        None,
        None,
        make_batch,
        None,
        "",
        dataset=dataset,
        collate=collate,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_samples_of_rank_across_epochs(workers):
    trial = Trial(
        task="",
        execution=Execution(micro_batch=2, accumulation=2, nproc_per_node=2),
        loader=LoaderSettings(workers=workers, prefetch_factor=3 if workers else None),
    )
    next_batch, notes = batches_of(
        trial, task(TensorDataset(torch.arange(20))), 1, lambda batch: batch
    )
    assert notes == ()
    for step in range(5):
        expected = positions(20, 0, 8, step)[4:]
        assert torch.cat([next_batch()[0], next_batch()[0]]).tolist() == expected.tolist()


def test_generated_samples_do_not_depend_on_division():
    def make_batch(count):
        return {"x": torch.randn(count, 3)}

    def of(ranks, accumulation):
        e = Execution(
            micro_batch=8 // ranks // accumulation, accumulation=accumulation, nproc_per_node=ranks
        )
        trial = Trial(task="", execution=e)
        takers = [
            batches_of(trial, task(None, make_batch), rank, lambda batch: batch)[0]
            for rank in range(ranks)
        ]
        return [
            torch.cat([taker()["x"] for taker in takers for _ in range(accumulation)])
            for _ in range(6)
        ]

    whole = of(1, 1)
    for ranks, accumulation in ((2, 1), (1, 4), (4, 2)):
        assert all(torch.equal(a, b) for a, b in zip(whole, of(ranks, accumulation), strict=True))
    assert not torch.equal(whole[0], whole[1])


def test_shards_need_a_task_with_dataset():
    trial = Trial(task="", execution=Execution(), loader=LoaderSettings(shards="nowhere"))
    with pytest.raises(TrainpaceError):
        batches_of(trial, task(None, torch.zeros), 0, lambda batch: batch)


class Online(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index / 10.0]), index

    @staticmethod
    def online(sample):
        return sample[0].float() / 10, sample[1]


class WithoutASplit(Online):
    online = None


class Bytes(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index], dtype=torch.uint8), index


@pytest.fixture
def shards(tmp_path):
    from shard_folders import write_folder

    return write_folder(tmp_path / "shards", Bytes(), 4, 2)


def test_shards_replace_offline_computation(shards):
    trial = Trial(
        task="", execution=Execution(micro_batch=4), loader=LoaderSettings(shards=str(shards))
    )
    through_shards, notes = batches_of(trial, task(Online()), 0, lambda batch: batch)
    own, _ = batches_of(
        Trial(task="", execution=Execution(micro_batch=4)), task(Online()), 0, lambda batch: batch
    )
    assert notes == ()
    for _ in range(6):
        (x, y), (x_own, y_own) = through_shards(), own()
        assert torch.equal(x, x_own)
        assert torch.equal(y, y_own)


def test_shards_of_other_samples_are_rejected(shards):
    trial = Trial(
        task="", execution=Execution(micro_batch=4), loader=LoaderSettings(shards=str(shards))
    )
    with pytest.raises(Contradiction) as caught:
        batches_of(trial, task(WithoutASplit()), 0, lambda batch: batch)
    assert "`online`" in caught.value.hint
