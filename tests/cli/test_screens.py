"""Answers fit a terminal of 80 columns, and --details prints the rest."""

import contextlib
import io
import json
import re
import shlex

import pytest
from rich.cells import cell_len

from nouns import workload
from trainpace.cli import main
from trainpace.core.records import save
from trainpace.report import Lines, show
from trainpace.report.sections import Column, Table, words
from trainpace.report.terminal import LINES

FLEET = "--gpu H100 --num-gpus 8 --nodes 2 --network 50"
COMMANDS = [
    "forecast resnet50",
    "forecast resnet50 --gpu T4 --gpu 'RTX 3090' --gpu A100 --gpu H100 --gpu V100 --gpu L4 --gpu A10G --batch 8,16,32,64",
    "forecast vgg16 --gpu T4 --batch 1:70",
    "forecast resnet50 --gpu T4 --gpu H100 --batch 1:40",
    f"forecast resnet50 {FLEET} --zero 1 --samples 1281167 --epochs 90 --price 2.5 --evaluation-samples 50000",
    "forecast resnet50 --gpu T4 --batch 4096",
    f"forecast model.json {FLEET}",
    "match resnet50 --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h --budget 2000",
    "match resnet50 --samples 1281167 --epochs 90 --deadline 1min",
    "plan resnet50 --gpu A100 --num-gpus 4 --batch 64 --samples 1281167 --epochs 90 --price 2",
    f"plan model.json {FLEET} --samples 1000000 --epochs 1",
    "schedule --samples 1281167 --epochs 90 --micro-batch 32 --nproc-per-node 8 --step-time 210ms --speedup 3.63x",
    "schedule --samples 50k --epochs 90 --micro-batch 64 --step-time 210ms --learning-rate 0.1 --base-global-batch 32",
    "schedule --config ds.json --samples 1281167 --epochs 90 --step-time 210ms --nproc-per-node 8",
    "validate runs.csv",
    "gpus",
    "gpus H100",
    "offers",
    "journal list --public --limit 100",
    "journal show public:9331e53526",
    "journal list --journal own.db --limit 100",
    "journal compare public:3c1b85f7e6 public:4077d16d93",
    "journal score --journal own.db",
    "calibrate --detect-only",
]


NAMED = re.compile(r"\(--details\)|^More with --details: ", re.MULTILINE)


def shape(text):
    """Return the words of an answer without column rules and --details hints."""
    return [
        word
        for word in text.split()
        if word not in ("--details", "\\") and not word.startswith("─")
    ]


def printed(command, place, *more):
    out = io.StringIO()
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as ended,
    ):
        main([*shlex.split(command), *more])
    assert ended.value.code in (0, 1), command
    return out.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("screens")
    save(workload(), folder / "model.json")
    keys = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }
    (folder / "ds.json").write_text(
        json.dumps(keys | {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
    )
    head = "model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms\n"
    rows = [
        f"resnet50,{gpu},fp32,{batch},{9 * batch}\n"
        for batch in range(1, 25)
        for gpu in ("T4", "RTX 3090")
    ]
    (folder / "runs.csv").write_text(head + "".join(rows[::6]))
    (folder / "many.csv").write_text(head + "".join(rows))
    printed("journal import many.csv --journal own.db", folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_answer_fits_one_screen(command, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief = printed(command, place)
    lines = brief.splitlines()
    assert 0 < len(lines) <= LINES or command.startswith("precompute")
    assert all(cell_len(line) <= 80 for line in lines) or command.startswith("precompute")
    whole = printed(command, place, "--details")
    assert not NAMED.search(whole)
    assert bool(NAMED.search(brief)) == (shape(brief) != shape(whole))
    if "Forecast" in whole or "forecast" in whole.partition("\n\n")[0]:
        assert (
            "not a measurement" in brief
            or "not measurements" in brief
            or command.startswith(("journal", "validate"))
        )


def test_truncated_table_counts_the_omitted_rows(place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief = printed("gpus", place)
    found = re.search(r"\.\.\. (\d+) more rows \(--details\)", brief)
    rows = brief.partition("─\n")[2].partition("...")[0].count("\n")
    assert found is not None
    assert brief.startswith(f"{rows + int(found[1])} devices.")


def test_table_omitting_one_row_shows_the_row_instead(capsys):
    rows = [(f"row {i}",) for i in range(LINES - 5)]
    for beside, cut in ((2, ""), (3, "... 2 more rows (--details)")):
        show([Lines(["so much else"] * beside), Table([words("name")], rows)], details=False)
        out = capsys.readouterr().out
        assert out.count("\n") <= LINES
        assert "".join(line for line in out.splitlines() if "more" in line) == cut


def test_table_rule_is_dropped_to_fit_the_screen(capsys):
    rows = [("a long name", "1"), ("b", "2"), ("c", "3")]
    for beside, has_rule in ((LINES - 5, True), (LINES - 4, False)):
        table = Table([words("name"), Column("ms")], rows)
        show([Lines(["so much else"] * beside), table], details=False)
        out = capsys.readouterr().out
        assert out.count("\n") == LINES
        assert ("────" in out) == has_rule


def test_json_and_details_are_never_truncated(place):
    assert len(json.loads(printed("gpus", place, "--json"))) > LINES
    assert printed("gpus", place, "--json", "--details") == printed("gpus", place, "--json")
