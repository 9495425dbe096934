"""Export to MLflow and Weights & Biases with the real libraries, if they are installed here or in .trackers."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entries import entry, whole_entry
from nouns import measurement
from trainpace.core.execution import Execution
from trainpace.journal import Given, Journal
from trainpace.journal.exporting import numbers_of, series_of, settings_of, start_ms, words_of
from trainpace.journal.importing import read_mlflow

ROOT = Path(__file__).parents[2]
TRACKERS = os.environ.get("TRAINPACE_TRACKERS", str(ROOT / ".trackers"))


def needs(module):
    there = importlib.util.find_spec(module) is not None or Path(TRACKERS, module).is_dir()
    return pytest.mark.skipif(not there, reason=f"pip install --target .trackers {module}")


def run(tmp_path, *words, **more):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", ""), TRACKERS])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TRAINPACE_JOURNAL": str(tmp_path / "journal.db"),
        "HOME": str(tmp_path),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        **more,
    }
    code = "import sys; sys.argv[0] = 'trainpace'; from trainpace.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )


@pytest.fixture
def journal(tmp_path):
    kept = [
        whole_entry(
            step_time_ms=measurement().median_ms,
            notes="a remark",
            commit="abc",
            sequence_length=128,
            execution=Execution(micro_batch=8, accumulation=4),
        ),
        entry(model="vgg16", step_time_ms=12.5, seed=3),
        entry(model="big", step_time_ms=None, outcome="out_of_memory", reason="not enough memory"),
    ]
    with Journal.open(str(tmp_path / "journal.db")) as opened:
        opened.add_many(kept)
    return kept


def test_run_maps_to_tracker_settings_metrics_and_tags():
    one = whole_entry(losses=(2.0, None, 1.0), forecast_ms=11.0)
    assert settings_of(one)["micro_batch"] == one.execution.micro_batch
    assert "sequence_length" not in settings_of(one)
    assert numbers_of(one)["forecast_ms"] == 11.0
    assert [value for _, value in series_of(one)["step_time_ms"]] == list(one.step_times_ms)
    assert series_of(one)["step_time_ms"][0][0] == len(one.warmup_ms)
    assert series_of(one)["loss"] == [(0, 2.0), (2, 1.0)]
    assert words_of(one)["torch"] == "2.13"
    assert series_of(entry(step_time_ms=4.0))["step_time_ms"] == [(0, 4.0)]


def test_start_time_is_utc():
    assert start_ms(entry(created_at="1970-01-01T00:00:01.500000Z")) == 1500


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_export_round_trips(tmp_path, journal):
    for count in (3, 0):  # A second export adds nothing.
        done = run(tmp_path, "journal", "export", "--to", "mlflow", "mlruns", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"file": "mlruns", "records": count}
    back = list(read_mlflow(tmp_path / "mlruns", Given()))
    read = {one.model: one for one in back if hasattr(one, "model")}
    assert set(read) == {"resnet50", "vgg16"}  # a run that failed has no step time
    for was in journal[:2]:
        now = read[was.model]
        assert now.step_time_ms == pytest.approx(was.step_time_ms)
        assert (now.device, now.sequence_length, now.seed) == (
            "T4",
            was.sequence_length,
            was.seed,
        )  # the catalogue's name
        for name in ("micro_batch", "accumulation", "precision", "optimizer"):
            assert getattr(now.execution, name) == getattr(was.execution, name), name
    tags = [file.read_text() for file in (tmp_path / "mlruns").rglob("trainpace.reason")]
    assert tags == ["not enough memory"]


@needs("wandb")
@pytest.mark.slow
def test_wandb_export_works_offline(tmp_path, journal):
    done = run(
        tmp_path,
        "journal",
        "export",
        "--to",
        "wandb",
        "trials",
        "--model",
        "resnet50",
        WANDB_MODE="offline",
    )
    assert done.returncode == 0, done.stderr
    assert "1 runs added to wandb's trials" in done.stdout
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert kept.name.endswith(journal[0].id)
    (file,) = kept.glob("*.wandb")
    assert b"median_step_ms" in file.read_bytes()


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_missing_tracker_library_names_pip_install(tmp_path, journal, tracker):
    (tmp_path / f"{tracker}.py").write_text("raise ImportError\n")
    done = run(
        tmp_path,
        "journal",
        "export",
        "--to",
        tracker,
        "there",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}",
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install 'trainpace[{tracker}]'" in done.stderr


@needs("mlflow")
@pytest.mark.slow
def test_unreachable_mlflow_server_is_an_error(tmp_path, journal):
    more = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    done = run(tmp_path, "journal", "export", "--to", "mlflow", "http://127.0.0.1:9", **more)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "MLflow at http://127.0.0.1:9 refuses" in done.stderr
