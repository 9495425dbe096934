"""Help, schedules and forecasts of packaged workloads work without torch."""

import json
import subprocess
import sys

import pytest

BLOCKED = (
    "import sys; sys.modules['torch'] = None; from trainpace.cli import main; main(sys.argv[1:])"
)


def answer(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["schedule", "--help"], ["forecast", "--help"], ["gpus"]],
    ids=" ".join,
)
def test_help_and_gpus_work_without_torch(arguments):
    assert len(answer(*arguments).splitlines()) > 10


def test_schedule_works_without_torch():
    given = [
        "--samples",
        "50k",
        "--global-batch",
        "128",
        "--epochs",
        "2",
        "--step-time",
        "80ms",
        "--json",
    ]
    assert "782" in answer("schedule", *given)  # 2 x ceil(50,000 / 128) steps


def test_forecast_of_a_packaged_workload_works_without_torch():
    forecast = json.loads(answer("forecast", "resnet50", "--gpu", "A100", "--json"))
    assert "resnet50" in json.dumps(forecast)
