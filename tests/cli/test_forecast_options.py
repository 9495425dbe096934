"""`trainpace forecast` on a saved workload: options that cannot have an effect are refused, and a no says why on stderr."""

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.records import save


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("forecast") / "model.json"
    save(replace(workload(), sample="3 x 224 x 224 image"), path)
    return path


def forecast(*arguments):
    command = [sys.executable, "-m", "trainpace", "forecast", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mode", "inference"), "traced with --mode train"),
        (("--optimizer", "adamw"), "traced with --optimizer sgd_momentum"),
        (("--image-size", "128"), "traced with --image-size 224"),
        (("--sequence-length", "77"), "traced with --sequence-length none"),
        (("--save-workload", "again.json"), "saved workload already"),
        (("--shard-size", "2"), "--zero"),
        (("--keep-gathered",), "--zero 3"),
        (("--async-tp",), "--tp of 2"),
        (("--sequence-parallel",), "--tp of 2"),
        (("--partition-activations", "--tp", "2"), "--checkpointing"),
        (("--price", "3"), "--samples and --epochs"),
        (("--startup", "1h"), "--startup does nothing without --samples and --epochs"),
        (("--mtbf", "9h"), "--mtbf does nothing"),
        (("--nodes", "2"), "1 Gbit/s Ethernet is 0.125"),
        (("--num-gpus", "0"), "'--num-gpus'"),
        (("--nodes", "2M"), "'--nodes'"),
        (("--num-gpus", "2000", "--nodes", "1000", "--network", "1"), "1,000,000 GPUs"),
        (("--network", "inf"), "'--network'"),
        (("--network", "2e6"), "up to 1,000,000"),
        (("--samples", "9", "--epochs", "1e308"), "'--epochs'"),
        (("--network-latency", "1ms"), "several --nodes"),
        (("--workers", "3"), "go together"),
        (("--workers", "3", "--loader-rate", "9"), "--samples and --epochs"),
    ],
)
def test_an_option_that_would_be_ignored_or_cannot_be_is_refused(model, arguments, said):
    done = forecast(model, "--gpu", "T4", *arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_traced_may_be_said_again(model):
    said = ("--mode", "train", "--optimizer", "sgd_momentum", "--image-size", "224")
    plain, again = (forecast(model, "--gpu", "T4", "--json", *more) for more in ((), said))
    assert again.returncode == 0, again.stderr
    assert json.loads(plain.stdout) == json.loads(again.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--tp", "2", "--num-gpus", "2"), "repeated blocks"), (("--precision", "bf16"), "no bf16")]
)
def test_a_no_says_why_on_stderr(model, arguments, said):
    done = forecast(model, "--gpu", "T4", "--json", *arguments)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_file_without_a_function(tmp_path):
    (tmp_path / "m.py").write_text("")
    done = forecast(tmp_path / "m.py", "--gpu", "T4")
    assert done.returncode == 2
    assert "m.py:FUNCTION" in done.stderr


def test_what_a_training_does_besides_its_steps_counts(model):
    def hours(*more):
        done = forecast(model, "--gpu", "T4", "--samples", "100k", "--epochs", "3", "--json", *more)
        return json.loads(done.stdout)["rows"][0]["training_time_s"] / 3600

    assert hours("--startup", "60s") == hours()
    assert hours("--startup", "2h") == pytest.approx(hours() + 2 - 1 / 60, rel=1e-3)
    assert hours("--evaluation-samples", "100k") > hours()
    assert hours("--mtbf", "10h") > hours()


def test_copies_latency_and_loaders_take_their_time(model, tmp_path):
    """A batch of 32 images of 600,000 bytes at 12 GB/s takes 1.6 ms, and two copies 6 us each to start; two workers feed 2 a second."""
    images = tmp_path / "images.json"
    save(replace(workload(), sample_bytes=600_000.0), images)

    def row(*more):
        done = forecast(images, "--gpu", "T4", "--batch", "32", "--json", *more)
        return json.loads(done.stdout)["rows"][0]

    copied = row("--host-copy", "12", "--accumulate", "2")
    assert row()["breakdown_ms"]["host_to_device_ms"] == 0
    assert copied["breakdown_ms"]["host_to_device_ms"] == pytest.approx(2 * (32 * 600_000 / 12e9 * 1e3 + 0.012))
    nodes = ("--nodes", "4", "--network", "1")
    assert row(*nodes, "--network-latency", "1ms")["step_time_ms"] > row(*nodes)["step_time_ms"]
    job = ("--samples", "100k", "--epochs", "1", "--startup", "0s", "--loader-rate", "1", "--workers", "2")
    assert row(*job)["training_time_s"] == pytest.approx(1e5 / 2, rel=1e-2)
    assert row(*job, *nodes)["training_time_s"] == pytest.approx(1e5 / 8, rel=1e-2)
