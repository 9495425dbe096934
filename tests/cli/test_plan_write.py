"""Tests of `trainpace plan --write`: it shows a diff and changes files only with --yes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.configs import Changes, combine, parse_config, rewrite
from trainpace.core.errors import Contradiction
from trainpace.core.execution import Execution
from trainpace.core.records import save
from trainpace.plan import Change, Choice, Plan, Projection
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import Misuse
from trainpace.verbs.settings import rewritten, save_all

ARGS = """# the run of March
per_device_train_batch_size: 4   # fits
gradient_accumulation_steps: 8
num_train_epochs: 3
gradient_checkpointing: false
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
        "--details",
        "model.json",
        "--gpu",
        "A100",
        "--samples",
        "100k",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


FILES = ("--config", "args.yaml", "--config", "run.sh")


def test_write_without_yes_shows_a_diff_only(folder):
    done = plan(folder, *FILES, "--write", "--keep", "GPUs")
    assert done.returncode == 0, done.stderr
    assert "--- args.yaml (now)\n+++ args.yaml (planned)" in done.stdout
    assert "-bf16: false\n+bf16: true" in done.stdout
    assert "run.sh: nothing changes" in done.stdout
    assert "Add --yes" in done.stdout
    assert (folder / "args.yaml").read_text() == ARGS
    assert sorted(p.name for p in folder.iterdir()) == ["args.yaml", "model.json", "run.sh"]


def test_new_option_creates_config_files_by_name(folder):
    options = (
        "--epochs",
        "3",
        "--num-gpus",
        "4",
        "--write",
        "--new",
        "ds.json",
        "--new",
        "job.sbatch",
    )
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
    assert (said["micro_batch"], said["nproc_per_node"]) == (
        end["micro_batch"],
        end["nproc_per_node"],
    )
    assert said["time_limit_s"] >= json.loads(done.stdout)["best"]["job_s"]
    assert "already exists" in plan(folder, *options).stderr
    assert "the format of" in plan(folder, "--epochs", "3", "--write", "--new", "ds.toml").stderr
    assert "--new needs --write" in plan(folder, "--epochs", "3", "--new", "a.json").stderr


def test_new_deepspeed_and_accelerate_files_agree(folder):
    """DeepSpeed's bf16 section conflicted with accelerate's mixed_precision."""
    options = (
        "--epochs",
        "3",
        "--num-gpus",
        "4",
        "--write",
        "--new",
        "ds.json",
        "--new",
        "accelerate.yaml",
        "--yes",
    )
    for precision in ("bf16", "amp_bf16", "fp32"):
        done = plan(
            folder,
            *options,
            "--precision",
            precision,
            "--keep",
            "precision",
            "--sample-ms",
            "9",
            "--workers",
            "1",
            "--cores",
            "32",
        )
        assert done.returncode == 0, done.stderr
        files = [
            parse_config((folder / name).read_text(), name)
            for name in ("ds.json", "accelerate.yaml")
        ]
        combined = combine(files)
        assert combined.clashes == ()
        values = {name: setting.value for name, setting in combined.values.items()}
        # what accelerate refuses beside a file of DeepSpeed's own (utils/dataclasses.py, _deepspeed_config_checks)
        assert {s.name for s in files[1].settings} == {"nnodes", "world_size"}
        assert "deepspeed_config_file: ds.json" in (folder / "accelerate.yaml").read_text()
        assert (values["world_size"], values["zero_stage"]) == (
            4,
            0,
        )  # accelerate requires a ZeRO stage, even 0
        assert values.get("precision", "fp32").removeprefix("amp_") == precision.removeprefix(
            "amp_"
        )
        for name in ("ds.json", "accelerate.yaml"):
            (folder / name).unlink()
        words = " ".join(done.stdout.split())
        if "Nothing to change" in words:
            continue
        assert "change your code" in words
        assert "dataloader_workers" in words
        assert "num_workers=8" in done.stdout
        assert "--write" not in words.split("Next: ")[1]  # the new files exist already


def test_plan_without_config_files_shows_pytorch_code(folder):
    done = plan(folder, "--epochs", "3")
    assert "with torch.autocast(" in done.stdout
    assert "bf16=true" not in done.stdout
    save(
        replace(workload(), settings={"micro_batch": 8, "accumulation": 1}), folder / "model.json"
    )  # settings of a Hugging Face Trainer
    assert "bf16=true" in plan(folder, "--epochs", "3").stdout
    with_files = plan(folder, *FILES, "--keep", "GPUs")
    assert "bf16=true" in with_files.stdout
    assert "torch.autocast" not in with_files.stdout


def test_write_with_yes_saves_the_plan_and_a_backup(folder):
    done = plan(folder, *FILES, "--write", "--yes", "--json", "--keep", "GPUs")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    best = answer["changes"][-1]["execution"]
    text = (folder / "args.yaml").read_text()
    found = {s.name: s.value for s in parse_config(text, "args.yaml").settings}
    assert (found["micro_batch"], found["accumulation"]) == (
        best["micro_batch"],
        best["accumulation"],
    )
    assert found["precision"] == best["precision"] != "fp32"
    assert text.startswith("# the run of March\n")
    assert (folder / "args.yaml.bak").read_text() == ARGS
    assert not (folder / "run.sh.bak").exists()
    shown = {f["file"]: f for f in answer["files"]}
    assert shown["args.yaml"]["backup"].endswith("args.yaml.bak")
    assert shown["run.sh"]["diff"] == ""
    assert answer["not_written"] == {}
    again = plan(folder, *FILES, "--write", "--json", "--keep", "GPUs")
    assert json.loads(again.stdout)["start"]["micro_batch"] == best["micro_batch"]


def test_rewritten_command_is_shown_and_not_saved(folder):
    flags = "--per_device_train_batch_size 4 --gradient_accumulation_steps"
    done = plan(
        folder,
        "--command",
        f"torchrun --nproc-per-node 4 t.py {flags} 16",
        "--epochs",
        "3",
        "--num-gpus",
        "8",
        "--write",
        "--yes",
        "--keep",
        "micro-batch",
        "--keep",
        "precision",
    )
    assert done.returncode == 0, done.stderr
    assert f"+torchrun --nproc-per-node 8 t.py {flags} 8" in done.stdout
    assert not (folder / "command.sh").exists()


def test_gpu_count_is_unchanged_if_no_file_sets_the_batch(folder):
    done = plan(
        folder,
        "--command",
        "torchrun --nproc-per-node 4 t.py",
        "--epochs",
        "3",
        "--batch",
        "4",
        "--num-gpus",
        "8",
        "--global-batch",
        "256",
        "--write",
        "--yes",
        "--details",
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun --nproc-per-node 8" not in done.stdout
    assert "not compared: command.sh:" in done.stdout


RANDOM_MODELS = Path(__file__).parents[2] / "benchmarks" / "random_models.py"
LIGHTNING = """trainer:
  devices: 1
  num_nodes: 4
  accumulate_grad_batches: 1
  precision: 16-mixed
  max_steps: 10000
data:
  batch_size: 8
"""


@pytest.mark.slow
def test_plan_excludes_settings_the_engine_does_not_support(tmp_path):
    (tmp_path / "lightning.yaml").write_text(LIGHTNING)
    fleet = (
        "--gpu",
        "T4",
        "--nodes",
        "4",
        "--network",
        "0.125",
        "--samples",
        "1M",
        "--max-steps",
        "10000",
        "--json",
    )
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "plan",
        str(RANDOM_MODELS) + ":transformer_12",
        *fleet,
        "--keep",
        "GPUs",
    ]

    def planned(*arguments):
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        return done, json.loads(done.stdout) if done.returncode == 0 else {}

    free = planned("--batch", "8", "--precision", "amp_fp16")[1]
    assert (
        free["best"]["choice"]["execution"]["pp"] > 1
    )  # where nothing speaks against it, the network does
    assert not any(
        "pipeline" in r["title"] and "not compared" in r["why"] for r in free["rejected"]
    )
    assert {r["title"]: r["why"] for r in free["rejected"]}["tensor parallelism"].endswith(
        "which has one GPU"
    )
    _, answer = planned("--config", "lightning.yaml")
    end = answer["best"]["choice"]["execution"]
    assert end["pp"] == 1
    said = {r["title"]: r["why"] for r in answer["rejected"]}
    assert (
        said["pipeline parallelism"]
        == "not compared: lightning.yaml: Lightning has no pipeline parallelism"
    )
    _, answer = planned("--config", "lightning.yaml", "--write", "--yes")
    assert answer["not_written"] == {}
    end = answer["best"]["choice"]["execution"]
    found = {
        s.name: s.value
        for s in parse_config((tmp_path / "lightning.yaml").read_text(), "lightning.yaml").settings
    }
    assert (
        found["micro_batch"] * found["accumulation"] * found["nnodes"] * found["nproc_per_node"]
        == 32
    )
    assert (found["micro_batch"], found.get("zero_stage", 0)) == (
        end["micro_batch"],
        end["zero_stage"],
    )
    refused, _ = planned("--config", "lightning.yaml", "--pp", "4")
    assert refused.returncode == 2
    assert (
        "pp is 4 now, and lightning.yaml: Lightning has no pipeline parallelism" in refused.stderr
    )


def test_plan_that_no_file_can_express_is_rejected(tmp_path):
    path = tmp_path / "lightning.yaml"
    path.write_text(LIGHTNING)
    start = Execution(micro_batch=8, nnodes=4, precision="amp_fp16")
    change = Change(
        title="fp8, sharded",
        execution=replace(start, precision="fp8", zero_stage=2),
        forecast_saved_s=1.0,
    )
    outlook = Projection(
        choice=Choice(execution=change.execution),
        changes=1,
        step_ms=1.0,
        job_s=1.0,
        needed_gib=1.0,
        num_devices=4,
    )
    made = Plan(start=start, changes=(change,), best=outlook, fastest=outlook)
    with pytest.raises(Misuse, match=r"can express .*`precision` \(.*transformer-engine\)"):
        rewritten(PlanRequest(model="m", config=(str(path),)), made, ())
    assert path.read_text() == LIGHTNING


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--write", "--epochs", "3"), "--write needs --config"),
        ((*FILES, "--yes"), "--yes needs --write"),
        ((*FILES, "--config", "none.yaml", "--write"), "cannot read none.yaml"),
    ],
)
def test_misuse_is_rejected(folder, arguments, words):
    done = plan(folder, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_contradicting_files_are_not_written(tmp_path):
    # no file can express pipeline stages, so the global batch contradicts the number of processes
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
    with pytest.raises(Contradiction, match="contradict each other: global_batch 16"):
        save_all(files)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == texts
