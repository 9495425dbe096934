"""Model specs traced in the real child process."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from trainpace.core import records
from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.workload import Variant, build_task, load_workload
from trainpace.workload.task import name_of_loss

ROOT = Path(__file__).parents[2]

GOOD = """
import torch
from torch import nn
def task():
    model = nn.Linear(4, 2)
    data = [(torch.randn(4), 1)] * 8
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), data
"""


def weighted(weight, out, target):
    return weight * (out - target).abs().mean()


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.MSELoss(), "MSELoss"),
        (nn.functional.nll_loss, "nll_loss"),
        (functools.partial(weighted, 2.0), "weighted"),
        (lambda out, target: out.sum(), None),
    ],
)
def test_loss_is_named_after_class_or_function(loss, name):
    assert name_of_loss(loss) == name


def test_built_in_tasks_name_their_loss():
    assert build_task("resnet18").loss_name == "cross_entropy"


def test_task_function_in_file_is_traced(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    workload = load_workload(f"{file}:task", ("fp32", "amp"))
    assert (workload.parameters, workload.optimizer) == (10, "sgd")
    saved = tmp_path / "w.json"
    records.save(workload, saved)
    assert records.to_json(load_workload(str(saved), ("fp32",))) == records.to_json(workload)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("SGD(model.parameters(), lr=0.1, momentum=0.9)", "sgd_momentum"),
        ("SGD(model.parameters(), momentum=0.0)", "sgd"),
        ("AdamW(model.parameters())", "adamw"),
        (
            "SGD([{'params': [model.weight], 'momentum': 0.9}, {'params': [model.bias]}], lr=0.1)",
            "sgd_momentum",
        ),
        ("RMSprop(model.parameters(), momentum=0.9)", "rmsprop"),
    ],
)
def test_optimizer_name_includes_momentum(tmp_path, optimizer, name):
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace("SGD(model.parameters(), lr=0.1)", optimizer))
    assert load_workload(f"{file}:task", ("fp32",)).optimizer == name


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("nn.Linear(4, 2)", "nn.Linear(3, 2)"), "raised RuntimeError"),
        (("def task", "def other"), "unknown function"),
        (("import torch\n", "import torch\n1 / 0\n"), "ZeroDivisionError at mine.py line"),
        (("import torch\n", "import torhc\n"), "torhc"),
        (("return model,", "return"), "must return"),
        (("* 8", "* 0"), "above 0"),
        (("(torch.randn(4), 1)", "3"), "a sample"),
        (("import torch\n", "import torch, sys\nsys.exit(3)\n"), "SystemExit"),
        (("import torch\n", "import torch, os\nos._exit(3)\n"), "gave no answer"),
        (("import torch\n", "import torch, os\nos.kill(os.getpid(), 11)\n"), "SIGSEGV"),
        (("def task", "def task("), "SyntaxError"),
    ],
)
def test_wrong_task_code_gives_one_line_error(tmp_path, change, word):
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace(*change))
    with pytest.raises(TrainpaceError) as caught:
        load_workload(f"{file}:task", ("fp32",))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hanging_task_code_times_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(UserCodeError, match="longer than 5 s"):
        load_workload(f"{file}:task", ("fp32",), timeout_s=5)


def write_config(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return f"transformers:{path}"


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}


def test_transformers_configuration_is_traced(tmp_path):
    workload = load_workload(write_config(tmp_path, **GPT2), ("amp",), Variant("adamw", 256))
    assert workload.parameters == 53561088
    assert workload.sequence_length == 256
    assert "attention" in workload.forms["amp"].operators.kind


@pytest.mark.parametrize(
    ("values", "length", "word"),
    [
        ({"n_layer": 2}, None, "model_type"),
        ({"model_type": "gpt9"}, None, "gpt9"),
        (GPT2, 4096, "1024 positions"),
        ({**GPT2, "architectures": ["GPT9"]}, None, "GPT9"),
    ],
)
def test_invalid_transformers_configurations_are_rejected(tmp_path, values, length, word):
    with pytest.raises(TrainpaceError, match=word):
        load_workload(write_config(tmp_path, **values), ("fp32",), Variant(sequence_length=length))


@pytest.mark.slow
def test_torchvision_and_timm_resnet50_match_built_in():
    """Uses the optional packages that `make test` installs. Their ResNet-50 has the same operators and FLOPs as ours."""
    zoo = ROOT / ".zoo"
    assert (zoo / "timm").is_dir(), "make .zoo/installed"
    code = (
        "from trainpace.workload.trace import trace\n"
        "import torchvision, timm\n"
        "from trainpace.workload import specs\n"
        "own = trace('resnet50'); specs.MODELS.clear()\n"
        "for spec in ('torchvision:resnet50', 'timm:resnet50'):\n"
        "    w = trace(spec)\n"
        "    assert w.parameters == own.parameters, spec\n"
        "    a, b = (x.forms['fp32'].operators for x in (w, own))\n"
        "    assert abs((a.flops[:, 1] * a.count).sum() / (b.flops[:, 1] * b.count).sum() - 1) < 0.001, spec\n"
        "print(trace('timm:vit_tiny_patch16_224').parameters)\n"
    )
    path = os.pathsep.join([str(zoo), str(ROOT / "tests" / "shims")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5717416"
