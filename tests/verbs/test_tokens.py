"""Tokens, global batches and tokens per second mean the same in all verbs."""

import pytest
from msgspec.structs import replace

import trainpace
from nouns import TOKENS, stacked, workload
from trainpace.cli.program import main
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import save
from trainpace.verbs.training import USUAL_BATCH, USUAL_GLOBAL_BATCH

EPOCH = 1_000 * TOKENS + 7
"""Tokens of a thousand samples plus an incomplete one."""
QUIET = {"no_journal": True, "evidence": "none"}
MACHINE = (
    '[[machine]]\nname = "lab"\ndevice = "A100 SXM 40GB"\ncount = 1\nprice_usd_per_hour = 2.0\n'
)


@pytest.fixture(scope="module")
def model():
    return replace(stacked(), sequence_length=TOKENS)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    path = tmp_path_factory.mktemp("machines") / "mine.toml"
    path.write_text(MACHINE)
    return str(path)


def test_verbs_agree_on_steps_for_a_token_budget(model, machines):
    (row,) = trainpace.forecast(model, gpu="A100", tokens=EPOCH, epochs=2, batch=10, **QUIET).rows
    plan = trainpace.plan(model, gpu="A100", tokens=EPOCH, epochs=2, batch=10, **QUIET)
    servers = trainpace.match(
        model,
        tokens=EPOCH,
        epochs=2,
        global_batch=10,
        machines=machines,
        only_machines=True,
        **QUIET,
    )
    answer = trainpace.schedule(tokens=EPOCH, sequence_length=TOKENS, epochs=2, global_batch=10)
    steps = {row.training_time.steps, servers.matches[0].time.steps, 2 * answer.epoch.steps}
    assert steps == {200}
    assert plan.now.job_s == pytest.approx(row.training_time.total_s)


@pytest.mark.parametrize("ask", [trainpace.forecast, trainpace.plan, trainpace.match])
def test_tokens_are_rejected_for_a_model_without_sequences(ask):
    where = {} if ask is trainpace.match else {"gpu": "A100"}
    with pytest.raises(TrainpaceError, match="`tokens`"):
        ask(workload(), tokens=EPOCH, epochs=1, **where, **QUIET)


@pytest.mark.parametrize("ask", [trainpace.forecast, trainpace.match])
def test_samples_and_tokens_together_are_rejected(model, ask):
    with pytest.raises(TrainpaceError, match="samples"):
        ask(model, tokens=EPOCH, samples=1000, epochs=1, **QUIET)


def test_forecast_and_plan_agree_on_a_global_batch(model):
    for more in ({}, {"batch": 4}, {"num_gpus": 4}, {"num_gpus": 4, "batch": 8}):
        (row,) = trainpace.forecast(model, gpu="A100", global_batch=128, **more, **QUIET).rows
        plan = trainpace.plan(model, gpu="A100", global_batch=128, max_steps=100, **more, **QUIET)
        assert row.execution == plan.start
        assert row.execution.global_batch == 128
        assert row.execution.micro_batch == more.get("batch", USUAL_BATCH)


def test_global_batch_determines_micro_batch_and_accumulation(model):
    (row,) = trainpace.forecast(model, gpu="A100", global_batch=24, num_gpus=2, **QUIET).rows
    assert (row.execution.micro_batch, row.execution.accumulation) == (12, 1)
    (row,) = trainpace.forecast(model, gpu="A100", global_batch=80, **QUIET).rows
    assert (row.execution.micro_batch, row.execution.accumulation) == (20, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": (8, 16)}, "single `batch`"),
        ({"batch": 8, "accumulate": 2}, "is not"),
        ({"batch": 7}, "not a multiple|cannot"),
        ({"num_gpus": 3}, "not a multiple|cannot"),
    ],
)
def test_unreachable_global_batch_is_rejected(model, options, said):
    with pytest.raises(TrainpaceError, match=said):
        trainpace.forecast(model, gpu="A100", global_batch=128, **options, **QUIET)


def test_verbs_agree_on_the_default_global_batch(model, machines):
    """The default is 32 per GPU, or 32 x 8 if servers of all sizes share a global batch."""
    (row,) = trainpace.forecast(model, gpu="A100", num_gpus=8, **QUIET).rows
    plan = trainpace.plan(model, gpu="A100", num_gpus=8, max_steps=100, **QUIET)
    servers = trainpace.match(
        model, samples=1000, epochs=1, machines=machines, only_machines=True, **QUIET
    )
    assert (
        row.execution.global_batch
        == plan.start.global_batch
        == servers.matches[0].forecast.execution.global_batch
        == USUAL_GLOBAL_BATCH
    )
    assert USUAL_GLOBAL_BATCH == 8 * USUAL_BATCH


def test_output_shows_tokens_per_second(model, machines, tmp_path, capsys):
    save(model, tmp_path / "w.json")
    work = ["--tokens", str(EPOCH), "--epochs", "1"]
    asks = {
        "forecast": ["--gpu", "A100", *work],
        "plan": ["--gpu", "A100", *work],
        "match": ["--machines", machines, "--only-machines", *work],
    }
    for verb, words in asks.items():
        with pytest.raises(SystemExit):
            main([verb, str(tmp_path / "w.json"), *words, "--no-journal", "--evidence", "none"])
        assert "tokens/s" in " ".join(capsys.readouterr().out.split()), verb


def test_match_states_that_its_global_batch_is_assumed(model, machines, tmp_path, capsys):
    save(model, tmp_path / "w.json")
    with pytest.raises(SystemExit):
        main(
            [
                "match",
                str(tmp_path / "w.json"),
                "--machines",
                machines,
                "--only-machines",
                "--tokens",
                str(EPOCH),
                "--epochs",
                "1",
                "--no-journal",
                "--evidence",
                "none",
            ]
        )
    first = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert "of 256 samples (assumed: 32 for each GPU of eight; --global-batch)" in first
