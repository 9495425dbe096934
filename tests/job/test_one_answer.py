"""All commands report exactly the same hours and dollars for the same job."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Grid, Target
from trainpace.job import (
    JobConditions,
    Question,
    Schedule,
    answer,
    state_bytes,
    training_of,
    with_job,
)
from trainpace.offers import Offer
from trainpace.offers.match import Job, rank
from trainpace.plan import Choice, Evaluator, Problem
from trainpace.plan.evaluate import evaluate, job_seconds
from trainpace.run.ladder import Ladder, Setup
from trainpace.run.results import Attempt, job_time
from trainpace.run.step_forecasts import StepForecast

MODEL = workload()
IN_STEPS = st.fixed_dictionaries(
    {}, optional={"evaluate_every_steps": st.integers(1, 500), "evaluation_s": st.floats(0, 100)}
).filter(
    lambda evaluations: "evaluation_s" not in evaluations or "evaluate_every_steps" in evaluations
)
CHECKPOINTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"checkpoint_every_steps": st.integers(1, 5000), "checkpoint_s": st.floats(0, 60)}
    ),
    st.fixed_dictionaries({"checkpoint_every_s": st.floats(60, 1e5)}),
    st.just({"checkpoints": False}),
)
CONDITIONS = st.builds(
    lambda evaluations, checkpoints, **rest: JobConditions(**evaluations, **checkpoints, **rest),
    IN_STEPS,
    CHECKPOINTS,
    startup_s=st.floats(0, 600),
    storage_gb_per_s=st.floats(0.01, 100),
    device_mtbf_h=st.one_of(st.none(), st.floats(100, 1e6)),
    restart_s=st.floats(0, 3600),
    sample_bytes=st.sampled_from([0.0, 1e5, 1e7]),
    data_gb=st.sampled_from([0.0, 150.0]),
    repeats=st.integers(1, 3),
)
COUNTS = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    CONDITIONS,
    COUNTS,
    st.integers(100, 10**7),
    st.floats(0.1, 100),
    st.floats(0.1, 50),
    st.sampled_from([32, 64, 256]),
)
def test_forecast_match_plan_run_and_schedule_agree(
    conditions, gpus, samples, epochs, price, global_batch
):
    schedule = Schedule(samples=samples, epochs=epochs)
    offer = Offer(
        provider="p", instance_type="i", device="A100", count=gpus, price_usd_per_hour=price * gpus
    )
    device = find_device("A100")
    job = Job(
        schedule=schedule, global_batch=global_batch, precisions=("fp32",), conditions=conditions
    )
    match = rank(MODEL, [offer], {"A100": device}, job)
    match = (match.matches or match.missed)[0]
    e = match.forecast.execution
    per_device = offer.price_usd_per_hour / gpus  # price * gpus / gpus can differ in the last digit

    cluster = Cluster(device=device, devices_per_node=gpus, price_usd_per_device_hour=per_device)
    priced = replace(conditions, price_usd_per_device_hour=per_device)
    f = with_job(Forecaster(MODEL, Target(cluster)).forecast(e), MODEL, schedule, priced)
    setting = Problem(MODEL, cluster, schedule, conditions=conditions)
    outlook = Evaluator(setting, e).projection(Choice(execution=e), 0)
    grid = Grid.of([e])
    evaluation = evaluate(setting, grid)
    step_ms, state = f.step.total_ms, state_bytes(MODEL, e)
    ranked = job_seconds(setting, e, grid, evaluation, np.array([[step_ms]]))[0, 0]
    assert evaluation.step_ms[0] == pytest.approx(step_ms, rel=1e-12)
    assert step_ms == match.forecast.step.total_ms == outlook.step_ms
    told = replace(conditions, price_usd_per_device_hour=per_device)
    if conditions.checkpoint_s is None:  # `schedule` has no model, so it needs the checkpoint time
        told = replace(
            told, checkpoint_s=state / (conditions.storage_gb_per_s * 1e9), checkpoints=True
        )
        if not conditions.checkpoints:
            told = replace(told, checkpoint_s=None, checkpoints=False)
    asked = Question(
        schedule=schedule,
        conditions=told,
        micro_batch=e.micro_batch,
        accumulation=e.accumulation,
        nnodes=e.nnodes,
        nproc_per_node=e.nproc_per_node,
        step_time_s=step_ms / 1e3,
    )
    said = answer(asked)
    setup = Setup(task="t", execution=e)
    ladder = Ladder(
        start=setup,
        rungs=(),
        job=schedule,
        conditions=conditions,
        price_usd_per_hour=offer.price_usd_per_hour,
    )
    run = job_time(ladder, Attempt(setup=setup, foreseen=StepForecast(state_bytes=state)), step_ms)

    hours = {
        f.training_time.hours,
        match.mean_hours,
        said.time.hours,
        run.hours,
        outlook.job_s / 3600,
        ranked / 3600,
    }
    dollars = {f.cost_usd, match.mean_usd, said.cost_usd, run.usd, outlook.cost_usd}
    assert len(hours) == len(dollars) == 1
    assert (f.training_time_interval_s.low / 3600, f.cost_interval_usd) == (
        match.hours.low,
        match.usd,
    )


@settings(max_examples=200, derandomize=True)
@given(
    CONDITIONS, st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e-3, 10), st.floats(1, 1.5)
)
def test_more_work_never_takes_less_time(conditions, steps, more, step_s, slower):
    def total_s(count, seconds):
        return (
            training_of(Schedule(max_steps=count), Execution(nproc_per_node=8), conditions, 1e10)
            .time(seconds)
            .total_s
        )

    before = total_s(steps, step_s)
    assert before <= total_s(steps + more, step_s) * (1 + 1e-12)
    assert before <= total_s(steps, step_s * slower) * (1 + 1e-12)
