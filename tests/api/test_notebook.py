"""`%load_ext trainpace` in a real kernel, and the magic by itself."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.api import notebook

ROOT = Path(__file__).parents[2]
SCHEDULE = "schedule --samples 9000 --epochs 3 --micro-batch 8 --step-time 10ms"
FOLDER = ROOT / ".tools"
CELLS = (
    "%load_ext trainpace",
    f"%trainpace {SCHEDULE}",
    f"answer = %trainpace {SCHEDULE} --json\nanswer['time']['steps']",
    "epochs = 6\nanswer = %trainpace schedule --samples 9000 --epochs {epochs} --micro-batch 8 --step-time 10ms --json\nanswer['time']['steps']",
    "import trainpace\ntrainpace.schedule(samples=9000, epochs=3, micro_batch=8, step_time='10ms')",
    "trainpace.gpus()",
    "%trainpace forecst resnet18",
    "'the kernel goes on'",
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
def test_in_a_real_kernel(tmp_path):
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
    loaded, printed, steps, expanded, record, gpus, refused, after = json.loads(done.stdout)
    assert loaded == []
    assert "The training takes 33.8 s" in "".join(out["text"] for out in printed)
    assert [out["data"]["text/plain"] for out in (*steps, *expanded)] == ["3375", "6750"]
    assert "<td>3,375</td>" in record[0]["data"]["text/html"]
    assert "RTX 4090" in gpus[0]["data"]["text/html"]
    (error,) = refused
    assert (error["name"], "Traceback" in json.dumps(error)) == ("stderr", False)
    assert "'forecst' is no verb" in error["text"]
    assert "Nearest: forecast" in error["text"]
    assert after[0]["data"]["text/plain"] == "'the kernel goes on'"


def test_the_magic_prints_what_the_command_prints(capfd):
    assert notebook.magic(SCHEDULE) is None
    assert "The training takes 33.8 s" in capfd.readouterr().out


def test_with_json_it_returns_values(capfd):
    assert notebook.magic(f"{SCHEDULE} --json")["time"]["steps"] == 3375
    assert capfd.readouterr().out == ""


def test_a_no_is_an_answer(capfd):
    assert notebook.magic(f"{SCHEDULE} --deadline 1s --json")["meets_limit"] is False


@pytest.mark.parametrize("line", ["forecst resnet18", "schedule 'open", "gpus nonsense"])
def test_misuse_is_one_sentence(line):
    kind = Exception if importlib.util.find_spec("IPython") else notebook.TrainpaceError
    with pytest.raises(kind) as refused:
        notebook.magic(line)
    assert str(refused.value).strip().count("\n") == 0


def test_the_cells_folder_is_not_searched_for_modules(tmp_path, monkeypatch, capfd):
    (tmp_path / "click.py").write_text("raise SystemExit('a module of the folder was imported')")
    monkeypatch.chdir(tmp_path)
    assert notebook.magic(f"{SCHEDULE} --json")["time"]["steps"] == 3375
