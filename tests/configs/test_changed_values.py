"""A changed value is read, rejected or noted. It is never ignored silently.

The tests cover every key of every format and every kind of value that a person or an editor might write.
"""

import copy
import json

import pytest
import yaml

from configs.test_readers import ACCELERATE, DS, HF, LIGHTNING
from trainpace.configs import parse_command, parse_config
from trainpace.core.errors import TrainpaceError

FULL_HF = {
    **HF,
    "torch_compile": False,
    "dataloader_drop_last": True,
    "save_strategy": "steps",
    "optim": "sgd",
    "max_length": 512,
}
FULL_DS = {
    **DS,
    "gradient_accumulation_steps": 2,
    "dataloader_drop_last": True,
    "tensor_parallel": {"autotp_size": 2},
    "sequence_parallel_size": 2,
    "compile": {"deepcompile": True},
    "activation_checkpointing": {"partition_activations": True},
}
FULL_LIGHTNING = {
    **yaml.safe_load(LIGHTNING),
    "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5}},
}
FULL_ACCELERATE = {
    **yaml.safe_load(ACCELERATE),
    "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 3},
    "fsdp_config": {"fsdp_activation_checkpointing": True},
    "parallelism_config": {"tp_size": 2, "cp_size": 2},
    "dynamo_config": {"dynamo_backend": "inductor"},
}

COUNTS = {
    "hf.json": "per_device_train_batch_size gradient_accumulation_steps eval_steps save_steps dataloader_num_workers max_length",
    "ds.json": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps tensor_parallel.autotp_size "
    "sequence_parallel_size zero_optimization.stage",
    "trainer.yaml": "trainer.devices trainer.num_nodes trainer.accumulate_grad_batches trainer.max_epochs "
    "data.init_args.batch_size data.init_args.num_workers",
    "acc.yaml": "num_processes num_machines deepspeed_config.zero_stage deepspeed_config.gradient_accumulation_steps "
    "parallelism_config.tp_size parallelism_config.cp_size",
}
NUMBERS = {
    "hf.json": "learning_rate num_train_epochs",
    "ds.json": "optimizer.params.lr",
    "trainer.yaml": "optimizer.init_args.lr",
}
FLAGS = {
    "hf.json": "torch_compile dataloader_drop_last gradient_checkpointing",
    "ds.json": "dataloader_drop_last compile.deepcompile activation_checkpointing.partition_activations",
    "acc.yaml": "fsdp_config.fsdp_activation_checkpointing",
}
FILES = {
    "hf.json": FULL_HF,
    "ds.json": FULL_DS,
    "trainer.yaml": FULL_LIGHTNING,
    "acc.yaml": FULL_ACCELERATE,
}
VALUES = [
    -1,
    0,
    2.5,
    True,
    False,
    "8",
    "many",
    "auto",
    "1e-3",
    [],
    {},
    [8],
    10**20,
    1e300,
    "",
    " ",
    "-8",
    "no",
    7,
    4096,
    1,
    3,
    float("nan"),
    "bf16",
    "8 ",
    "٣",
    -0.0,
]


def cases(table):
    return [(file, path) for file, paths in table.items() for path in paths.split()]


def changed(file, path, value):
    data = copy.deepcopy(FILES[file])
    *parents, last = path.split(".")
    part = data
    for key in parents:
        part = part.setdefault(key, {})
    part[last] = value
    return json.dumps(data) if file.endswith(".json") else yaml.safe_dump(data)


def outcome(file, path, value):
    """Return ("refused", None), or the values read under the key and the notes about it."""
    try:
        config = parse_config(changed(file, path, value), file)
    except TrainpaceError as error:
        assert file in str(error)
        return "refused", []
    notes = [note for note in config.notes if path in note.key or note.key in path]
    return [
        s.value for s in config.settings if path in s.key.replace("parallelism_config_", "")
    ], notes


def numeric(value):
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize(("file", "path"), cases(COUNTS) + cases(NUMBERS))
def test_changed_number_is_read_rejected_or_noted(file, path):
    read_count = 0
    for value in VALUES:
        read, notes = outcome(file, path, value)
        if read == "refused":
            continue
        if not read:
            assert (
                notes
                or (path == "tensor_parallel.autotp_size" and value == 0)
                or (path.endswith("max_epochs") and value == -1)
            ), value
        elif path == "trainer.devices" and value == [8]:
            assert read == [1]
        else:
            read_count += 1
            assert read == [numeric(value)], value
            assert not isinstance(value, bool)
            assert (
                path in ("learning_rate", "num_train_epochs")
                or path.endswith("lr")
                or read[0] == int(read[0])
            )
    assert read_count >= 2  # the test would pass if everything were refused


@pytest.mark.parametrize(("file", "path"), cases(FLAGS))
def test_changed_flag_is_read_or_rejected(file, path):
    for value in VALUES:
        read, notes = outcome(file, path, value)
        if isinstance(value, bool):
            assert read == [value]
        else:
            assert read == "refused" or (value == "auto" and notes), value


WORDS = {  # the setting for each value; all other values must be rejected or noted
    ("hf.json", "optim"): {v: [v] for v in VALUES if isinstance(v, str) and v.strip()},
    ("hf.json", "bf16"): {True: ["amp_bf16"]},
    ("ds.json", "optimizer.type"): {v: [v] for v in VALUES if isinstance(v, str) and v.strip()},
    ("ds.json", "bf16.enabled"): {True: ["bf16"]},
    ("ds.json", "zero_optimization.offload_optimizer.device"): {},
    ("trainer.yaml", "optimizer.class_path"): {
        v: [v] for v in VALUES if isinstance(v, str) and v.strip()
    },
    ("trainer.yaml", "trainer.precision"): {"bf16": ["amp_bf16"]},
    ("trainer.yaml", "trainer.strategy"): {"auto": []},
    ("acc.yaml", "mixed_precision"): {False: ["fp32"], "no": ["fp32"], "bf16": ["amp_bf16"]},
    ("acc.yaml", "dynamo_config.dynamo_backend"): {"no": [False], False: [False]},
    ("acc.yaml", "distributed_type"): {False: [], "no": []},
}


@pytest.mark.parametrize(("file", "path"), WORDS)
def test_changed_word_is_read_rejected_or_noted(file, path):
    expected = {(type(value), str(value)): read for value, read in WORDS[file, path].items()}
    for value in VALUES:
        read, notes = outcome(file, path, value)
        known = expected.get((type(value), str(value)))
        if known is None:
            assert read == "refused" or (read == [] and notes), value
        else:
            assert read == known, value


FLAG_VALUES = [
    "1",
    "7",
    "4096",
    "0",
    "-1",
    "2.5",
    "many",
    "gpu",
    "1:4",
    "4:4",
    "$N",
    "$((2*N))",
    "''",
    "٣",
    "1e3",
    "999999999999999999",
]


@pytest.mark.parametrize(
    ("before", "flag", "after"),
    [
        ("torchrun --nproc-per-node 2", "--nnodes", "t.py"),
        ("torchrun --nnodes 2", "--nproc-per-node", "t.py"),
        ("accelerate launch", "--num_processes", "t.py"),
        ("accelerate launch --num_processes 2", "--num_machines", "t.py"),
        ("deepspeed", "--num_gpus", "t.py"),
        ("torchrun --nproc-per-node 2 t.py", "--per_device_train_batch_size", "--seed 1"),
        ("torchrun --nproc-per-node 2 t.py", "--gradient-accumulation-steps", ""),
    ],
)
@pytest.mark.parametrize("equals", ["=", " "])
def test_changed_command_flag_is_read_rejected_or_noted(before, flag, after, equals):
    bare = flag.lstrip("-").replace("_", "-")
    read_count = 0
    for value in FLAG_VALUES:
        try:
            config = parse_command(f"{before} {flag}{equals}{value} {after}")
        except TrainpaceError:
            continue
        read = [s.value for s in config.settings if bare == s.key.lstrip("-").replace("_", "-")]
        notes = [note for note in config.notes if bare == note.key.lstrip("-").replace("_", "-")]
        read_count += len(read)
        assert notes or read == [float(value.partition(":")[0])], value
    assert read_count >= 3


SBATCH_VALUES = ["1", "7", "4096", "0", "-1", "2.5", "many", "1-4", "4-4", "''", "٣", "1e3"]


@pytest.mark.parametrize(
    "option",
    [
        "--nodes",
        "-N",
        "--ntasks-per-node",
        "--ntasks",
        "-n",
        "--gpus-per-node",
        "--gres",
        "--gpus",
        "-G",
        "--time",
    ],
)
def test_changed_sbatch_option_is_read_rejected_or_noted(option):
    read_count = 0
    for value in SBATCH_VALUES:
        written = f"gpu:{value}" if option == "--gres" else value
        separator = "=" if option.startswith("--") else " "
        nodes = "" if option in ("--nodes", "-N") else "#SBATCH --nodes=1\n"
        script = f"#!/bin/bash\n{nodes}#SBATCH {option}{separator}{written}\nsrun python t.py\n"
        try:
            config = parse_config(script, "j.sh")
        except TrainpaceError as error:
            assert "j.sh" in str(error)
            continue
        long = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}.get(option, option)
        read = {s.value for s in config.settings if s.key == f"#SBATCH {long}"}
        notes = [note for note in config.notes if note.key.startswith("#SBATCH")]
        read_count += len(read)
        if option == "--time":
            assert notes or (read and value != "many")
        elif option in ("--gpus-per-node", "--gres", "--gpus", "-G") and value in (
            "0",
            "''",
            "many",
        ):
            assert read <= {1}  # a type without a count is one GPU; zero GPUs give no setting
        else:
            assert notes or read == {int(value.partition("-")[0])}, value
    assert read_count >= 3
