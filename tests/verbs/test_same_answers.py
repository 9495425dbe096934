"""Forecast, plan, match and schedule share their defaults and agree on their numbers."""

import pytest
from msgspec.structs import replace

import trainpace
from nouns import stacked
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.verbs.training import default_setup
from trainpace.web import whatif
from trainpace.workload import Workload, load_workload

SAMPLES, EPOCHS = 50_000, 3
CARDS = ("RTX 3090", "A100 SXM 40GB", "V100 SXM2 16GB")
"""Cards with and without TF32."""
QUIET = {"no_journal": True, "evidence": "none"}
MACHINES = "".join(
    f'[[machine]]\nname = "{card}"\ndevice = "{card}"\ncount = 1\nprice_usd_per_hour = 2.0\n'
    for card in CARDS
)


@pytest.fixture(scope="module")
def model() -> Workload:
    return load_workload("resnet18", ("fp32", "amp"))


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    path = tmp_path_factory.mktemp("machines") / "mine.toml"
    path.write_text(MACHINES)
    return str(path)


def forecasts(model, gpu, **options):
    (row,) = trainpace.forecast(
        model, gpu=gpu, samples=SAMPLES, epochs=EPOCHS, **QUIET, **options
    ).rows
    return row


def planned(model, gpu, **options):
    return trainpace.plan(model, gpu=gpu, samples=SAMPLES, epochs=EPOCHS, **QUIET, **options)


def matched(model, machines, **options):
    found = trainpace.match(
        model,
        samples=SAMPLES,
        epochs=EPOCHS,
        machines=machines,
        only_machines=True,
        **QUIET,
        **options,
    )
    return {m.offer.device: m for m in found.matches}


@pytest.fixture(scope="module")
def servers(model, machines):
    return matched(model, machines, global_batch=32)


@pytest.fixture(scope="module", params=CARDS)
def asked(request, model, servers):
    """Return a card, its server, and a forecast and a plan with the server's execution."""
    server = servers[request.param]
    e = server.forecast.execution
    same = {"batch": e.micro_batch, "accumulate": e.accumulation, "price": 2.0}
    return (
        request.param,
        server,
        forecasts(model, request.param, **same),
        planned(model, request.param, **same),
    )


def test_default_batch_is_the_same_in_forecast_and_plan(model):
    assert (
        forecasts(model, "A100").execution.micro_batch
        == planned(model, "A100").start.micro_batch
        == 32
    )


def test_verbs_agree_on_precision(asked):
    card, server, row, plan = asked
    expected = "fp32" if card.startswith("V100") else "torch_fp32"
    assert {server.forecast.execution.precision, row.execution.precision, plan.start.precision} == {
        expected
    }


def test_verbs_agree_on_execution(asked):
    _, server, row, plan = asked
    assert server.forecast.execution == row.execution == plan.start


def test_verbs_agree_on_step_time(asked):
    _, server, row, plan = asked
    assert server.forecast.step.total_ms == pytest.approx(row.step.total_ms)
    assert plan.now.step_ms == pytest.approx(row.step.total_ms)


def test_verbs_agree_on_intervals(asked):
    _, server, row, plan = asked
    assert server.forecast.step_time_interval_ms == row.step_time_interval_ms
    ends = row.training_time_interval_s
    assert (plan.now.job_low_s, plan.now.job_high_s) == pytest.approx((ends.low, ends.high))
    assert (3600 * server.hours.low, 3600 * server.hours.high) == pytest.approx(
        (ends.low, ends.high)
    )


def test_match_and_forecast_agree_on_memory(asked):
    _, server, row, _ = asked
    assert server.forecast.memory == row.memory


def test_verbs_agree_on_number_of_steps(asked):
    _, server, row, _ = asked
    e = row.execution
    answer = trainpace.schedule(
        samples=SAMPLES, epochs=EPOCHS, micro_batch=e.micro_batch, accumulate=e.accumulation
    )
    assert server.time.steps == row.training_time.steps == 3 * answer.epoch.steps


def test_verbs_agree_on_training_time(asked):
    _, server, row, plan = asked
    assert server.time.total_s == pytest.approx(row.training_time.total_s)
    assert plan.now.job_s == pytest.approx(row.training_time.total_s)


def test_forecast_and_schedule_agree_on_stepping_time(asked):
    _, _, row, _ = asked
    e = row.execution
    answer = trainpace.schedule(
        samples=SAMPLES,
        epochs=EPOCHS,
        micro_batch=e.micro_batch,
        accumulate=e.accumulation,
        step_time=row.step.total_ms / 1e3,
    )
    assert answer.time.stepping_s == pytest.approx(row.training_time.stepping_s)


def test_verbs_agree_on_cost(asked):
    _, server, row, plan = asked
    assert server.mean_usd == pytest.approx(row.cost_usd)
    assert plan.now.cost_usd == pytest.approx(row.cost_usd)


@pytest.fixture(scope="module")
def configured() -> Workload:
    """A transformer that names no precision, such as one of a configuration without a dtype."""
    return replace(stacked(), model="transformers:little.json")


def test_all_verbs_have_the_same_default_setup(configured, machines):
    row, plan = forecasts(configured, "A100"), planned(configured, "A100")
    assert row.execution.precision == "bf16"
    assert row.execution.micro_batch == 32
    assert plan.start == row.execution
    assert plan.now.step_ms == pytest.approx(row.step.total_ms)
    assert plan.now.fit_probability == pytest.approx(row.fit_probability)
    there = matched(configured, machines, global_batch=32)
    assert {name: m.forecast.execution.precision for name, m in there.items()} == {
        "RTX 3090": "bf16",
        "A100 SXM 40GB": "bf16",
        "V100 SXM2 16GB": "fp16",
    }
    page = whatif.run(
        whatif.WhatIfRequest(gpu="A100"),
        whatif.forecaster_of(configured),
        find_device("A100"),
        None,
    )
    assert page.forecast.step == row.step
    assert page.request.batch == row.execution.micro_batch
    assert page.request.precision == row.execution.precision
    assert page.request.samples * stacked().sequence_length <= whatif.USUAL_TOKENS


def test_default_precision_does_not_depend_on_the_batch(configured):
    for gpu, precision in (("A100", "bf16"), ("T4", "fp16")):
        rows = [forecasts(configured, gpu, **more) for more in ({}, {"batch": 4})]
        assert {row.execution.precision for row in rows} == {precision}


@pytest.mark.parametrize("same_global_batch", [False, True])
def test_default_setup_is_the_largest_batch_that_fits(configured, same_global_batch):
    device = find_device("A100")
    usual = Execution(micro_batch=32, precision="bf16", optimizer=configured.optimizer)
    for gib in (80.0, 2.0, 1.5, 1.2, 1.0, 0.9, 0.8):
        small = replace(device, memory_gib=replace(device.memory_gib, value=gib))
        forecaster = Forecaster(configured, Target(Cluster(device=small)))
        e = default_setup(forecaster, usual, True, same_global_batch)
        f = forecaster.forecast(e)
        assert f.fits or (e.micro_batch, e.activation_checkpointing) == (1, "full")
        if same_global_batch:
            assert e.global_batch == usual.global_batch
        elif f.fits:
            assert e.micro_batch == min(32, forecaster.largest_micro_batch(e))
        plain = replace(e, activation_checkpointing="none", micro_batch=1)
        assert (e.activation_checkpointing == "full") == (not forecaster.forecast(plain).fits)


def test_forecast_and_match_agree_on_speed_ratio_of_two_cards(model, servers):
    """Regression: two verbs gave different speed ratios (435 to 423 samples/s, and 1.9)."""
    rate = {card: forecasts(model, card, batch=32).samples_per_second for card in CARDS}
    steps = {card: m.forecast.step.total_ms for card, m in servers.items()}
    assert rate["A100 SXM 40GB"] / rate["RTX 3090"] == pytest.approx(
        steps["RTX 3090"] / steps["A100 SXM 40GB"], rel=0.05
    )
    assert rate["A100 SXM 40GB"] > rate["RTX 3090"]


def test_match_and_forecast_agree_on_an_explicit_precision(model, machines):
    server = matched(model, machines, global_batch=32, precision="amp_fp16")["V100 SXM2 16GB"]
    e = server.forecast.execution
    row = forecasts(
        model,
        "V100 SXM2 16GB",
        batch=e.micro_batch,
        accumulate=e.accumulation,
        precision="amp_fp16",
    )
    assert server.forecast.step == row.step


def test_all_verbs_use_the_settings_of_a_workload(model, machines):
    own = replace(
        model,
        settings={
            "micro_batch": 16,
            "accumulation": 2,
            "precision": "amp_bf16",
            "clip_gradients": True,
        },
    )
    expected = Execution(
        micro_batch=16,
        accumulation=2,
        precision="amp_bf16",
        clip_gradients=True,
        optimizer=model.optimizer,
    )
    row, plan = forecasts(own, "A100"), planned(own, "A100")
    assert row.execution == plan.start == expected
    assert plan.now.step_ms == pytest.approx(row.step.total_ms)
    there = matched(own, machines)["A100 SXM 40GB"].forecast.execution
    assert (there.global_batch, there.precision, there.clip_gradients) == (32, "amp_bf16", True)


def test_first_paragraph_states_default_precision_and_optimizer(capsys):
    from trainpace.cli.program import main

    job = ["--samples", "50000", "--epochs", "1"]
    asks = {
        "forecast": ["--gpu", "A100"],
        "plan": ["--gpu", "A100", *job],
        "match": ["--gpu", "A100 SXM 40GB", *job],
    }
    for verb, words in asks.items():
        with pytest.raises(SystemExit):
            main([verb, "resnet18", *words, "--no-journal", "--evidence", "none"])
        said = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
        assert "torch_fp32" in said, verb
        assert "sgd_momentum (assumed)" in said, verb
    assert find_device("A100").torch_precision == "torch_fp32"
