"""The public journal in the terminal, and the chart of forecasts against measurements."""

import io
from contextlib import redirect_stdout

import pytest

from public_made import RUNS, public
from trainpace.forecast import Row, Score, ScoreLine, summarise
from trainpace.report import (
    accuracy_chart,
    public_facts,
    public_run_sections,
    public_runs_sections,
    public_score_sections,
    show,
)
from trainpace.report.journal import MOST_POINTS


def printed(sections, *arguments, width=120):
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        show(sections(*arguments))
    return out.getvalue()


def test_public_list_marks_runs_in_the_fit():
    text = printed(public_runs_sections, RUNS, 5)
    assert "5 runs of others in the public journal." in text
    assert "-25*" in text
    assert "*" not in printed(public_runs_sections, RUNS[:1], 1)


def test_public_list_shows_sample_sizes():
    text = printed(public_runs_sections, [public(image_size=64), RUNS[3]], 2, width=160)
    assert "64 px" in text
    assert "1,024 tokens" in text


def test_public_run_shows_source_and_license():
    facts = dict(public_facts(RUNS[3]))
    assert facts["licence"] == "MIT"
    assert facts["forecast"] == "nobody traced it."
    assert facts["device"] == "8 x A100 SXM 80GB"
    assert "https://example.org/bench" in printed(public_run_sections, RUNS[0])
    assert dict(public_facts(RUNS[1]))["in the fit"].startswith("yes")


def rows(*errors, inside=True):
    return [
        Row(
            index=0,
            file="",
            model="m",
            gpu="T4",
            num_gpus=1,
            precision="fp32",
            batch=8,
            measured_ms=100.0,
            forecast_ms=100.0 + e,
            low_ms=80.0,
            high_ms=120.0,
            error_pct=e,
            in_interval=inside,
        )
        for e in errors
    ]


def test_public_score_lists_held_out_runs_first():
    new, fitted = summarise("new", rows(10.0, -30.0)), summarise("fitted", rows(1.0, 2.0, 3.0))
    line = ScoreLine(name="T4", in_fit=fitted, not_in_fit=new)
    score = Score(
        fingerprint="x",
        runs=5,
        without_forecast=7,
        overall=summarise("all", rows(10.0, -30.0, 1.0, 2.0, 3.0)),
        in_fit=fitted,
        not_in_fit=new,
        by_card=(line,),
        by_model_kind=(line,),
        by_source=(line,),
        by_way=(line,),
        rows=(),
    )
    text = printed(public_score_sections, score)
    assert text.startswith(
        "2 forecasts of public runs that no constant was fitted on are off by 20.0% on average (median 20.0%);"
    )
    assert "7 public runs have no forecast" in text
    assert "errors are smaller than yours will be" in " ".join(text.split())
    empty = summarise("none", [])
    nothing = Score(
        fingerprint="x",
        runs=0,
        without_forecast=1,
        overall=empty,
        in_fit=empty,
        not_in_fit=empty,
        by_card=(),
        by_model_kind=(),
        by_source=(),
        by_way=(),
        rows=(),
    )
    assert "None of the public runs" in printed(public_score_sections, nothing)


def test_accuracy_chart_separates_fitted_and_held_out_runs():
    chart = accuracy_chart(RUNS)
    series = {s.name: s for s in chart.series}
    assert series["as measured"].x == series["as measured"].y
    assert (series["in the fit"].x, series["in the fit"].y) == ((200.0,), (150.0,))
    assert series["not in the fit"].x == (100.0, 50.0, 30.0)
    assert (chart.x.scale, chart.y.scale, chart.nearest) == ("log10", "log10", "point")
    assert chart.finding.startswith("3 of 4 forecasts")
    assert accuracy_chart(RUNS[:1]) is None


def test_accuracy_chart_thins_out_many_runs():
    chart = accuracy_chart([public(ms=100.0 + i) for i in range(2 * MOST_POINTS)])
    assert sum(len(s.x) for s in chart.series if s.kind == "points") == MOST_POINTS
    assert chart.note == "One run in 2 is drawn."
