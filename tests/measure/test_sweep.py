"""Sweep logic: pure functions choose the next probe and what to keep, tested on invented outcomes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import measurement
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import FailedProbe
from trainpace.measure.sweep import SweepPlan, analyse, next_for_largest, next_probe, run_sweep
from trainpace.report import show, sweep_sections, sweep_verdict
from trainpace.verbs.measure import MeasuredSweep


def measured(batch, ms=None, memory=None):
    ms = 2.0 + batch if ms is None else ms
    return replace(
        measurement(), execution=Execution(micro_batch=batch), median_ms=ms, peak_memory_gib=memory
    )


def failed(batch, failure="out_of_memory", reason="out of memory."):
    run = Execution(micro_batch=batch)
    return FailedProbe(
        model="m", device="cpu", execution=run, failure=failure, reason=reason, environment={}
    )


def carried_out(plan, probe, most=500):
    outcomes = []
    while (batch := next_probe(plan, outcomes)) is not None:
        outcomes.append(probe(batch))
        assert len(outcomes) < most
    return outcomes


def test_repeats_run_in_rounds_of_different_order():
    plan = SweepPlan(batches=(1, 2, 4, 8, 16, 32), repeats=3)
    order = [o.execution.micro_batch for o in carried_out(plan, measured)]
    rounds = [order[:6], order[6:12], order[12:]]
    assert [sorted(part) for part in rounds] == [[1, 2, 4, 8, 16, 32]] * 3
    assert len({tuple(part) for part in rounds}) == 3


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_largest_batch_search_needs_at_most_30_probes(limit, most):
    worked, out = set(), set()
    probes = 0
    while (batch := next_for_largest(worked, out, most)) is not None:
        assert 1 <= batch <= most
        assert batch not in worked | out
        (worked if batch <= limit else out).add(batch)
        probes += 1
    found, truth = max(worked, default=0), min(limit, most)
    assert found <= truth
    assert truth - found <= max(1, truth // 64)
    assert probes <= 30
    assert next_for_largest((), {1}, 100) is None


def test_until_oom_also_measures_listed_batches_below_limit():
    plan = SweepPlan(batches=(1, 2, 3, 100), until_oom=True, repeats=1)
    outcomes = carried_out(plan, lambda b: measured(b) if b <= 23 else failed(b))
    sizes = {o.execution.micro_batch for o in outcomes}
    assert {23, 24, 3} <= sizes
    assert 100 not in sizes
    assert analyse(outcomes).largest_that_fits == 23
    alone = carried_out(
        replace(plan, also_batches=False), lambda b: measured(b) if b <= 23 else failed(b)
    )
    assert 3 not in {o.execution.micro_batch for o in alone}


def test_sweep_skips_failed_sizes_and_sizes_above_oom():
    plan = SweepPlan(batches=(8, 16, 32, 64), repeats=2)
    outcomes = carried_out(
        plan, lambda b: failed(b) if b >= 32 else failed(b, "timeout") if b == 16 else measured(b)
    )
    sizes = [o.execution.micro_batch for o in outcomes]
    assert sizes.count(8) == 2
    assert sizes.count(16) == 1
    assert sizes.count(32) + sizes.count(64) <= 2


def test_code_that_fails_at_every_size_stops_the_sweep():
    plan = SweepPlan(batches=(1, 2, 4, 8))
    with pytest.raises(TrainpaceError, match="ZeroDivisionError"):
        carried_out(
            plan, lambda b: failed(b, "crashed", "the model's code raised ZeroDivisionError")
        )
    # Batch norm rejects a single sample only.
    assert (
        len(
            carried_out(
                plan, lambda b: failed(b, "crashed", "one sample") if b == 1 else measured(b)
            )
        )
        == 7
    )


def refusing(*sizes, limit=10**6):
    """Return a model whose code raises at some batch sizes and runs out of memory above a limit."""
    return lambda b: (
        failed(b, "crashed", "no") if b in sizes else failed(b) if b > limit else measured(b)
    )


@given(st.sets(st.integers(1, 30), max_size=3), st.booleans())
def test_sweep_continues_past_sizes_that_crash(bad, every):
    plan = SweepPlan(batches=tuple(range(1, 31)), every=every)
    outcomes = carried_out(plan, refusing(*bad))
    measured_at = {o.execution.micro_batch for o in outcomes if not isinstance(o, FailedProbe)}
    assert not measured_at & bad
    failures = [o.execution.micro_batch for o in outcomes if isinstance(o, FailedProbe)]
    assert len(failures) == len(set(failures))
    assert {f.batch for f in analyse(outcomes, plan.batches).failures} == set(failures) <= bad
    if every:
        assert measured_at == set(plan.batches) - bad
    else:
        # The ends are probed if possible.
        allowed = sorted(set(plan.batches) - bad)
        assert {allowed[0], allowed[-1]} <= measured_at


def test_largest_batch_is_found_if_smallest_batches_crash():
    plan = SweepPlan(batches=(1000,), until_oom=True, also_batches=False, repeats=1)
    outcomes = carried_out(plan, refusing(1, 2, limit=100))
    a = analyse(outcomes)
    assert 99 <= a.largest_that_fits <= 100
    assert [f.batch for f in a.failures if f.failure == "crashed"] == [1, 2]
    assert next_for_largest((), {4}, 100, {1, 2}) == 3
    assert next_for_largest((), {4}, 100, {1, 2, 3}) is None
    assert next_for_largest((), (), 3, {1, 2, 3}) is None
    # A crash above a working size counts as the limit.
    assert next_for_largest({1, 2, 4}, (), 100, {8}) == 6


def test_only_long_ranges_use_adaptive_search():
    assert not SweepPlan(batches=tuple(range(1, 13))).adaptive
    plan = SweepPlan(batches=tuple(range(1, 71)))
    assert plan.adaptive
    noise = random.Random(1)
    outcomes = carried_out(
        plan, lambda b: measured(b, (5 + b + 8 * (b > 32)) * noise.gauss(1, 0.005))
    )
    assert len(outcomes) <= 28
    (jump,) = analyse(outcomes).curve.jumps
    assert (jump.before, jump.after) == (32, 33)
    assert len(carried_out(replace(plan, every=True, repeats=1), measured)) == 70


def test_finished_probes_are_not_repeated(monkeypatch):
    plan = SweepPlan(batches=(1, 2, 4), repeats=1)
    asked, kept = [], []
    monkeypatch.setattr(
        "trainpace.measure.sweep.probe",
        lambda conditions, batch, device: asked.append(batch) or measured(batch),
    )
    outcomes = run_sweep(None, plan, "cpu", kept.append, done=[measured(2)])
    assert sorted(asked) == [1, 4]
    assert len(kept) == 2
    assert len(outcomes) == 3


@pytest.mark.parametrize(
    "wrong", [{"batches": ()}, {"batches": (0, 1)}, {"batches": (1,), "repeats": 0}]
)
def test_invalid_sweep_plan_is_an_error(wrong):
    with pytest.raises(TrainpaceError):
        SweepPlan(**wrong)


def test_analysis_summarizes_points_noise_and_failures():
    outcomes = [measured(8, 10.0, 1.5), measured(8, 11.0, 1.75), measured(16, 15.0), failed(64)]
    a = analyse(outcomes)
    assert [p.batch for p in a.points] == [8, 16]
    first = a.points[0]
    assert (first.probes, first.step_ms, first.peak_memory_gib) == (2, 10.5, 1.75)
    assert first.interval_ms.low < 10.0
    assert first.interval_ms.high > 11.0
    assert first.samples_per_second == pytest.approx(8e3 / 10.5)
    assert a.noise.degrees == 1
    assert a.best.best.batch == 16
    assert a.failures[0].batch == 64
    assert analyse([measured(8)]).noise is None


def test_unresolved_gaps_are_reported():
    """Jumps follow 16, 32, 48 and 64; the last ones are not narrowed down."""

    def step(b):
        return 20 + 0.4 * b + 0.6 * 16 * -(-b // 16)

    sizes = (
        1,
        4,
        8,
        12,
        15,
        16,
        17,
        20,
        24,
        28,
        31,
        32,
        33,
        37,
        41,
        45,
        48,
        55,
        58,
        61,
        64,
        65,
        67,
        70,
    )
    outcomes = [measured(b, step(b) * (1 + 1e-4 * way)) for b in sizes for way in (-1, 1)]
    asked = range(1, 71)
    a = analyse(outcomes, asked)
    assert a.unresolved == ((48, 55),)
    assert "between batch 48 and 55" in " ".join(sweep_verdict(a))
    assert analyse(outcomes, sizes).unresolved == ()
    assert analyse([measured(b, step(b)) for b in asked], asked).unresolved == ()


def test_too_noisy_sweep_has_no_best_size():
    noise = random.Random(3)
    loud = [
        measured(b, (20 + b) * max(0.05, noise.gauss(1, 0.4)))
        for b in range(1, 31)
        for _ in range(2)
    ]
    a = analyse(loud, range(1, 31))
    words = " ".join(sweep_verdict(a))
    assert a.too_noisy
    assert "No batch size can be called the best" in words
    assert "costs about the same" not in words
    assert "one more sample costs" not in words
    quiet = [measured(b, (20 + b) * noise.gauss(1, 0.005)) for b in range(1, 31) for _ in range(2)]
    a = analyse(quiet, range(1, 31))
    assert not a.too_noisy
    assert 0.005 < a.curve.least_jump < 0.05
    assert (
        f"No jumps of {100 * a.curve.least_jump:.1f}% of the step or more were found"
        in " ".join(sweep_verdict(a))
    )
    assert a.trend.shape == "linear"
    assert a.trend.ms_per_sample == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(30))
def test_verdict_best_batch_is_fastest_measured_row(seed):
    """Regression: "batch 32, 604 samples/s, best" stood above a table with 696 samples/s at 64."""
    noise = random.Random(seed)
    spread = noise.choice((0.0, 0.01, 0.05, 0.15))
    sizes = sorted(noise.sample(range(1, 129), noise.randrange(2, 24)))
    jump = noise.choice((0.0, 5.0))
    outcomes = [
        measured(b, (3 + 0.2 * b + jump * (b // 32)) * max(0.2, noise.gauss(1, spread)))
        for b in sizes
        for _ in range(2)
    ]
    a = analyse(outcomes, sizes)
    words = sweep_verdict(a)[0]
    fastest = max(a.points, key=lambda p: p.samples_per_second)
    if words.startswith("Best throughput"):
        assert f"batch {fastest.batch}," in words
    elif not a.too_noisy:
        assert f"batch {fastest.batch} measured" in words


def test_sequence_models_show_tokens_per_second(capsys):
    for length, shown in ((128, "1,024 tokens/s), of 128 tokens per sample"), (None, "")):
        outcomes = [replace(measured(8, 1000.0), sequence_length=length)]
        answer = MeasuredSweep(
            measurements=tuple(outcomes), failed=(), analysis=analyse(outcomes), forecasts={}
        )
        show(sweep_sections(answer))
        out = " ".join(capsys.readouterr().out.split())
        assert shown in out
        assert ("tokens/s" in out) == bool(length)
