"""A rung's changes applied to what is kept: the global batch stays, and what cannot be is one sentence."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName
from trainpace.core.execution import Execution
from trainpace.run.ladder import Ladder, Rung, Setup, changed, words_of
from trainpace.run.trial import LoaderSettings

SMALL = st.integers(1, 12)


def setup(**execution) -> Setup:
    return Setup(task="train.py:task", execution=Execution(**execution))


@given(
    SMALL,
    SMALL,
    SMALL,
    st.sampled_from(
        [
            {"micro_batch": 1},
            {"micro_batch": 6},
            {"nproc_per_node": 2},
            {"nproc_per_node": 3, "nnodes": 2},
            {"accumulation": 2},
            {"precision": "amp_bf16"},
            {"nproc_per_node": 4, "micro_batch": 2},
        ]
    ),
)
def test_the_global_batch_stays_or_a_contradiction_names_the_numbers(
    micro, accumulation, ranks, changes
):
    kept = setup(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    try:
        after = changed(kept, changes)
    except Contradiction as error:
        assert str(kept.execution.global_batch) in error.message
        return
    assert after.execution.global_batch == kept.execution.global_batch
    for key, value in changes.items():
        assert getattr(after.execution, key) == value


@given(SMALL, SMALL, SMALL, SMALL)
def test_more_ranks_work_whenever_they_divide_the_global_batch(micro, accumulation, ranks, more):
    kept = setup(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    assume(kept.execution.global_batch % more == 0)
    after = changed(kept, {"nproc_per_node": more}).execution
    assert (after.nproc_per_node, after.global_batch) == (more, kept.execution.global_batch)
    assert after.micro_batch <= micro


def test_accumulation_makes_up_first_then_the_micro_batch():
    kept = setup(micro_batch=8, accumulation=4)
    assert changed(kept, {"micro_batch": 16}).execution.accumulation == 2
    assert changed(kept, {"nproc_per_node": 2}).execution.accumulation == 2
    two = changed(setup(micro_batch=16, accumulation=1), {"nproc_per_node": 2}).execution
    assert (two.micro_batch, two.accumulation) == (8, 1)


def test_what_does_not_divide_says_its_numbers():
    with pytest.raises(Contradiction):
        changed(setup(micro_batch=16), {"nproc_per_node": 3})
    with pytest.raises(Contradiction):
        changed(setup(micro_batch=16), {"micro_batch": 5})


def test_another_global_batch_only_where_it_is_allowed():
    kept = setup(micro_batch=16)
    with pytest.raises(Contradiction):
        changed(kept, {"global_batch": 64})
    assert changed(kept, {"global_batch": 64}, allow_global_batch=True).execution.accumulation == 4
    with pytest.raises(Contradiction):
        changed(kept, {"global_batch": 64, "micro_batch": 5}, allow_global_batch=True)


def test_loader_and_engine_settings():
    kept = Setup(
        task="t", execution=Execution(), loader=LoaderSettings(workers=2), engine="deepspeed"
    )
    after = changed(kept, {"prefetch_factor": 4, "threads": 1})
    assert (after.loader.workers, after.loader.prefetch_factor, after.threads, after.engine) == (
        2,
        4,
        1,
        "deepspeed",
    )
    assert changed(kept, {"zero_stage": 3}).engine is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch": "many"}, "micro_batch cannot be 'many'"),
        ({"precision": "fp7"}, "precision cannot be 'fp7'"),
        ({"workers": 1.5}, "workers cannot be 1.5"),
        ({"global_batch": True}, "global_batch is True"),
    ],
)
def test_values_of_a_wrong_kind_are_one_sentence(changes, words):
    with pytest.raises(TrainpaceError, match=words):
        changed(setup(), changes, allow_global_batch=True)


def test_alternatives_are_all_combinations():
    rung = Rung(title="both", changes={"micro_batch": (4, 8), "workers": (0, 1), "compile": True})
    assert len(rung.alternatives()) == 4
    assert rung.alternatives()[0] == {"micro_batch": 4, "workers": 0, "compile": True}


def test_rungs_that_make_no_sense():
    with pytest.raises(UnknownName, match="micro_batch"):
        Rung(title="x", changes={"microbatch": 4})
    with pytest.raises(TrainpaceError, match="changes nothing"):
        Rung(title="x", changes={})
    with pytest.raises(TrainpaceError, match="no value"):
        Rung(title="x", changes={"workers": ()})
    with pytest.raises(TrainpaceError, match="alternatives"):
        Rung(title="x", changes={"workers": tuple(range(5)), "micro_batch": (1, 2, 3, 4)})
    with pytest.raises(TrainpaceError, match="tolerance"):
        Ladder(start=setup(), rungs=(), loss_tolerance=0)


def test_the_usual_engine_is_taken():
    assert setup().trial(seconds=1.0).engine == "plain"
    assert setup(nproc_per_node=2).trial().engine == "ddp"


def test_words_say_what_differs():
    said = words_of(
        Setup(task="t", execution=Execution(micro_batch=4, nproc_per_node=2, precision="amp_bf16"))
    )
    assert said == "micro-batch 4 x 1 x 2, 2 ranks, amp_bf16, 0 workers"
