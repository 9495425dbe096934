"""Tests of the defaults in a project's trainpace.toml."""

import json
import os
import re
from pathlib import Path

import pytest

from hostile.commands import Ended, attempt, command
from trainpace.cli.program import _cli, main
from trainpace.verbs import SUMMARIES
from trainpace.verbs.defaults import ONLY_JOURNAL, REFUSED, SETTABLE, defaults_for
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.match import MatchRequest
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import fields_of
from trainpace.verbs.schedule import ScheduleRequest

REQUESTS = {
    "forecast": ForecastRequest,
    "match": MatchRequest,
    "plan": PlanRequest,
    "schedule": ScheduleRequest,
}
TASK = "open('ran', 'w')\ndef task(): raise RuntimeError\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a repository. The commands start in a subfolder."""
    monkeypatch.delenv("TRAINPACE_JOURNAL", raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "inside").mkdir()
    (tmp_path / "evil.py").write_text(TASK)
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path


@pytest.fixture
def ask(project, capsys):
    """Write the defaults file and return a command's exit code, output and errors."""

    def asked(text, *words, name="trainpace.toml"):
        (project / name).write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return asked


def rows(out):
    return json.loads(out)["rows"]


FORECAST = ("forecast", "resnet18", "--json")


def test_defaults_are_applied_and_reported_in_one_line(ask):
    code, out, err = ask('gpu = ["T4", "A100"]\nbatch = 8\n', *FORECAST)
    assert code == 0
    assert [(row["gpu"][:4], row["batch"]) for row in rows(out)] == [("T4", 8), ("A100", 8)]
    assert err.splitlines()[0] == "Defaults from ../trainpace.toml: --gpu T4 --gpu A100 --batch 8"


def test_command_line_overrides_defaults(ask):
    _, out, err = ask('gpu = ["T4", "A100"]\nbatch = 8\n', *FORECAST, "--gpu", "V100")
    assert {row["batch"] for row in rows(out)} == {8}
    assert len(rows(out)) == 1
    assert "V100" in rows(out)[0]["gpu"]
    assert err.splitlines()[0] == "Defaults from ../trainpace.toml: --batch 8"


def test_unused_defaults_are_not_reported(ask):
    assert (
        "Defaults"
        not in ask(
            'gpu = "T4"\n',
            "schedule",
            "--samples",
            "9",
            "--epochs",
            "1",
            "--micro-batch",
            "1",
            "--step-time",
            "1s",
        )[2]
    )


def test_conflicting_command_line_option_drops_a_default(ask):
    run = ("schedule", "--micro-batch", "8", "--step-time", "10ms", "--json")
    assert json.loads(ask("samples = 800\nepochs = 3\n", *run)[1])["time"]["steps"] == 300
    code, out, err = ask("samples = 800\nepochs = 3\n", *run, "--max-steps", "7")
    assert (code, json.loads(out)["time"]["steps"]) == (0, 7)
    assert "--epochs" not in err


def test_tokens_and_epochs_from_the_file_do_not_conflict(ask):
    code, _out, err = ask(
        'tokens = "1M"\nepochs = 2\nsequence_length = 128\n', *FORECAST[:1], "gpt2", "--json"
    )
    assert code == 2  # the built-in gpt2 has a fixed length; the options themselves do not conflict
    assert "cannot be combined" not in err
    assert "needs" not in err


def test_command_line_tokens_drop_the_samples_default(ask):
    _, _, err = ask("samples = 100\nepochs = 2\n", *FORECAST, "--gpu", "T4", "--tokens", "1M")
    assert "--epochs 2" in err
    assert "--samples 100" not in err


def test_default_applies_only_with_the_options_it_needs(ask):
    code, _, err = ask("epochs = 30\nprice = 2.5\n", *FORECAST, "--gpu", "T4")
    assert (code, err) == (0, "")
    assert (
        "--epochs 30 --price 2.5"
        in ask("epochs = 30\nprice = 2.5\n", *FORECAST, "--gpu", "T4", "--samples", "9000")[2]
    )


def test_a_required_option_may_come_from_the_file(ask):
    code, _, err = ask(
        'samples = "50k"\nepochs = 1\n', "match", "resnet18", "--gpu", "T4", "--json"
    )
    assert (code, err.splitlines()[0]) == (
        0,
        "Defaults from ../trainpace.toml: --samples 50k --epochs 1",
    )
    code, _, err = ask("epochs = 1\n", "match", "resnet18")
    assert (code, "--samples or --tokens" in err) == (2, True)


def test_verb_table_overrides_top_level_defaults(ask):
    text = 'gpu = "T4"\n[forecast]\ngpu = "V100"\n[plan]\nnum_gpus = 4\n'
    assert "--gpu V100" in ask(text, *FORECAST)[2]
    assert ask(text, "offers", "--json")[2] == "Defaults from ../trainpace.toml: --gpu T4\n"


def test_pyproject_table_is_read_after_trainpace_toml(ask, project):
    text = '[project]\nname = "x"\n[tool.trainpace]\ngpu = "T4"\n'
    assert (
        ask(text, *FORECAST, name="pyproject.toml")[2]
        == "Defaults from ../pyproject.toml, [tool.trainpace]: --gpu T4\n"
    )
    assert "--gpu V100" in ask('gpu = "V100"\n', *FORECAST)[2], "trainpace.toml comes first"
    (project / "trainpace.toml").unlink()
    assert ask("= no TOML, and no business of ours", *FORECAST, name="pyproject.toml")[2] == ""


def test_file_search_stops_at_the_repository(ask, project):
    (project / "inside" / ".git").write_text("gitdir: elsewhere\n")
    assert ask('gpu = "T4"\n', *FORECAST)[2] == ""


def test_file_search_without_a_repository_stays_in_the_current_folder(ask, project):
    (project / ".git").rmdir()
    assert ask('gpu = "T4"\n', *FORECAST)[2] == ""


def test_journal_path_is_relative_to_the_defaults_file(ask, project, monkeypatch):
    text = 'journal = "team.db"\n'
    assert str(project / "team.db") in os.path.realpath(
        ask(text, "journal", "path")[2].split()[-1].rstrip(".")
    )
    assert ask(text, *FORECAST, "--gpu", "T4")[2] == "", (
        "a journal that is not there yet has no runs to consult"
    )
    monkeypatch.setenv("TRAINPACE_JOURNAL", str(project / "own.db"))
    assert "own.db" in "".join(ask(text, "journal", "path")[1:]), "the user's own word comes first"


def test_defaults_do_not_filter_the_journal(ask):
    code, _, err = ask(
        'precision = "fp32"\nbatch = 8\n', "journal", "list", "--public", "--limit", "1"
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("text", "verb", "part"),
    [
        ("epoch = 3", "forecast", "unknown key 'epoch'. Nearest: epochs."),
        ("[forcast]\nbatch = 3", "forecast", "unknown table 'forcast'. Nearest: forecast"),
        ("[forecast]\ncolor = 3", "forecast", "unknown key 'color'."),
        ("[plan]\nbatches = 3", "forecast", "unknown key 'batches'. Nearest: batch"),
        ("gpu = 3090", "forecast", "--gpu takes text in quotation marks."),
        ("batch = [[1]]", "forecast", "--batch takes plain values."),
        ("batch = true", "forecast", "is not a value of --batch"),
        ("batch = 'many'", "forecast", "../trainpace.toml, batch: 'many' is not a"),
        (
            "gpu = ['T4', 'A100']",
            "plan",
            "takes one --gpu, not a list. Set one for plan under [plan].",
        ),
        ("gpu = [" + "'T4'," * 101 + "]", "forecast", "has more than 100 values"),
        ("batch = ", "forecast", "is not valid TOML"),
        ("model = 'evil.py:task'", "forecast", "must not set"),
        ("[forecast]\nmodel = '../evil.py:task'", "forecast", "must not set"),
        ("[run]\ntask = 'evil.py:task'", "forecast", "must not set"),
        ("[watch]\ncommand = 'rm -r .'", "forecast", "must not set"),
        ("[validate]\nrun_code = true", "forecast", "must not set"),
        ("html = '../.bashrc'", "forecast", "must not set"),
        ("[serve]\nhost = '0.0.0.0'", "serve", "unknown key 'host'"),
        ("journal = 'postgresql://u:p@evil.example/db'", "journal", "cannot name a server"),
        ("journal = '../../x.db'", "journal", "is outside the folder of ../trainpace.toml"),
        ("journal = '/etc/passwd'", "journal", "is outside the folder"),
        ("hardware = '/etc/shadow'", "forecast", "is outside the folder"),
        ('journal = "a\\u0000b"', "journal", "is not a path"),
    ],
)
def test_invalid_file_exits_2_with_one_line(ask, project, text, verb, part):
    words = {"journal": ("journal", "list"), "serve": ("serve",)}.get(verb, (verb, "resnet18"))
    code, out, err = ask(text + "\n", *words)
    assert (code, out, part in err, err.count("\n")) == (2, "", True, 1), err
    assert not list(project.rglob("ran"))


def test_symlink_out_of_the_project_is_rejected(ask, project, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "devices.toml"
    secret.write_text("secret = 1\n")
    (project / "devices.toml").symlink_to(secret)
    code, _, err = ask('hardware = "devices.toml"\n', *FORECAST)
    assert (code, "is outside" in err, "secret" in err) == (2, True, False)


def test_named_pipe_is_rejected_without_blocking(project):
    os.mkfifo(project / "trainpace.toml")
    ended: Ended = attempt(command("forecast", "resnet18"), project / "evil.py")
    assert ended.problem is None
    assert "a device or a pipe" in ended.said


def test_help_works_with_a_broken_file(ask):
    assert ask("= broken\n", "forecast", "--help")[0] == 0


def test_error_caused_by_a_default_names_the_file(ask):
    code, _, err = ask("nodes = 4\n", *FORECAST, "--gpu", "T4")
    assert (code, err.count("Defaults from ../trainpace.toml: --nodes 4")) == (2, 2)


def every_option():
    import click

    for verb in SUMMARIES:
        made = _cli.get_command(click.Context(_cli), verb)
        for one in made.commands.values() if isinstance(made, click.Group) else [made]:
            yield from ((verb, option) for option in one.params if isinstance(option, click.Option))


def test_settable_names_are_existing_options():
    options = {option.name for _, option in every_option()}
    assert options >= SETTABLE
    assert not SETTABLE & REFUSED


def test_code_paths_output_files_and_flags_are_not_settable():
    """The check reads the options themselves, not the list of settable names."""
    for verb, option in every_option():
        if option.name in SETTABLE and verb not in ONLY_JOURNAL:
            assert not option.is_flag, (verb, option.name)
            assert "FILE.py" not in f"{option.metavar} {option.help}", (verb, option.name)
            assert not re.match("Save|Write|Keep|Where to (write|record|put)", option.help or ""), (
                verb,
                option.name,
            )


PAGE = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text()


def test_documentation_lists_the_settable_options():
    assert set(re.findall(r"`(\w+)`", PAGE.rpartition("|---|---|")[2])) == SETTABLE


def test_documentation_example_works(ask):
    example = re.search("```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    assert (
        "--gpu A100 --gpu H100 --samples 1.28M --epochs 90 --precision amp_bf16"
        in ask(example, *FORECAST)[2]
    )
    code, _, err = ask(example, "plan", "resnet18", "--json")
    assert (code, "--gpu A100 --samples 1.28M" in err, "--num-gpus 4" in err) == (0, True, True)


@pytest.mark.parametrize("verb", ["forecast", "match", "plan", "schedule"])
def test_tokens_replace_samples_and_keep_epochs_in_every_verb(verb, project):
    (project / "trainpace.toml").write_text('samples = "1.28M"\nepochs = 90\nbatch = 32\n')
    fields = fields_of(REQUESTS[verb])
    given = {"tokens": 10**9} if "tokens" in fields else {}
    values = defaults_for((verb,), fields, given).values
    assert values["epochs"] == 90
    assert ("samples" in values) is not bool(given)
