"""Chart data before drawing: values equal those of the answer, and parts add up."""

import itertools
import json
import math
import re

import pytest
from msgspec.structs import replace

from answers import asked, forecasts, jumps, measured, traced
from diagnose.recordings import block, fetch, loader, rank, recording
from nouns import stacked, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.core.outcome import STEP_PARTS, Interval
from trainpace.core.records import from_json, to_json, to_jsonable
from trainpace.diagnose import diagnose
from trainpace.forecast import Forecaster, Nearness, Target, nearest
from trainpace.job import DataPath, Schedule
from trainpace.measure.sweep import analyse
from trainpace.offers import Offer, picks
from trainpace.offers.match import Job
from trainpace.offers.match import rank as rank_servers
from trainpace.plan import Change, Plan, Problem, plan_changes
from trainpace.plan.changes import Choice, Projection
from trainpace.report.charts import Axis, Chart, Mark, Series
from trainpace.report.diagnosis import proofs_chart, shares_chart
from trainpace.report.forecast import forecast_pictures
from trainpace.report.match import match_pictures
from trainpace.report.plan import plan_ladder
from trainpace.report.run import LadderTable, rung_times, speedups
from trainpace.report.steps import (
    Timed,
    forecast_sweep,
    measured_sweep,
    memory_at_peak,
    roofline_chart,
    scaling_chart,
    step_breakdown,
)
from trainpace.run import LadderRow

AXIS = Axis(label="x")


def chart(*series, **more):
    return Chart(title="t", finding="f", x=AXIS, y=AXIS, series=series, **more)


def test_chart_round_trips_through_json():
    one = chart(
        Series(name="s", kind="line", tone="measured", x=(1.0, 2.0), y=(3.0, None)),
        marks=(Mark(axis="point", at=1, y=2, text="here", tone="best"),),
    )
    assert to_jsonable(from_json(to_json(one), Chart)) == json.loads(to_json(one))
    assert to_jsonable(one)["series"][0]["y"] == (3.0, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": (1.0, 2.0), "y": (1.0,)},
        {"x": (2.0, 1.0), "y": (1.0, 2.0)},
        {"x": (1.0,), "y": (math.nan,)},
    ],
)
def test_series_rejects_invalid_values(wrong):
    with pytest.raises(AssertionError):
        Series(**{"name": "s", "kind": "line", "tone": "measured", **wrong})


def test_forecast_sweep_chart_shows_forecasts_and_intervals():
    one = asked(workload(), batches=range(1, 41))
    made = forecast_sweep(one.rows, jumps(one))
    (line,) = made.series
    assert line.y == tuple(f.step.total_ms for f in one.rows)
    assert line.low == tuple(f.step_time_interval_ms.low for f in one.rows)
    best = next(m for m in made.marks if m.tone == "best")
    assert best.at == max(one.rows, key=lambda f: f.samples_per_second).execution.micro_batch
    assert forecast_sweep(one.rows[:2], {}) is None


def test_memory_limit_is_marked_in_sweep_chart():
    one = asked(workload(), batches=(1, 10, 1000, 10_000))
    largest = one.rows[0].largest_micro_batch
    assert largest < 10_000
    made = forecast_sweep(one.rows, {})
    assert [m.at for m in made.marks if m.tone == "limit"] == [largest + 0.5]


def test_measured_sweep_chart_names_its_jump():
    a = analyse(measured())
    made = measured_sweep(a, {})
    points = made.series[-1]
    assert points.y == tuple(p.step_ms for p in a.points)
    fitted = made.series[0]
    assert fitted.x == (1, 16, 16, 17, 40, 40)
    assert [y is None for y in fitted.y] == [False, False, True] * 2
    (jump,) = [m for m in made.marks if m.tone == "jump"]
    assert (jump.at, "16 to 17: +" in jump.text) == (16.5, True)
    assert "jumps after batch 16" in made.finding


def test_wide_interval_does_not_flatten_curve():
    one = asked(workload(), batches=range(1, 5))
    wide = [
        replace(
            f, step_time_interval_ms=replace(f.step_time_interval_ms, high=100 * f.step.total_ms)
        )
        for f in one.rows
    ]
    made = forecast_sweep(wide, {})
    assert made.y.high == pytest.approx(2.5 * max(f.step.total_ms for f in one.rows))
    assert forecast_sweep(one.rows, {}).y.high is None


def test_step_breakdown_segments_sum_to_step():
    one = asked(workload(), batches=(8, 64))
    made = step_breakdown(
        [Timed("", str(i), f.step, f.step_time_interval_ms) for i, f in enumerate(one.rows)]
    )
    for bar, f in zip(
        made.groups[0].bars, sorted(one.rows, key=lambda f: f.step.total_ms), strict=True
    ):
        assert bar.total == pytest.approx(f.step.total_ms)
        assert [s.value for s in bar.segments] == [getattr(f.step, part) for part in STEP_PARTS]
        assert (bar.low, bar.high) == (f.step_time_interval_ms.low, f.step_time_interval_ms.high)


def test_step_breakdown_names_fastest_step_and_group():
    one, other = asked(workload(), batches=(8, 64)).rows
    made = step_breakdown(
        [Timed("batch 8", "forecast", one.step), Timed("batch 64", "forecast", other.step)]
    )
    assert made.finding.startswith("Batch 8, forecast: ")
    assert step_breakdown([Timed("", "forecast", one.step)]).finding[0].isupper()


def test_memory_chart_sums_to_device_memory():
    f = asked(workload()).rows[0]
    (bar,) = memory_at_peak([("T4", f)]).groups[0].bars
    assert bar.total == pytest.approx(min(f.memory.device_gib, f.capacity_gib))
    assert math.fsum(s.value for s in bar.segments[:4]) == pytest.approx(f.memory.allocated_gib)


def test_roofline_uses_datasheet_limits():
    one = asked(workload())
    found = one.forecaster.roofline(one.rows[0].execution)
    roofs = roofline_chart(found, "T4").series[0]
    ridge = roofs.x[1]
    assert roofs.y[1] == roofs.y[2] == one.forecaster.target.cluster.device.fp32_tflops.value
    assert roofs.y[0] / roofs.x[0] == pytest.approx(
        one.forecaster.target.cluster.device.memory_bandwidth_gb_per_s.value / 1e3
    )
    assert ridge == pytest.approx(
        roofs.y[1] * 1e3 / one.forecaster.target.cluster.device.memory_bandwidth_gb_per_s.value
    )


def test_scaling_chart_is_relative_to_fewest_devices():
    one = asked(workload(), devices_per_node=2, nodes=2, network_gb_per_s_per_device=1.0)
    made = scaling_chart(one.forecaster.fewer_devices(one.rows[0].execution))
    ideal, forecast, _ = made.series
    assert forecast.x == (1, 2, 4)
    assert ideal.y == tuple(forecast.y[0] * n for n in ideal.x)
    assert all(a <= b * 1.001 for a, b in zip(forecast.y, ideal.y, strict=True))
    assert scaling_chart([]) is None


def test_scaling_of_tensor_parallel_model_starts_at_its_minimum():
    model = stacked()
    cluster = asked(workload(), devices_per_node=4).forecaster.target.cluster
    e = Execution(micro_batch=2, tp=2, nproc_per_node=4, optimizer="adam")
    assert [f.num_devices for f in Forecaster(model, Target(cluster)).fewer_devices(e)] == [2, 4]


def test_wide_interval_does_not_flatten_bars():
    f = asked(workload()).rows[0]
    made = step_breakdown(
        [Timed("", "a", f.step, replace(f.step_time_interval_ms, high=100 * f.step.total_ms))]
    )
    assert made.longest(made.groups[0]) == pytest.approx(2.5 * f.step.total_ms)


def test_plan_chart_decreases_change_by_change():
    setting = Problem(
        workload(),
        asked(workload(), "A100").forecaster.target.cluster,
        Schedule(samples=100_000, epochs=3.0),
    )
    plan = plan_changes(
        setting,
        asked(workload()).rows[0].execution,
        (
            DataPath(workers=0, ms_per_sample=8.0, beside=False),
            DataPath(workers=1, ms_per_sample=0.01, precomputed=True),
        ),
    )
    bars = plan_ladder(plan).groups[0].bars
    assert bars[0].total == pytest.approx(plan.now.job_s / 3600, rel=1e-6)
    assert bars[-1].segments[0].value == pytest.approx(plan.best.job_s / 3600)
    for before, after in itertools.pairwise(bars):
        assert after.total >= before.segments[0].value - 1e-9
        assert after.segments[0].value + after.segments[1].value == pytest.approx(after.total)


def test_plan_chart_states_its_saving():
    def change(saved_s, **more):
        return Change(
            title="c", execution=Execution(micro_batch=8), forecast_saved_s=saved_s, **more
        )

    end = Projection(
        choice=Choice(execution=Execution(micro_batch=8)),
        changes=2,
        step_ms=1,
        job_s=7200,
        needed_gib=1,
        num_devices=1,
    )
    plan = Plan(
        start=Execution(micro_batch=8), changes=(change(7200),), best=replace(end, changes=1)
    )
    assert plan_ladder(plan).finding == "1 change brings the job from 4 h to 2 h, 50% less."
    slower = replace(plan, best=end, changes=(change(0), change(-3600)))
    assert plan_ladder(slower).finding == "2 changes bring the job from 1 h to 2 h, 100% more."
    too_big = replace(slower, changes=(change(0, makes_fit=True), change(7200)), start_fits=False)
    assert (
        plan_ladder(too_big).finding
        == "The current setup does not fit in memory. With 2 changes it does, and the job takes 2 h."
    )


def ladder_of(*rows):
    return LadderTable(title="t", what="a step", rows=tuple(LadderRow(**row) for row in rows))


def test_ladder_chart_counts_kept_changes():
    baseline = {"title": "baseline", "total": 1.0}
    made = speedups(
        ladder_of(
            baseline,
            {"title": "a", "total": 2.0},
            {"title": "b", "kept": False},
            {"title": "c", "total": 1.5, "kept": False},
        )
    )
    assert [bar.end_label for bar in made.groups[0].bars] == ["1.00x", "2.00x", "1.50x, undone"]
    assert made.finding == "1 of 2 changes was kept; it makes a step 2.0 times as fast."
    none = speedups(ladder_of(baseline, {"title": "a", "total": 0.5, "kept": False}))
    assert none.finding == "None of 1 change was kept."
    assert speedups(ladder_of(baseline)) is None


def test_rung_chart_counts_forecasts_within_interval():
    forecast = {
        "forecast_ms": 100.0,
        "forecast_interval_ms": Interval(low=90, high=110, coverage=0.9, basis=""),
    }
    made = rung_times(
        ladder_of(
            {"title": "a", "measured_ms": 105.0, **forecast},
            {"title": "b", "measured_ms": 120.0, **forecast},
            {"title": "c", "measured_ms": 5.0},
        )
    )
    assert made.finding == "Forecast intervals that contain the measurement: 1 of 2."
    assert [len(group.bars) for group in made.groups] == [2, 2, 1]


def test_diagnosis_chart_sums_to_step_time():
    blocks = [
        block("plain", data=16, forward=2, backward=3),
        block("cached_batch", forward=2, backward=3),
    ] * 3
    d = diagnose(
        recording(
            rank(data=16, forward=2, backward=3, blocks=blocks, loader=loader(), fetch=fetch())
        )
    )
    bars = shares_chart(d.shares, d.verdict, "").groups[0].bars
    assert math.fsum(bar.total for bar in bars) == pytest.approx(d.step_ms, rel=0.01)
    plain, without = proofs_chart(d).groups[0].bars
    assert plain.total - without.total == pytest.approx(d.proofs[0].saved_ms)
    assert proofs_chart(replace(d, proofs=())) is None


def test_scaling_chart_labels_points_with_efficiency():
    one = asked(stacked(), "A100", devices_per_node=4, nodes=2, network_gb_per_s_per_device=0.5)
    made = scaling_chart(one.forecaster.fewer_devices(one.rows[0].execution))
    points = made.series[-1]
    first = points.y[0] / points.x[0]
    for n, rate, label, mark in zip(
        points.x[1:], points.y[1:], points.labels[1:], made.marks, strict=True
    ):
        assert mark.text == f"{rate / first / n:.0%}"
        assert label.endswith(mark.text)
    assert points.y[-1] / points.x[-1] < 0.99 * first


def test_sweep_chart_ends_slightly_beyond_memory_limit():
    one = asked(workload(), batches=[1, 2, 4, 8, *(10**6 * i for i in range(1, 20))])
    made = forecast_sweep(one.rows, {})
    fitting = [f.execution.micro_batch for f in one.rows if f.fits]
    assert set(fitting) <= set(made.series[0].x)
    assert len(made.series[0].x) <= 1.25 * len(fitting) + 1


def test_public_runs_are_drawn_only_if_comparable():
    one = asked(workload(), batches=range(1, 65))
    closest = nearest(one.forecaster.workload, one.rows[0].execution, find_device("T4")).closest
    run = replace(closest.run, micro_batch=32, global_batch=32, gpus=1, step_time_ms=123.0)
    same = replace(
        closest,
        run=run,
        alike=("the same operators", "the same card"),
        unlike=("batch 32 instead of 1", "Keras"),
    )

    def points(*near, rows=one.rows):
        made = forecast_sweep(
            rows, {}, [Nearness(model="m", device=rows[0].device, batch=1, runs=near, closest=None)]
        )
        return [
            (x, y)
            for s in made.series
            if s.tone == "measured"
            for x, y in zip(s.x, s.y, strict=True)
        ]

    assert points(same) == [(32.0, 123.0)]
    assert points(same, rows=one.rows[:20]) == []
    assert points(replace(same, unlike=("fp32 instead of amp_fp16",))) == []
    assert points(replace(same, alike=("operators of the same kinds", "the same card"))) == []


def test_memory_peak_finding_names_its_parts():
    one = asked(traced(), batches=(8,))
    (made,) = [
        c
        for c in forecast_pictures(forecasts([one]))
        if c is not None and c.title == "Memory over the step"
    ]
    whole = one.rows[0].memory.allocated_gib
    said = re.findall(r"([\d.]+) GiB \(\d+%\)", made.finding.partition("At the peak: ")[2])
    assert math.fsum(map(float, said)) == pytest.approx(whole, rel=0.05)


def test_pareto_chart_names_three_recommended_offers():
    offers = [
        Offer(
            provider="p",
            instance_type=f"{gpu} {n}",
            device=gpu,
            count=n,
            price_usd_per_hour=price * n,
            network_gb_per_s=10.0,
        )
        for gpu, price in (("T4", 0.5), ("A100", 2.0), ("H100", 4.0))
        for n in (1, 4, 8)
    ]
    job = Job(schedule=Schedule(samples=100_000, epochs=50), global_batch=64)
    ranking = rank_servers(
        workload(), offers, {o.device: find_device(o.device) for o in offers}, job
    )
    three = picks(ranking.matches)
    made, *_ = match_pictures(ranking, three)
    assert {(m.at, m.y) for m in made.marks} == {
        (p.match.mean_hours, p.match.mean_usd) for p in three
    }
    assert [m.text.partition(":")[0] for m in made.marks] == ["cheapest", "in between", "fastest"][
        : len(three)
    ]


def test_roofline_accounts_for_sharded_optimizer():
    one = asked(stacked(), "A100", devices_per_node=8)
    f = next(row for row in one.rows)
    sharded = one.forecaster.forecast(replace(f.execution, zero_stage=3))
    points = one.forecaster.roofline(sharded.execution).points
    updates = [p for p in points if p.name.endswith("optimizer")]
    assert updates
    assert math.fsum(p.time_ms for p in updates) <= sharded.step.optimizer_ms * (1 + 1e-9)
    whole = {p.name: p for p in one.forecaster.roofline(f.execution).points}
    assert all(p.tflops == pytest.approx(whole[p.name].tflops, rel=0.02) for p in updates)
