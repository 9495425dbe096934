"""What `trainpace measure` does: conditions from options, the machine's forecast, the sweep into the journal, the report."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import click
import numpy as np

from trainpace.cli.machine import device_of, profile_here
from trainpace.cli.pictures import save_pictures
from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.hardware import Cluster
from trainpace.journal import Circumstances, Foresight, Journal, RecordedSweep, execution_of, foresee, record_sweep
from trainpace.machine import Machine, detect, warnings_of
from trainpace.measure import (
    Conditions,
    SuiteItem,
    SweepAnalysis,
    SweepPlan,
    analyse,
    measure_noise_scale,
    run_sweep,
    suite,
)
from trainpace.outcome import FailedProbe, Forecast, Jump, Measurement
from trainpace.records import to_jsonable, write_whole
from trainpace.report.measurement import print_sweep, sweep_json
from trainpace.report.progress import Bar
from trainpace.workload import Variant, form_of

DEFAULT_BATCHES = (8, 16, 32)
LARGEST_SEARCHED = 65536
MEMORY_SHARE = 0.7


class Measured(NamedTuple):
    """A sweep of one model: what was measured, what it says, and what was forecast for it."""

    outcomes: list[Measurement | FailedProbe]
    measured: list[Measurement]
    analysis: SweepAnalysis
    foreseen: dict[int, Forecast]
    causes: tuple[Jump, ...]
    sweep: str | None


def measure_one(model: str, batches: Sequence[int] | None, o: dict[str, Any]) -> dict[str, Any] | None:
    """Measure one model and print what it says; the JSON twin."""
    _, measured, analysis, foreseen, causes, sweep = measured_of(model, batches, o)
    if o["output"]:
        write_whole(o["output"], json.dumps([to_jsonable(m) for m in measured], indent=1) + "\n")
    if o["page"] or o["figure"]:
        from trainpace.report.pages.sweep import sweep_page, sweep_pictures

        shown = (measured, analysis, foreseen, causes)
        save_pictures(o, lambda: sweep_page(*shown), lambda: sweep_pictures(*shown))
    if not o["as_json"]:
        print_sweep(measured, analysis, foreseen, causes, sweep, model)
    return sweep_json(measured, analysis, foreseen, sweep)


def measured_of(model: str, batches: Sequence[int] | None, o: dict[str, Any]) -> Measured:
    """Measure one model, as the options ask. Raises UserCodeError where nothing could be measured."""
    if o["noise_scale"] and ".py:" not in model:
        raise click.UsageError(
            "--noise-scale is one of real samples, and those of this model are random: name FILE.py:FUNCTION."
        )
    machine = detect()
    o = sparing_the_machine(o, machine)
    conditions, plan = _asked(model, batches, o)
    for warning in warnings_of(machine):
        click.echo(f"note: {warning}", err=True)
    device = device_of(conditions.device, machine)
    with _journal(o) as journal:
        foresight = None if o["no_forecast"] else _foresight(conditions, device, journal)
        execution = execution_of(conditions, plan.batches[0], "" if foresight is None else foresight.workload.optimizer)
        causes: tuple[Jump, ...] = ()
        if foresight is not None:
            causes = _forecast_jumps(foresight, plan, conditions)
        recorded = _run(conditions, plan, device, journal, foresight, [jump.batch for jump in causes], o)
    measured = [outcome for outcome in recorded.outcomes if isinstance(outcome, Measurement)]
    measured.sort(key=lambda m: m.execution.micro_batch)
    if o["noise_scale"] and measured:
        from msgspec.structs import replace

        click.echo(f"gathering gradients at batch {measured[-1].execution.micro_batch}", err=True)
        scale = measure_noise_scale(conditions, measured[-1].execution.micro_batch)
        measured[-1] = replace(measured[-1], noise_scale=scale)
    if not measured:
        reasons = [
            f"batch {f.execution.micro_batch}: {f.reason}" for f in recorded.outcomes if not isinstance(f, Measurement)
        ]
        raise UserCodeError(f"nothing could be measured ({'; '.join(reasons[:3])}).")
    analysis = analyse(recorded.outcomes)
    foreseen: dict[int, Forecast] = {}
    if foresight is not None:
        from msgspec.structs import replace

        there = {p.batch: foresight.at(replace(execution, micro_batch=p.batch)) for p in analysis.points}
        foreseen = {batch: f for batch, f in there.items() if f.step is not None}
    return Measured(recorded.outcomes, measured, analysis, foreseen, causes, recorded.id or None)


def measure_suite(batches: Sequence[int] | None, o: dict[str, Any]) -> int:
    """Measure every model of a suite into the journal; one that fails is said and left behind."""
    items = suite(o["suite"], o["suite_size"], o["suite_seed"])
    machine = detect()
    for warning in warnings_of(machine):
        click.echo(f"note: {warning}", err=True)
    o = sparing_the_machine(o, machine)
    device = device_of(o["device"], machine)
    failed = 0
    begin = time.monotonic()
    with _journal(o) as journal:
        for i, item in enumerate(items):
            left = "" if not i else f", about {_minutes((time.monotonic() - begin) / i * (len(items) - i))} left"
            click.echo(f"{item.spec} ({i + 1} of {len(items)}{left})", err=True)
            try:
                measure_item(item, batches, device, journal, o)
            except TrainpaceError as error:
                failed += 1
                click.echo(f"  left out: {error}", err=True)
    done = len(items) - failed
    kept = "" if o["no_journal"] else " Kept in the journal: trainpace journal list"
    click.echo(f"{done} of {len(items)} models measured on {device}.{kept}")
    return 0 if done else 1


def measure_item(
    item: SuiteItem, batches: Sequence[int] | None, device: str, journal: Journal | None, o: dict[str, Any]
) -> None:
    """One model of a suite into the journal. Raises UserCodeError where nothing could be measured."""
    options = o | {
        "precision": item.precision, "optimizer": item.optimizer or o["optimizer"],
        "sequence_length": item.sequence_length or o["sequence_length"],
    }  # fmt: skip
    conditions, plan = _asked(item.spec, batches or item.batches, options)
    foresight = None if o["no_forecast"] else _foresight(conditions, device, journal)
    recorded = _run(conditions, plan, device, journal, foresight, [], o)
    measured = [outcome for outcome in recorded.outcomes if isinstance(outcome, Measurement)]
    if not measured:
        raise UserCodeError(recorded.outcomes[-1].reason if recorded.outcomes else "nothing was measured.")  # type: ignore[union-attr]
    best = analyse(recorded.outcomes).best.best
    click.echo(f"  best batch {best.batch}: {best.measured_samples_per_second:.4g} samples/s", err=True)


def _asked(model: str, batches: Sequence[int] | None, o: dict[str, Any]) -> tuple[Conditions, SweepPlan]:
    conditions = Conditions(
        model=model, device=o["device"], precision=o["precision"], optimizer=o["optimizer"], accumulation=o["accumulate"],
        sequence_length=o["sequence_length"], image_size=o["image_size"], channels_last=o["channels_last"],
        compile=o["compiled"], seconds=o["seconds"], timeout_s=o["timeout"], memory_limit_gib=o["memory_limit"],
    )  # fmt: skip
    chosen = tuple(batches or ((LARGEST_SEARCHED,) if o["until_oom"] else DEFAULT_BATCHES))
    repeats = o["repeats"] or (2 if len(chosen) > 2 else 3)
    plan = SweepPlan(
        batches=chosen, repeats=repeats, every=o["every"], until_oom=o["until_oom"], also_batches=batches is not None
    )  # fmt: skip
    return conditions, plan


def sparing_the_machine(o: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """A search for the largest batch on a CPU gets a memory limit: beyond it the system would end other programs."""
    memory_gib = machine.memory_limit_gib or machine.memory_gib
    if not o["until_oom"] or o["device"] != "cpu" or o["memory_limit"] is not None or memory_gib is None:
        return o
    click.echo(f"a probe may take {MEMORY_SHARE * memory_gib:.1f} GiB; --memory-limit changes it", err=True)
    return o | {"memory_limit": round(MEMORY_SHARE * memory_gib, 1)}


def _foresight(conditions: Conditions, device: str, journal: Journal | None) -> Foresight | None:
    """What is forecast on this machine; None, with a reason said, where it cannot be."""
    from trainpace.trace import load_workload

    c = conditions
    try:
        if c.device == "cpu":
            profile = profile_here()
            if profile is None:
                click.echo("note: no forecast beside the measurements: trainpace calibrate first.", err=True)
                return None
            cluster, model = Cluster(device=profile.device), profile.kernels
        else:
            from trainpace.hardware import find_device
            from trainpace.verbs.own_hardware import own_devices

            cluster, model = Cluster(device=find_device(device, own_devices(None))), None
        variant = Variant(c.optimizer, c.sequence_length, c.image_size, cpu=c.device == "cpu")
        with Bar(f"tracing {c.model}") as bar:
            bar.to(0)
            workload = load_workload(c.model, (form_of(c.precision),), variant, c.timeout_s)
        execution = execution_of(c, 1, workload.optimizer)
        return foresee(workload, execution, cluster, model, journal, c.sequence_length, c.image_size)
    except TrainpaceError as error:
        click.echo(f"note: no forecast beside the measurements: {error}", err=True)
        return None


def _forecast_jumps(foresight: Foresight, plan: SweepPlan, conditions: Conditions) -> tuple[Jump, ...]:
    """Where the forecast has its jumps: probes on both sides of them tell soonest whether they are there."""
    from msgspec.structs import replace

    if not plan.adaptive or foresight.forecaster.target.kernels.traces_cpu:
        return ()
    execution = execution_of(conditions, plan.batches[0], foresight.workload.optimizer)
    steps = [foresight.at(replace(execution, micro_batch=b)).step for b in plan.batches]
    step_ms = [step.total_ms for step in steps if step is not None]
    if len(step_ms) != len(plan.batches):
        return ()
    return foresight.forecaster.jumps_in(execution, plan.batches, np.array(step_ms))


def _run(
    conditions: Conditions, plan: SweepPlan, device: str, journal: Journal | None, foresight: Foresight | None,
    hints: Sequence[int], o: dict[str, Any],
) -> RecordedSweep:  # fmt: skip
    most = _most_probes(plan)
    with Bar(f"measuring {conditions.model}", most, "probes at most") as bar:
        try:
            tell = lambda batch, finished: bar.to(finished, words=f"batch {batch}")  # noqa: E731
            if journal is None:
                return RecordedSweep("", run_sweep(conditions, plan, device, lambda _: None, (), hints, tell), 0)
            circumstances = Circumstances(
                device=device, command=o["command"], commit=_commit(), notes=o["notes"],
                versions=f"torch {version('torch')}, trainpace {version('trainpace')}", keep_identity=o["keep_identity"],
            )  # fmt: skip
            recorded = record_sweep(journal, conditions, plan, circumstances, foresight, hints, tell, o["fresh"])
        except KeyboardInterrupt:
            if journal is not None:
                bar.say("\nStopped. What was measured is in the journal; the same command takes it up again.")
            raise
    if recorded.resumed:
        click.echo(f"{recorded.resumed} probes were there from an interrupted run of the same sweep.", err=True)
    return recorded


def _most_probes(plan: SweepPlan) -> int | None:
    """How many probes it may take, None where nobody knows."""
    if plan.until_oom:
        return None
    if plan.adaptive:
        from trainpace.measure import most_probes

        return most_probes(len(plan.batches))
    return len(plan.batches) * plan.repeats


@contextlib.contextmanager
def _journal(o: dict[str, Any]) -> Iterator[Journal | None]:
    if o["no_journal"]:
        yield None
        return
    with Journal.open(o["place"]) as journal:
        yield journal


def _commit() -> str | None:
    """The commit of the folder that this runs in, if it is one of git's."""
    import subprocess

    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
