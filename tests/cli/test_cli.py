"""Tests of the command in a real process: answers, exit codes and bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from nouns import machine_profile, measurement
from trainpace.core.execution import Execution
from trainpace.core.records import save, to_jsonable

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
TASK = """
import torch
from torch import nn
def task():
    model = nn.Linear(4, 2)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(4), 1)] * 8
def broken():
    raise RuntimeError("no such luck")
"""


def trainpace(*arguments, cwd=None):
    command = [sys.executable, "-m", "trainpace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def ask(*arguments):
    done = trainpace(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


RUN = (
    "schedule",
    "--samples",
    "1281167",
    "--epochs",
    "90",
    "--micro-batch",
    "32",
    "--nproc-per-node",
    "8",
)


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TASK)
    return file


def test_schedule_computes_steps_time_and_cost():
    answer = ask(*RUN, "--step-time", "210ms", "--price", "2.50")
    assert answer["time"]["steps"] == 450450
    assert answer["total_s"] == pytest.approx(94594.5)
    assert answer["cost_usd"] == pytest.approx(525.5, abs=0.1)


def test_forecast_is_scaled_by_a_measurement_on_another_gpu(tmp_path):
    plain = ask("forecast", "vgg11", "--gpu", "V100", "--gpu", "T4", "--batch", "1:24")
    rows = {(row["gpu"], row["batch"]): row for row in plain["rows"]}
    source = next(row for row in plain["rows"] if row["batch"] == 8)
    run = Execution(micro_batch=8, optimizer="sgd_momentum")
    times = {"step_times_ms": (1.0,), "warmup_ms": (), "median_ms": 1.5 * source["step_time_ms"]}
    measured = replace(measurement(), model="vgg11", device="V100", execution=run, **times)
    file = tmp_path / "measured.json"
    file.write_text(json.dumps([to_jsonable(measured)]))
    scaled = ask("forecast", "vgg11", "--gpu", "T4", "--batch", "1:24", "--transfer-from", file)
    for row in scaled["rows"]:
        assert row["provenance"] == "transferred"
        before = rows[row["gpu"], row["batch"]]
        assert before["step_time_ms"] < row["step_time_ms"] < 1.5 * before["step_time_ms"]
    (jumps,) = scaled["jumps"].values()
    assert jumps
    for jump in jumps:  # the jump refers to the shown step times
        shown = next(row for row in scaled["rows"] if row["batch"] == jump["batch"])
        assert jump["after_ms"] == pytest.approx(shown["step_time_ms"])
    file.write_text("[]")
    assert (
        "no measurement"
        in trainpace("forecast", "vgg11", "--gpu", "T4", "--transfer-from", file).stderr
    )


def test_forecast_uses_a_calibrated_machine_profile(tmp_path):
    save(machine_profile(), tmp_path / "profile.json")
    (row,) = ask("forecast", "resnet18", "--calibrated", tmp_path / "profile.json", "--batch", "8")[
        "rows"
    ]
    assert row["provenance"] == "calibrated"
    # ResNet-18's 1.8 GMAC, three passes, at a tenth of a TFLOP/s
    assert row["step_time_ms"] > 8 * 1e3 * 3 * 2 * 1.8e9 / 0.1e12


def test_schedule_from_epoch_time_repeats_and_speedup():
    done = trainpace(
        "schedule",
        "--epoch-time",
        "10.7h",
        "--epochs",
        "50",
        "--repeats",
        "32",
        "--speedup",
        "2153%",
    )
    assert done.returncode == 0
    for part in ("713 days", "21.53x", "4.64%", "33.1 days"):
        assert part in done.stdout


def test_missed_deadline_exits_1_and_states_the_excess():
    done = trainpace(*RUN, "--step-time", "210ms", "--deadline", "24h")
    assert done.returncode == 1
    assert "2 h 17 min over 24 h" in done.stdout


def test_schedule_combines_config_files_and_options():
    files = [f"--config={CONFIGS / name}" for name in ("ds.json", "args.json", "train.sbatch")]
    done = trainpace(
        "schedule", *files, "--samples", "1281167", "--epochs", "90", "--step-time", "150ms"
    )
    assert done.returncode == 0, done.stderr
    assert "gradient_cliping: unknown to DeepSpeed" in " ".join(done.stdout.split())
    assert "16 micro-batch x 2 accumulation x 8 data parallel" in " ".join(done.stdout.split())


def test_contradicting_config_files_exit_2_and_are_named():
    files = [f"--config={CONFIGS / name}" for name in ("ds.json", "args.json")]
    done = trainpace(
        "schedule",
        *files,
        "--command",
        "torchrun --nproc-per-node 4 t.py",
        "--samples",
        "9",
        "--epochs",
        "1",
    )
    assert done.returncode == 2
    for part in (
        "256",
        "ds.json, train_batch_size",
        "args.json, per_device_train_batch_size",
        "= 128",
    ):
        assert part in done.stderr


def test_option_contradicting_a_config_file_exits_2():
    done = trainpace(
        "schedule",
        "--config",
        CONFIGS / "args.json",
        "--micro-batch",
        "4",
        "--samples",
        "9",
        "--epochs",
        "1",
    )
    assert done.returncode == 2
    assert "4 on the command line and 16 in" in done.stderr


def test_forecast_json_rows_have_the_documented_fields():
    answer = ask(
        "forecast",
        "resnet18",
        "--gpu",
        "T4",
        "--gpu",
        "A100",
        "--batch",
        "8,16",
        "--precision",
        "amp_fp16",
    )
    assert answer["schema_version"] == 1
    assert [(row["gpu"], row["batch"]) for row in answer["rows"]] == [
        ("T4", 8),
        ("T4", 16),
        ("A100 SXM 40GB", 8),
        ("A100 SXM 40GB", 16),
    ]
    wanted = {
        "model",
        "gpu",
        "num_gpus",
        "precision",
        "batch",
        "step_time_ms",
        "step_time_ms_low",
        "step_time_ms_high",
        "samples_per_second",
        "peak_memory_gib",
        "fits",
        "mfu",
        "breakdown_ms",
        "provenance",
        "warnings",
    }
    for row in answer["rows"]:
        assert wanted <= row.keys()
        assert sum(row["breakdown_ms"].values()) == pytest.approx(row["step_time_ms"])
        assert row["step_time_ms_low"] < row["step_time_ms"] < row["step_time_ms_high"]


def test_saved_workload_forecasts_every_precision(task, tmp_path):
    saved = tmp_path / "w.json"
    assert (
        trainpace("forecast", f"{task}:task", "--gpu", "T4", "--save-workload", saved).returncode
        == 0
    )
    for precision in ("fp32", "amp_fp16", "fp16"):
        assert (
            ask("forecast", saved, "--gpu", "A100", "--precision", precision)["rows"][0][
                "step_time_ms"
            ]
            > 0
        )


def test_forecast_includes_training_time_and_cost():
    answer = ask(
        "forecast",
        "resnet18",
        "--gpu",
        "H100",
        "--samples",
        "1.28M",
        "--epochs",
        "2",
        "--price",
        "3",
        "--num-gpus",
        "4",
    )
    row = answer["rows"][0]
    assert row["training_time_s"] == pytest.approx(60 + 20000 * row["step_time_ms"] / 1e3, rel=0.01)
    assert row["assumed"][0] == "a start takes 1 min"
    assert row["cost_usd"] == pytest.approx(row["training_time_s"] / 3600 * 12)


def test_out_of_memory_forecast_exits_1():
    done = trainpace("forecast", "vgg16", "--gpu", "T4", "--batch", "1024")
    assert done.returncode == 1
    assert "No: it does not fit in memory." in done.stdout


def test_card_without_bf16_units_emulates_it_slowly():
    done = trainpace("forecast", "resnet18", "--gpu", "V100", "--precision", "amp_bf16")
    assert done.returncode == 0
    assert "emulates bf16" in " ".join(done.stdout.split())


def test_measure_saves_its_measurements(task, tmp_path):
    saved = tmp_path / "m.json"
    done = trainpace(
        "measure",
        f"{task}:task",
        "--batch",
        "4,8",
        "--repeats",
        "1",
        "--seconds",
        "0.2s",
        "--output",
        saved,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(saved.read_text())
    assert [m["execution"]["micro_batch"] for m in measured] == [4, 8]
    assert all(m["record"] == "Measurement" for m in measured)
    assert "Best throughput" in done.stdout


def test_gpus_lists_and_shows_cards():
    assert "RTX 3090" in trainpace("gpus").stdout
    assert "936" in trainpace("gpus", "NVIDIA GeForce RTX 3090").stdout
    assert ask("gpus", "T4")["memory_gib"]["kind"] in ("datasheet", "secondary")


def test_forecast_accepts_a_custom_gpu_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[gpu]]\nname = "My card"\nfp32_tflops = 10\nmemory_bandwidth_gb_per_s = 500\nmemory_gib = 8\n'
    )
    row = ask("forecast", "resnet18", "--gpu", "my card", "--hardware", file)["rows"][0]
    assert row["step_time_ms"] > 0


BAD = {
    "no such verb": ["forcast", "resnet50"],
    "no arguments": ["schedule"],
    "no batch": ["schedule", "--samples", "100", "--epochs", "1"],
    "negative": ["schedule", "--samples", "-5", "--epochs", "1", "--micro-batch", "1"],
    "zero": [*RUN, "--accumulate", "0"],
    "huge": [*RUN, "--step-time", "1e300s"],
    "huge count": ["schedule", "--samples", "1e30", "--epochs", "1", "--micro-batch", "1"],
    "not a number": [*RUN, "--step-time", "fast"],
    "nan epochs": ["schedule", "--samples", "9", "--epochs", "nan", "--micro-batch", "1"],
    "infinite epochs": ["schedule", "--samples", "9", "--epochs", "inf", "--micro-batch", "1"],
    "unit missing": [*RUN, "--step-time", "210"],
    "contradiction": [*RUN, "--global-batch", "100"],
    "shards": [*RUN, "--tp", "3"],
    "budget without price": [*RUN, "--budget", "5", "--step-time", "1s"],
    "no such option": [*RUN, "--step-tim", "1s"],
    "config is missing": [
        "schedule",
        "--config",
        "/nonexistent/ds.json",
        "--samples",
        "9",
        "--epochs",
        "1",
    ],
    "config is a folder": ["schedule", "--config", "/", "--samples", "9", "--epochs", "1"],
    "command": ["schedule", "--command", "rm -rf", "--samples", "9", "--epochs", "1"],
    "unknown GPU": ["forecast", "resnet50", "--gpu", "RTX 9090"],
    "unknown model": ["forecast", "resnet51", "--gpu", "T4"],
    "unknown kind": ["forecast", "keras:vgg16", "--gpu", "T4"],
    "bad batch": ["forecast", "resnet50", "--gpu", "T4", "--batch", "8:2"],
    "zero batch": ["forecast", "resnet50", "--gpu", "T4", "--batch", "0"],
    "huge batch": ["forecast", "resnet50", "--gpu", "T4", "--batch", "1e30"],
    "many batches": ["forecast", "resnet50", "--gpu", "T4", "--batch", "1:100M"],
    "zero batch step": ["forecast", "resnet50", "--gpu", "T4", "--batch", "1:9:0"],
    "bad precision": ["forecast", "resnet50", "--gpu", "T4", "--precision", "int4"],
    "bad optimizer": ["forecast", "resnet18", "--gpu", "T4", "--optimizer", "lionn"],
    "samples alone": ["forecast", "resnet50", "--gpu", "T4", "--samples", "5"],
    "no such workload": ["forecast", "/nonexistent/w.json", "--gpu", "T4"],
    "no such file": ["forecast", "/nonexistent/m.py:task", "--gpu", "T4"],
    "no such transformer": ["forecast", "transformers:/nonexistent.json", "--gpu", "T4"],
    "no such hardware file": [
        "forecast",
        "resnet50",
        "--gpu",
        "T4",
        "--hardware",
        "/nonexistent.toml",
    ],
    "measure what": ["measure", "resnet51"],
    "measure where": ["measure", "resnet18", "--output", "/nonexistent/folder/m.json"],
    "unknown GPU listed": ["gpus", "RTX 9090"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_2_with_one_message(name):
    done = trainpace(*BAD[name])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("trainpace: ")]
    assert len(message) == 1
    assert len(message[0]) > 30
    assert done.stdout == ""


@pytest.mark.parametrize("function", ["broken", "nothing"])
def test_model_function_that_raises_exits_2(task, function):
    for verb in (["forecast", "--gpu", "T4"], ["measure"]):
        done = trainpace(verb[0], f"{task}:{function}", *verb[1:])
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert ("no such luck" if function == "broken" else "unknown function") in done.stderr


def test_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m trainpace gpus | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [[], ["schedule"], ["forecast"], ["measure"], ["gpus"]])
def test_help_fits_the_line_width(verb):
    done = trainpace(*verb, "--help")
    assert done.returncode == 0
    assert "trainpace" in done.stdout
    assert all(len(line) <= 112 for line in done.stdout.splitlines())


@pytest.mark.parametrize("verb", ["forecast", "plan", "match", "measure", "schedule", "run"])
def test_help_shows_common_options_and_help_all_shows_every_option(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (trainpace(verb, option).stdout for option in ("--help", "--help-all"))
    options = {word for word in whole.split() if word.startswith("--")}
    assert 15 < sum(line.startswith("  -") for line in short.splitlines()) < 45
    assert "More options:" in whole
    assert "More options:" not in short
    assert len(options) > 25
    if verb == "forecast":
        assert len(short.splitlines()) <= 70


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            ("verify",),
            ["Decides weights and samples.  [default: 0]", "it is rounding.  [default: 0.00001]"],
        ),
        (
            ("journal", "list"),
            ["Number of newest runs to skip.  [default: 0]", "Runs to show.  [default: 20]"],
        ),
        (("schedule", "--help-all"), ["Time of one evaluation.  [default: 0s]", "Nodes."]),
    ],
)
def test_help_shows_zero_defaults_and_small_defaults_without_exponent(command, lines):
    shown = command if "--help-all" in command else (*command, "--help")
    text = " ".join(trainpace(*shown).stdout.split())
    for line in lines:
        assert " ".join(line.split()) in text
    assert "[default: False]" not in text
    assert "[default: ()]" not in text
