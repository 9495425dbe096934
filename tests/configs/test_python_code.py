"""Trainer arguments are read from Python code without running it. Non-literal values are listed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.configs import Changes, parse_config, rewrite
from trainpace.core.errors import UnreadableInput
from trainpace.core.execution import Execution

TRAINING = """import os
from transformers import Trainer, TrainingArguments

raise SystemExit("this file must not run")
args = TrainingArguments(
    "out",
    per_device_train_batch_size=4, gradient_accumulation_steps=8, bf16=True, fp16=False,
    learning_rate=float(os.environ["LR"]), num_train_epochs=3, gradient_checkpointing=True,
)
trainer = Trainer(model=model, args=args, callbacks=[])
"""
LIGHTNING = """import lightning as L
trainer = L.Trainer(devices=2, num_nodes=4, strategy="deepspeed_stage_2", precision="16-mixed", accumulate_grad_batches=4)
"""


def read(text, file="train.py"):
    config = parse_config(text, file)
    return {s.name: s.value for s in config.settings}, [
        n.text for n in config.notes if n.severity == "warning"
    ]


def test_training_arguments_are_read_from_code():
    settings, unread = read(TRAINING)
    assert settings == {
        "micro_batch": 4,
        "accumulation": 8,
        "precision": "amp_bf16",
        "epochs": 3,
        "activation_checkpointing": True,
    }
    (note,) = unread
    assert note.startswith("learning_rate: ")
    assert "line 8" in note


def test_lightning_trainer_is_read_from_code():
    settings, unread = read(LIGHTNING)
    assert settings == {
        "nproc_per_node": 2,
        "nnodes": 4,
        "accumulation": 4,
        "precision": "amp_fp16",
        "zero_stage": 2,
    }
    assert unread == []


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('trainer_args = {"devices": 2}', {"nproc_per_node": 2}),
        (
            'cfg = dict(devices=[0, 1], num_nodes=4, precision="bf16")',
            {"nproc_per_node": 2, "nnodes": 4, "precision": "amp_bf16"},
        ),
        (
            'cfg = {"trainer": {"devices": 2}, "data": {"batch_size": 16}}',
            {"nproc_per_node": 2, "micro_batch": 16},
        ),
        (
            'ds = {"train_batch_size": 64, "zero_optimization": {"stage": 3}}',
            {"global_batch": 64, "zero_stage": 3},
        ),
        ('kwargs: dict = {"per_device_train_batch_size": 4}', {"micro_batch": 4}),
        (
            "fabric = Fabric(devices=4, num_nodes=2, strategy=DeepSpeedStrategy(stage=1, offload_optimizer=True))",
            {"nproc_per_node": 4, "nnodes": 2, "zero_stage": 1, "offload_optimizer": True},
        ),
        (
            "def main():\n    return SFTConfig(per_device_train_batch_size=2, bf16=True)",
            {"micro_batch": 2, "precision": "amp_bf16"},
        ),
        (
            'trainer_args = {"devices": 2, "max_steps": -1}\ntrainer = Trainer(**trainer_args)',
            {"nproc_per_node": 2},
        ),
    ],
)
def test_settings_are_read_from_dicts_and_calls(text, settings):
    assert read(text) == (settings, [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("t = Trainer(devices=N, num_nodes=2)", "trainer.devices: 'N' (line 1)"),
        (
            "a = TrainingArguments(per_device_train_batch_size=2 * 8, bf16=True)",
            "per_device_train_batch_size: '2 * 8' (line 1)",
        ),
        ("a = TrainingArguments(**common, per_device_train_batch_size=2)", "**: 'common' (line 1)"),
        (
            'd = {"train_batch_size": 8, "zero_optimization": {"stage": STAGE}}',
            "zero_optimization.stage: 'STAGE' (line 1)",
        ),
        (
            "t = Trainer(devices=2, strategy=DDPStrategy(timeout=day))",
            "trainer.strategy.timeout: 'day' (line 1)",
        ),
        ("t = Trainer(devices=2, strategy=make())", ""),
    ],
)
def test_non_literal_values_are_listed_as_unread(text, named):
    _, unread = read(text)
    assert any(named in one for one in unread)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("args = TrainingArguments(", "is not valid Python at line 1"),
        ("import torch\nmodel = build(layers=3)", "trainer arguments"),
        ("trainer = Trainer(model=model, args=args, callbacks=[])", "trainer arguments"),
        (TRAINING + LIGHTNING, "in lines 5, 12"),
        ("t = Trainer(devices=1e400, num_nodes=2)", "which cannot be a setting"),
        ("t = Trainer(devices='many', num_nodes=2)", "should be a whole number"),
        ("x = " + "(" * 500 + ")" * 500, "train.py"),
    ],
)
def test_unreadable_code_raises_error_naming_the_file(text, words):
    with pytest.raises(UnreadableInput) as error:
        read(text)
    assert words in str(error.value)
    assert "train.py" in str(error.value)


def test_rewrite_leaves_python_code_unchanged():
    texts = {"train.py": LIGHTNING}
    before = Execution(
        micro_batch=2,
        accumulation=4,
        nnodes=4,
        nproc_per_node=2,
        precision="amp_fp16",
        zero_stage=2,
    )
    done = rewrite(texts, Changes(before=before, after=Execution(micro_batch=4)))
    assert [f.text for f in done.files] == [LIGHTNING]
    assert done.left.keys() >= {
        "micro_batch",
        "nnodes",
        "nproc_per_node",
        "precision",
        "zero_stage",
    }


@given(
    st.dictionaries(
        st.sampled_from(["devices", "num_nodes", "accumulate_grad_batches"]),
        st.integers(1, 64),
        min_size=2,
    )
)
def test_calls_and_dicts_are_read_like_yaml(arguments):
    as_yaml = "trainer:\n" + "".join(f"  {key}: {value}\n" for key, value in arguments.items())
    as_call = f"t = Trainer({', '.join(f'{key}={value}' for key, value in arguments.items())})"
    expected = {s.name: s.value for s in parse_config(as_yaml, "t.yaml").settings}
    assert read(as_call)[0] == read(f"t = {arguments!r}")[0] == expected
