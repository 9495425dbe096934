"""Readers of each format: realistic files, special cases, and rejected files."""

import dataclasses
import json

import pytest

from configs.read_examples import CASES
from trainpace.configs import parse_command, parse_config, read_configs
from trainpace.configs.files import syntax_of
from trainpace.configs.huggingface import NAMES
from trainpace.core.errors import UnreadableInput

HF = {
    "output_dir": "out",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 3,
    "learning_rate": 2e-5,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "save_steps": 1000,
    "dataloader_num_workers": 4,
    "gradient_checkpointing": True,
}
DS = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}
LIGHTNING = """
trainer:
  accelerator: gpu
  devices: [2, 3]
  num_nodes: 2
  precision: bf16-mixed
  accumulate_grad_batches: 4
  max_epochs: 90
data:
  class_path: my.Data
  init_args:
    batch_size: 2
    num_workers: 4
model: {}
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_machines: 2
num_processes: 16
machine_rank: 0
"""
SBATCH = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --time=2-12:30:00
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=${SLURM_GPUS_ON_NODE} \\
    --rdzv-backend=c10d train.py
"""
EXAMPLES = {
    "args.json": json.dumps(HF),
    "ds.json": json.dumps(DS),
    "trainer.yaml": LIGHTNING,
    "acc.yaml": ACCELERATE,
    "job.sbatch": SBATCH,
}


def settings(text, file):
    return {s.name: s.value for s in parse_config(text, file).settings}


def notes(text, file):
    return " | ".join(note.text for note in parse_config(text, file).notes)


def hf(**changes):
    return json.dumps({**HF, **changes})


def ds(**changes):
    return json.dumps({**DS, **changes})


def test_hugging_face_arguments_are_read():
    assert settings(EXAMPLES["args.json"], "args.json") == {
        "micro_batch": 8,
        "accumulation": 4,
        "epochs": 3.0,
        "learning_rate": 2e-5,
        "precision": "amp_bf16",
        "evaluate_every_steps": 500,
        "checkpoint_every_steps": 1000,
        "dataloader_workers": 4,
        "activation_checkpointing": True,
    }


def test_hugging_face_yaml_under_a_key_is_read():
    text = "training:\n  per_device_train_batch_size: 8\n  learning_rate: 1e-4\n"
    assert settings(text, "c.yaml") == {
        "micro_batch": 8,
        "learning_rate": 1e-4,
    }  # PyYAML leaves 1e-4 as text


def test_hugging_face_overridden_and_misspelled_keys_are_noted():
    found = settings(hf(max_steps=100), "a.json")
    assert found["max_steps"] == 100
    assert "epochs" not in found
    assert notes(hf(max_steps=100), "a.json")
    assert settings(hf(max_steps=-1), "a.json")["epochs"] == 3
    assert notes(hf(per_device_train_batchsize=4), "a.json")
    assert settings('{"per_gpu_train_batch_size": 4}', "a.json") == {"micro_batch": 4}
    assert notes('{"num_train_epochs": 3}', "a.json")


def test_deepspeed_config_is_read():
    assert settings(EXAMPLES["ds.json"], "ds.json") == {
        "global_batch": 256,
        "micro_batch": 8,
        "precision": "bf16",
        "zero_stage": 2,
        "offload_optimizer": True,
        "optimizer": "adamw",
        "learning_rate": 3e-4,
    }
    assert '"auto"' in notes(EXAMPLES["ds.json"], "ds.json")


def test_unknown_deepspeed_keys_are_noted():
    text = notes(ds(gradient_cliping=1.0), "ds.json")
    assert "ignores it silently; nearest: gradient_clipping" in text
    assert notes(ds(zero_optimization={"stag": 2}), "ds.json")


def test_lightning_config_is_read():
    assert settings(LIGHTNING, "trainer.yaml") == {
        "nproc_per_node": 2,
        "nnodes": 2,
        "precision": "amp_bf16",
        "accumulation": 4,
        "epochs": 90.0,
        "micro_batch": 2,
        "dataloader_workers": 4,
    }
    assert settings(LIGHTNING.replace("[2, 3]", '"0,1,2"'), "t.yaml")["nproc_per_node"] == 3
    for unknown in ("auto", "-1"):
        assert "nproc_per_node" not in settings(LIGHTNING.replace("[2, 3]", unknown), "t.yaml")
        assert notes(LIGHTNING.replace("[2, 3]", unknown), "t.yaml")


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ("32", "fp32"),
        ("16", "amp_fp16"),
        ("16-mixed", "amp_fp16"),
        ("bf16-true", "bf16"),
        ('"32-true"', "fp32"),
        ("16-true", "fp16"),
    ],
)
def test_lightning_precision_names_are_mapped(written, precision):
    assert settings(LIGHTNING.replace("bf16-mixed", written), "t.yaml")["precision"] == precision


def test_accelerate_num_processes_is_world_size():
    assert settings(ACCELERATE, "a.yaml") == {
        "world_size": 16,
        "nnodes": 2,
        "precision": "amp_fp16",
    }
    assert notes(ACCELERATE, "a.yaml")
    assert (
        settings(ACCELERATE.replace("fp16", "no"), "a.yaml")["precision"] == "fp32"
    )  # YAML reads a bare `no` as false


def test_sbatch_resolves_its_own_variables():
    assert settings(SBATCH, "job.sbatch") == {
        "nnodes": 2,
        "gpus_per_node": 4,
        "nproc_per_node": 4,
        "time_limit_s": 217800.0,
    }
    plain = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n#SBATCH -t 90\nsrun python train.py\n"
    assert settings(plain, "job.sh") == {"nnodes": 2, "nproc_per_node": 4, "time_limit_s": 5400.0}
    assert notes(SBATCH.replace("$SLURM_NNODES", "$NODES"), "job.sh")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "torchrun --nnodes 2 --nproc-per-node 8 train.py --lr 0.1",
            {"nnodes": 2, "nproc_per_node": 8},
        ),
        ("python -m torch.distributed.run --nproc_per_node=4 train.py", {"nproc_per_node": 4}),
        ("torchrun --standalone --nproc-per-node gpu train.py", {}),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", {"nproc_per_node": 8}),
        (
            "accelerate launch --num_processes 16 --num_machines 2 train.py",
            {"world_size": 16, "nnodes": 2},
        ),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", {"nproc_per_node": 4}),
        (
            "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 t.py --per_device_train_batch_size 4",
            {"nproc_per_node": 2, "micro_batch": 4},
        ),
    ],
)
def test_launch_commands_are_read(command, expected):
    assert {s.name: s.value for s in parse_command(command).settings} == expected


@pytest.mark.parametrize(
    "command",
    [
        "",
        "bash train.sh",
        "torchrun --nproc-per-node",
        "torchrun --nproc-per-node four t.py",
        "torchrun 'x",
    ],
)
def test_unrecognized_commands_are_rejected(command):
    with pytest.raises(UnreadableInput):
        parse_command(command)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("", "a.json"),
        ("{", "a.json"),
        ("[]", "a.json"),
        ("3", "a.json"),
        ('{"a": 1}', "a.json"),
        ("a: [", "a.yaml"),
        ("just text", "a.yaml"),
        ("a: 1\n", "a.yaml"),
        ("x\x00", "a.json"),
        ("echo hello", "a.sh"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', "a.json"),
        ("trainer: {devices: 1}\ntrainer: {}\n", "a.yaml"),
        ('{"train_batch_size": NaN}', "a.json"),
        ('{"train_batch_size": -8}', "a.json"),
        ('{"train_batch_size": 2.5}', "a.json"),
        ('{"train_batch_size": true}', "a.json"),
        ('{"train_batch_size": "many"}', "a.json"),
        ('{"train_batch_size": 1e300}', "a.json"),
        ('{"train_batch_size": [8]}', "a.json"),
        (hf(fp16=True), "a.json"),
        (hf(learning_rate="fast"), "a.json"),
        (hf(bf16="maybe"), "a.json"),
        (hf(eval_steps=-5), "a.json"),
        (ds(zero_optimization={"stage": 4}), "a.json"),
        (ds(zero_optimization=3), "a.json"),
        (ds(fp16={"enabled": True}), "a.json"),
        (LIGHTNING.replace("[2, 3]", "[2, 2]"), "a.yaml"),
        (LIGHTNING.replace("[2, 3]", "[]"), "a.yaml"),
        (LIGHTNING.replace("bf16-mixed", "17"), "a.yaml"),
        (LIGHTNING.replace("num_nodes: 2", "num_nodes: 0"), "a.yaml"),
        (ACCELERATE.replace("fp16", "int4"), "a.yaml"),
        (SBATCH.replace("--nodes=2", "--nodes=two"), "a.sh"),
        (SBATCH.replace("2-12:30:00", "tomorrow"), "a.sh"),
        ("!!python/object/apply:os.system ['true']", "a.yaml"),
        ("[" * 100_000, "a.json"),
        ("[" * 100_000, "a.yaml"),
        ("{" * 5000 + '"a"', "a.json"),
        (
            "a: &a [x, x]\n"
            + "".join(
                f"{c}: &{c} [*{p}, *{p}]\n"
                for p, c in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
            ),
            "a.yaml",
        ),
        ("x" * (1 << 21), "a.yaml"),
    ],
)
def test_bad_files_are_rejected_with_short_message(text, file):
    with pytest.raises(UnreadableInput) as caught:
        parse_config(text, file)
    assert file in str(caught.value)
    assert len(str(caught.value)) < 600


KNOWN = (
    "Known: Hugging Face TrainingArguments, DeepSpeed, Lightning CLI, accelerate, an sbatch script, a launch command, or Python"
    " code with arguments of these."
)
WHOLE, ABOVE_0 = "it should be a whole number from 1.", "it should be a number above 0."


@pytest.mark.parametrize(
    ("text", "file", "said"),
    [
        ("", "a.json", "a.json is empty."),
        ("[]", "a.json", f"a.json holds no keys and values, so it is not a settings file. {KNOWN}"),
        (
            "just text",
            "a.yaml",
            f"a.yaml holds no keys and values, so it is not a settings file. {KNOWN}",
        ),
        ('{"a": 1}', "a.json", f"a.json is in no known format of settings files. {KNOWN}"),
        ("echo hello", "a.sh", f"a.sh holds no known launch command. {KNOWN}"),
        (
            json.dumps({"a": HF, "b": HF}),
            "a.json",
            "a.json holds TrainingArguments under a, b. Give each as a file of its own.",
        ),
        ("x\x00", "a.json", "a.json holds a NUL byte, so it is not a text file."),
        ('{"a": "\\u0000"}', "a.json", "a.json holds '\\x00', which is not valid text."),
        ('a: "\\ud800"', "a.yaml", "a.yaml holds '\\ud800', which is not valid text."),
        (
            "x" * ((1 << 20) + 1),
            "a.yaml",
            "a.yaml is larger than 1 MiB, which no settings file is.",
        ),
        (
            "trainer: [",
            "a.yaml",
            "a.yaml is not valid YAML at line 1: expected the node content, but found '<stream end>'.",
        ),
        (
            "trainer:\n  a: b: c\n",
            "a.yaml",
            "a.yaml is not valid YAML at line 2: mapping values are not allowed here.",
        ),
        ("[" * 100_000, "a.yaml", "a.yaml is nested more than 50 levels deep."),
        (
            "".join(f"{' ' * i}k:\n" for i in range(52)),
            "a.yaml",
            "a.yaml is nested more than 50 levels deep.",
        ),
        ('{"a":' * 51 + "1" + "}" * 51, "a.json", "a.json is nested more than 50 levels deep."),
        (
            '{"train_batch_size": 8, "train_batch_size": 16}',
            "a.json",
            "a.json: the key 'train_batch_size' is given twice. Keep one.",
        ),
        (
            "trainer: {devices: 1}\nx: {a: 1, b: 1, a: 2}\n",
            "a.yaml",
            "a.yaml: the key 'a' is given twice. Keep one.",
        ),
        ('{"train_batch_size": NaN}', "a.json", "a.json holds nan, which cannot be a setting."),
        ("a: [1, .inf]", "a.yaml", "a.yaml holds inf, which cannot be a setting."),
        (
            json.dumps({"a": 1 << 128}),
            "a.json",
            "a.json holds a whole number of 129 bits, which cannot be a setting.",
        ),
        ('{"train_batch_size": 0}', "a.json", f"a.json: train_batch_size is 0; {WHOLE}"),
        ('{"train_batch_size": 2.5}', "a.json", f"a.json: train_batch_size is 2.5; {WHOLE}"),
        ('{"train_batch_size": true}', "a.json", f"a.json: train_batch_size is True; {WHOLE}"),
        (
            '{"train_batch_size": "8 GPUs"}',
            "a.json",
            f"a.json: train_batch_size is '8 GPUs'; {WHOLE}",
        ),
        (
            '{"train_batch_size": 1000000000000001}',
            "a.json",
            f"a.json: train_batch_size is 1000000000000001; {WHOLE}",
        ),
        (hf(max_steps="x" * 59), "a.json", f"a.json: max_steps is '{'x' * 56}...; {WHOLE}"),
        (hf(max_steps="x" * 58), "a.json", f"a.json: max_steps is '{'x' * 58}'; {WHOLE}"),
        (
            hf(dataloader_num_workers=-1),
            "a.json",
            "a.json: dataloader_num_workers is -1; it should be a whole number from 0.",
        ),
        (hf(learning_rate="fast"), "a.json", f"a.json: learning_rate is 'fast'; {ABOVE_0}"),
        (hf(learning_rate=True), "a.json", f"a.json: learning_rate is True; {ABOVE_0}"),
        (hf(learning_rate=0), "a.json", f"a.json: learning_rate is 0; {ABOVE_0}"),
        (hf(learning_rate=[1]), "a.json", f"a.json: learning_rate is [1]; {ABOVE_0}"),
        (
            hf(learning_rate=1e15),
            "a.json",
            f"a.json: learning_rate is 1000000000000000.0; {ABOVE_0}",
        ),
        (hf(bf16="maybe"), "a.json", "a.json: bf16 is 'maybe'; it should be true or false."),
        (
            json.dumps({"training": {**HF, "bf16": "maybe"}}),
            "a.json",
            "a.json: training.bf16 is 'maybe'; it should be true or false.",
        ),
        (hf(fp16=True), "a.json", "a.json: fp16 is True; it should be false where bf16 is true."),
        (
            ds(fp16={"enabled": True}),
            "a.json",
            "a.json: fp16.enabled is True; it should be false where bf16.enabled is true.",
        ),
        (
            ds(zero_optimization={"stage": 4}),
            "a.json",
            "a.json: zero_optimization.stage is 4; it should be a whole number from 0 to 3.",
        ),
        (
            ds(zero_optimization=3),
            "a.json",
            "a.json: zero_optimization is 3; it should be a section with keys of its own.",
        ),
        (
            ds(zero_optimization={"stage": 3, "offload_optimizer": {"device": "gpu"}}),
            "a.json",
            "a.json: zero_optimization.offload_optimizer.device is 'gpu'; it should be one of none, cpu, nvme.",
        ),
        (
            ds(optimizer={"type": " "}),
            "a.json",
            "a.json: optimizer.type is ' '; it should be a word.",
        ),
        (
            LIGHTNING.replace("[2, 3]", "[2, 2]"),
            "a.yaml",
            'a.yaml: trainer.devices is [2, 2]; it should be a number, a list of different device indices, or "auto".',
        ),
        (hf(fsdp=3), "a.json", "a.json: fsdp is 3; it should be options such as full_shard."),
        (
            hf(deepspeed=3),
            "a.json",
            "a.json: deepspeed is 3; it should be a section, or the name of a file.",
        ),
        (
            hf(attn_implementation=3),
            "a.json",
            "a.json: attn_implementation is 3; it should be a word.",
        ),
        (
            hf(use_liger_kernel="x"),
            "a.json",
            "a.json: use_liger_kernel is 'x'; it should be true or false.",
        ),
        (
            hf(eval_strategy="no", evaluation_strategy="no"),
            "a.json",
            "a.json: evaluation_strategy is 'no'; it should be left out, since eval_strategy, its new name, is given too.",
        ),
        (
            hf(eval_strategy="often"),
            "a.json",
            "a.json: eval_strategy is 'often'; it should be one of no, steps, epoch, best.",
        ),
        (hf(optim=5), "a.json", "a.json: optim is 5; it should be a word."),
        (hf(eval_steps=1.5), "a.json", f"a.json: eval_steps is 1.5; {WHOLE}"),
        (
            hf(parallelism_config={"tp_size": 0}),
            "a.json",
            f"a.json: parallelism_config.tp_size is 0; {WHOLE}",
        ),
        (
            ACCELERATE + "parallelism_config: {tp_size: 0}\n",
            "a.yaml",
            f"a.yaml: parallelism_config.tp_size is 0; {WHOLE}",
        ),
        (
            LIGHTNING.replace("max_epochs: 90", "max_epochs: -3"),
            "a.yaml",
            f"a.yaml: trainer.max_epochs is -3; {WHOLE}",
        ),
        (
            LIGHTNING.replace("max_epochs: 90", "max_steps: x"),
            "a.yaml",
            f"a.yaml: trainer.max_steps is 'x'; {WHOLE}",
        ),
        (
            LIGHTNING.replace("max_epochs: 90", "strategy: 3"),
            "a.yaml",
            "a.yaml: trainer.strategy is 3; it should be a word.",
        ),
        (
            LIGHTNING.replace("max_epochs: 90", "val_check_interval: -1"),
            "a.yaml",
            "a.yaml: trainer.val_check_interval is -1; it should be a number of micro-batches, a share of an epoch, or a time.",
        ),
        (SBATCH.replace("--nodes=2", "-N"), "a.sh", f"a.sh: #SBATCH --nodes is ''; {WHOLE}"),
        ("torchrun --nnodes x t.py", "a.sh", "a.sh: --nnodes is 'x'; it should be a whole number."),
        ("torchrun --nproc-per-node", "a.sh", "a.sh: --nproc-per-node has no value."),
        (
            "accelerate launch --mixed_precision int4 t.py",
            "a.sh",
            "a.sh: --mixed-precision is 'int4'; it should be one of no, fp16, bf16, fp8.",
        ),
        (
            "torchrun t.py --per_device_train_batch_size x",
            "a.sh",
            f"a.sh: --per_device_train_batch_size is 'x'; {WHOLE}",
        ),
        (
            ACCELERATE.replace("fp16", "int4"),
            "a.yaml",
            "a.yaml: mixed_precision is 'int4'; it should be one of no, fp16, bf16, fp8.",
        ),
        (
            SBATCH.replace("--nodes=2", "--nodes=two"),
            "a.sh",
            f"a.sh: #SBATCH --nodes is 'two'; {WHOLE}",
        ),
        (
            SBATCH.replace("2-12:30:00", "tomorrow"),
            "a.sh",
            "a.sh: #SBATCH --time is 'tomorrow'; it should be a time such as 24:00:00 or 2-12.",
        ),
    ],
)
def test_error_names_file_key_and_value(text, file, said):
    with pytest.raises(UnreadableInput) as caught:
        parse_config(text, file)
    assert str(caught.value).startswith(said.partition("; it should be")[0].split(" ", 1)[0])
    if "; it should be" in said:
        assert str(caught.value).startswith(said.partition("; it should be")[0])


def test_largest_and_deepest_allowed_files_are_read():
    assert settings('{"train_batch_size": 1000000000000000}', "a.json") == {"global_batch": 10**15}
    assert settings(f'{{"train_batch_size": 8, "x": {(1 << 128) - 1}}}', "a.json") == {
        "global_batch": 8
    }
    padded = json.dumps(DS)
    assert settings(padded + " " * ((1 << 20) - len(padded)), "ds.json") == settings(
        padded, "ds.json"
    )
    deep = "trainer: {devices: 2, x: " + "[" * 48 + "]" * 48 + "}"
    assert settings(deep, "t.yaml") == {"nproc_per_node": 2}


@pytest.mark.parametrize(
    ("written", "value"),
    [("8", 8), ("8.0", 8), ('"8"', 8), ('" 16 "', 16), ("1", 1), ("null", None)],
)
def test_integers_in_various_notations_are_read(written, value):
    read = parse_config(f'{{"train_batch_size": {written}, "steps_per_print": 1}}', "ds.json")
    assert {s.name: s.value for s in read.settings} == (
        {} if value is None else {"global_batch": value}
    )
    assert all(type(s.value) is int for s in read.settings)
    texts = [note.text for note in read.notes if note.key == "train_batch_size"]
    assert texts == (
        [f"train_batch_size: written as text, {json.loads(written)!r}"] if '"' in written else []
    )


def test_settings_and_notes_name_file_and_key():
    read = parse_config(
        json.dumps({"training": {**HF, "per_device_train_batchsize": 4}}), "all.json"
    )
    assert (read.file, read.format) == ("all.json", "Hugging Face TrainingArguments")
    (epochs,) = [s for s in read.settings if s.name == "epochs"]
    assert (epochs.value, epochs.file, epochs.key) == (3.0, "all.json", "training.num_train_epochs")
    (unknown,) = [note for note in read.notes if note.severity == "warning"]
    assert (unknown.file, unknown.key) == ("all.json", "training.per_device_train_batchsize")
    assert unknown.text.startswith("training.per_device_train_batchsize: ")
    assert unknown.text.endswith(
        "; nearest: per_device_train_batch_size, per_device_eval_batch_size"
    )
    assert unknown.leaves_open is None
    (auto,) = [
        note for note in parse_config(EXAMPLES["ds.json"], "ds.json").notes if note.leaves_open
    ]
    assert (auto.key, auto.leaves_open, auto.severity) == (
        "gradient_accumulation_steps",
        "accumulation",
        "info",
    )
    assert auto.text == 'gradient_accumulation_steps: "auto": another file or the run decides'


def told(text, file):
    """Return the format, then settings and notes in reading order."""
    read = parse_config(text, file)
    assert {part.file for part in (*read.settings, *read.notes)} <= {file}
    assert all(note.text.startswith(f"{note.key}: ") for note in read.notes)
    lines = [f"{setting.key}: {setting.name} = {setting.value!r}" for setting in read.settings]
    for note in read.notes:
        stays_open = f" ({note.leaves_open} stays open)" if note.leaves_open else ""
        lines.append(f"{note.severity} {note.key}{stays_open}")
    return [read.format, *lines]


@pytest.mark.parametrize("file", CASES)
def test_example_files_give_expected_settings_and_notes(file):
    text, expected = CASES[file]
    assert sorted(told(text, file)) == sorted(expected.splitlines())


def test_hugging_face_rejects_auto_max_steps():
    with pytest.raises(UnreadableInput):
        parse_config(hf(max_steps="auto"), "a.json")


def test_first_fifty_unknown_keys_have_suggestions():
    text = notes(ds(**{f"gradient_cliping{i}": 1 for i in range(60)}), "ds.json")
    assert text.count("nearest: ") == 50
    assert text.count("ignores it silently") == 60


@pytest.mark.parametrize(
    ("text", "file", "syntax"),
    [
        ("{}", "a.json", "json"),
        (" \n{}", "a", "json"),
        ("\ufeff{}", "a.txt2", "json"),
        ("a: 1", "a.yaml", "yaml"),
        ("a: 1", "a", "yaml"),
        ("[]", "a.json", "json"),
        ("srun x", "a.sh", None),
        ("srun x", "a.slurm", None),
        ("torchrun t.py", "a.txt", None),
        ("torchrun t.py", "a.bash", None),
        ("torchrun t.py", "a.cmd", None),
        ("#!/bin/sh\ntorchrun t.py", "start", None),
        ("#SBATCH --nodes=2\n", "job", None),
        ("x = 1", "a.py", None),
        ("\ufeff#!/bin/sh\ntorchrun t.py", "start", None),
        ("torchrun t.py", "a.sbatch", None),
    ],
)
def test_syntax_is_detected_from_name_and_content(text, file, syntax):
    assert syntax_of(text, file) == syntax


def test_byte_order_mark_and_crlf_are_ignored():
    for text, file in (
        (LIGHTNING, "t.yaml"),
        (SBATCH, "job.sh"),
        (json.dumps(DS, indent=1), "ds.json"),
    ):
        assert parse_config("\ufeff" + text.replace("\n", "\r\n"), file) == parse_config(text, file)


def test_yaml_alias_bomb_is_rejected():
    """Forty nested aliases expand to 2**40 values."""
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 41))]
    with pytest.raises(UnreadableInput):
        parse_config("\n".join(lines), "bomb.yaml")


def test_yaml_merge_keys_are_resolved():
    text = "base: &base {max_epochs: 3}\ntrainer:\n  <<: *base\n  devices: 2\n"
    assert settings(text, "t.yaml") == {"nproc_per_node": 2, "epochs": 3.0}


def test_unreadable_files_are_rejected(tmp_path):
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path, tmp_path / "missing.json", binary):
        with pytest.raises(UnreadableInput):
            read_configs([str(path)])


@pytest.mark.slow
def test_hugging_face_names_match_installed_transformers():
    transformers = pytest.importorskip("transformers")
    assert {f.name for f in dataclasses.fields(transformers.TrainingArguments)} == NAMES
