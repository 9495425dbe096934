"""Tests of answers in a real Jupyter kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".tools"
CELLS = (
    "import trainpace\ntrainpace.schedule(samples=9000, epochs=3, micro_batch=8, step_time='10ms')",
    "trainpace.gpus()",
)
RUN = """
import json, sys, nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
book = nbformat.v4.new_notebook(cells=cells)
NotebookClient(book, timeout=120, allow_errors=True, kernel_name="python3").execute()
print(json.dumps([cell["outputs"] for cell in book.cells]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="make .tools/installed")
def test_magic_runs_in_a_real_kernel(tmp_path):
    path = os.pathsep.join([str(ROOT / "src"), str(FOLDER), os.environ.get("PYTHONPATH", "")])
    places = {
        name: str(tmp_path)
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    }
    environment = {
        **os.environ,
        **places,
        "PYTHONPATH": path,
        "JUPYTER_PATH": str(FOLDER / "share" / "jupyter"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN],
        input=json.dumps(CELLS),
        text=True,
        capture_output=True,
        env=environment,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    record, gpus = json.loads(done.stdout)
    assert "<td>3,375</td>" in record[0]["data"]["text/html"]
    assert "RTX 4090" in gpus[0]["data"]["text/html"]
