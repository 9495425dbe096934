"""Step time as the maximum of data time and compute time."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.measure.loader import LoaderCost, batch_ms, fewest_workers, limit_of, step_ms

MS = st.floats(0, 1e4)
CORES = st.floats(0.5, 128)
WORKERS = st.integers(0, 64)


@st.composite
def costs(draw):
    wall = draw(MS)
    return LoaderCost(
        sample_wall_ms=wall,
        sample_cpu_ms=wall * draw(st.floats(0, 1)),
        collate_ms=draw(MS),
        batch_size=draw(st.integers(1, 512)),
        send_ms=draw(MS),
        handover_ms=draw(MS),
    )


WAITING = LoaderCost(
    sample_wall_ms=10, sample_cpu_ms=0, collate_ms=1, batch_size=4, send_ms=1, handover_ms=0.5
)
COMPUTING = replace(WAITING, sample_cpu_ms=10)


def test_io_scales_with_workers_and_cpu_time_with_cores():
    assert batch_ms(WAITING, 0, 2) == 41
    assert batch_ms(WAITING, 1, 2) == 42
    assert batch_ms(WAITING, 8, 2) == 42 / 8
    assert batch_ms(COMPUTING, 2, 2) == pytest.approx(42.5 / 2)
    assert batch_ms(COMPUTING, 8, 2) == pytest.approx(42.5 / 2)


def test_step_time_is_maximum_of_data_and_compute():
    assert step_ms(WAITING, 100, 0, 2) == 141
    assert step_ms(WAITING, 100, 1, 2) == 100.5
    assert step_ms(WAITING, 20, 1, 2) == 42
    # Compute on one of two cores leaves the other core to the workers.
    assert step_ms(COMPUTING, 30, 4, 2, compute_cores=1) == pytest.approx((42.5 + 30) / 2)
    # Compute threads on both cores wait for the workers.
    assert step_ms(COMPUTING, 30, 4, 2, compute_cores=2) == pytest.approx(42 + 30)
    assert step_ms(COMPUTING, 5, 4, 2, compute_cores=2) == pytest.approx(5 + 20 + 22 / 2)


def test_limit_is_series_workers_compute_or_cores():
    assert limit_of(WAITING, 5, 0, 2) == "series"
    assert limit_of(WAITING, 5, 2, 2) == "workers"
    assert limit_of(WAITING, 100, 2, 2) == "compute"
    assert limit_of(COMPUTING, 5, 4, 2) == "cores"


@given(costs(), MS, st.integers(1, 64), CORES, st.floats(0, 1))
def test_more_workers_or_cores_are_never_slower(cost, compute, workers, cores, share):
    now = step_ms(cost, compute, workers, cores, share * cores)
    assert step_ms(cost, compute, workers + 1, cores, share * cores) <= now
    assert step_ms(cost, compute, workers, cores * 2, share * cores) <= now


@given(costs(), MS, CORES, st.floats(0, 1))
def test_first_worker_adds_at_most_its_overhead(cost, compute, cores, share):
    assume(cores >= 1)
    series = step_ms(cost, compute, 0, cores, share * cores)
    overhead = cost.send_ms + cost.handover_ms
    assert step_ms(cost, compute, 1, cores, share * cores) <= (series + overhead) * (1 + 1e-9)


@given(
    costs(),
    MS,
    WORKERS,
    CORES,
    st.sampled_from(["sample_wall_ms", "sample_cpu_ms", "collate_ms", "send_ms", "handover_ms"]),
    MS,
)
def test_more_work_never_takes_less_time(cost, compute, workers, cores, part, more):
    now = step_ms(cost, compute, workers, cores)
    assert (
        step_ms(replace(cost, **{part: getattr(cost, part) + more}), compute, workers, cores) >= now
    )
    assert step_ms(replace(cost, batch_size=cost.batch_size + 1), compute, workers, cores) >= now
    assert step_ms(cost, compute + more, workers, cores) >= now


@given(costs(), MS, WORKERS, CORES)
def test_step_time_is_bounded_by_data_and_compute(cost, compute, workers, cores):
    assume(cores >= 1)
    step = step_ms(cost, compute, workers, cores)
    data = batch_ms(cost, workers, cores)
    assert step >= max(compute, data) * (1 - 1e-9)
    assert step <= (compute + data) * (1 + 1e-9)
    assert (workers > 0) or step == pytest.approx(compute + data)


@given(st.dictionaries(WORKERS, st.floats(1e-3, 1e6), min_size=1))
def test_fewest_workers_is_within_five_percent_of_best(steps):
    chosen = fewest_workers(steps)
    assert steps[chosen] <= 1.05 * min(steps.values())
    assert all(steps[w] > 1.05 * min(steps.values()) for w in steps if w < chosen)
