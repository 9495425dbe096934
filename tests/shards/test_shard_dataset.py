"""Reading back: exactly once over ranks and workers, the same order, resumed mid-epoch."""

import pickle
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shard_folders import write_folder
from trainpace.core.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.shards import ShardDataset, ShardStream
from trainpace.shards import dataset as shard_dataset

COUNT, BAD = 203, {5, 77, 78}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    samples = [(torch.full((2, 3), i, dtype=torch.int32), i) for i in range(COUNT)]
    return write_folder(tmp_path_factory.mktemp("data") / "s", samples, 50, 8, bad=BAD)


GOOD = [i for i in range(COUNT) if i not in BAD]


def ids(batches):
    return [batch[1].tolist() for batch in batches]


def flat(batches):
    return [i for batch in batches for i in batch]


def stream(folder, **options):
    return ShardStream(folder, 7, seed=1, buffer_samples=30, **options)


def test_map_style(folder):
    data = ShardDataset(folder, transform=lambda sample: sample[1])
    assert [data[i] for i in range(len(data))] == GOOD
    assert data[-1] == COUNT - 1
    assert [data.source_index(i) for i in (0, 5, 199)] == [0, 6, 202]
    with pytest.raises(IndexError):
        data[200]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_give_every_sample_once(folder, workers):
    data = ShardDataset(pickle.loads(pickle.dumps(ShardDataset(folder))).reader.folder)
    for loader in (
        DataLoader(data, batch_size=16, shuffle=True, num_workers=workers),
        data.loader(16, num_workers=workers),
    ):
        batches = list(loader)
        assert sorted(flat(ids(batches))) == GOOD
        assert all((batch[0][:, 0, 0] == batch[1]).all() for batch in batches)
        assert len(batches) == len(loader) == 13


@pytest.mark.slow
def test_four_ranks_two_workers_resumed_mid_epoch(folder):
    def epochs(workers, interrupt):
        """Per epoch and rank, batches of ids; after `interrupt` batches every loader is thrown away and made anew."""
        seen = []
        for epoch in range(2):
            of_epoch = []
            for rank in range(4):
                loader = stream(folder, rank=rank, world_size=4).loader(num_workers=workers)
                loader.set_epoch(epoch)
                got = []
                for batch in loader:
                    got.append(batch[1].tolist())
                    if len(got) == interrupt:
                        state = pickle.loads(pickle.dumps(loader.state_dict()))
                        break
                if interrupt:
                    again = stream(folder, rank=rank, world_size=4).loader(num_workers=workers)
                    again.load_state_dict(state)
                    again.set_epoch(epoch)
                    got += ids(again)
                of_epoch.append(got)
            assert sorted(flat(flat(of_epoch))) == GOOD
            seen.append(of_epoch)
        assert seen[0] != seen[1]
        return seen

    plain = epochs(workers=0, interrupt=None)
    assert epochs(workers=2, interrupt=3) == plain


def test_the_number_of_workers_does_not_change_the_order(folder):
    orders = [ids(stream(folder).loader(num_workers=workers)) for workers in (0, 1, 2)]
    assert orders[0] == orders[1] == orders[2]


def test_workers_that_live_on_see_the_next_epoch(folder):
    loader = stream(folder).loader(num_workers=1, persistent_workers=True)
    first, second = ids(loader), ids(loader)
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == GOOD
    loader.set_epoch(0)
    assert ids(loader) == first


def test_resumed_with_another_number_of_ranks(folder):
    taken, state = [], None
    for rank in range(4):
        loader = stream(folder, rank=rank, world_size=4).loader()
        for batch in loader:
            taken += batch[1].tolist()
            state = loader.state_dict()
            if state["history"][-1][1] == 14:
                break
    for rank in range(3):
        loader = stream(folder, rank=rank, world_size=3).loader()
        loader.load_state_dict(state)
        taken += flat(ids(loader))
        assert loader.stream.epoch == 1
    assert sorted(taken) == GOOD


def test_even_ranks(folder):
    counts = {len(stream(folder, rank=r, world_size=3, drop_last=True)) for r in range(3)}
    assert counts == {200 // 3 // 7}
    batches = ids(stream(folder, rank=0, world_size=3, drop_last=True).loader())
    assert {len(b) for b in batches} == {7}


def test_an_iteration_broken_off_begins_anew(folder):
    loader = stream(folder).loader()
    first = next(iter(loader))[1].tolist()
    assert ids(loader)[0] == first


def test_the_transform_is_applied_online(folder):
    batch = next(iter(stream(folder, transform=lambda s: (s[0] + 1000, s[1])).loader()))
    assert (batch[0][:, 0, 0] == batch[1] + 1000).all()


def test_rank_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(flat(ids(stream(folder).loader()))) == 100
    with pytest.raises(TrainpaceError, match="rank 2 of 2"):
        stream(folder, rank=2, world_size=2)


def test_another_state_is_refused(folder):
    loader = stream(folder).loader()
    state = loader.state_dict()
    with pytest.raises(Contradiction, match="batch_size 8, and this stream has 7"):
        loader.load_state_dict({**state, "batch_size": 8})


def test_missing_and_damaged_folders(tmp_path):
    with pytest.raises(UnreadableInput, match="is no folder"):
        ShardDataset(tmp_path / "none")
    with pytest.raises(UnreadableInput, match="holds no finished shards"):
        ShardStream(tmp_path, 4)
    (tmp_path / "plan.json").touch()
    with pytest.raises(
        UnreadableInput, match=r"is not finished\. Give its trainpace precompute command again"
    ):
        ShardDataset(tmp_path)
    place = write_folder(tmp_path / "s", [np.zeros(3)] * 6, 3, 3)
    with open(place / "shard-000001.parquet", "r+b") as file:
        file.truncate(100)
    data = ShardDataset(place)
    assert data[0].shape == (3,)
    with pytest.raises(
        UnreadableInput, match=r"shard-000001\.parquet is not as long as it was written"
    ):
        data[3]
    (place / "shard-000001.parquet").unlink()
    with pytest.raises(UnreadableInput, match=r"shard-000001\.parquet is missing"):
        data[3]
    (place / "shard-000001.parquet").mkdir()
    with pytest.raises(
        UnreadableInput, match=r"shard-000001\.parquet cannot be read: is a directory\.$"
    ):
        data[3]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(1, 5),
    workers=st.integers(1, 4),
    batch=st.integers(1, 40),
    buffer=st.integers(1, 250),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_exactly_once_over_ranks_and_workers(
    folder, monkeypatch, ranks, workers, batch, buffer, epoch, drop_last
):
    taken, counts = [], set()
    for rank in range(ranks):
        one = ShardStream(
            folder,
            batch,
            seed=2,
            buffer_samples=buffer,
            rank=rank,
            world_size=ranks,
            drop_last=drop_last,
        )
        one.place(epoch)
        of_workers = []
        for worker in range(workers):
            info = SimpleNamespace(id=worker, num_workers=workers)
            with monkeypatch.context() as patch:
                patch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
                patch.setattr(
                    shard_dataset, "_allocate", lambda count: torch.empty(count, dtype=torch.uint8)
                )
                of_workers.append(ids(one))
        in_turn = [b for group in zip_longest(*of_workers) for b in group if b is not None]
        assert in_turn == ids(one)
        taken += flat(in_turn)
        counts.add(len(in_turn))
    if drop_last:
        assert len(counts) == 1
        assert len(set(taken)) == len(taken) > len(GOOD) - ranks * batch
    else:
        assert sorted(taken) == GOOD


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_many_lengths_are_collated_by_the_users_function(tmp_path, workers):
    place = write_folder(tmp_path / "s", [torch.arange(n % 5 + 1) for n in range(20)], 10, 5)
    by_position = ShardDataset(place).loader(
        4, shuffle=False, collate_fn=padded, num_workers=workers
    )
    assert [batch.shape for batch in by_position] == [(4, 4), (4, 5), (4, 5), (4, 5), (4, 5)]
    streamed = ShardStream(place, 4, shuffle=False, collate_fn=padded).loader(num_workers=workers)
    assert all(map(torch.equal, streamed, by_position))


def test_what_belongs_to_the_stream_is_not_the_loaders(folder):
    with pytest.raises(
        TrainpaceError,
        match=r"collate_fn: for the stream, not for its loader\. ShardStream\(folder, \.\.\., collate_fn",
    ):
        stream(folder).loader(collate_fn=padded)
