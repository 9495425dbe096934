"""More verbs on a simulated accelerator: other loops, number formats and streams than a plain step has, and verbs for the CPU beside it."""

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


def test_the_noise_scale_is_that_of_the_cpu(simulated):
    """It trains too: with an optimizer that still holds the CPU's parameters, gradients would only grow."""
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
def test_number_formats(simulated, tmp_path, precision):
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


def test_a_step_of_several_models(simulated, tmp_path):
    there = measured(simulated, tmp_path, "several.py:gan", "--device", "sim", "--seconds", "300ms")
    here = measured(simulated, tmp_path, "several.py:gan", "--device", "cpu", "--seconds", "0ms")
    assert there["losses"][:8] == pytest.approx(here["losses"][:8], rel=1e-4)
    assert there["median_ms"] >= 11.9  # planted; a busy machine adds to it
    assert there["step"]["forward_ms"] == pytest.approx(12, abs=1)
    assert there["run"]["settled"] is True


def test_a_trial_in_16_bits_with_its_noise_scale(simulated, tmp_path):
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


def test_a_diagnosis(simulated):
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


def test_streams_of_a_watched_script_stay_joined(simulated):
    """Copies in a stream of their own take 5.8 ms a step, and the steps' stream waits for them before its own 2.4."""

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


def test_verbs_for_the_cpu_beside_an_accelerator(simulated, tmp_path):
    """Replicas, sharding and exchanges of `verify`, and the micro-benchmarks of `calibrate`, stay on the CPU."""
    equal = answer_of(simulated, "verify", "planted.py:task", "--steps", "2", "--ranks", "2")
    assert equal["equal"] is True
    run = simulated("trainpace", "calibrate", "--seconds", "1s", "--output", "profile.json")
    assert run.returncode == 0, run.stderr
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert "gpu" not in profile["environment"]
