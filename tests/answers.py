"""Pages with an answer of every kind, made by the real commands from small invented records under a hostile name."""

import datetime
import tempfile
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from diagnose.recordings import block, fetch, loader, rank, recording
from ladder_world import World, ladder, result, rung
from made_logs import simple_run, write_worker
from made_traces import ALL_REDUCE, Work, events_of, trace_of, write
from nouns import measurement, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import Interval, StepTime
from trainpace.core.records import to_jsonable
from trainpace.diagnose import diagnose, read_profiled
from trainpace.forecast import Forecaster, Grid, Target, nearest
from trainpace.job import DataPath, Schedule
from trainpace.measure.sweep import analyse
from trainpace.offers import Offer, picks
from trainpace.offers.match import Job
from trainpace.offers.match import rank as rank_servers
from trainpace.plan import Problem, plan_changes
from trainpace.report import (
    diagnosis_sections,
    forecast_sections,
    forecast_title,
    ladder_json,
    ladder_sections,
    match_page_json,
    match_sections,
    match_title,
    page,
    plan_sections,
    plan_title,
    profiled_sections,
    sweep_json,
    sweep_sections,
    sweep_title,
    table_of,
    timeline_sections,
)
from trainpace.report.measurement import side_by_side_sections
from trainpace.run.climbing import climb
from trainpace.run.trial import FailedTrial
from trainpace.verbs.forecast import Forecasts, Sweep
from trainpace.verbs.match import Matches
from trainpace.verbs.measure import MeasuredSweep
from trainpace.verbs.plan import Planned
from trainpace.watch import timeline_of
from trainpace.workload import load_workload

HOSTILE = '<script>document.title="broken"</script><img src=x onerror="document.title=\'broken\'">'


def traced():
    """A real trace with the memory over its step."""
    return replace(load_workload("mobilenet_v2", ("fp32",)), model=HOSTILE)


def asked(model, gpu="T4", batches=(8,), **cluster):
    of = Cluster(device=find_device(gpu), **cluster)
    e = Execution(
        micro_batch=8,
        nproc_per_node=of.devices_per_node,
        nnodes=of.nodes,
        optimizer=model.optimizer,
    )
    forecaster = Forecaster(model, Target(of))
    return Sweep(forecaster, forecaster.at(Grid.vary(e, micro_batch=batches)).forecasts(), e)


def jumps(one):
    batches = [row.execution.micro_batch for row in one.rows]
    device = one.forecaster.target.cluster.device.name
    return {device: one.forecaster.jumps(one.rows[0].execution, batches)}


def forecasts(sweeps, jumps=None, notes=(), **more):
    rows = tuple(row for one in sweeps for row in one.rows)
    return Forecasts(rows=rows, jumps=jumps or {}, notes=notes, sweeps=tuple(sweeps), **more)


def forecast_page(answer):
    return page(forecast_title(answer), forecast_sections(answer), answer.as_json())


def a_forecast():
    one = asked(traced(), batches=range(1, 41))
    return forecast_page(
        forecasts([one], jumps(one), ("T4: nothing is known of it.",), evidence=near_to(one))
    )


def near_to(one):
    """Public runs near to a sweep, from sources with hostile names, and the closest run that is not near."""
    asked_for = one.forecaster.workload, one.rows[0].execution, one.forecaster.target.cluster.device
    found = nearest(*asked_for)
    run = replace(
        found.closest.run, model=HOSTILE, source=HOSTILE, licence=HOSTILE, parallelism=HOSTILE
    )
    near = replace(found.closest, run=run, distance=0.1)
    return replace(found, runs=(near,)), replace(
        found, runs=(), closest=replace(near, distance=3.0)
    )


def forecasts_on_many():
    model = traced()
    nodes = {"devices_per_node": 4, "nodes": 2, "network_gb_per_s_per_device": 3.0}
    return forecast_page(
        forecasts([asked(model, gpu, (64,), **nodes) for gpu in ("T4", "A100", "H100")])
    )


def nothing_fits():
    return forecast_page(forecasts([asked(workload(), "T4", (10**6,))]))


def measured(batches=range(1, 41), jump_at=17):
    """Two probes of every batch size, with a jump by half and noise of 1 %."""
    rng, found = np.random.default_rng(1), []
    for batch in batches:
        for _ in range(2):
            ms = float((10 + batch * (1.0 if batch < jump_at else 1.5)) * rng.normal(1.0, 0.01))
            found.append(
                replace(
                    measurement(),
                    model=HOSTILE,
                    execution=Execution(micro_batch=batch),
                    median_ms=ms,
                    interval_ms=Interval(
                        low=0.98 * ms, high=1.02 * ms, coverage=0.9, basis="steps"
                    ),
                    step=StepTime(forward_ms=0.4 * ms, backward_ms=0.5 * ms, idle_ms=0.1 * ms),
                )
            )
    return found


def a_sweep():
    outcomes, one = measured(), asked(workload(), batches=range(1, 41))
    answer = MeasuredSweep(
        measurements=tuple(outcomes),
        failed=(),
        analysis=analyse(outcomes),
        forecasts={f.execution.micro_batch: f for f in one.rows},
    )
    return page(sweep_title(answer), sweep_sections(answer), sweep_json(answer))


def a_timeline():
    folder = Path(tempfile.mkdtemp())
    simple_run(folder)
    write_worker(folder, 0, [(t, t + 10) for t in range(0, 200, 10)])
    return timeline_of(folder, range(5, 15))


def a_diagnosis():
    blocks = [
        block("plain", data=16, forward=2, backward=3),
        block("cached_batch", forward=2, backward=3),
    ] * 3
    of = rank(data=16, forward=2, backward=3, blocks=blocks, loader=loader(), fetch=fetch())
    found = diagnose(recording(of), epochs=10)
    sections = diagnosis_sections(found, HOSTILE, timeline=timeline_sections(a_timeline()))
    return page(f"What slows it down: python {HOSTILE}", sections, to_jsonable(found))


def a_trace():
    """Traces of two ranks, with hostile kernel and device names."""
    kernels = ((HOSTILE, 10.0, 100.0, 4100.0), (ALL_REDUCE, 20.0, 3100.0, 9100.0))
    with tempfile.TemporaryDirectory() as made:
        for rank in (0, 1):
            events = events_of(Work(10_000.0, kernels, operators=(("aten::mm", 5.0, 60.0),)))
            write(Path(made) / f"rank{rank}.json", trace_of(events, rank, 2, device=HOSTILE))
        found = read_profiled(made)
        return page(HOSTILE, profiled_sections(found, HOSTILE), to_jsonable(found))


def a_match(top=60):
    offers = [
        Offer(
            provider="p",
            instance_type=f"{gpu} <b>{n}",
            device=gpu,
            count=n,
            price_usd_per_hour=price * n,
            network_gb_per_s=10.0,
        )
        for gpu, price in (("T4", 0.5), ("V100", 1.0), ("A100", 2.0), ("H100", 4.0))
        for n in (1, 2, 4, 8)
    ]
    job, model = (
        Job(schedule=Schedule(samples=100_000, epochs=50), global_batch=64),
        replace(workload(), model=HOSTILE),
    )
    ranking = rank_servers(model, offers, {o.device: find_device(o.device) for o in offers}, job)
    answer = Matches(
        workload=model, job=job, ranking=ranking, nearest=None, picks=picks(ranking.matches)
    )
    today = datetime.date(2026, 11, 21)
    sections = match_sections(answer, "usd", top, today)
    return page(match_title(answer), sections, match_page_json(answer, today))


def a_plan():
    cluster = Cluster(device=find_device("A100"), devices_per_node=2, price_usd_per_device_hour=2.0)
    setting = Problem(
        replace(workload(), model=HOSTILE), cluster, Schedule(samples=100_000, epochs=3.0)
    )
    paths = (
        DataPath(workers=0, ms_per_sample=8.0, beside=False),
        DataPath(workers=1, ms_per_sample=0.01, precomputed=True),
    )
    start = Execution(micro_batch=8, nproc_per_node=2, optimizer="sgd_momentum")
    plan = plan_changes(setting, start, paths)
    answer = Planned(plan=plan, setting=setting, script_changes=())
    return page(plan_title(answer), plan_sections(answer), to_jsonable(plan))


def ms_of(setup):
    if setup.execution.precision == "amp_bf16":
        return FailedTrial(kind="out of memory", reason="out of memory.")
    return result(
        100.0
        if setup.execution.compile
        else 5.0
        if setup.loader.shards
        else 50.0
        if setup.loader.workers
        else 100.0
    )


def a_ladder():
    rungs = (
        rung(HOSTILE, workers=2),
        rung("bf16", precision="amp_bf16"),
        rung("compile", compile=True),
        rung("shards"),
    )
    climbed = climb(
        ladder(*rungs, job=Schedule(max_steps=36_000), price_usd_per_hour=2.0),
        World(ms_of).actions(),
    )
    table = table_of(climbed)
    return page(table.title, ladder_sections(table), ladder_json(climbed))


def pairs(model=HOSTILE):
    rows = asked(workload(), batches=(8, 32)).rows
    return [
        (
            replace(f, model=model, device="a & b"),
            replace(measurement(), step=f.step, median_ms=2 * f.step.total_ms) if i else None,
        )
        for i, f in enumerate(rows)
    ]


def a_first_look():
    sections = side_by_side_sections(["1 < 2 & 3"], pairs())
    return page(f"A first look at {HOSTILE}", sections, {})


PAGES = {
    "forecast": a_forecast,
    "forecasts": forecasts_on_many,
    "nothing_fits": nothing_fits,
    "sweep": a_sweep,
    "diagnosis": a_diagnosis,
    "trace": a_trace,
    "timeline": lambda: page(HOSTILE, timeline_sections(a_timeline()), {}),
    "match": a_match,
    "plan": a_plan,
    "ladder": a_ladder,
    "first_look": a_first_look,
}
CANVASES = {"forecast": 3, "forecasts": 3, "sweep": 2, "match": 1, "plan": 1, "nothing_fits": 1}
"""Charts on a canvas, by page; the others have bars and pictures alone."""
