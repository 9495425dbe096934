"""Advice on loader settings from a measured loader, including "change nothing"."""

import pytest
from msgspec.structs import replace

from trainpace.core.records import from_json, to_json
from trainpace.measure.loader import (
    LoaderCost,
    LoaderMeasurement,
    LoaderPoint,
    SampleCost,
    Stage,
    advise,
    batch_ms,
)
from trainpace.report.measurement import loader_json, loader_sections, next_step
from trainpace.report.measurement import loader_verdict as verdict
from trainpace.report.sections import Next

COST = LoaderCost(
    sample_wall_ms=5, sample_cpu_ms=5, collate_ms=0, batch_size=10, send_ms=0, handover_ms=0
)


def point(workers, ms, startup_s=0.0):
    return LoaderPoint(
        workers=workers,
        batch_size=10,
        prefetch_factor=2 if workers else None,
        pin_memory=False,
        batch_ms=ms,
        interval_ms=None,
        predicted_ms=None,
        startup_s=startup_s,
        runs=1,
    )


def measurement(cost=COST, cores=4.0, given=None, startup_s=0.0, stages=(), target="mine.py:data"):
    return LoaderMeasurement(
        target=target,
        dataset="Data",
        length=1000,
        batch_size=10,
        drop_last=False,
        given_workers=given,
        given_persistent=False,
        is_task=False,
        cores=cores,
        memory_gib=8.0,
        sample=SampleCost(
            samples=8, wall_ms=cost.sample_wall_ms, cpu_ms=cost.sample_cpu_ms, first_ms=5.0
        ),
        cost=cost,
        points=tuple(point(w, batch_ms(cost, w, cores), startup_s if w else 0.0) for w in range(6)),
        variants=(),
        stages=stages,
        notes=(),
        environment={},
    )


def test_data_bound_loader_gets_fewest_workers_that_hide_loading():
    m = measurement()
    a = advise(m, compute_ms=24, compute_cores=1)
    assert (a.workers_now, a.now_ms) == (0, 74)
    assert a.workers == 2  # 50 / 2 = 25, within 5 % of the 24 of the compute
    assert a.step_ms == 25
    assert a.saved_s_per_epoch == 4.9  # 100 steps of 49 ms
    assert "68%" in verdict(m, a)
    assert "saves 4.9 s per epoch (66%)" in verdict(m, a)
    assert "num_workers=2" in next_step(m, a)


def test_compute_bound_loader_needs_no_change():
    m = measurement(given=1)
    a = advise(m, compute_ms=200, compute_cores=1)
    assert (a.workers, a.worth_it) == (1, False)
    assert "No: other numbers of workers save nothing" in verdict(m, a)
    assert next_step(m, a).startswith("Next: nothing to gain")


def test_small_gain_is_not_worth_it():
    cost = replace(COST, sample_wall_ms=0.3, sample_cpu_ms=0.3)
    m = measurement(cost)
    a = advise(m, compute_ms=100, compute_cores=1)
    assert not a.worth_it
    assert "No: other numbers of workers save nothing" in verdict(
        m, a
    )  # 3 % of a step: 0 workers are within 5 % of the best.
    a = advise(m, compute_ms=57, compute_cores=1)
    assert (a.workers, a.worth_it) == (0, False)
    assert "No: other numbers of workers save 300 ms per epoch (5%)" in verdict(m, a)


def test_worker_start_time_counts_every_epoch():
    m = measurement(startup_s=10.0)
    a = advise(m, compute_ms=24, compute_cores=1)
    assert a.saved_s_per_epoch < 0
    assert (a.workers, a.worth_it) == (0, False)
    brief = advise(measurement(startup_s=0.2), compute_ms=24, compute_cores=1)
    assert brief.worth_it
    assert brief.keep_workers
    assert "persistent_workers=True" in next_step(m, brief)


def test_fewer_workers_are_advised_if_cores_are_scarce():
    m = measurement(cores=2.0, given=5)
    a = advise(m)
    assert a.workers == 2
    assert a.limit == "cores"


def test_workers_are_kept_if_compute_time_is_unknown():
    """Without workers a batch loads fastest here, but loading then cannot overlap compute."""
    cost = LoaderCost(
        sample_wall_ms=0.01,
        sample_cpu_ms=0.01,
        collate_ms=0.1,
        batch_size=10,
        send_ms=1,
        handover_ms=1,
    )
    m = measurement(cost, given=2)
    assert advise(m).workers == 2
    assert advise(m, compute_ms=0.0).workers == 0
    alone = measurement(cost)
    assert advise(alone).workers == 0
    assert "give --compute-ms" in next_step(alone, advise(alone))


def test_precompute_is_not_advised_for_cheap_samples():
    stages = (Stage(name="__getitem__", kind="function", wall_ms=0.01, offline=True),)
    m = measurement(replace(COST, sample_wall_ms=0.01, sample_cpu_ms=0.01), stages=stages)
    assert "precompute" not in next_step(m, advise(m))


def test_advice_uses_measured_instead_of_predicted_time():
    m = measurement()
    slower = replace(m, points=tuple(replace(p, batch_ms=p.batch_ms * 2) for p in m.points))
    assert advise(slower, 24, 1).step_ms_by_workers[1] == 100


def test_precompute_is_advised_if_it_saves_time():
    stages = (
        Stage(name="load", kind="", wall_ms=4.0, random=False, offline=True),
        Stage(name="Flip", kind="transform", wall_ms=1.0, random=True),
    )
    m = measurement(stages=stages)
    a = advise(m, compute_ms=5, compute_cores=1)
    assert (a.offline_ms, a.offline_share) == (4.0, 0.8)
    assert "without Flip and what follows, which could save up to 4 ms (80%)" in next_step(m, a)
    assert "precompute" not in next_step(m, advise(m, compute_ms=500, compute_cores=1))


def test_loader_measurement_round_trips_through_json():
    m = measurement(stages=(Stage(name="load", kind="", wall_ms=4.0),))
    assert from_json(to_json(m), LoaderMeasurement) == m
    assert loader_json(m, advise(m))["samples_per_second"]["1"] == 200.0


def test_data_bound_step_gets_advice_on_samples():
    """Starting workers costs more than they save, and every part of a sample is random."""
    flip = Stage(name="Flip", kind="transform", wall_ms=5.0, random=True)
    for stages, said in (
        ((flip,), "make Flip cheaper: it is 100% of a sample"),
        ((), "make a sample cheaper"),
    ):
        m = measurement(startup_s=10.0, stages=stages)
        a = advise(m, compute_ms=2, compute_cores=1)
        assert (a.workers, a.worth_it) == (0, False)
        assert a.now_ms > 20 * 2  # 96 % of the step is waiting.
        assert said in next_step(m, a)
        assert "look at the compute" not in next_step(m, a)


@pytest.mark.parametrize("flips", [False, True])
def test_precompute_is_a_next_command_for_deterministic_samples_only(tmp_path, flips):
    load = Stage(name="load", kind="", wall_ms=4.0, random=False, offline=True)
    flip = Stage(name="Flip", kind="transform", wall_ms=1.0, random=True)
    m = measurement(stages=(load, *[flip] * flips), target=f"{tmp_path}/train.py:data")
    sections = loader_sections(m, advise(m, compute_ms=5, compute_cores=1))
    assert any(isinstance(s, Next) for s in sections) is not flips
