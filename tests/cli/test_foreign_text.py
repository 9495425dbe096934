"""Commands print text from files without terminal escape sequences."""

import os
import re
import subprocess
import sys

import pytest

from report.test_streams import in_a_terminal

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1A"
COLOURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r")

TABLE = "model_spec,gpu,precision,batch_per_gpu,step_time_ms,file\n{0}resnet50,T4,fp32,64,1,a\nresnet18,{0}T4,fp32,64,1,b\nresnet18,T4,fp32,64,100,{0}\n"
CASES = {
    "a table": (TABLE.format(ESCAPES), "runs.csv", ("validate", "runs.csv")),
    "a workload": (
        f'{{"record": "{ESCAPES.encode("unicode_escape").decode().replace("x", "u00")}"}}',
        "w.json",
        ("forecast", "w.json", "--gpu", "T4"),
    ),
    "a suite": (
        f'[[task]]\n"{ESCAPES.encode("unicode_escape").decode().replace("x", "u00")}" = 1\n',
        "s.toml",
        ("measure", "--suite", "s.toml"),
    ),
    "a script": (
        f"def task():\n    raise ValueError({ESCAPES!r})\n",
        "t.py",
        ("forecast", "t.py:task", "--gpu", "T4"),
    ),
    "a setting": (
        f'{{"train_batch_size": "{ESCAPES.encode("unicode_escape").decode().replace("x", "u00")}"}}',
        "ds.json",
        ("schedule", "--config", "ds.json"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_escape_sequences_in_files_are_not_printed(tmp_path, monkeypatch, case):
    text, name, arguments = CASES[case]
    (tmp_path / name).write_text(text, encoding="utf-8")
    command = (sys.executable, "-m", "trainpace", *arguments)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    said = done.stdout + done.stderr
    assert "owned" in said
    assert "\x1b" not in said
    assert "Traceback" not in said


def test_escape_sequences_are_not_printed_in_a_terminal(tmp_path, monkeypatch):
    (tmp_path / "runs.csv").write_text(CASES["a table"][0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shown = in_a_terminal(sys.executable, "-m", "trainpace", "validate", "runs.csv")
    assert "owned" in shown
    assert "\x1b" not in COLOURS.sub("", shown)
    assert "\x1b]0" not in shown
