"""Progress on stderr: a bar in a real pseudo-terminal, periodic lines in a log."""

import os
import pty
import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.report import streams
from trainpace.report.streams import Bar, left_s, visible

WORK = """
import time
from trainpace.report.streams import Bar
with Bar("measuring resnet50", 24, "probes") as bar:
    for i in range(8):
        bar.to(i, words=f"batch {i}")
        if i == 6:
            bar.say("a line that stays")
        time.sleep(0.4)
print("the end")
"""


def in_a_terminal(*command, code=0):
    """Return everything that the command writes to a terminal of 80 columns."""
    master, slave = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    out = b""
    while True:
        try:
            more = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        if not more:
            break
        out += more
    os.close(master)
    assert process.wait() == code, out.decode()
    return out.decode()


def test_terminal_shows_bar_with_time_left():
    out = in_a_terminal(sys.executable, "-c", WORK)
    assert re.search(r"measuring resnet50: \d of 24 probes, .*about \d+ s left \(batch \d\)", out)
    assert "━" in out
    assert out.index("a line that stays") < out.rindex("the end")
    assert "\x1b[2K" in out, "the bar is cleared away"


WITHIN = """
import time
from trainpace.report.streams import Bar
with Bar("examining"):
    time.sleep(0.7)
    with Bar("tracing") as inner:
        time.sleep(0.7)
        inner.say("a line of the inner work")
    time.sleep(0.3)
with Bar("comparing"):
    time.sleep(0.9)
"""


def test_nested_progress_shows_outer_bar():
    out = in_a_terminal(sys.executable, "-c", WITHIN)
    assert "examining" in out
    assert "tracing" not in out
    assert "comparing" in out, "the next work has a bar again"
    assert out.count("a line of the inner work") == 1


def test_log_gets_periodic_progress_lines(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(streams.time, "monotonic", lambda: clock[0])
    with Bar("tracing", unit="models") as bar:
        for done in range(101):
            bar.to(done, 100)
            clock[0] += 1.0
        bar.say("a line that stays")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tracing: 0 of 100 models"
    assert lines[3] == "tracing: 30 of 100 models, 1/s, about 1 min 10 s left"
    assert lines[-1] == "a line that stays"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("done", "total", "new", "elapsed_s", "left"),
    [
        (25, 100, 25, 50.0, 150.0),
        (75, 100, 25, 50.0, 50.0),  # 50 were there from an interrupted run
        (100, 100, 100, 9.0, 0.0),
        (0, 100, 0, 9.0, None),
        (3, None, 3, 9.0, None),
    ],
)
def test_time_left_is_extrapolated(done, total, new, elapsed_s, left):
    assert left_s(done, total, new, elapsed_s) == left


def test_command_in_terminal_uses_color_and_width():
    out = in_a_terminal(
        sys.executable,
        "-m",
        "trainpace",
        "schedule",
        "--samples",
        "1000",
        "--epochs",
        "2",
        "--global-batch",
        "10",
        "--step-time",
        "1s",
        "--deadline",
        "1min",
        code=1,
    )
    assert "38;5;160mNo:" in out, "red"
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert "No: 3 min 20 s is 2 min 20 s over 1 min." in plain
    assert all(len(line) <= 80 for line in plain.splitlines())


@given(st.text(st.characters(exclude_categories=())))
def test_visible_replaces_control_characters_one_to_one(text):
    shown = visible(text)
    assert len(shown) == len(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n"]
    assert visible(shown) == shown
    assert [
        c
        for c, d in zip(text, shown, strict=True)
        if c != d and unicodedata.category(c) not in ("Cc", "Cs", "Cf")
    ] == []


def test_escape_sequences_are_shown_as_symbols():
    assert visible("\x1b]0;title\x07\x1b[2J\r\x7f\x9b") == "␛]0;title␇␛[2J␍␡\ufffd"
