"""Tests of `--html` and `--figure` in real processes."""

import json
import os
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from answers import HOSTILE
from nouns import workload
from trainpace.core.records import save

JOB = ("--samples", "100k", "--epochs", "3")
FORECAST = ("forecast", "w.json", "--gpu", "T4", "--batch", "1:20", "--no-journal")


@pytest.fixture
def run(tmp_path):
    save(replace(workload(), model=HOSTILE), tmp_path / "w.json")

    def trainpace(*arguments):
        command = [sys.executable, "-m", "trainpace", *map(str, arguments)]
        environment = os.environ | {
            "XDG_DATA_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
        }
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
        )

    return trainpace


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (FORECAST, 0, "a step"),
        (("match", "w.json", *JOB, "--gpu", "T4"), 0, "Cheapest:"),
        (
            ("match", "w.json", *JOB, "--gpu", "T4", "--deadline", "1s"),
            1,
            "No server meets the deadline.",
        ),
        (("plan", "w.json", "--gpu", "A100", *JOB, "--batch", "8"), 0, "the job takes"),
    ],
)
def test_html_page_contains_the_terminal_answer(run, tmp_path, arguments, code, said):
    done = run(*arguments, "--html", "page.html", "--json")
    assert done.returncode == code, done.stderr
    assert "Page: page.html" in done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert said in page
    assert HOSTILE not in page
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )
    assert data["record"] == json.loads(done.stdout)["record"]


def test_figure_option_writes_one_file_per_chart(run, tmp_path):
    pytest.importorskip("matplotlib")
    done = run(*FORECAST, "--figure", "f.svg")
    assert done.returncode == 0, done.stderr
    written = re.findall(r"Picture: (.*)", done.stderr)
    assert written[0] == "f.svg"
    assert len(written) >= 3
    assert all((tmp_path / name).stat().st_size > 5000 for name in written)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*FORECAST, "--html", "no/where.html"), "folder of no/where.html does not exist"),
        ((*FORECAST, "--figure", "f.gif"), "f.gif"),
        (("plan", "w.json", "--gpu", "T4", *JOB, "--figure", "no/f.png"), "does not exist"),
        (("run", "ladder.toml", "--dry-run", "--html", "l.html"), "--dry-run cannot be combined"),
        (("measure", "--suite", "random", "--figure", "f.png"), "--figure needs one model"),
        (("diagnose", "--html", "no/d.html", "--", "true"), "does not exist"),
    ],
)
def test_invalid_output_paths_are_rejected(run, arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
