"""Forecast, plan, match and schedule share their defaults and agree on their numbers."""

import datetime
import html
import itertools
import re
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import trainpace
from nouns import stacked, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import forecast_row
from trainpace.forecast import Forecaster, Target, needed_gib
from trainpace.report import show
from trainpace.report.answers import sections_of, shared_page
from trainpace.report.phrases import duration, usd
from trainpace.verbs import forecast, match, plan
from trainpace.verbs.forecast import ForecastRequest, Forecasts
from trainpace.verbs.match import FORECAST_COLUMNS, Matches, MatchRequest
from trainpace.verbs.plan import Planned, PlanRequest
from trainpace.verbs.request import Silent, request_of
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


# ---- questions to every verb

PRICE = 2.0
LENGTH = {"samples": SAMPLES, "epochs": EPOCHS}
STEPS = {"samples": SAMPLES, "max_steps": 700}
TOKENS = {"tokens": 10_000_000, "epochs": 2}


class Ask(NamedTuple):
    """A question that every verb can answer. `options` are those of all verbs."""

    model: str
    gpu: str
    options: dict[str, Any]
    num_gpus: int = 1
    nodes: int = 1


QUESTIONS = (
    *(Ask("resnet18", card, LENGTH) for card in CARDS),
    Ask("vector", "H100", LENGTH | {"precision": "amp_bf16"}),
    Ask("vector", "T4", STEPS | {"precision": "amp_fp16", "startup": "2min"}),
    Ask("blocks", "A100", TOKENS | {"precision": "bf16"}),
    Ask("blocks", "H100", LENGTH | {"precision": "bf16", "compile": True}, 4),
    Ask("own", "A100", LENGTH, 2, 2),
    Ask("one", "RTX 4090", LENGTH, 2),
    Ask("large", "H100", STEPS | {"precision": "bf16", "checkpointing": "full"}, 8),
    *(
        Ask(model, gpu, LENGTH | options, *size)
        for (model, gpu, size), options in zip(
            itertools.product(
                ("vector", "blocks", "own"),
                ("T4", "RTX 3090", "A100", "V100 SXM2 16GB", "B200"),
                ((1,), (4, 2)),
            ),
            itertools.cycle(
                (
                    {"startup": "5min", "evaluation_samples": 500},
                    {"checkpoint_every": "10min", "storage": 0.5},
                    {"mtbf": "1000h", "step_variation": 0.03},
                    {"data_gb": 150, "download": 0.5},
                    {"sample_bytes": 100_000, "storage": 2},
                    {"software": "torch1.13"},
                    {"optimizer_implementation": "fused", "channels_last": True},
                )
            ),
        )
    ),
)
FAST = 8
"""Questions of the fast tests. Together, they are about every kind of model and length."""


class Answers(NamedTuple):
    """Answers of the verbs to one question, with the execution that `match` chose."""

    ask: Ask
    model: Workload
    forecasts: Forecasts
    matches: Matches
    plan: Planned

    @property
    def row(self):
        return self.forecasts.rows[0]

    @property
    def server(self):
        (server,) = (m for m in self.matches.ranking.matches if m.nodes == self.ask.nodes)
        return server


@pytest.fixture(scope="module")
def models(model):
    blocks = stacked()
    own = {"micro_batch": 16, "accumulation": 2, "precision": "bf16", "clip_gradients": True}
    return {
        "resnet18": model,
        "vector": workload(),
        "blocks": blocks,
        "own": replace(blocks, settings=own),
        "one": replace(workload(), traced_batches=(48,)),
        "large": stacked(hidden=8192),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ask, marks=[] if i < FAST else pytest.mark.slow)
        for i, ask in enumerate(QUESTIONS)
    ],
    ids=lambda ask: f"{ask.model}-{ask.gpu}-{ask.nodes}x{ask.num_gpus}",
)
def asked(request, models, tmp_path_factory):
    ask = request.param
    path = tmp_path_factory.mktemp("lab") / "lab.toml"
    path.write_text(
        f'[[machine]]\nname = "lab"\ndevice = "{ask.gpu}"\ncount = {ask.num_gpus}\n'
        f"nodes = {ask.nodes}\nnetwork_gb_per_s = 25\nprice = {PRICE * ask.num_gpus}\n"
    )
    own, options = models[ask.model], dict(ask.options)
    machines = {"machines": str(path), "only_machines": True, "max_nodes": ask.nodes}
    precision = {"precision": (options["precision"],)} if "precision" in options else {}
    checkpointing = {"checkpointing": True} if "checkpointing" in options else {}
    batch = 48 if ask.model == "one" else 16
    matches = run_of(
        match,
        model=own,
        global_batch=batch * ask.num_gpus * ask.nodes,
        **options | machines | precision | checkpointing,
    )
    (server,) = (m for m in matches.ranking.matches if m.nodes == ask.nodes)
    e = server.forecast.execution
    options |= {"batch": e.micro_batch, "accumulate": e.accumulation, "zero": e.zero_stage or None}
    options |= {"gpu": ask.gpu, "num_gpus": ask.num_gpus, "price": PRICE}
    options |= {"nodes": ask.nodes, "network": 25.0} if ask.nodes > 1 else {}
    return Answers(
        ask,
        own,
        run_of(forecast, model=own, **options | {"shard_size": e.shard_size}),
        matches,
        run_of(plan, model=own, **options),
    )


def run_of(verb, **options):
    kind = {forecast: ForecastRequest, match: MatchRequest, plan: PlanRequest}[verb]
    given = {name: value for name, value in options.items() if value is not None}
    return verb.run(request_of(kind, QUIET | given), Silent())


def test_verbs_agree_on_execution(asked):
    assert asked.server.forecast.execution == asked.row.execution == asked.plan.plan.start


def test_verbs_agree_on_step_and_its_interval(asked):
    row, server, now = asked.row, asked.server, asked.plan.plan.now
    assert server.forecast.step == row.step
    assert server.forecast.step_time_interval_ms == row.step_time_interval_ms
    waits_ms = 1e3 * row.training_time.data_wait_s / row.training_time.steps
    assert now.step_ms == pytest.approx(row.step.total_ms + waits_ms)


def test_verbs_agree_on_training_time_and_its_interval(asked):
    row, server, now = asked.row, asked.server, asked.plan.plan.now
    ends = row.training_time_interval_s
    assert server.time.steps == row.training_time.steps
    assert (server.time.total_s, now.job_s) == pytest.approx((row.training_time.total_s,) * 2)
    assert (now.job_low_s, now.job_high_s) == pytest.approx((ends.low, ends.high))
    assert (3600 * server.hours.low, 3600 * server.hours.high) == pytest.approx(
        (ends.low, ends.high)
    )


def test_verbs_agree_on_cost(asked):
    row, now = asked.row, asked.plan.plan.now
    assert (asked.server.mean_usd, now.cost_usd) == pytest.approx((row.cost_usd,) * 2)


def test_verbs_agree_on_memory_and_fit(asked):
    row, plan = asked.row, asked.plan.plan
    assert asked.server.forecast.memory == row.memory
    assert plan.now.needed_gib == pytest.approx(float(needed_gib(row.memory)))
    assert plan.start_fits
    assert row.fits is not False


def test_schedule_agrees_on_steps_and_their_time(asked):
    row, length = asked.row, {**asked.ask.options}
    e, sequence = row.execution, {}
    if "tokens" in length:
        sequence = {"sequence_length": asked.model.sequence_length}
    answer = trainpace.schedule(
        **{n: length[n] for n in ("samples", "tokens", "epochs", "max_steps") if n in length},
        **sequence,
        micro_batch=e.micro_batch,
        accumulate=e.accumulation,
        nnodes=e.nnodes,
        nproc_per_node=e.nproc_per_node,
        step_time=row.step.total_ms / 1e3,
    )
    assert answer.time.steps == row.training_time.steps
    if not length.get("step_variation"):
        assert answer.time.stepping_s == pytest.approx(row.training_time.stepping_s)


def test_whatif_page_agrees(asked):
    ask, row = asked.ask, asked.row
    if ask.options.keys() - {"precision", "checkpointing", *LENGTH} or "epochs" not in ask.options:
        pytest.skip("the page has no such option")
    e = row.execution
    question = whatif.WhatIfRequest(
        gpus=ask.num_gpus,
        nodes=ask.nodes,
        network=25.0,
        batch=e.micro_batch,
        accumulate=e.accumulation,
        precision=e.precision,
        zero=e.zero_stage,
        checkpointing=e.activation_checkpointing,
        epochs=EPOCHS,
        samples=SAMPLES,
        price=PRICE,
    )
    device, forecaster = find_device(ask.gpu), whatif.forecaster_of(asked.model)
    there = whatif.run(question, forecaster, device, None).forecast
    assert there.step.total_ms == pytest.approx(row.step.total_ms)
    assert there.training_time.total_s == pytest.approx(row.training_time.total_s)
    assert there.cost_usd == pytest.approx(row.cost_usd)
    assert there.memory == row.memory


def test_json_agrees(asked):
    row = forecast_row(asked.row)
    (there,) = (
        one
        for one in asked.matches.as_json(datetime.date.today())["rows"]
        if one["nodes"] == asked.ask.nodes
    )
    now = asked.plan.as_json()["now"]
    for name in FORECAST_COLUMNS:
        assert there[name] == row[name], name
    assert there["hours"] * 3600 == pytest.approx(now["job_s"])
    assert there["usd"] == pytest.approx(now["cost_usd"]) == pytest.approx(row["cost_usd"])


def test_text_and_shared_page_agree(asked, capsys):
    """Every form of every answer shows the same time and cost, in the same format."""
    row = asked.row
    time, cost = duration(row.training_time.total_s), usd(row.cost_usd)
    for answer in (asked.forecasts, asked.matches, asked.plan):
        show([*sections_of(answer)], details=True)
        text = capsys.readouterr().out
        page = html.unescape(re.sub(r"<[^>]*>", " ", str(shared_page(answer, "Shared"))))
        for form in (text, page):
            assert " ".join(time.split()) in " ".join(form.split()), type(answer)
            assert cost in form, type(answer)


# ---- defaults


def test_default_batch_is_the_same_in_forecast_and_plan(model):
    assert (
        forecasts(model, "A100").execution.micro_batch
        == planned(model, "A100").start.micro_batch
        == 32
    )


@pytest.fixture(scope="module")
def configured() -> Workload:
    """A transformer that names no precision, such as one of a configuration without a dtype."""
    forms = stacked().forms
    return replace(
        stacked(), model="transformers:little.json", forms=forms | {"amp": forms["half"]}
    )


def test_all_verbs_have_the_same_default_setup(configured, machines):
    row, plan = forecasts(configured, "A100"), planned(configured, "A100")
    assert row.execution.precision == "amp_bf16"
    assert row.execution.micro_batch == 32
    assert plan.start == row.execution
    assert plan.now.step_ms == pytest.approx(row.step.total_ms)
    assert plan.now.fit_probability == pytest.approx(row.fit_probability)
    there = matched(configured, machines, global_batch=32)
    assert {name: m.forecast.execution.precision for name, m in there.items()} == {
        "RTX 3090": "amp_bf16",
        "A100 SXM 40GB": "amp_bf16",
        "V100 SXM2 16GB": "amp_fp16",
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
    for gpu, precision in (("A100", "amp_bf16"), ("T4", "amp_fp16")):
        rows = [forecasts(configured, gpu, **more) for more in ({}, {"batch": 4})]
        assert {row.execution.precision for row in rows} == {precision}


@pytest.mark.parametrize("same_global_batch", [False, True])
def test_default_setup_is_the_largest_batch_that_fits(configured, same_global_batch):
    device = find_device("A100")
    usual = Execution(micro_batch=32, precision="amp_bf16", optimizer=configured.optimizer)
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
