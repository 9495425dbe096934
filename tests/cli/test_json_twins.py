"""Every command has a versioned JSON answer that agrees with its table."""

import contextlib
import importlib
import io
import json

import click
import pytest

from nouns import workload
from trainpace.cli import main
from trainpace.core.records import save


def commands(group=None, name=()):
    group = group or importlib.import_module("trainpace.cli.program")._cli
    for verb in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), verb)
        if isinstance(command, click.Group):
            yield from commands(command, (*name, verb))
        else:
            yield (*name, verb), command


@pytest.mark.parametrize(
    "command", [pytest.param(c, id=" ".join(n)) for n, c in commands() if n[-1] != "serve"]
)
def test_every_verb_has_a_json_option(command):
    assert any("--json" in option.opts for option in command.params)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twins")
    save(workload(), folder / "model.json")
    (folder / "runs.csv").write_text(
        "model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms\nresnet50,T4,fp32,32,300\n"
    )
    return folder


def trainpace(place, *arguments):
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()) as out,
        pytest.raises(SystemExit) as ended,
    ):
        main([*arguments])
    assert ended.value.code in (0, 1)
    return out.getvalue()


JOB = ("--samples", "100000", "--epochs", "2")
VERBS = [
    ("forecast", "model.json", "--gpu", "T4", "--batch", "8"),
    ("match", "model.json", *JOB, "--top", "2"),
    ("plan", "model.json", "--gpu", "T4", *JOB),
    ("offers", "--gpu", "H100"),
    ("gpus", "T4"),
    ("schedule", *JOB, "--global-batch", "32", "--step-time", "100ms"),
    ("calibrate", "--detect-only"),
    ("journal", "import", "runs.csv", "--journal", "j.db"),
    ("journal", "list", "--journal", "j.db"),
    ("journal", "score", "--journal", "j.db"),
    ("journal", "path", "--journal", "j.db"),
    ("journal", "export", "out.json", "--journal", "j.db"),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_json_answers_have_a_schema_version(place, verb):
    said = json.loads(trainpace(place, *verb, "--json"))
    for one in said if isinstance(said, list) else [said]:
        assert one["record"]
        assert isinstance(one["schema_version"], int)


def test_forecast_json_and_table_agree(place):
    verb = ("forecast", "model.json", "--gpu", "T4", "--gpu", "A100", "--batch", "8")
    rows = json.loads(trainpace(place, *verb, "--json"))["rows"]
    table = trainpace(place, *verb)
    for row in rows:
        line = next(line for line in table.splitlines() if line.startswith(row["gpu"]))
        for value in (
            row["step_time_ms"],
            row["step_time_ms_low"],
            row["samples_per_second"],
            row["peak_memory_gib"],
        ):
            assert f"{value:,.3g}" in line or f"{value:,.0f}" in line
