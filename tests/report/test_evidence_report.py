"""Public measurements next to an answer: lines, JSON and rows of a page."""

import json

import pytest
from msgspec.structs import replace

from trainpace.cli.program import main
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.forecast import nearest, public_runs
from trainpace.report.journal import evidence_sections, rate, what
from trainpace.verbs.traced import evidence_json
from trainpace.workload import load_workload


@pytest.fixture(scope="module")
def found():
    return nearest(
        load_workload("resnet50", ("fp32",)), Execution(micro_batch=32), find_device("T4")
    )


@pytest.fixture(autouse=True)
def no_journal(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINPACE_JOURNAL", str(tmp_path / "journal.db"))
    monkeypatch.setenv("COLUMNS", "120")


def code_of(arguments):
    try:
        return main(arguments) or 0
    except SystemExit as stop:
        return stop.code or 0


def rows_of(*evidence):
    return next(iter(evidence_sections(evidence))).rows


def test_each_nearby_run_shows_both_times_and_source(found):
    rows = rows_of(found)
    assert len(rows) == len(found.runs) == 3
    for row, near in zip(rows, found.runs, strict=True):
        run = near.run
        assert run.in_fit
        measured, forecast = (
            1e3 * run.global_batch / ms for ms in (run.step_time_ms, run.forecast_ms)
        )
        assert row[0] == f"{run.model} on T4, batch {run.micro_batch}, fp32"
        assert row[1] == f"{measured:.0f} images/s"
        assert f"({100 * (forecast / measured - 1):+.0f}%)*" in row[2]
        assert run.url in row[4]
        assert row[5] == run.licence


def test_only_runs_in_the_fit_have_a_star(found):
    mine = replace(
        found, runs=tuple(replace(near, run=replace(near.run, in_fit=False)) for near in found.runs)
    )
    assert not any("*" in cell for row in rows_of(mine) for cell in row)


def test_closest_run_is_named_if_none_is_near(found):
    far = replace(found, runs=(), closest=replace(found.closest, distance=2.0))
    [row] = rows_of(far)
    assert row[0].startswith("ResNet50 on T4, batch 32, fp32")
    assert row[3].startswith("not near: ")
    assert rows_of(replace(far, closest=None)) == []
    assert rows_of() == []


def test_evidence_json_has_source_and_similarity(found):
    [entry] = evidence_json([found])
    assert entry["gpu"] == "T4"
    assert not entry["none_near"]
    near = entry["nearest"][0]
    for name in (
        "source",
        "url",
        "licence",
        "date",
        "trust",
        "step_time_ms",
        "forecast_ms",
        "in_fit",
        "error_pct",
    ):
        assert near[name] is not None
    assert "the same card" in near["alike"]
    assert json.loads(json.dumps(entry)) == entry
    [none] = evidence_json([replace(found, runs=())])
    assert none["none_near"]
    assert none["closest"]["id"] == found.closest.run.id


def test_rates_use_units_of_the_samples():
    runs = public_runs()
    tokens = next(run for run in runs if run.sequence_length and run.global_batch)
    images = next(run for run in runs if run.image_size and run.global_batch)
    assert rate(tokens, 1000.0) == (tokens.global_batch * tokens.sequence_length, "tokens/s")
    assert rate(images, 500.0) == (2 * images.global_batch, "images/s")
    assert rate(replace(images, global_batch=0), 7.0) == (7.0, "ms per step")
    assert "forward" in what(replace(images, mode="inference"))


def test_forecast_shows_evidence_unless_disabled(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert (
        code_of(["forecast", "resnet50", "--gpu", "T4", "--batch", "32", "--html", str(page)]) == 0
    )
    assert "ResNet50 on T4, batch 32, fp32: " in capsys.readouterr().out
    assert "measured by others" in page.read_text()
    assert (
        code_of(["forecast", "resnet50", "--gpu", "T4", "--batch", "32", "--evidence", "none"]) == 0
    )
    assert "Measured by others" not in capsys.readouterr().out
    assert (
        code_of(
            ["forecast", "resnet50", "--gpu", "T4", "--gpu", "A100", "--batch", "16,32", "--json"]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert [entry["gpu"] for entry in answer["evidence"]] == ["T4", "A100 SXM 40GB"]
    assert all(len(entry["nearest"]) <= 1 for entry in answer["evidence"])


def test_match_and_plan_show_evidence(capsys):
    match = ["match", "resnet50", "--samples", "1.28M", "--epochs", "1", "--gpu", "T4"]
    assert code_of([*match, "--details"]) == 0
    assert "measured by others" in capsys.readouterr().out
    assert code_of([*match, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evidence"]
    plan = ["plan", "resnet50", "--gpu", "T4", "--samples", "100000", "--epochs", "1"]
    assert code_of([*plan, "--details"]) == 0
    assert "measured by others" in capsys.readouterr().out
    assert code_of([*plan, "--json", "--evidence", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["evidence"] == []


def test_unknown_evidence_value_is_rejected(capsys):
    assert code_of(["forecast", "resnet50", "--gpu", "T4", "--evidence", "all"]) == 2
    assert "nearest" in capsys.readouterr().err
