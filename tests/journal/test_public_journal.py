"""Filters, ids and comparisons of the public journal, on a small handmade one and on the packaged one."""

import pytest

from entries import whole_entry
from public_made import RUNS, public
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.forecast import public_runs, score_of
from trainpace.journal import Query, compared, entry_of_public, matching, public_run


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr("trainpace.journal.comparison.public_runs", lambda: RUNS)
    return RUNS


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"model": "RESNET"}, [0, 1, 2, 4]),
        ({"device": "3090"}, [2]),
        ({"device": "3090", "exact": True}, []),
        ({"device": "rtx 3090", "exact": True}, [2]),
        ({"micro_batch": 16}, [1]),
        ({"precision": "bf16"}, [3]),
        ({"mode": "inference"}, [4]),
        ({"source": "other lab"}, [3]),
        ({"model_kind": "transformers"}, [3]),
        ({"optimizer": "adamw"}, [3]),
        ({"text": "table 3"}, [3]),
        ({"model": "resnet", "device": "T4", "mode": "train"}, [0, 1]),
        ({"model": "%"}, []),
        ({"model": "Res_Net-50"}, [0, 1, 2, 4]),
        ({"model": "gpt2_124m", "exact": True}, [3]),
        ({"model": "-"}, []),
        ({"optimizer": "SGD"}, [0, 1, 2]),
        ({"optimizer": "sgd-momentum"}, [0, 1, 2]),
        ({"optimizer": "sgd", "exact": True}, []),
        ({"optimizer": "SGD Momentum", "exact": True}, [0, 1, 2]),
        ({"optimizer": "adam"}, []),
        ({"optimizer": "_"}, []),
    ],
)
def test_public_runs_are_filtered(made, filters, found):
    kind = filters.pop("model_kind", "")
    assert [made.index(run) for run in matching(Query(**filters), kind)] == found


def test_public_runs_reject_own_run_filters():
    for own in (Query(outcome="ok"), Query(kind="measure"), Query(since="2026-11-21")):
        with pytest.raises(TrainpaceError, match="public runs"):
            matching(own)


def test_public_run_is_found_by_id_prefix(made):
    assert public_run("public:333") is made[3]
    assert public_run("4444444444") is made[4]
    with pytest.raises(TrainpaceError, match="several"):
        public_run("public:11")
    for unknown in ("public:9", "public:", "public:resnet", "public:%"):
        with pytest.raises(UnknownName):
            public_run(unknown)


def test_public_run_is_compared_with_own_run(made, journal):
    own = whole_entry(model="torchvision:resnet50", device="Tesla T4", step_time_ms=120.0)
    journal.add(own)
    found = compared(journal, "public:0a1b", own.id)
    assert (found.a, found.b) == (("public:0a1b2c3d4e",), (own.id,))
    assert found.median_ratio == pytest.approx(1.2)
    both = compared(journal, "public:0a1b", "public:111")
    assert both.median_ratio == pytest.approx(2.0)


def test_mine_selects_newest_most_similar_own_run(made, journal):
    times = iter(range(10, 60))

    def run(**fields):
        return whole_entry(
            created_at=f"2026-11-21T08:{next(times)}:00.000000Z", **{"device": "Tesla T4", **fields}
        )

    old, like, other_batch, other_card = run(), run(), run(batch=16), run(device="RTX 3090")
    journal.add_many(
        [
            old,
            like,
            other_batch,
            other_card,
            run(model="vgg16"),
            forward := run(mode="inference", model="timm:ResNet-50"),
        ]
    )
    assert compared(journal, "public:0a1b", "mine").b == (like.id,)
    assert compared(journal, "mine", "public:111").a == (other_batch.id,)
    assert compared(journal, "mine", "public:112").a == (other_card.id,)
    assert compared(journal, "mine", "public:444").a == (forward.id,)
    with pytest.raises(TrainpaceError):
        compared(journal, "public:333", "mine")
    with pytest.raises(TrainpaceError):
        compared(journal, "mine", "mine")


def test_public_filters_ignore_spelling_variants():
    def found(**filters):
        return {run.id for run in matching(Query(**filters))}

    assert found(model="mobilenet_v2") == found(model="MobileNetV2") != set()
    assert "ResNet-50" in {run.model for run in matching(Query(model="resnet50"))}
    spelt = {run.optimizer for run in matching(Query(optimizer="sgd"))}
    assert {"SGD", "sgd momentum", "SGD momentum"} <= spelt
    assert (
        found(optimizer="sgd_momentum") == found(optimizer="SGD momentum") < found(optimizer="sgd")
    )


def test_mine_prefers_same_sample_size(made, journal):
    small, usual = whole_entry(image_size=64), whole_entry(device="RTX 3090")
    journal.add_many([small, usual])
    assert compared(journal, "public:0a1b", "mine").b == (usual.id,)
    journal.add(
        same := whole_entry(
            device="RTX 3090", image_size=224, created_at="2020-01-01T00:00:00.000000Z"
        )
    )
    assert compared(journal, "public:0a1b", "mine").b == (same.id,)


def test_different_global_batches_are_reported(journal):
    found = compared(journal, "public:a825cab1c0", "public:d0ee99a45f")
    assert [(d.name, d.a, d.b) for d in found.conditions] == [("global_batch", "512", "256")]
    of = {run.id: run.samples_per_second for run in public_runs()}
    assert found.samples_per_second.a == pytest.approx(of["a825cab1c0"])
    assert found.samples_per_second.b == pytest.approx(of["d0ee99a45f"])


def test_run_without_batch_is_not_compared(journal):
    without = [run for run in public_runs() if not run.micro_batch]
    assert without
    for run in without:
        with pytest.raises(TrainpaceError):
            compared(journal, f"public:{run.id}", "mine")


def test_every_packaged_run_can_be_compared():
    for run in public_runs():
        entry = entry_of_public(run)
        assert entry.step_time_ms == run.step_time_ms
        assert entry.execution.world_size >= 1


def test_public_accuracy_matches_manual_calculation():
    runs = [
        public(ms=100.0, forecast_ms=110.0),
        public(ms=100.0, forecast_ms=70.0),
        public(ms=100.0, forecast_ms=105.0, in_fit=True),
        public(forecast_ms=None),
        public(device="A100 SXM 80GB", ms=100.0, forecast_ms=200.0),
    ]
    score = score_of(runs)
    assert (score.not_in_fit.n, score.in_fit.n, score.without_forecast) == (3, 1, 1)
    assert score.not_in_fit.mape == pytest.approx((10 + 30 + 100) / 3)
    assert score.not_in_fit.median == pytest.approx(30)
    assert score.not_in_fit.coverage == pytest.approx(100 / 3)
    assert score.in_fit.mape == pytest.approx(5)
    assert [line.name for line in score.by_card] == ["A100 SXM 80GB", "T4"]
    assert score_of([]).in_fit.mape is None
