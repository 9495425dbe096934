"""Tests of sharing runs, importing them and the public journal, in a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entries import whole_entry
from trainpace.core.outcome import Interval, StepTime
from trainpace.forecast import public_runs
from trainpace.journal import Journal


@pytest.fixture
def run(tmp_path):
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "COLUMNS": "200",
        "USER": "jdoe",
    }
    environment.pop("TRAINPACE_JOURNAL", None)

    def command(*arguments, code=0):
        whole = [sys.executable, "-m", "trainpace", "journal", *map(str, arguments)]
        done = subprocess.run(
            whole, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    command.place = tmp_path / "data" / "trainpace" / "journal.db"
    return command


def add(place, *runs):
    place.parent.mkdir(parents=True, exist_ok=True)
    with Journal.open(str(place)) as journal:
        journal.add_many(runs)


def timed(ms, **fields):
    return whole_entry(
        step_time_ms=ms,
        step=StepTime(forward_ms=ms),
        interval_ms=Interval(low=0.9 * ms, high=1.1 * ms, coverage=0.9, basis="x"),
        **{"model": "resnet50", "device": "Tesla T4", "notes": "jdoe's cluster", **fields},
    )


def test_share_writes_a_file_only_with_output(run, tmp_path):
    add(
        run.place,
        timed(80.0),
        timed(1000.0, batch=16),
        timed(90.0, model="/home/jdoe/acme.py:make", kind="run"),
        timed(1.0, kind="import"),
    )
    shown = run("share").stdout
    assert not list(tmp_path.glob("*.json"))
    assert "3 runs" in shown
    assert "Nothing" in shown
    assert "Next: trainpace journal share --output mine.json" in shown
    assert "Next: trainpace journal share --model resnet50 --batch 8 --output mine.json" in (
        run("share", "--model", "resnet50", "--batch", "8").stdout
    )
    assert "1 run imported" in shown
    assert "jdoe" not in shown
    assert "acme" not in shown
    written = run("share", "--output", "mine.json").stdout
    text = (tmp_path / "mine.json").read_text()
    assert written.startswith(text)
    assert "3 runs" in written
    assert "Next:" not in written
    assert len(json.loads(text)["runs"]) == 3
    assert json.loads(run("share", "--json", "--output", "again.json").stdout) == json.loads(text)


def test_imported_journal_counts_as_own_runs(run):
    add(run.place, timed(80.0))
    run("export", "theirs.json")
    run("import", "theirs.json", "--journal", "mine.db")
    said = run("share", "--journal", "mine.db").stdout
    assert "1 run. " in said
    assert "not included" not in said
    helped = " ".join(run("share", "--help").stdout.split())
    assert "counts as yours" in helped


def test_share_selects_runs_by_id_or_filters(run):
    one, other = timed(80.0), timed(90.0, device="RTX 3090")
    add(run.place, one, other)
    for chosen in ((one.id,), ("--device", "T4")):
        assert [
            r["device"] for r in json.loads(run("share", "--json", *chosen).stdout)["runs"]
        ] == ["T4"]
    assert "filters" in run("share", one.id, "--device", "T4", code=2).stderr
    assert "no run" in run("share", "--model", "vgg", code=2).stderr


def test_import_of_a_shared_file_is_checked_and_reports_corrections(run, tmp_path):
    add(run.place, timed(80.0), timed(1000.0, batch=9), timed(0.001, batch=10))
    run("share", "--output", "theirs.json")
    mine = tmp_path / "mine.db"
    said = run("import", "theirs.json", "--journal", mine).stdout
    assert "1 new run in" in said
    assert "faster than the card's peak rate allows" in said
    assert "1 run is 3 times off" in said
    assert "--accept-odd" in said
    assert "resnet50 on T4, batch 9, fp32: 1,000 ms" in said
    assert "Forecasts of resnet50 will be corrected by them" in said
    assert "1 new run in" in run("import", "theirs.json", "--journal", mine, "--accept-odd").stdout
    again = json.loads(run("import", "theirs.json", "--journal", mine, "--json").stdout)["files"][0]
    assert (again["new"], again["already_there"]) == (0, 2)
    assert "0 new runs" in run("import", "theirs.json").stdout


def test_control_characters_in_shared_files_are_not_printed(run, tmp_path):
    add(run.place, timed(80.0))
    run("share", "--output", "x.json")
    data = json.loads((tmp_path / "x.json").read_text())
    data["runs"].append({**data["runs"][0], "\x1b]0;owned\x07\x9b31m": 1})
    data["runs"].append({**data["runs"][0], "outcome": "\x1b[2J"})
    Path(tmp_path / "x.json").write_text(json.dumps(data))
    done = run("import", "x.json", "--journal", tmp_path / "other.db")
    assert not set(done.stdout + done.stderr) & {"\x1b", "\x07", "\x9b"}


def test_public_journal_can_be_listed_filtered_shown_and_compared(run):
    first = public_runs()[0]
    said = run("list", "--public", "--limit", "1").stdout
    assert f"{len(public_runs()):,} runs" in said
    assert f"public:{first.id}" in said
    t4 = json.loads(
        run(
            "list",
            "--public",
            "--device",
            "T4",
            "--exact",
            "--mode",
            "train",
            "--batch",
            "16",
            "--json",
        ).stdout
    )
    assert t4
    assert {(r["device"], r["mode"], r["micro_batch"]) for r in t4} == {("T4", "train", 16)}
    assert {
        r["source"]
        for r in json.loads(run("list", "--public", "--source", "profet", "--json").stdout)
    } == {"PROFET: training on AWS instances"}
    assert (
        "No such runs in the public journal."
        in run("list", "--public", "--model", "no such").stdout
    )
    shown = run("show", f"public:{first.id}").stdout
    for word in (first.source, first.url, first.licence, first.device):
        assert word in " ".join(shown.split())
    assert json.loads(run("show", f"public:{first.id[:8]}", "--json").stdout)["id"] == first.id


def test_compare_public_run_with_own_run(run):
    public = next(
        r for r in public_runs() if r.mode == "train" and r.micro_batch and r.precision == "fp32"
    )
    add(
        run.place,
        timed(
            2 * public.step_time_ms,
            model=public.model,
            device=public.device,
            batch=public.micro_batch,
        ),
    )
    said = run("compare", f"public:{public.id}", "mine").stdout
    assert "B takes 100.0% more" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--public", "--sweeps"),
        ("list", "--public", "--outcome", "ok"),
        ("show", "public:zzz"),
        ("show", "public:"),
        ("score", "--public", "--model", "x"),
        ("compare", "public:0000000000", "mine"),
        ("share", "--output", "none/x.json"),
        ("share", "abc"),
        ("import", "x.json", "--format", "shared"),
        ("list", "--public", "--kind", "import"),
    ],
)
def test_misuse_exits_2_with_one_line(run, arguments):
    add(run.place, timed(80.0))
    said = run(*arguments, code=2).stderr
    assert said.startswith("trainpace: ")
    assert len(said.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.long  # tests/forecast/test_scoring.py computes the same score without the command
def test_public_score_matches_the_packaged_forecasts(run):
    done = run("score", "--public", "--json")
    score = json.loads(done.stdout)
    assert score["runs"] == score["in_fit"]["n"] + score["not_in_fit"]["n"] > 100
    packaged = {r.id: r for r in public_runs()}
    anew = [(r["forecast_ms"], packaged[r["id"]].forecast_ms) for r in score["rows"]]
    assert all(packaged_ms and abs(ms / packaged_ms - 1) < 1e-3 for ms, packaged_ms in anew)
