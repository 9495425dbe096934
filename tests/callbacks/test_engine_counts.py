"""The callbacks' remaining counts match real trainings at every step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS_ENGINES = pytest.mark.skipif(
    not (ROOT / ".engines").is_dir(), reason="make .engines/installed"
)
EVERY_4 = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}
NO_SAVE = {"save_strategy": "no"}


def train(script, settings):
    """Run the script for all settings in one process, since importing an engine takes seconds."""
    path = [str(ROOT / "src"), str(ROOT / ".engines"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name(script)),
            json.dumps(settings),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"said"')
    ], done.stderr


def assert_all_came(found):
    assert found["said"]
    assert not found["off"]
    for said in found["said"]:
        came = [end - now for end, now in zip(found["end"], said["now"], strict=True)]
        assert said["left"] == came, said
    assert found["told"] > 0


TRANSFORMERS = {
    "plain": {**NO_SAVE, "num_train_epochs": 2},
    "accumulation": {**EVERY_4, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
    "max steps": {**EVERY_4, "max_steps": 17},
    "evaluation delayed": {**EVERY_4, "max_steps": 16, "eval_delay": 6},
    "half an epoch": {**NO_SAVE, "num_train_epochs": 1.5, "eval_strategy": "epoch"},
    "by epochs": {
        "num_train_epochs": 3,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "gradient_accumulation_steps": 4,
    },
    "resume": {**EVERY_4, "num_train_epochs": 3, "resume": 10},
    "a share": {**EVERY_4, "num_train_epochs": 2, "eval_steps": 0.2, "dataloader_drop_last": True},
}
LIGHTNING = {
    "plain": {"max_epochs": 2},
    "accumulation": {"max_epochs": 3, "accumulate_grad_batches": 3, "val_check_interval": 0.25},
    "max steps": {"max_epochs": -1, "max_steps": 11, "accumulate_grad_batches": 3},
    "every second epoch": {"max_epochs": 5, "check_val_every_n_epoch": 2, "limit_train_batches": 7},
    "every six batches": {
        "max_epochs": 3,
        "check_val_every_n_epoch": None,
        "val_check_interval": 6,
    },
    "resume": {
        "max_epochs": 3,
        "check_val_every_n_epoch": None,
        "val_check_interval": 6,
        "resume": 24,
    },
    "no validation": {"max_epochs": 2, "validates": False},
    "two optimizers by hand": {"max_epochs": -1, "max_steps": 30, "optimizers": 2},
    "validation off": {"max_epochs": 2, "limit_val_batches": 0},
}


@pytest.mark.slow
def test_transformers_callback_counts_match_the_training():
    settings = [{"per_device_train_batch_size": 4, **one} for one in TRANSFORMERS.values()]
    for found in train("counting_transformers.py", settings)[0]:
        assert_all_came(found)


@NEEDS_ENGINES
@pytest.mark.slow
def test_lightning_callback_counts_match_the_training():
    for name, found in zip(
        LIGHTNING, train("counting_lightning.py", list(LIGHTNING.values()))[0], strict=True
    ):
        print(name)
        assert_all_came(found)


@pytest.mark.slow
def test_callback_error_disables_the_callback_and_training_continues():
    (found,), said = train("counting_transformers.py", [{**NO_SAVE, "max_steps": 12, "raises": 1}])
    assert found["end"][0] == 12
    assert found["off"]
    assert said.count("trainpace: the remaining time is no longer reported") == 1
