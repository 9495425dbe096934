"""Tests of `trainpace journal` in a real process."""

import json
import os
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from entries import entry, sweep, whole_entry
from nouns import measurement
from trainpace.core.outcome import Interval
from trainpace.core.records import from_json, to_jsonable
from trainpace.journal import Entry, Journal


@pytest.fixture
def run(tmp_path):
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "COLUMNS": "200"}
    environment.pop("TRAINPACE_JOURNAL", None)

    def command(*arguments, code=0, **more):
        whole = [sys.executable, "-m", "trainpace", "journal", *map(str, arguments)]
        done = subprocess.run(
            whole,
            capture_output=True,
            text=True,
            env={**environment, **more},
            cwd=tmp_path,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return (
            done.stderr
            if code == 2
            else json.loads(done.stdout)
            if "--json" in arguments
            else done.stdout
        )

    command.place = tmp_path / "data" / "trainpace" / "journal.db"
    return command


@pytest.mark.slow
def test_journal_imports_lists_shows_and_exports_runs(run, tmp_path):
    (tmp_path / "cnn.json").write_text(
        json.dumps([to_jsonable(replace(measurement(), loss="CrossEntropyLoss"))])
    )
    facts = {"journal": str(run.place), "database": "sqlite", "database_version": 3, "runs": 0}
    assert run("path", "--json") == {"record": "JournalPlace", "schema_version": 1, **facts}
    assert "1 new" in run("import", "cnn.json")
    assert "0 new, 1 there already" in run("import", "cnn.json")
    (listed,) = run("list", "--json")
    id_ = listed["id"]
    assert re.search(
        rf"{id_[:8]}.*one layer.*cpu.*8.*fp32.*3.1.*3 to 3.2.*ok", run("list", "--model", "LAYER")
    )
    assert "No such runs" in run("list", "--model", "vgg")
    shown = run("show", id_[:6])
    for word in (
        id_,
        "one layer",
        "forward 1, backward 2",
        "torch",
        "3 after 1 of warm-up",
        "cnn.json",
        "CrossEntropyLoss",
    ):
        assert word in shown
    assert from_json(json.dumps(run("show", id_, "--json")), Entry).model == "one layer"
    assert "warm room [x] [/x]" in run("annotate", id_[:6], "warm room [x] [/x]")
    assert "warm room [x] [/x]" in run("show", id_)
    for ending in ("json", "csv", "parquet"):
        assert "1 records" in run("export", f"x.{ending}")
        other = str(tmp_path / f"other-{ending}.db")
        assert "1 new" in run("import", f"x.{ending}", "--journal", other)
        assert run("list", "--json", "--journal", other) == run("list", "--json")
    assert run("merge", other, "--json")["already_there"] == 1
    assert "1 new" in run("merge", run.place, "--journal", tmp_path / "third.db")
    assert run("delete", id_[:5], "--json") == {
        "record": "Deletion",
        "schema_version": 1,
        "deleted": [id_],
    }
    assert run("list", "--json", TRAINPACE_JOURNAL=other) != run("list", "--json") == []


def test_compare_reports_differences_of_runs_and_sweeps(run):
    run.place.parent.mkdir(parents=True)

    def timed(ms, **fields):
        return whole_entry(
            step_time_ms=ms,
            interval_ms=Interval(low=ms * 0.99, high=ms * 1.01, coverage=0.9, basis=""),
            **fields,
        )

    first, second = sweep(), sweep()
    slow, quick = timed(10.0, sweep=first.id), timed(5.0, sweep=second.id, notes="x", device="A100")
    more = [timed(20.0, batch=16, sweep=first.id), timed(8.0, batch=16, sweep=second.id)]
    failed = entry(step_time_ms=None)
    with Journal.open(str(run.place)) as journal:
        journal.add_many([first, second, slow, quick, *more, failed])
    said = run("compare", slow.id, quick.id)
    assert "50.0% less" in said
    assert "beyond the noise" in said
    assert re.search(r"device\s+Tesla T4\s+A100", said)
    assert [
        r["batch"] for r in run("compare", first.id[:9], second.id[:9], "--json")["ratios"]
    ] == [8, 16]
    assert "at 2 of 2 batch sizes" in run("compare", first.id, second.id)
    assert "within the noise" in run("compare", slow.id, slow.id)
    assert "cannot be compared" in run("compare", slow.id, failed.id, code=1)
    assert first.id[:8] in run("list", "--sweeps")


def test_score_reports_forecast_errors(run):
    assert "No run in the journal has a forecast" in run("score", code=1)
    with Journal.open(str(run.place)) as journal:
        journal.add_many(
            entry(
                step_time_ms=100.0, forecast_ms=110.0, forecast_low_ms=90.0, forecast_high_ms=120.0
            )
            for _ in range(3)
        )
        journal.add(
            entry(
                "vgg16",
                step_time_ms=100.0,
                forecast_ms=150.0,
                forecast_low_ms=140.0,
                forecast_high_ms=160.0,
            )
        )
    said = run("score")
    assert all(figure in said for figure in ("4 forecasts", "20.0%", "median 10.0%", "75%"))
    assert run("score", "--model", "vgg", "--json")["overall"]["mean_pct"] == 50.0


def test_failed_import_does_not_affect_other_files(run, tmp_path):
    (tmp_path / "good.json").write_text(json.dumps([to_jsonable(measurement())]))
    (tmp_path / "bad.json").write_text("{")
    said = run("import", "bad.json", "good.json", "none.csv", code=2)
    assert said.count("nothing imported") == 2
    assert len(run("list", "--json")) == 1
    (tmp_path / "runs.csv").write_text("model,batch_per_gpu\nx,1\n")
    assert "no known precision" in run("import", "runs.csv", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "abc"),
        ("show",),
        ("frobnicate",),
        ("list", "--since", "someday"),
        ("list", "--kind", "x"),
        ("list", "--limit", "-1"),
        ("list", "--journal", "none.db"),
        ("list", "--journal", "mysql://x/y"),
        ("list", "--journal", "postgresql://u:hunter2@/x?host=/none"),
        ("list", "--journal", "."),
        ("export", "x.pickle"),
        ("export", "none/x.json"),
        ("merge", "none.db"),
        ("import",),
        ("import", "x", "--format", "pickle"),
        ("import", "x", "--precision", "fp7"),
        ("compare", "a", "b"),
        ("annotate", "a", "b"),
        ("delete", "a"),
        ("list", "--model", "\udcff"),
        ("compare", "\udcff", "a"),
        ("annotate", "a", "\udcff"),
        ("list", "--batch", "99999999T"),
    ],
)
def test_misuse_exits_2_with_one_line(run, arguments):
    said = run(*arguments, code=2)
    assert said.startswith("trainpace: ")
    assert len(said.strip().splitlines()) == 1
    assert "hunter2" not in said


def test_merging_a_journal_with_itself_is_rejected(run):
    run("path")
    assert "itself" in run("merge", run.place, code=2)


def test_control_characters_in_runs_are_not_printed(run):
    with Journal.open(str(run.place)) as journal:
        one = whole_entry(
            model="x\x1b[31mred [bold]loud[/bold] [/]",
            notes="\x1b]0;title\x07 \x9b31m",
            environment={"[b]": "[/]"},
        )
        journal.add(one)
    for said in (run("list"), run("show", one.id), run("compare", one.id, one.id)):
        assert not set(said) & {"\x1b", "\x07", "\x9b"}
    assert "[bold]loud[/bold] [/]" in run("show", one.id)


def test_list_does_not_import_heavy_modules(run, tmp_path):
    with Journal.open(str(run.place)) as journal:
        journal.add(entry())
    code = "import sys\nfrom trainpace.cli import main\ntry: main(['journal', 'list'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TRAINPACE_JOURNAL": str(run.place)},
        check=True,
    )
    loaded = set(done.stdout.split("\n")[-2].split())
    assert "sqlalchemy" in loaded
    assert not loaded & {"torch", "pyarrow", "pandas", "psycopg", "scipy"}


def test_list_accepts_huge_limit_and_offset(run):
    assert run("list", "--limit", "99999999T", "--offset", "99999999T", "--json") == []
