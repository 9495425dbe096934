"""Every position exactly once, whatever the ranks, sizes and interruptions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainpace.shards.dataset import EpochOrder, cut, remaining, share

GROUPS = st.lists(st.integers(1, 9), min_size=1, max_size=30).map(
    lambda sizes: np.array(sizes, dtype=np.int64)
)


def positions(spans):
    return [p for start, stop in spans for p in range(start, stop)]


@given(
    groups=GROUPS,
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
    buffer=st.integers(1, 60),
    data=st.data(),
)
def test_the_order_is_a_permutation_that_can_be_entered_anywhere(groups, seed, epoch, buffer, data):
    total = int(groups.sum())
    whole = EpochOrder(groups, seed, epoch, buffer).at(0, total)
    assert sorted(whole) == list(range(total))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert (
        EpochOrder(groups, seed, epoch, buffer).at(start, stop).tolist()
        == whole[start:stop].tolist()
    )


def test_epochs_and_seeds_differ():
    groups = np.full(50, 4)
    orders = {
        tuple(EpochOrder(groups, seed, epoch, 40).at(0, 200))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert EpochOrder(groups, 0, 0, 40, shuffle=False).at(0, 200).tolist() == list(range(200))


def test_a_buffer_mixes_far_apart_samples():
    order = EpochOrder(np.full(100, 10), 0, 0, 200).at(0, 1000)
    assert len(set(order[:32] // 10)) > 8  # a batch of 32 is from many row groups
    assert np.abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.3


@given(
    total=st.integers(0, 200), world=st.integers(1, 9), batch=st.integers(1, 8), even=st.booleans()
)
def test_shares_are_disjoint_and_all(total, world, batch, even):
    shares = [positions(share([(0, total)], rank, world, batch, even)) for rank in range(world)]
    together = sorted(p for mine in shares for p in mine)
    if even:
        assert len(set(map(len, shares))) == 1
        assert len(shares[0]) % batch == 0
        assert total - len(together) < world * batch
        assert len(set(together)) == len(together)
    else:
        assert together == list(range(total))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    total=st.integers(0, 200),
    batch=st.integers(1, 6),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), max_size=4),
    last=st.integers(1, 6),
)
def test_nothing_is_lost_or_doubled_over_resumptions_with_other_ranks(total, batch, worlds, last):
    left, taken = [(0, total)], []
    for world, batches in worlds:
        for rank in range(world):
            taken += positions(cut(share(left, rank, world), 0, batches * batch))
        left = remaining(left, world, batches * batch)
    for rank in range(last):
        taken += positions(share(left, rank, last))
    assert sorted(taken) == list(range(total))


@given(
    total=st.integers(0, 300),
    batch=st.integers(1, 6),
    world=st.integers(1, 5),
    batches=st.integers(0, 20),
    even=st.booleans(),
)
def test_the_same_ranks_go_on_with_what_was_theirs(total, batch, world, batches, even):
    whole = [(0, total)]
    left = remaining(whole, world, batches * batch, batch, even)
    for rank in range(world):
        mine = positions(share(whole, rank, world, batch, even))
        after = positions(share(left, rank, world, batch, even))
        if batches * batch <= total // world:  # no rank had run out
            assert after == mine[batches * batch :]
