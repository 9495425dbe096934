"""The table of measured speed-ups in the terminal, Markdown, HTML and JSON, and the thesis' numbers in it."""

import json
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ladder_world import World, ladder, result, rung
from trainpace.job import JobConditions, Schedule
from trainpace.report import page, show
from trainpace.report.run import (
    ahead_json,
    ahead_sections,
    equivalence_verdict,
    ladder_json,
    ladder_sections,
    ladder_table,
    markdown,
    speedups,
    table_of,
)
from trainpace.run import NO_FORECAST, Equivalence, Question, StepForecast, WayResult
from trainpace.run.climbing import climb, preview
from trainpace.run.equivalence import Facts, Tried
from trainpace.run.results import EndToEnd, Gain
from trainpace.run.trial import FailedTrial

ROOT = Path(__file__).parents[2]


def head_and_rows(table):
    shown = ladder_table(table)
    return [column.name for column in shown.columns], shown.rows


def ms_of(setup):
    if setup.execution.precision == "amp_bf16":
        return FailedTrial(kind="out of memory", reason="out of memory.")
    if setup.execution.compile:
        return result(100.0)
    return 5.0 if setup.loader.shards else 50.0 if setup.loader.workers else 100.0


@pytest.fixture
def climbed():
    rungs = (
        rung("workers", workers=2),
        rung("bf16", precision="amp_bf16"),
        rung("compile", compile=True),
        rung("shards"),
    )
    return climb(
        ladder(*rungs, job=Schedule(max_steps=36_000), price_usd_per_hour=2.0),
        World(ms_of).actions(),
    )


def test_ladder_table_rows_show_speedups_and_forecasts(climbed):
    table = table_of(climbed)
    head, cells = head_and_rows(table)
    rows = [dict(zip(head, row, strict=True)) for row in cells]
    assert [r["rung"] for r in rows] == ["baseline", "workers", "bf16", "compile", "shards"]
    assert [r["rung speed-up"] for r in rows] == ["", "2.00x", "", "0.50x", "10.00x"]
    assert [r["total speed-up"] for r in rows] == ["1.00x", "2.00x", "", "1.00x", "20.00x"]
    assert [r["of the first"] for r in rows] == ["100%", "50%", "", "100%", "5%"]
    assert [r["result"] for r in rows] == ["", "kept", "undone", "undone", "kept"]
    assert rows[1]["whole job"] == "31 min"
    assert rows[1]["cost"] == "$1.03"
    assert (rows[1]["forecast"], rows[1]["90% interval"]) == ("100 ms", "90 to 110 ms")


def test_ladder_verdict_states_total_and_next_step(climbed):
    said = "\n".join(table_of(climbed).verdict)
    assert "20.0x in total (20 to 20): a step takes 5 ms instead of 100 ms, 5% of the time." in said
    assert "The whole job: 4 min instead of 1 h 1 min, $0.13 instead of $2.03." in said
    assert "Assumed: a start takes 1 min, a GPU fails every 50,000 h" in said
    assert "bf16: undone, out of memory: out of memory." in said
    assert "Forecast intervals that contain the measurement: 2 of 4." in said
    assert "shards (micro-batch 16 x 1, 2 workers, shards): 5 ms is outside 90 to 110 ms" in said
    assert (
        "Next: use the adopted settings in your training: micro-batch 16 x 1, 2 workers, shards."
        in said
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"samples": 160.0, "low": 90.0, "high": 300.0, "steps": 200.0},
            "Gradient noise scale: 160 samples (90% interval 90 to 300), from the first 200 steps of 16",
        ),
        ({"samples": 160.0, "low": 90.0, "steps": 200.0}, "90 to no upper limit"),
        ({"steps": 40.0}, "too large to be estimated from 40 steps of 16"),
    ],
)
def test_ladder_verdict_reports_first_known_noise_scale(told, said):
    def with_noise(setup):
        return replace(result(100.0), noise_scale=told if setup.loader.workers else {})

    lines = table_of(climb(ladder(rung("workers", workers=2)), World(with_noise).actions())).verdict
    assert any(said in line for line in lines), lines
    rule = "To the same loss: Global batch 32 needs 0.55 times the steps"  # (1 + 160 / 32) / (1 + 160 / 16)
    assert any(line.startswith(rule) and "x 1.83 with SGD" in line for line in lines) == (
        "samples" in told
    )


def test_total_speedup_is_measured_end_to_end(climbed):
    """The table shows the product of the rungs; step, epoch and job times come from the end-to-end trials."""
    gain = Gain(ratio=16.0, low=15.0, high=17.0, trials=4)
    ends = EndToEnd(key="", first_ms=(90.0, 110.0, 96.0), last_ms=(6.0, 6.0, 7.0), gain=gain)
    table = table_of(replace(climbed, end_to_end=ends))
    assert (
        table.verdict[0]
        == "16.0x in total (15 to 17): a step takes 6 ms instead of 96 ms, 6.25% of the time."
    )
    assert any(
        "compare the first and the last setup, which ran alternately" in line
        for line in table.verdict
    )
    assert (
        "The whole job: 4 min 36 s instead of 58 min 36 s, $0.15 instead of $1.95." in table.verdict
    )
    assert table.rows[-1].total == pytest.approx(20)
    assert "together they make a step 16.0 times as fast" in speedups(table).finding
    alone = table_of(replace(climbed, end_to_end=None))
    assert (
        alone.verdict[0] == "20.0x in total: a step takes 5 ms instead of 100 ms, 5% of the time."
    )


def test_paired_speedups_multiply_on_slowing_machine():
    """Every trial is 2% slower than the one before. Paired ratios multiply to the total; first and last step do not."""
    tried = []

    def slowing(setup):
        tried.append(setup)
        return (
            1.02 ** len(tried)
            * 100.0
            / (2 if setup.loader.workers else 1)
            / (1.3 if setup.execution.compile else 1)
        )

    rungs = (
        rung("compile", compile=True),
        rung("bf16", precision="amp_bf16"),
        rung("workers", workers=2),
    )
    rows = table_of(climb(ladder(*rungs), World(slowing).actions())).rows
    assert [r.kept for r in rows] == [True, True, False, True]
    assert rows[1].total == pytest.approx(rows[1].ratio)
    assert rows[2].total == pytest.approx(rows[1].total * rows[2].ratio)
    assert rows[3].total == pytest.approx(rows[1].total * rows[3].ratio)
    assert rows[3].total == pytest.approx(2 * 1.3, rel=0.1)
    assert abs(rows[0].measured_ms / rows[3].measured_ms / rows[3].total - 1) > 0.05


def test_epoch_time_includes_validation():
    job = Schedule(samples=1600, epochs=10)
    climbed = climb(ladder(rung("workers", workers=2), job=job), World(ms_of).actions())
    table = table_of(climbed)
    head, cells = head_and_rows(table)
    assert [row[head.index("an epoch")] for row in cells] == ["10 s", "5 s"]  # 100 steps
    assert (
        head.index("an epoch")
        < head.index("whole job")
        < head.index("rung speed-up")
        < head.index("total speed-up")
    )
    assert "An epoch: 5 s instead of 10 s." in table.verdict
    validated = replace(climbed.ladder, conditions=JobConditions(evaluation_samples=800))
    known = table_of(replace(climbed, ladder=validated))
    assert [r.epoch_s for r in known.rows] == [
        15,
        7.5,
    ]  # 50 batches more, as whole steps where nothing is known of them
    assert any("800 samples validated (as whole steps" in line for line in known.verdict)
    baseline = climbed.baseline
    tried = replace(
        baseline.tried[0], foreseen=replace(baseline.tried[0].foreseen, evaluating_share=0.4)
    )
    forward = table_of(
        replace(climbed, ladder=validated, baseline=replace(baseline, tried=(tried,)))
    )
    assert forward.rows[0].epoch_s == pytest.approx(10 + 50 * 0.1 * 0.4)
    given = replace(
        climbed.ladder, conditions=JobConditions(evaluate_every_steps=50, evaluation_s=3.0)
    )
    assert [r.epoch_s for r in table_of(replace(climbed, ladder=given)).rows] == [16, 11]


def test_missing_rung_forecast_is_explained(climbed):
    def none(reason):
        rungs = [
            replace(
                r, tried=tuple(replace(t, foreseen=StepForecast(reason=reason)) for t in r.tried)
            )
            for r in climbed.rungs
        ]
        start = replace(
            climbed.baseline,
            tried=(replace(climbed.baseline.tried[0], foreseen=StepForecast(reason=reason)),),
        )
        return table_of(replace(climbed, baseline=start, rungs=tuple(rungs)))

    table = none("this machine could not be calibrated: it took longer than 340 s.")
    head, cells = head_and_rows(table)
    assert [row[head.index("forecast")] for row in cells] == ["none"] * 5
    assert any(
        line
        == "No forecast of baseline, workers, bf16, compile, shards: this machine could not be calibrated: it took longer"
        " than 340 s."
        for line in table.verdict
    )
    assert "forecast" not in head_and_rows(none(NO_FORECAST))[0]


def test_verdict_states_that_no_rung_helped():
    table = table_of(climb(ladder(rung("compile", compile=True)), World(lambda _: 100.0).actions()))
    assert table.verdict[0].startswith("No rung helped")
    head, _ = head_and_rows(table)
    assert "whole job" not in head
    assert "cost" not in head


def test_terminal_json_markdown_and_page_agree(climbed, capsys):
    table, answer = table_of(climbed), ladder_json(climbed)
    show(ladder_sections(table))
    printed = capsys.readouterr().out
    text, html = markdown(table), page(table.title, ladder_sections(table), answer)
    for words in ("20.0x in total", "undone", "baseline"):
        assert words in printed
        assert words in text
        assert words in html
    assert text.count("\n| ") == 6
    assert json.loads(json.dumps(answer))["rows"][-1]["total"] == pytest.approx(20)
    inside = re.search(r'id="data">(.*)</script>', html)
    assert json.loads(inside[1])["record"] == "LadderResult"
    assert html.index("20.0x in total") < html.index("<table>")


def test_rung_names_are_escaped():
    rungs = (rung("<b>| x", workers=2),)
    table = table_of(climb(ladder(*rungs), World(ms_of).actions()))
    assert "<b>" not in page(table.title, ladder_sections(table), {"title": "<b>"})
    assert "<b>/ x" in markdown(table)


def test_dry_run_shows_commands_and_impossible_rungs(capsys):
    ahead = preview(
        ladder(rung("five", micro_batch=5), rung("workers", workers=1)), World(ms_of).actions()
    )
    show(ahead_sections(ahead, [["env python"], [], ["env python -m x"]]))
    printed = capsys.readouterr().out
    assert "not possible" in printed
    assert "env python -m x" in printed
    answer = ahead_json(ahead, [["a"], [], ["b"]])
    assert json.dumps(answer)
    assert answer["rungs"][2]["started"] == ["b"]


def test_thesis_table_matches_published_numbers(monkeypatch):
    """The thesis' table from its own numbers: 713 days become 33."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "ladder"))
    sys.modules.pop("thesis", None)
    from thesis import thesis_table

    table = thesis_table()
    head, rows = head_and_rows(table)
    last = dict(zip(head, rows[-1], strict=True))
    assert (last["total speed-up"], last["whole job"], last["of the first"]) == (
        "21.53x",
        "33.1 days",
        "4.64%",
    )
    assert rows[0][head.index("whole job")] == "713 days (1.95 years)"
    assert head[1] == "an epoch, measured"
    assert "| ZeRO + fp16 | 29 min 49 s | 33.1 days |" in markdown(table)


def test_chosen_alternative_follows_rung_title():
    table = table_of(
        climb(
            ladder(rung("workers", workers=(0, 2)), rung("compile", compile=True)),
            World(ms_of).actions(),
        )
    )
    assert [r.title for r in table.rows] == ["baseline", "workers (workers 2)", "compile"]


def compared(way, first, **fields):
    result = WayResult(
        way=way,
        sizes=(4, 4),
        difference=0.1,
        worst="w",
        moved=1.0,
        equal=False,
        first_loss=5.302336,
        **fields,
    )
    asked = Question(model="m", batch=8)
    return Equivalence(question=asked, ways=(result,), facts=Facts(losses=(first,)), repeated=0.0)


def test_losses_that_differ_are_printed_with_the_digits_that_differ():
    (line,) = equivalence_verdict(compared("ddp", 5.302118))
    assert "5.3023 in parts and 5.3021 at once" in line
    (line,) = equivalence_verdict(compared("ddp", 5.302337))
    assert "The first loss is still the same" in line


def test_change_that_removes_most_of_the_difference_is_named():
    tried = (
        Tried(changes=("sum",), difference=0.1),
        Tried(changes=("no_dropout",), difference=2e-5),
    )
    (line,) = equivalence_verdict(compared("ddp", 5.302118, tried=tried))
    assert "dropout" in line
    assert "up to 2.0e-05, where they differed by 1.0e-01" in line
    assert "contrastive" not in line
