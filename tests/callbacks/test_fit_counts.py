"""The remaining counts of Lightning match a loop that simulates a fit batch by batch."""

from hypothesis import given
from hypothesis import strategies as st

from trainpace.callbacks.time_left import FitState, remaining_counts


def loop(s):
    """Simulate the rest of a fit, one batch at a time."""
    batches = evaluations = epochs = 0
    epoch, batch, total, step = s.epoch, s.batch, s.total_batch, s.global_step
    every = s.epoch_batches if s.val_every_batches is None else s.val_every_batches

    def validates():
        place = total if s.val_every_epochs is None else batch
        right_epoch = s.val_every_epochs is None or (epoch + 1) % s.val_every_epochs == 0
        return every > 0 and right_epoch and place % every == 0

    while True:
        evaluations += validates()
        if s.max_steps is not None and step >= s.max_steps:
            break
        if batch == s.epoch_batches:
            epoch, batch = epoch + 1, 0
            if s.max_epochs is not None and epoch >= s.max_epochs:
                break
            epochs += 1
        batch, total, batches = batch + 1, total + 1, batches + 1
        step += batch % s.accumulation == 0 or batch == s.epoch_batches
    return batches, evaluations, epochs


@st.composite
def states(draw):
    an_epoch = draw(st.integers(1, 12))
    accumulation = draw(st.integers(1, 5))
    max_epochs = draw(st.integers(1, 6))
    epoch, batch = draw(st.integers(0, max_epochs - 1)), draw(st.integers(1, an_epoch))
    steps = epoch * -(-an_epoch // accumulation) + batch // accumulation
    steps += batch == an_epoch and batch % accumulation != 0
    limit = draw(st.none() | st.integers(steps, steps + 40))
    return FitState(
        epoch=epoch,
        batch=batch,
        total_batch=epoch * an_epoch + batch,
        epoch_batches=an_epoch,
        max_epochs=max_epochs if limit is None else draw(st.sampled_from([None, max_epochs])),
        global_step=steps,
        max_steps=limit,
        accumulation=accumulation,
        val_every_batches=draw(st.none() | st.integers(0, an_epoch)),
        val_every_epochs=draw(st.none() | st.integers(1, 3)),
    )


@given(states())
def test_remaining_counts_match_a_simulated_loop(state):
    left = remaining_counts(state)
    assert (left.batches, left.evaluations, left.epochs) == loop(state)
    assert left.total_batches == state.total_batch + left.batches


def test_fit_without_batches_has_nothing_left():
    for max_steps in (None, 100):
        state = FitState(
            0, 0, 0, 0, max_epochs=5, max_steps=max_steps, accumulation=2, val_every_batches=None
        )
        assert remaining_counts(state) == (0, 0, 0, 0)


def test_remaining_counts_are_none_for_an_unknown_end():
    assert remaining_counts(FitState(0, 3, 3, None, max_epochs=2)) is None
    assert remaining_counts(FitState(0, 3, 3, 10, max_epochs=None)) is None
    assert (
        remaining_counts(
            FitState(0, 3, 3, None, max_epochs=None, global_step=3, max_steps=10)
        ).batches
        == 7
    )
