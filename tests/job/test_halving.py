"""Successive halving: the rounds of a search, and what they take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import Contradiction
from trainpace.job import ONLY_STEPS, Question, Schedule, answer, successive_halving


def test_27_trainings_by_thirds_take_as_long_as_three():
    rounds = successive_halving(27, 54.0, 3)
    assert [(r.trainings, r.epochs) for r in rounds] == [(27, 2.0), (9, 6.0), (3, 18.0), (1, 54.0)]
    # 27 x 2 epochs, then 9 x 4, 3 x 12 and 1 x 36 more
    assert sum(r.share for r in rounds) * 27 == pytest.approx((54 + 36 + 36 + 36) / 54)


def test_a_round_keeps_whole_trainings_and_counts_only_what_it_adds():
    rounds = successive_halving(10, 9.0, 3)
    assert [(r.trainings, r.epochs) for r in rounds] == [(10, 1.0), (3, 3.0), (1, 9.0)]
    # of 10 x 9 epochs: 10 x 1, then 3 x 2 and 1 x 6 more
    assert [r.share * 90 for r in rounds] == pytest.approx([10, 6, 6])


@pytest.mark.parametrize(("trainings", "factor"), [(27, 1), (27, 0), (2, 3)])
def test_a_search_that_cannot_be_halved_says_what_to_give(trainings, factor):
    with pytest.raises(Contradiction) as refused:
        successive_halving(trainings, 9.0, factor)
    assert refused.value.message == f"of {trainings} trainings, no round can keep one of {factor}."
    assert refused.value.hint == "`halving` is 2 or more, and `repeats` at least as many."


@given(st.integers(2, 10_000), st.floats(0.1, 1e4), st.integers(2, 10))
def test_one_trains_to_the_end_and_nothing_takes_longer_than_all_of_them(trainings, epochs, factor):
    if trainings < factor:
        with pytest.raises(Contradiction, match="`halving`"):
            successive_halving(trainings, epochs, factor)
        return
    rounds = successive_halving(trainings, epochs, factor)
    assert rounds[-1].epochs == pytest.approx(epochs)
    assert 1 <= rounds[-1].trainings < factor
    assert 1 / trainings < sum(r.share for r in rounds) < 1


def test_a_schedule_has_its_rounds_in_time():
    from msgspec.structs import replace

    question = Question(
        schedule=Schedule(epochs=54.0),
        conditions=replace(ONLY_STEPS, repeats=27),
        epoch_time_s=3600.0,
        halving=3,
    )
    found = answer(question)
    assert found.time.total_s == 27 * 54 * 3600
    assert sum(r.share for r in found.halving) * found.time.total_s == pytest.approx(162 * 3600)
    assert answer(replace(question, halving=None)).halving == ()
