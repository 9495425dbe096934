"""Tests of `trainpace match` and `trainpace offers` in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nouns import stacked, workload
from trainpace.core.records import save

JOB = ("--samples", "100000", "--epochs", "2", "--global-batch", "64")


@pytest.fixture
def run(tmp_path):
    save(workload(), tmp_path / "w.json")
    environment = os.environ | {
        "XDG_DATA_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "COLUMNS": "118",
    }

    def trainpace(*arguments, python=()):
        command = [sys.executable, *python, "-m", "trainpace", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
        )

    return trainpace


def test_match_ranks_all_offers_without_importing_torch(run):
    done = run("match", "w.json", *JOB, "--json", python=("-X", "importtime"))
    assert done.returncode == 0, done.stderr[-500:]
    assert "| torch\n" not in done.stderr
    assert "| rich\n" not in done.stderr
    answer = json.loads(done.stdout)
    assert (answer["record"], answer["schema_version"]) == ("Matches", 1)
    rows = answer["rows"]
    assert len(rows) > 286
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["usd"] for row in rows] == sorted(row["usd"] for row in rows)
    for row in rows:
        assert row["batch"] * row["accumulation"] * row["num_gpus"] == 64
        assert row["hours_low"] <= row["hours"] * (1 + 1e-9) <= row["hours_high"] * (1 + 1e-6)
        assert row["price_source"]


def test_table_shows_verdict_next_step_and_stale_prices(run):
    done = run(
        "match",
        "w.json",
        *JOB,
        "--spot",
        "--provider",
        "aws",
        "--provider",
        "crusoe",
        "--top",
        "4",
        "--details",
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "ranked by cost",
        "Cheapest:",
        "Fastest:",
        "Next:",
        "may be old",
        "estimated from the TDP",
        "spot",
    ):
        assert said in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 118


def test_missed_deadline_exits_1_and_names_the_binding_limit(run):
    done = run("match", "w.json", *JOB, "--gpu", "T4", "--deadline", "1s")
    assert done.returncode == 1
    assert "No server meets the deadline." in done.stdout
    assert "missed by" in done.stdout
    answer = json.loads(
        run("match", "w.json", *JOB, "--gpu", "T4", "--deadline", "1s", "--json").stdout
    )
    assert answer["binds"]["binding"] == "deadline"
    assert answer["binds"]["nearest"]["gpu"] == "T4"


def test_only_machines_ranks_own_machines(run, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[machine]]\nname = "lab"\ndevice = "RTX 4090"\ncount = 2\nprice_usd_per_hour = 0.1\n'
    )
    answer = json.loads(
        run("match", "w.json", *JOB, "--machines", "mine.toml", "--only-machines", "--json").stdout
    )
    assert [(row["provider"], row["num_gpus"]) for row in answer["rows"]] == [("own", 2)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("nodes = 2", "cannot be joined"),
        ("count = 2", "no price"),
        ("electricity_usd_per_kwh = 0.3", "its cost counts as 0"),
    ],
)
def test_missing_fields_of_own_machines_are_reported(run, tmp_path, fields, said):
    (tmp_path / "mine.toml").write_text(
        f'[[machine]]\nname = "lab"\ndevice = "RTX 4090"\n{fields}\n'
    )
    done = run("match", "w.json", *JOB, "--machines", "mine.toml", "--only-machines")
    assert done.returncode == 0
    assert said in done.stderr
    assert "Stale" not in done.stdout


def test_machines_example_in_the_documentation_works(run, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text("utf-8")
    (tmp_path / "mine.toml").write_text(page.split("```toml")[1].split("```")[0])
    done = run("match", "w.json", *JOB, "--machines", "mine.toml", "--only-machines", "--json")
    assert done.stderr == ""
    assert {row["nodes"] for row in json.loads(done.stdout)["rows"]} == {1, 2}


def test_failures_faster_than_progress_exit_1(run):
    done = run("match", "w.json", *JOB, "--mtbf", "1s")
    assert done.returncode == 1
    assert "failures come faster" in " ".join(done.stdout.split())
    for said in ("--mtbf", "restart"):
        assert said in done.stdout
    assert "inf" not in done.stdout


def test_deadline_and_budget_conflict_shows_best_offer_for_each(run):
    rows = json.loads(run("match", "w.json", *JOB, "--json").stdout)["rows"]
    soonest, cheapest = min(r["hours"] for r in rows), min(r["usd"] for r in rows)
    done = run(
        "match",
        "w.json",
        *JOB,
        "--deadline",
        f"{soonest * 3600 * 1.001}s",
        "--budget",
        f"{cheapest * 1.001}",
    )
    assert done.returncode == 1
    for said in (
        "both the deadline and the budget",
        "Cheapest that meets the deadline: ",
        "Fastest within the budget: ",
    ):
        assert said in done.stdout
    assert ": none" not in done.stdout


def test_identical_servers_show_their_region(run):
    asked = ("match", "w.json", *JOB, "--gpu", "T4", "--max-nodes", "1", "--top", "100")
    rows = json.loads(run(*asked, "--json").stdout)["rows"]
    names = [(row["provider"], row["instance_type"]) for row in rows]
    assert len(names) > len(set(names)), "one server in several regions"
    shown = run(*asked, "--details").stdout
    for row, name in zip(rows, names, strict=True):
        if names.count(name) > 1:
            assert f" {row['region'][:13]}" in shown


def test_checkpointing_reduces_peak_memory(run, tmp_path):
    save(stacked(), tmp_path / "blocks.json")

    def memory(*more):
        done = run(
            "match", "blocks.json", *JOB, "--gpu", "H100", "--precision", "bf16", "--json", *more
        )
        return {row["batch"]: row["peak_memory_gib"] for row in json.loads(done.stdout)["rows"]}

    plain, recomputed = memory(), memory("--checkpointing")
    assert plain.keys() == recomputed.keys()
    assert all(recomputed[batch] < plain[batch] for batch in plain)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--samples"),
        (("--samples", "10"), "--epochs or --max-steps"),
        ((*JOB, "--provider", "asw"), "aws"),
        ((*JOB, "--gpu", "A1000"), "Nearest"),
        ((*JOB, "--region", "atlantis"), "unknown region"),
        ((*JOB, "--gpu", "T4", "--provider", "verda"), "No offer"),
        ((*JOB, "--global-batch", "0"), "'--global-batch'"),
        ((*JOB, "--storage", "0"), "'--storage'"),
        ((*JOB, "--only-machines"), "--machines"),
        ((*JOB, "--machines", "missing.toml"), "cannot read"),
        (("--samples", "10", "--epochs", "nan"), "epochs"),
        ((*JOB, "--data-gb", "-1"), "'--data-gb'"),
        ((*JOB, "--loader-rate", "0"), "'--loader-rate'"),
        ((*JOB, "--loader-rate", "nan"), "'--loader-rate'"),
        ((*JOB, "--max-nodes", "0"), "'--max-nodes'"),
        ((*JOB, "--mtbf", "0s"), "'--mtbf'"),
        ((*JOB, "--sample-bytes", "1e30"), "'--sample-bytes'"),
        (("--samples", "10", "--epochs", "1e308"), "'--epochs'"),
        ((*JOB, "--data-from", "narnia", "--data-gb", "3"), "azure"),
        ((*JOB, "--data-from", "aws"), "--data-gb"),
        ((*JOB, "--optimizer", "adamw"), "traced with --optimizer sgd_momentum"),
        ((*JOB, "--image-size", "64"), "new trace"),
        ((*JOB, "--save-workload", "again.json"), "already a saved workload"),
        ((*JOB, "--checkpointing"), "no repeated blocks"),
    ],
)
def test_bad_input_exits_2_with_a_message(run, arguments, said):
    done = run("match", "w.json", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_offers_can_be_listed_and_refreshed(run, tmp_path):
    done = run("offers", "--gpu", "H200", "--provider", "aws")
    assert done.returncode == 0
    assert "3200" in done.stdout
    assert "1 price is old" in done.stdout
    (tmp_path / "gpuhunt.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def query():\n"
        "    return [N(instance_name='new', location='mars', price=1.0, cpu=4, memory=16.0, gpu_count=1, gpu_name='T4',"
        " gpu_memory=16.0, spot=False, provider='aws')]\n"
    )
    assert "1 offers" in run("offers", "--refresh").stderr
    answer = json.loads(run("match", "w.json", *JOB, "--json").stdout)
    assert [(row["instance_type"], row["price_stale"]) for row in answer["rows"]] == [
        ("new", False)
    ]


def test_offline_refresh_keeps_the_snapshot(run, tmp_path):
    (tmp_path / "gpuhunt.py").write_text("def query():\n    raise OSError('no network')\n")
    done = run("offers", "--refresh")
    assert done.returncode == 2
    assert "stays in use" in done.stderr
    assert run("offers").returncode == 0
