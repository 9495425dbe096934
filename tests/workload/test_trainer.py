"""Precision from a Trainer's arguments and the dtype of its model, with the real libraries."""

import importlib.util
from pathlib import Path

import pytest
import torch

from trainpace.workload.user_task import as_with_a_gpu, trainer_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "tasks" / "language_models.py"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def make_trainer():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("language_models", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.trainer


@pytest.fixture
def trainer(make_trainer):
    return as_with_a_gpu(make_trainer)


def test_trainer_of_a_model_on_the_meta_device_is_a_task(make_trainer):
    with torch.device("meta"):
        made = as_with_a_gpu(make_trainer)
    task = trainer_task("t", made)
    assert {p.device.type for p in task.model.parameters()} == {"meta"}


def test_trainer_bf16_with_fp32_model_is_amp(trainer):
    task = trainer_task("t", trainer)
    assert (task.settings["precision"], task.autocast) == ("amp_bf16", False)


def test_trainer_bf16_with_bf16_model_keeps_fp32_parameters(trainer):
    trainer.model.to(torch.bfloat16)
    norm = next(p for name, p in trainer.model.named_parameters() if "norm" in name)
    norm.data = norm.data.float()
    task = trainer_task("t", trainer)
    assert (task.settings["precision"], task.autocast) == ("bf16", True)
    assert [p.keeps_dtype for p in task.model.parameters() if p.dtype == torch.float32] == [True]
