"""A rung's changes applied to the kept setup: the global batch stays, and impossible changes give one-line errors."""

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
def test_rung_keeps_global_batch_or_raises_contradiction(micro, accumulation, ranks, changes):
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
def test_rank_count_dividing_global_batch_is_accepted(micro, accumulation, ranks, more):
    kept = setup(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    assume(kept.execution.global_batch % more == 0)
    after = changed(kept, {"nproc_per_node": more}).execution
    assert (after.nproc_per_node, after.global_batch) == (more, kept.execution.global_batch)
    assert after.micro_batch <= micro


def test_accumulation_adjusts_before_micro_batch():
    kept = setup(micro_batch=8, accumulation=4)
    assert changed(kept, {"micro_batch": 16}).execution.accumulation == 2
    assert changed(kept, {"nproc_per_node": 2}).execution.accumulation == 2
    two = changed(setup(micro_batch=16, accumulation=1), {"nproc_per_node": 2}).execution
    assert (two.micro_batch, two.accumulation) == (8, 1)


def test_indivisible_global_batch_is_a_contradiction():
    with pytest.raises(Contradiction):
        changed(setup(micro_batch=16), {"nproc_per_node": 3})
    with pytest.raises(Contradiction):
        changed(setup(micro_batch=16), {"micro_batch": 5})


def test_global_batch_changes_only_if_allowed():
    kept = setup(micro_batch=16)
    with pytest.raises(Contradiction):
        changed(kept, {"global_batch": 64})
    assert changed(kept, {"global_batch": 64}, allow_global_batch=True).execution.accumulation == 4
    with pytest.raises(Contradiction):
        changed(kept, {"global_batch": 64, "micro_batch": 5}, allow_global_batch=True)


def test_rung_changes_loader_threads_and_engine():
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
def test_rung_rejects_values_of_wrong_type(changes, words):
    with pytest.raises(TrainpaceError, match=words):
        changed(setup(), changes, allow_global_batch=True)


def test_alternatives_are_all_combinations():
    rung = Rung(title="both", changes={"micro_batch": (4, 8), "workers": (0, 1), "compile": True})
    assert len(rung.alternatives()) == 4
    assert rung.alternatives()[0] == {"micro_batch": 4, "workers": 0, "compile": True}


def test_invalid_rungs_are_rejected():
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


def test_default_engine_depends_on_rank_count():
    assert setup().trial(seconds=1.0).engine == "plain"
    assert setup(nproc_per_node=2).trial().engine == "ddp"


def test_setup_words_list_non_default_settings():
    said = words_of(
        Setup(task="t", execution=Execution(micro_batch=4, nproc_per_node=2, precision="amp_bf16"))
    )
    assert said == "micro-batch 4 x 1 x 2, 2 ranks, amp_bf16, 0 workers"
