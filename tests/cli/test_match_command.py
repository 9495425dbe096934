"""`trainpace match` and `trainpace offers` as real processes."""

import json
import os
import subprocess
import sys

import pytest

from nouns import workload
from trainpace.records import save

JOB = ("--samples", "100000", "--epochs", "2", "--global-batch", "64")


@pytest.fixture
def run(tmp_path):
    save(workload(), tmp_path / "w.json")
    environment = os.environ | {"XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "118"}

    def trainpace(*arguments, python=()):
        command = [sys.executable, *python, "-m", "trainpace", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)

    return trainpace


def test_a_ranking_of_all_offers_without_torch(run):
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


def test_a_table_with_verdict_next_step_and_stale_prices(run):
    done = run("match", "w.json", *JOB, "--spot", "--provider", "aws", "--provider", "crusoe", "--top", "4")
    assert done.returncode == 0, done.stderr
    for said in ("ranked by cost", "Cheapest:", "Fastest:", "Next:", "Stale prices", "estimate from TDP", "spot"):
        assert said in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 118


def test_no_is_an_answer_that_says_what_binds(run):
    done = run("match", "w.json", *JOB, "--gpu", "T4", "--deadline", "1s")
    assert done.returncode == 1
    assert "deadline binds" in done.stdout
    assert "missed by" in done.stdout
    answer = json.loads(run("match", "w.json", *JOB, "--gpu", "T4", "--deadline", "1s", "--json").stdout)
    assert answer["binds"]["binding"] == "deadline"
    assert answer["binds"]["nearest"]["gpu"] == "T4"


def test_ones_own_machines(run, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[machine]]\nname = "lab"\ndevice = "RTX 4090"\ncount = 2\nprice_usd_per_hour = 0.1\n'
    )
    answer = json.loads(run("match", "w.json", *JOB, "--machines", "mine.toml", "--only-machines", "--json").stdout)
    assert [(row["provider"], row["num_gpus"]) for row in answer["rows"]] == [("own", 2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--samples"),
        (("--samples", "10"), "--epochs or --max-steps"),
        ((*JOB, "--provider", "asw"), "aws"),
        ((*JOB, "--gpu", "A1000"), "Nearest"),
        ((*JOB, "--region", "atlantis"), "unknown region"),
        ((*JOB, "--gpu", "T4", "--provider", "verda"), "no offer"),
        ((*JOB, "--global-batch", "0"), "'--global-batch'"),
        ((*JOB, "--storage", "0"), "'--storage'"),
        ((*JOB, "--only-machines"), "--machines"),
        ((*JOB, "--machines", "missing.toml"), "cannot read"),
        (("--samples", "10", "--epochs", "nan"), "epochs"),
        ((*JOB, "--data-gb", "-1"), "'--data-gb'"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, said):
    done = run("match", "w.json", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_offers_are_listed_and_refreshed(run, tmp_path):
    done = run("offers", "--gpu", "H200", "--provider", "aws")
    assert done.returncode == 0
    assert "3200" in done.stdout
    assert "stale" in done.stdout
    (tmp_path / "gpuhunt.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def query():\n"
        "    return [N(instance_name='new', location='mars', price=1.0, cpu=4, memory=16.0, gpu_count=1, gpu_name='T4',"
        " gpu_memory=16.0, spot=False, provider='aws')]\n"
    )
    assert "1 offers" in run("offers", "--refresh").stderr
    answer = json.loads(run("match", "w.json", *JOB, "--json").stdout)
    assert [(row["instance_type"], row["price_stale"]) for row in answer["rows"]] == [("new", False)]


def test_a_refresh_offline_leaves_the_snapshot(run, tmp_path):
    (tmp_path / "gpuhunt.py").write_text("def query():\n    raise OSError('no network')\n")
    done = run("offers", "--refresh")
    assert done.returncode == 2
    assert "stays in use" in done.stderr
    assert run("offers").returncode == 0
