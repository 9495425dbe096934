"""Tests of `trainpace plan` in a real process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import trainpace
from nouns import workload
from trainpace.core.records import load, save
from trainpace.plan import Plan
from trainpace.report.phrases import duration
from trainpace.report.plan import within_limit
from trainpace.watch import read_recording
from watch.scripts import script

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
JOB = ("--samples", "100k", "--epochs", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "model.json"
    save(workload(), path)
    return path


def plan(*arguments):
    command = [sys.executable, "-m", "trainpace", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def ask(*arguments):
    done = plan(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_plan_compares_the_job_with_the_time_limit_of_its_batch_script(model, tmp_path):
    script = tmp_path / "job.sbatch"
    command = "srun torchrun --nproc_per_node 1 train.py --per_device_train_batch_size 16"
    script.write_text(f"#!/bin/bash\n#SBATCH --time=00:01:00\n{command}\n")
    asked = {"gpu": "A100", "samples": 100_000, "epochs": 3.0, "no_journal": True}
    found = trainpace.plan(str(model), config=(str(script),), **asked)
    job_s, longest_s = found.target.job_s, found.target.job_high_s
    assert found.time_limit_s == 60 < job_s < longest_s
    said = within_limit(found.target, 60.0)
    assert duration(job_s - 60) in said
    limits = (None, 60.0, (job_s + longest_s) / 2, longest_s)
    assert len({within_limit(found.target, limit) for limit in limits}) == 4


def test_noise_scale_compares_plans_at_equal_loss(tmp_path):
    job = (
        "resnet18",
        "--gpu",
        "A100",
        "--batch",
        "8",
        "--samples",
        "100000",
        "--epochs",
        "2",
        "--allow-global-batch",
    )
    by_samples, by_loss = ask(*job), ask(*job, "--noise-scale", "64")
    assert by_loss["noise_scale"] == 64
    assert (
        by_loss["best"]["job_s"] > by_samples["best"]["job_s"]
    )  # larger batches need more samples for the same loss
    said = plan(*job, "--noise-scale", "64").stdout
    assert "same loss" in said
    assert "learning rate x" in said
    file = tmp_path / "m.json"
    file.write_text(json.dumps([{"noise_scale": {"scale": {"samples": 64.0}}}]))
    assert ask(*job, "--noise-scale", file)["best"] == by_loss["best"]
    tried = [{"measured": None}, {"measured": {}}, {"measured": {"noise_scale": {"samples": 64.0}}}]
    file.write_text(
        json.dumps({"baseline": {"tried": tried[:2]}, "rungs": [{"tried": tried}]})
    )  # as trainpace run keeps it
    assert ask(*job, "--noise-scale", file)["best"] == by_loss["best"]
    file.write_text("[{}]")
    assert "has no gradient noise scale" in refuse(*job, "--noise-scale", file)
    assert "--allow-global-batch" in refuse(*job[:-1], "--noise-scale", "64")
    assert "negative" in refuse(*job, "--noise-scale", "-3")


def refuse(*arguments):
    done = plan(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_plan_lists_changes_and_saves_its_answer(model, tmp_path):
    kept = tmp_path / "plan.json"
    answer = ask(
        model,
        "--gpu",
        "A100",
        "--num-gpus",
        "2",
        "--batch",
        "16",
        *JOB,
        "--price",
        "2",
        "--output",
        kept,
    )
    assert answer["record"] == "Plan"
    assert sum(c["forecast_saved_s"] for c in answer["changes"]) == pytest.approx(
        answer["now"]["job_s"] - answer["best"]["job_s"]
    )
    assert answer["best"]["choice"]["execution"]["optimizer"] == "sgd_momentum"
    assert load(kept, Plan).saved_s == pytest.approx(answer["saved_s"])
    done = plan(model, "--gpu", "A100", "--num-gpus", "2", "--batch", "16", *JOB, "--details")
    assert done.returncode == 0, done.stderr
    for word in (
        "recommended",
        "plain DDP is right for",
        "90% interval",
        "considered and rejected",
    ):
        assert word in done.stdout


def test_current_setup_is_read_from_config_files(model):
    answer = ask(
        model,
        "--gpu",
        "A100",
        "--config",
        CONFIGS / "args.json",
        "--config",
        CONFIGS / "ds.json",
        *JOB,
        "--command",
        "torchrun --nproc-per-node 8 train.py",
    )
    args = json.loads((CONFIGS / "args.json").read_text())
    start = answer["start"]
    assert start["micro_batch"] == args["per_device_train_batch_size"]
    assert start["accumulation"] == args["gradient_accumulation_steps"]
    assert start["nproc_per_node"] == 8
    assert start["zero_stage"] == 1
    assert start["precision"] == "amp_bf16"
    clash = refuse(model, "--gpu", "A100", "--config", CONFIGS / "args.json", "--batch", "3", *JOB)
    assert "args.json" in clash


def test_cluster_file_sets_hardware_and_is_validated(model, tmp_path):
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('gpu = "A100"\nnum_gpus = 2\nnodes = 2\nnetwork_gb_per_s = 0.01\nprice = 2\n')
    answer = ask(model, "--cluster", fleet, "--batch", "16", *JOB)
    assert answer["start"]["nnodes"] == 2
    assert answer["best"]["choice"]["execution"]["nnodes"] == 1
    assert any("0.01 GB/s" in r["why"] for r in answer["rejected"])
    assert "2 in" in refuse(model, "--cluster", fleet, "--nodes", "3", *JOB)
    fleet.write_text('gpus = "A100"\n')
    assert "'gpus'" in refuse(model, "--cluster", fleet, *JOB)
    fleet.write_text("gpu = ")
    assert "TOML" in refuse(model, "--cluster", fleet, *JOB)
    fleet.write_text('gpu = "A100"\nnodes = "two"\n')
    assert "'two'" in refuse(model, "--cluster", fleet, *JOB)


def test_saved_workload_with_a_different_optimizer_is_rejected(model, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"}})
    )
    assert "traced with --optimizer" in refuse(model, "--gpu", "A100", "--config", config, *JOB)


def test_adding_gpus_is_a_planned_change(model):
    answer = ask(
        model, "--gpu", "H100", "--num-gpus", "4", "--gpus-now", "1", "--batch", "64", *JOB
    )
    assert answer["start"]["nproc_per_node"] == 1
    assert answer["best"]["num_devices"] == 4
    assert [c["effort"] for c in answer["changes"] if "GPUs" in c["title"]] == ["infrastructure"]


def test_slow_loader_leads_to_a_planned_change(model):
    answer = ask(
        model,
        "--gpu",
        "A100",
        "--batch",
        "64",
        *JOB,
        "--workers",
        "1",
        "--sample-ms",
        "5",
        "--cores",
        "16",
    )
    titles = [c["title"] for c in answer["changes"]]
    assert any("prepared offline" in t or "loader workers" in t for t in titles)
    assert answer["now"]["step_ms"] >= 64 * 5
    assert "--sample-ms" in refuse(model, "--gpu", "A100", *JOB, "--workers", "2")
    assert "--cores" in refuse(model, "--gpu", "A100", *JOB, "--workers", "2", "--sample-ms", "5")


def test_plan_exits_1_if_nothing_fits_in_memory(model, tmp_path):
    big = replace(
        workload(),
        forms={
            name: replace(form, memory=replace(form.memory, parameter_bytes=2.0**39))
            for name, form in workload().forms.items()
        },
    )
    save(big, tmp_path / "big.json")
    done = plan(tmp_path / "big.json", "--gpu", "T4", *JOB)
    assert done.returncode == 1
    assert "out of memory" in done.stdout
    assert "Nearest" in done.stdout
    assert ask(tmp_path / "big.json", "--gpu", "T4", *JOB)["best"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "A100"), "--epochs"),
        (("--gpu", "A100", "--epochs", "3"), "--samples"),
        (JOB, "--gpu"),
        (("--gpu", "A1000000", *JOB), "A100"),
        (("--gpu", "A100", *JOB, "--keep", "speed"), "'speed'"),
        (("--gpu", "A100", *JOB, "--num-gpus", "1", "--gpus-now", "2"), "--num-gpus"),
        (("--gpu", "A100", "--num-gpus", "8", *JOB, "--tp", "3"), "tp 3"),
        (("--gpu", "A100", *JOB, "--batch", "8", "--global-batch", "100"), "global batch 100"),
        (
            ("--gpu", "A100", *JOB, "--batch", "8", "--global-batch", "64", "--accumulate", "2"),
            "accumulation 2",
        ),
        (("--gpu", "A100", "--num-gpus", "2", *JOB, "--tp", "2"), "no repeated blocks"),
        (("--gpu", "T4", *JOB, "--precision", "fp8"), "no FP8"),
        (("--gpu", "A100", "--nodes", "2", *JOB), "network"),
        (("--gpu", "A100", *JOB, "--watched", "nowhere"), "nowhere"),
        *(
            (("--gpu", "A100", *JOB, "--network", n), "'--network'")
            for n in ("-1", "nan", "inf", "1e-9", "fast")
        ),
        *(
            (("--gpu", "A100", *JOB, zero, "0"), f"'{zero}'")
            for zero in (
                "--batch",
                "--accumulate",
                "--tp",
                "--pp",
                "--cp",
                "--gpus-now",
                "--nodes-now",
                "--global-batch",
                "--cores",
                "--num-gpus",
                "--nodes",
            )
        ),
        (("--gpu", "A100", "--nodes", "2", *JOB), "0.125"),
        (
            ("--gpu", "A100", "--num-gpus", "2000", "--nodes", "1000", *JOB, "--network", "1"),
            "1,000,000 GPUs",
        ),
        (("--gpu", "A100", *JOB, "--optimizer", "adamw"), "traced with --optimizer sgd_momentum"),
        (("--gpu", "A100", *JOB, "--image-size", "64"), "traced with --image-size"),
        (("--gpu", "A100", *JOB, "--offload", "all"), "parameters, both"),
    ],
)
def test_misuse_is_rejected_with_a_message(model, arguments, said):
    assert said in refuse(model, *arguments)


def test_current_setup_is_read_from_a_recording(model, tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSES", str(tmp_path / "losses"))
    train = script(tmp_path, sleep_s=0.002)
    recorded = tmp_path / "recorded"
    watch = [
        sys.executable,
        "-m",
        "trainpace",
        "watch",
        "--output",
        recorded,
        "--",
        sys.executable,
        train,
    ]
    done = subprocess.run([*map(str, watch)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (rank,) = read_recording(recorded).ranks
    answer = ask(model, "--gpu", "A100", "--watched", recorded, "--epochs", "3")
    assert answer["start"]["micro_batch"] == rank.loader.batch_size
    now = answer["now"]["choice"]["data"]
    assert now["workers"] == 0
    assert not now["beside"]
    assert now["ms_per_sample"] >= 2.0  # the script sleeps 2 ms per sample
    assert any("loader worker" in c["title"] or "offline" in c["title"] for c in answer["changes"])
    assert all(c["saved_s"] >= 0 and c["cause"] != "data" for c in answer["in_the_script"])
    assert "--watched" in refuse(recorded, "--gpu", "A100", *JOB)
