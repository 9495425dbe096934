"""Commands import nothing from the current folder."""

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("torch", "numpy", "random", "json", "trainpace", "msgspec")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("forecast", "resnet18", "--image-size", "64"), ("measure", "resnet18", "--batch", "2")],
)
def test_commands_do_not_import_from_the_working_directory(tmp_path, arguments):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit(7)\n")
    command = [str(Path(sys.executable).with_name("trainpace")), *arguments]
    more = ("--gpu", "T4", "--batch", "2") if arguments[0] == "forecast" else ("--no-journal",)
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
