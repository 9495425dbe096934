"""Tests of commands with closed, full or partly read standard streams."""

import subprocess
import sys

import pytest

FORECAST = "forecast resnet18 --gpu T4 --batch 8"


def shell(line):
    return subprocess.run(
        ["bash", "-c", line.replace("trainpace", f"{sys.executable} -m trainpace")],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_command_succeeds_with_closed_standard_streams(closed, tmp_path):
    page = tmp_path / "page.html"
    done = shell(f"trainpace {FORECAST} --html {page} {closed}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert page.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("words", [FORECAST, f"{FORECAST} --json", "--help"])
def test_full_disk_on_stdout_is_reported_in_one_line(words):
    done = shell(f"trainpace {words} > /dev/full")
    assert (done.returncode, done.stderr) == (
        2,
        "trainpace: cannot write the answer: no space left on device.\n",
    )


@pytest.mark.parametrize("words", ["gpus", "gpus --json", "offers --json"])
def test_reader_closing_the_pipe_early_is_not_an_error(words):
    done = shell(f"trainpace {words} | head -1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["/dev/full", "/", "/no/such/folder/page.html"])
def test_unwritable_output_path_is_rejected_before_work_starts(place):
    done = shell(f"trainpace {FORECAST} --html {place}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--html'" in done.stderr
