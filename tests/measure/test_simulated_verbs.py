"""More commands on the simulated accelerator: custom loops, precisions and streams, and commands that stay on the CPU."""

import json
import re

import pytest

pytestmark = pytest.mark.slow


def answer_of(simulated, *command, **settings):
    run = simulated("trainpace", *command, "--json", **settings)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def measured(simulated, folder, *options, around=(), **settings):
    run = simulated(
        "env",
        *around,
        "trainpace",
        "measure",
        *options,
        "--batch",
        "8",
        "--repeats",
        "1",
        "--no-forecast",
        "--no-journal",
        "--output",
        "measured.json",
        **settings,
    )
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "measured.json").read_text())[0]


def test_noise_scale_matches_cpu(simulated):
    """The device must also train: with an optimizer on the CPU's parameters, gradients would only grow."""
    scales = [
        answer_of(
            simulated,
            "measure",
            "planted.py:task",
            "--device",
            kind,
            "--batch",
            "8",
            "--noise-scale",
            "--seconds",
            "0ms",
            "--repeats",
            "1",
            "--no-forecast",
            "--no-journal",
        )["noise_scale"]["scale"]
        for kind in ("sim", "cpu")
    ]
    there, here = scales
    assert there["steps"] == here["steps"]
    assert there["covariance_trace"] == pytest.approx(here["covariance_trace"], rel=1e-3)
    assert there["gradient_squared"] == pytest.approx(here["gradient_squared"], rel=1e-3)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16", "bf16"])
def test_losses_in_each_precision_match_cpu(simulated, tmp_path, precision):
    options = ("planted.py:task", "--precision", precision, "--seconds", "0ms")
    there = measured(
        simulated,
        tmp_path,
        *options,
        "--device",
        "sim",
        around=("WORK_US=500,1000", "ACTIVATION_MIB=1"),
    )
    here = measured(simulated, tmp_path, *options, "--device", "cpu")
    assert there["median_ms"] >= 11.9  # planted; a busy machine adds to it
    assert there["losses"][:8] == pytest.approx(here["losses"][:8], rel=2e-2)
    assert 1024 * there["peak_memory_gib"] == pytest.approx(
        4, abs=0.2
    )  # activations have half the bits


def test_custom_step_of_two_models_matches_planted_times(simulated, tmp_path):
    there = measured(simulated, tmp_path, "several.py:gan", "--device", "sim", "--seconds", "300ms")
    here = measured(simulated, tmp_path, "several.py:gan", "--device", "cpu", "--seconds", "0ms")
    assert there["losses"][:8] == pytest.approx(here["losses"][:8], rel=1e-4)
    assert there["median_ms"] >= 11.9  # planted; a busy machine adds to it
    assert there["step"]["forward_ms"] == pytest.approx(12, abs=1)
    assert there["run"]["settled"] is True


def test_bf16_rung_halves_memory_and_reports_noise_scale(simulated, tmp_path):
    (tmp_path / "ladder.toml").write_text(
        """task = "planted.py:task"
        device = "sim"
        [start]
        micro_batch = 8
        accumulation = 2
        [job]
        samples = 10_000
        epochs = 2
        [[rung]]
        title = "half the bits"
        precision = "bf16"
        """
    )
    run = simulated(
        "env",
        "WORK_US=500,1000",
        "ACTIVATION_MIB=1",
        "trainpace",
        "run",
        "ladder.toml",
        "--steps",
        "12",
        "--no-journal",
        "--json",
    )
    assert run.returncode in (0, 1), run.stderr
    climbed = json.loads(run.stdout)
    tried = [t["measured"] for r in (climbed["baseline"], *climbed["rungs"]) for t in r["tried"]]
    assert [min(one["trials_ms"]) for one in tried] == [pytest.approx(24.5, abs=2)] * 2, (
        run.stdout
    )  # a busy machine only adds
    whole, half = (1024 * one["peak_memory_gib"] for one in tried)
    assert (whole, half) == (
        pytest.approx(8, abs=0.2),
        pytest.approx(4, abs=0.2),
    )  # each trial's own peak
    assert any("noise scale" in line for line in climbed["verdict"])


def test_diagnose_finds_planted_logging_cause(simulated):
    run = simulated(
        "env",
        "WORK_US=500,1000",
        "trainpace",
        "diagnose",
        "--json",
        "--rounds",
        "1",
        "--block",
        "4",
        "--warm-up",
        "5",
        "--",
        "python",
        "train.py",
        "item",
    )
    diagnosis = json.loads(run.stdout)
    assert (
        diagnosis["verdict"] == "logging"
    )  # each loss is read, and to read it waits for the device
    waited = next(share["ms"] for share in diagnosis["shares"] if share["cause"] == "logging")
    assert waited > 8


def test_watch_preserves_stream_synchronization(simulated):
    """Copies on their own stream take 5.8 ms per step. The step's stream waits for them before its 2.4 ms."""

    def step_ms(*arguments):
        run = simulated(
            "env",
            "WORK_US=100,200",
            "trainpace",
            "watch",
            "--output",
            f"recording{len(arguments)}",
            "--",
            "python",
            "prefetch.py",
            *arguments,
            copy_gb_per_s=0.0001,
        )
        found = re.search(r"\d+ steps after 3 of warm-up, ([\d.]+) ms each", run.stdout)
        assert found is not None, run.stdout + run.stderr
        return float(found[1])

    assert step_ms() > 7.5
    assert step_ms("hasty") < 7


def test_verify_and_calibrate_stay_on_cpu(simulated, tmp_path):
    """Replicas, sharding and collectives of `verify`, and the micro-benchmarks of `calibrate`, stay on the CPU."""
    equal = answer_of(simulated, "verify", "planted.py:task", "--steps", "2", "--ranks", "2")
    assert equal["equal"] is True
    run = simulated("trainpace", "calibrate", "--seconds", "1s", "--output", "profile.json")
    assert run.returncode == 0, run.stderr
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert "gpu" not in profile["environment"]
