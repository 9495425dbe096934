"""Scores, neighbors and comparisons computed from entries."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from entries import entry, whole_entry
from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval, StepTime
from trainpace.journal import LATELY, compare, scores
from trainpace.journal.comparison import ratio_of
from trainpace.journal.knowledge import newest_repeats, of_workload, other_models


def at(second):
    return f"2026-01-01T00:00:{second:02}.000000Z"


def test_score_statistics_match_manual_calculation():
    made = [
        entry(
            "a",
            100.0,
            forecast_ms=110.0,
            forecast_low_ms=90.0,
            forecast_high_ms=130.0,
            device="x",
            created_at=at(1),
        ),
        entry(
            "a",
            100.0,
            forecast_ms=70.0,
            forecast_low_ms=60.0,
            forecast_high_ms=80.0,
            device="y",
            created_at=at(2),
        ),
        entry("b", 200.0, forecast_ms=210.0, device="x", created_at=at(3)),
        entry("b", 200.0, device="x"),
        entry("b", None, forecast_ms=1.0),
    ]
    s = scores(reversed(made))
    o = s.overall
    assert (o.n, o.mean_pct, o.median_pct, o.bias_pct) == (
        3,
        pytest.approx(15),
        pytest.approx(10),
        pytest.approx(5),
    )
    assert (o.n_with_interval, o.coverage_pct) == (2, 50)
    assert [(d.name, d.n, d.mean_pct) for d in s.by_device] == [
        ("x", 2, pytest.approx(7.5)),
        ("y", 1, pytest.approx(30)),
    ]
    assert [(d.name, d.n) for d in s.by_model] == [("a", 2), ("b", 1)]
    assert [p.all_pct for p in s.over_time] == [pytest.approx(v) for v in (10, 20, 15)]
    nothing = scores([])
    assert (nothing.overall.n, nothing.overall.mean_pct, nothing.over_time) == (0, None, ())


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 1e4)), min_size=1, max_size=60))
def test_running_error_covers_last_runs(pairs):
    made = [
        entry(step_time_ms=m, forecast_ms=f, id=f"{i:032x}", created_at=at(0))
        for i, (m, f) in enumerate(pairs)
    ]
    errors = [100 * abs(f - m) / m for m, f in pairs]
    s = scores(made)
    assert s.over_time[-1].all_pct == pytest.approx(statistics.fmean(errors))
    assert (
        s.over_time[-1].lately_pct
        == pytest.approx(s.lately.mean_pct)
        == pytest.approx(statistics.fmean(errors[-LATELY:]))
    )


def test_nearby_and_other_model_runs_are_selected(journal):

    def near(second, batch=8, model="net", **fields):
        execution = Execution(
            **{"micro_batch": batch, "optimizer": "adamw", "precision": "amp_bf16"}
            | fields.pop("execution", {})
        )
        return entry(
            model,
            fields.pop("step_time_ms", 10.0),
            execution=execution,
            created_at=at(second),
            device=fields.pop("device", "cpu"),
            **fields,
        )

    older, newer, larger = near(1), near(2), near(1, batch=16)
    keyed = near(3, batch=32, model="the same by another name", workload_key="w")
    away = [
        near(4, execution={"precision": "fp32"}),
        near(4, execution={"optimizer": "sgd"}),
        near(4, device="cpu 2"),
        near(4, model="net2"),
        near(4, batch=64, workload_key="other"),
        near(4, step_time_ms=None),
        near(4, mode="inference"),
        near(4, batch=128, sequence_length=128),
        near(4, execution={"compile": True}),
    ]
    others = [
        near(5 + i, model="vgg", step_time_ms=ms, forecast_ms=10.0, forecast_shares=(0.125,) * 8)
        for i, ms in enumerate((11.0, 12.0, 30.0))
    ]
    journal.add_many([older, newer, larger, keyed, *away, *others, near(9, forecast_ms=5.0)])
    runs = newest_repeats(of_workload(journal, "net", ("w",), sequence_length=512))
    newest = {where: some[0] for where, some in runs.items()}
    same = {
        batch: e
        for (device, _, batch), e in newest.items()
        if device == "cpu" and _but_for_the_batch(e) == _but_for_the_batch(keyed)
    }
    assert sorted(same) == [8, 16, 32]
    assert same[8].forecast_ms == 5.0  # the newest of its batch
    assert same[32] == keyed
    # other settings on this device, and another device
    elsewhere = [e for e in newest.values() if e not in same.values()]
    differing = {
        (e.device, e.execution.precision, e.execution.optimizer, e.execution.compile)
        for e in elsewhere
    }
    assert differing == {
        ("cpu", "fp32", "adamw", False),
        ("cpu", "amp_bf16", "sgd", False),
        ("cpu", "amp_bf16", "adamw", True),
        ("cpu 2", "amp_bf16", "adamw", False),
    }
    assert len(elsewhere) == len(differing)
    known = {e.id for e in of_workload(journal, "net", ("w",))}
    assert [(e.model, e.step_time_ms) for e in other_models(journal, "cpu", known)] == [
        ("vgg", 12.0)
    ]
    assert other_models(journal, "gpu") == ()


def _but_for_the_batch(e):
    return replace(e.execution, micro_batch=1, accumulation=1)


def with_interval(ms, low, high, **fields):
    return whole_entry(
        step_time_ms=ms, interval_ms=Interval(low=low, high=high, coverage=0.9, basis=""), **fields
    )


def test_ratio_interval_combines_noise_of_both_runs():
    a, b = with_interval(100.0, 98.0, 102.0), with_interval(110.0, 108.0, 112.0)
    r = ratio_of(a, b)
    assert r.ratio == pytest.approx(1.1)
    assert 1.06 < r.low < 110 / 102 < 112 / 100 < r.high < 1.14
    assert r.beyond_noise
    back = ratio_of(b, a)
    assert (back.low, back.high) == (pytest.approx(1 / r.high), pytest.approx(1 / r.low))
    assert ratio_of(a, a).beyond_noise is False
    assert ratio_of(a, entry()).beyond_noise is None
    assert ratio_of(a, entry(step_time_ms=None)) is None


def test_comparison_of_two_runs_lists_all_differences():
    a = with_interval(
        100.0,
        98.0,
        102.0,
        step=StepTime(forward_ms=40.0, backward_ms=60.0),
        peak_memory_gib=2.0,
        environment={"torch": "1"},
        loss="MSELoss",
    )
    b = with_interval(
        50.0,
        49.0,
        51.0,
        execution=Execution(micro_batch=8, optimizer="sgd_momentum", precision="bf16"),
        peak_memory_gib=1.0,
        step=StepTime(forward_ms=20.0, backward_ms=30.0),
        environment={"torch": "2", "new": "x"},
        loss="L1Loss",
    )
    c = compare([a], [b])
    assert {(d.name, d.a, d.b) for d in c.conditions} == {
        ("precision", "fp32", "bf16"),
        ("environment: torch", "1", "2"),
        ("environment: new", "", "x"),
        ("loss", "MSELoss", "L1Loss"),
    }
    assert [(d.name, d.a, d.b) for d in c.parts_ms] == [
        ("forward", 40.0, 20.0),
        ("backward", 60.0, 30.0),
    ]
    assert [(d.name, d.a, d.b) for d in c.memory_gib] == [("peak", 2.0, 1.0)]
    assert c.median_ratio == 0.5


def test_comparison_of_sweeps_pairs_equal_batches():
    a = [with_interval(10.0 * n, 9.9 * n, 10.1 * n, batch=n) for n in (1, 2, 4)] + [
        entry(step_time_ms=None, batch=8)
    ]
    b = [with_interval(5.0 * n, 4.9 * n, 5.1 * n, batch=n) for n in (2, 4, 8)]
    c = compare(a, b)
    assert [(r.batch, r.ratio) for r in c.ratios] == [(2, 0.5), (4, 0.5)]
    assert (c.samples_per_second.a, c.samples_per_second.b) == (
        pytest.approx(100),
        pytest.approx(200),
    )
    assert "micro_batch" not in {d.name for d in c.conditions}


def test_sweep_comparison_uses_spread_between_repeats():
    """Steps within a process agree to 1 %, processes only to 31 %, so 10 % is within the noise."""

    def side(factor, spread):
        times = [
            (batch, factor * batch * 10 * math.exp(way * spread))
            for batch in (8, 16)
            for way in (-1, 0, 1)
        ]
        return [
            with_interval(ms, 0.99 * ms, 1.01 * ms, execution=Execution(micro_batch=batch))
            for batch, ms in times
        ]

    loud = compare(side(1.0, 0.31), side(1.1, 0.31))
    assert [r.batch for r in loud.ratios] == [8, 16]
    assert [r.ratio for r in loud.ratios] == pytest.approx([1.1, 1.1])
    assert not any(r.beyond_noise for r in loud.ratios)
    quiet = compare(side(1.0, 0.005), side(1.1, 0.005))
    assert all(r.beyond_noise for r in quiet.ratios)
