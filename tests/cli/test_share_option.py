"""Pages written by `--share` do not reveal names of files or folders."""

import subprocess
import sys

import pytest

TASK = """
import torch
from torch import nn
def qx7_task():
    model = nn.Linear(4, 2)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(4), 1)] * 8
"""
MACHINES = '[[machine]]\nname = "qx7-lab"\ndevice = "RTX 3090"\ncount = 2\nprice = 1.5\nhost = "EPYC 7742"\n'
MODEL = "qx7_model.py:qx7_task"
VERBS = {
    "forecast": (MODEL, "--gpu", "T4", "--batch", "8"),
    "match": (
        MODEL,
        "--samples",
        "50k",
        "--epochs",
        "1",
        "--machines",
        "qx7.toml",
        "--only-machines",
    ),
    "plan": (
        MODEL,
        "--gpu",
        "A100",
        "--num-gpus",
        "2",
        "--batch",
        "8",
        "--samples",
        "50k",
        "--epochs",
        "1",
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_shared_page_contains_no_user_names_or_paths(verb, tmp_path):
    folder = tmp_path / "home" / "qx7"
    folder.mkdir(parents=True)
    (folder / "qx7_model.py").write_text(TASK)
    (folder / "qx7.toml").write_text(MACHINES)
    command = [
        sys.executable,
        "-m",
        "trainpace",
        verb,
        *VERBS[verb],
        "--share",
        "page.html",
        "--no-journal",
        "--json",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "qx7" in done.stdout, "the answer itself names it"
    assert "Page to share: page.html" in done.stderr
    page = (folder / "page.html").read_text()
    assert "qx7" not in page.lower()
    assert str(tmp_path) not in page
    assert "own model" in page or verb == "match"
    assert {"forecast": "T4", "match": "RTX 3090", "plan": "torch.compile"}[verb] in page
