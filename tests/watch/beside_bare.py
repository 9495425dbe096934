"""Run scripts of real libraries with and without the recorder to compare them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from trainpace.watch import read_recording, watch

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
def keep(losses, of=""):
    with open(os.environ["LOSSES"] + of, "w") as file:
        json.dump([float(loss) for loss in losses], file)
"""


def use_libraries(monkeypatch, *folders):
    """Let scripts import the packages installed in these folders of the repository."""
    paths = [ROOT / "src", ROOT / "tests" / "shims", *(ROOT / name for name in folders)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("LOSSES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def lacking(*folders):
    """Return the folders that are not installed, as make targets."""
    return " ".join(f"{name}/installed" for name in folders if not (ROOT / name).is_dir())


def trained(text, folder, *launcher, arguments=()):
    """Return a script's losses without the recorder, with it, and the recording."""
    (folder / "train.py").write_text(HEAD + text)
    return compared([sys.executable, *launcher, str(folder / "train.py"), *arguments], folder)


def compared(command, folder, losses=lambda path: json.loads(path.read_text())):
    """Return a command's losses without the recorder, with it, and the recording.

    The command saves its losses in the file named by LOSSES. `losses` reads the file.
    """
    with subprocess.Popen(command, env={**os.environ, "LOSSES": str(folder / "bare")}) as bare:
        os.environ["LOSSES"] = str(folder / "watched")
        assert watch(command, folder / "recording") == 0
    assert bare.returncode == 0
    return losses(folder / "bare"), losses(folder / "watched"), read_recording(folder / "recording")
