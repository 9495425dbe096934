"""Importing the package and printing help open no socket, file or process."""

import subprocess
import sys

import pytest

HOOK = """
import os, sys
FORBIDDEN = ("socket.", "subprocess.", "os.posix_spawn", "os.exec", "os.fork", "os.system", "os.mkdir", "os.rename", "os.remove")
told = os.dup(2)
def hook(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event.startswith(FORBIDDEN) or (writes and "__pycache__" not in str(arguments[0])):
        os.write(told, f"{event} {arguments!r:.200}\\n".encode())
sys.dont_write_bytecode = True
sys.addaudithook(hook)
"""
HELP = "from trainpace.cli import main\nmain({!r})"
CASES = {
    "import trainpace": "import trainpace\ntrainpace.forecast, trainpace.plan, trainpace.measure",
    "every public name": "import trainpace\n[getattr(trainpace, name) for name in dir(trainpace)]",
    "--help": HELP.format(["--help"]),
    "--version": HELP.format(["--version"]),
    "forecast --help": HELP.format(["forecast", "--help"]),
    "journal --help": HELP.format(["journal", "--help"]),
    "serve --help": HELP.format(["serve", "--help"]),
    "gpus": HELP.format(["gpus"]),
    "a hook that sees something": "import tempfile; tempfile.TemporaryFile()",
}


@pytest.mark.parametrize("case", CASES)
def test_import_and_help_have_no_side_effects(case, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HOOK + CASES[case]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert "Traceback" not in done.stderr
    assert (done.stderr == "") == (case != "a hook that sees something"), done.stderr
    assert list(tmp_path.iterdir()) == []
