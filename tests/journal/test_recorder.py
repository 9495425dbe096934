"""Recording a sweep in the journal: stored probe by probe, resumed, and forecast before it is measured."""

import math
import socket

import pytest
from msgspec.structs import replace

from nouns import forecast, measurement, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import FailedProbe, Interval
from trainpace.forecast import Forecaster, Target
from trainpace.journal import (
    Circumstances,
    Knowledge,
    entry_of,
    record_sweep,
    share,
    text_of,
    workload_key,
)
from trainpace.measure import Conditions
from trainpace.measure.sweep import SweepPlan

DEVICE = "T4"
HERE = Circumstances(
    device=DEVICE, command="trainpace measure /home/anna/net.py:task", notes="a note"
)
CONDITIONS = Conditions(model="/home/anna/net.py:task")


def step_ms(batch):
    """Step time whose distance from the forecast grows with the batch."""
    run = Execution(micro_batch=batch, optimizer="sgd_momentum")
    return (1.2 + 0.005 * batch) * forecast(
        workload(), run, Cluster(device=find_device(DEVICE))
    ).step.total_ms


@pytest.fixture
def probes(monkeypatch):
    """Invented steps. After `probes.stop_at` probes, the sweep ends as if killed."""

    class Probes:
        asked = []
        stop_at = None

    def probe(conditions, batch, device):
        if len(Probes.asked) == Probes.stop_at:
            raise KeyboardInterrupt
        Probes.asked.append(batch)
        run = Execution(micro_batch=batch, optimizer="sgd_momentum")
        if batch == 32:
            return FailedProbe(
                model="net.py:task",
                device=device,
                execution=run,
                failure="timeout",
                reason="too long",
                environment={},
            )
        return replace(
            measurement(), model="one layer", device=device, execution=run, median_ms=step_ms(batch)
        )

    Probes.asked, Probes.stop_at = [], None
    monkeypatch.setattr("trainpace.measure.sweep.probe", probe)
    return Probes


def test_sweep_is_recorded_anonymously(journal, probes):
    done = record_sweep(journal, CONDITIONS, SweepPlan(batches=(8, 16, 32)), HERE)
    entries = journal.sweep_entries(done.id)
    assert [e.outcome for e in entries].count("timeout") == 1
    assert len(entries) == len(done.outcomes) == 5
    assert {e.notes for e in entries} == {"a note"}
    (sweep,) = journal.sweeps()
    assert sweep.finished_at is not None
    assert "anna" not in repr((sweep, entries))


@pytest.mark.parametrize("keep", [False, True])
def test_measured_by_is_recorded_but_not_shared(journal, probes, monkeypatch, keep):
    monkeypatch.setenv("TRAINPACE_MEASURED_BY", " Ada of the vision group\n")
    done = record_sweep(
        journal, CONDITIONS, SweepPlan(batches=(8, 16)), HERE._replace(keep_identity=keep)
    )
    entries = journal.sweep_entries(done.id)
    assert {e.environment["measured_by"] for e in entries} == {"Ada of the vision group"}
    assert {e.environment.get("hostname") for e in entries} == {
        socket.gethostname() if keep else None
    }
    for e in entries:
        shared = share(
            [replace(e, model="resnet50", environment={**e.environment, "torch": "2.4.1"})]
        )
        assert shared.runs.runs
        assert "Ada" not in text_of(shared.runs)
        assert socket.gethostname() not in text_of(shared.runs)


def test_measured_by_is_absent_by_default(journal, probes, monkeypatch):
    monkeypatch.delenv("TRAINPACE_MEASURED_BY", raising=False)
    done = record_sweep(journal, CONDITIONS, SweepPlan(batches=(8,)), HERE)
    assert not any("measured_by" in e.environment for e in journal.sweep_entries(done.id))


def test_interrupted_sweep_is_resumed(journal, probes):
    plan = SweepPlan(batches=(1, 2, 4, 8))
    probes.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        record_sweep(journal, CONDITIONS, plan, HERE)
    probes.stop_at = None
    done = record_sweep(journal, CONDITIONS, plan, HERE)
    assert done.resumed == 5
    assert len(probes.asked) == 8
    assert sorted(probes.asked) == [1, 1, 2, 2, 4, 4, 8, 8]
    # The sweep is finished, so the same command measures again.
    assert record_sweep(journal, CONDITIONS, plan, HERE).resumed == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda c, p, h: (replace(c, precision="amp_bf16"), p, h),
        lambda c, p, h: (c, replace(p, repeats=3), h),
        lambda c, p, h: (c, p, h._replace(device="another")),
        lambda c, p, h: (c, p, h._replace(versions="torch 3")),
    ],
)
def test_sweep_restarts_under_other_conditions(journal, probes, change):
    plan = SweepPlan(batches=(1, 2, 4, 8))
    probes.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        record_sweep(journal, CONDITIONS, plan, HERE)
    probes.stop_at = None
    assert record_sweep(journal, *change(CONDITIONS, plan, HERE)).resumed == 0


def test_fresh_restarts_sweep(journal, probes):
    plan = SweepPlan(batches=(1, 2, 4, 8))
    probes.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        record_sweep(journal, CONDITIONS, plan, HERE)
    probes.stop_at = None
    assert record_sweep(journal, CONDITIONS, plan, HERE, fresh=True).resumed == 0


def foresight(journal, name="one layer", **sizes):
    w = replace(workload(**sizes), model=name)
    return Forecaster(
        w, Target(Cluster(device=find_device(DEVICE))), knowledge=Knowledge(journal, w)
    )


def test_recorded_sweep_improves_next_forecast(journal, probes):
    before = foresight(journal)
    assert before.knowledge.in_words(before) == ""
    record_sweep(
        journal, replace(CONDITIONS, model="one layer"), SweepPlan(batches=(8, 64)), HERE, before
    )
    run = Execution(micro_batch=16, optimizer="sgd_momentum")
    plain = forecast(workload(), run, Cluster(device=find_device(DEVICE)))
    entry = next(e for e in journal.find() if e.execution.micro_batch == 8)
    assert entry.forecast_ms == pytest.approx(
        before.forecast(replace(run, micro_batch=8)).step.total_ms
    )
    assert entry.forecast_factor == pytest.approx(1.0)
    assert entry.workload_key == workload_key(workload(), run)
    after = foresight(journal)
    assert "batch 8, 64" in after.knowledge.in_words(after)
    sharp = after.forecast(run)
    assert sharp.provenance == "transferred"
    assert sharp.step.total_ms != pytest.approx(plain.step.total_ms)
    for batch in (8, 64):
        again = after.forecast(replace(run, micro_batch=batch))
        assert again.step.total_ms == pytest.approx(step_ms(batch), rel=0.05)
        assert again.step_time_interval_ms.low < step_ms(batch) < again.step_time_interval_ms.high


@pytest.mark.parametrize("spread", [0.0, 0.31])
def test_forecast_interval_reflects_spread_of_repeats(journal, spread):
    before, run = foresight(journal), Execution(micro_batch=16, optimizer="sgd_momentum")
    middle_ms = {
        batch: before.forecast(replace(run, micro_batch=batch)).step.total_ms for batch in (8, 16)
    }
    for i, way in enumerate((-1, 0, 1)):
        for batch in (8, 16):
            one_ms = middle_ms[batch] * math.exp(way * spread)
            m = replace(
                measurement(),
                model="one layer",
                device=DEVICE,
                execution=replace(run, micro_batch=batch),
                median_ms=one_ms,
                interval_ms=Interval(
                    low=0.99 * one_ms, high=1.01 * one_ms, coverage=0.9, basis="one process"
                ),
            )
            journal.add(entry_of(m, sweep="a" * 32, created_at=f"2026-11-2{i}T00:00:00.000000Z"))
    after = foresight(journal)
    assert len(after.knowledge.posterior(after).known) == 2  # the repeats of a size are one
    again = after.forecast(run)
    interval = again.step_time_interval_ms
    half = math.log(interval.high / interval.low) / 2
    assert again.step.total_ms == pytest.approx(middle_ms[16], rel=0.05)
    assert (half > 1.645 * spread) if spread else half < 0.1


def test_device_aliases_are_the_same_device(journal):
    run = Execution(micro_batch=16, optimizer="sgd_momentum")
    m = replace(measurement(), model="one layer", device="Tesla T4", execution=run, median_ms=50.0)
    journal.add(entry_of(m))
    known = foresight(journal)
    (seen,) = known.knowledge.posterior(known).known
    assert seen.run.device == known.target.cluster.device.name
    assert "on this device at batch 16" in known.knowledge.in_words(known)


def test_other_models_on_device_shift_forecast_slightly(journal, probes):
    record_sweep(
        journal,
        replace(CONDITIONS, model="one layer"),
        SweepPlan(batches=(8, 64)),
        HERE,
        foresight(journal),
    )
    other = foresight(journal, "another layer", n=512)
    assert "1 other model" in other.knowledge.in_words(other)
    run = Execution(micro_batch=16, optimizer="sgd_momentum")
    plain = other.plain.forecast(run)
    seen = other.knowledge.posterior(other).known
    of_itself = (
        foresight(journal).at([replace(run, micro_batch=8), replace(run, micro_batch=64)]).shares()
    )
    assert [one.run.shares for one in seen] == [tuple(shares.tolist()) for shares in of_itself]
    shifted = other.forecast(run)
    log_ratios = [one.log_ratios[0] for one in seen]
    assert 0 < math.log(shifted.step.total_ms / plain.step.total_ms) / max(log_ratios, key=abs) < 1
    old, new = plain.step_time_interval_ms, shifted.step_time_interval_ms
    assert new.high / new.low < old.high / old.low
    # A shifted forecast must not count as a plain one later.
    record_sweep(
        journal, replace(CONDITIONS, model="another layer"), SweepPlan(batches=(16,)), HERE, other
    )
    entry = next(e for e in journal.find() if e.execution.micro_batch == 16)
    assert entry.forecast_factor == pytest.approx(shifted.step.total_ms / plain.step.total_ms)
    assert entry.forecast_ms / entry.forecast_factor == pytest.approx(plain.step.total_ms)


def test_sweep_that_crashes_everywhere_is_an_error(journal, monkeypatch):
    def probe(conditions, batch, device):
        run = Execution(micro_batch=batch)
        return FailedProbe(
            model="m",
            device=device,
            execution=run,
            failure="crashed",
            reason="1 / 0",
            environment={},
        )

    monkeypatch.setattr("trainpace.measure.sweep.probe", probe)
    with pytest.raises(TrainpaceError):
        record_sweep(journal, CONDITIONS, SweepPlan(batches=(1, 2, 4)), HERE)
