"""`trainpace plan --write` in a real process: a diff first, the files only with --yes, and never half of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.configs import Changes, parse_config, rewrite
from trainpace.errors import Contradiction
from trainpace.execution import Execution
from trainpace.records import save
from trainpace.verbs.settings import save_all

ARGS = """# the run of March
per_device_train_batch_size: 4   # fits
gradient_accumulation_steps: 8
num_train_epochs: 3
bf16: false
fp16: false
"""
COMMAND = "#!/bin/sh\ntorchrun --nproc-per-node 8 train.py # all of them\n"


@pytest.fixture
def folder(tmp_path):
    save(workload(), tmp_path / "model.json")
    (tmp_path / "args.yaml").write_text(ARGS)
    (tmp_path / "run.sh").write_text(COMMAND)
    return tmp_path


def plan(folder, *arguments):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "plan",
        "model.json",
        "--gpu",
        "A100",
        "--samples",
        "100k",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


FILES = ("--config", "args.yaml", "--config", "run.sh")


def test_the_diff_is_shown_and_nothing_is_written(folder):
    done = plan(folder, *FILES, "--write", "--keep", "GPUs")
    assert done.returncode == 0, done.stderr
    assert "--- args.yaml (now)\n+++ args.yaml (planned)" in done.stdout
    assert "-per_device_train_batch_size: 4   # fits" in done.stdout
    assert "run.sh: nothing changes" in done.stdout
    assert "add --yes" in done.stdout
    assert (folder / "args.yaml").read_text() == ARGS
    assert sorted(p.name for p in folder.iterdir()) == ["args.yaml", "model.json", "run.sh"]


def test_files_that_are_not_there_are_made_by_name(folder):
    options = ("--epochs", "3", "--num-gpus", "4", "--write", "--new", "ds.json", "--new", "job.sbatch")
    done = plan(folder, *options)
    assert done.returncode == 0, done.stderr
    assert "+++ ds.json (planned)" in done.stdout
    assert not (folder / "ds.json").exists()
    done = plan(folder, *options, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout)["best"]["choice"]["execution"]
    files = [parse_config((folder / name).read_text(), name) for name in ("ds.json", "job.sbatch")]
    said = {s.name: s.value for file in files for s in file.settings}
    assert [f.format for f in files] == ["DeepSpeed", "Slurm batch script"]
    assert (said["micro_batch"], said["nproc_per_node"]) == (end["micro_batch"], end["nproc_per_node"])
    assert said["time_limit_s"] >= json.loads(done.stdout)["best"]["job_s"]
    assert "is there already" in plan(folder, *options).stderr
    assert "tells no format" in plan(folder, "--epochs", "3", "--write", "--new", "ds.toml").stderr
    assert "--new is for --write" in plan(folder, "--epochs", "3", "--new", "a.json").stderr


def test_with_yes_the_files_say_the_plan(folder):
    done = plan(folder, *FILES, "--write", "--yes", "--json", "--keep", "GPUs")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    best = answer["changes"][-1]["execution"]
    text = (folder / "args.yaml").read_text()
    found = {s.name: s.value for s in parse_config(text, "args.yaml").settings}
    assert (found["micro_batch"], found["accumulation"]) == (best["micro_batch"], best["accumulation"])
    assert found["precision"] == best["precision"] != "fp32"
    assert text.startswith("# the run of March\n")
    assert (folder / "args.yaml.bak").read_text() == ARGS
    assert not (folder / "run.sh.bak").exists()
    shown = {f["file"]: f for f in answer["files"]}
    assert shown["args.yaml"]["backup"].endswith("args.yaml.bak")
    assert shown["run.sh"]["diff"] == ""
    assert answer["not_written"].keys() <= {"channels_last", "reshard_after_forward", "zero_stage"}
    again = plan(folder, *FILES, "--write", "--json", "--keep", "GPUs")
    assert json.loads(again.stdout)["start"]["micro_batch"] == best["micro_batch"]


def test_a_command_as_text_is_shown_and_not_saved(folder):
    done = plan(folder, "--command", "torchrun --nproc-per-node 4 t.py", "--epochs", "3", "--batch", "4", "--num-gpus", "8",
                "--global-batch", "256", "--write", "--yes")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "-torchrun --nproc-per-node 4 t.py\n+torchrun --nproc-per-node 8 t.py" in done.stdout
    assert "Not written: micro_batch" in done.stdout
    assert not (folder / "command.sh").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--write", "--epochs", "3"), "name them with --config"),
        ((*FILES, "--yes"), "--yes is for --write"),
        ((*FILES, "--config", "none.yaml", "--write"), "cannot read none.yaml"),
    ],
)
def test_misuse_is_refused(folder, arguments, words):
    done = plan(folder, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_would_contradict_each_other_are_not_written(tmp_path):
    # no file says that there are pipeline stages, so the global batch that goes with them looks wrong beside the processes
    texts = {
        "ds.json": '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}',
        "run.sh": "torchrun --nproc-per-node 8 --nnodes 1 train.py\n",
    }
    before = Execution(micro_batch=4, nproc_per_node=8)
    paths = {str(tmp_path / name): text for name, text in texts.items()}
    for path, text in paths.items():
        Path(path).write_text(text)
    files = rewrite(paths, Changes(before=before, after=replace(before, pp=2)))
    assert [bool(f.diff) for f in files.files] == [True, False]
    with pytest.raises(Contradiction, match="nothing was written, for then global_batch 16"):
        save_all(files)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == texts
