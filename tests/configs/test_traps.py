"""Settings files are read as each tool interprets them, even if they look different."""

import json
import re
import time

import pytest

from configs.test_readers import DS, HF, LIGHTNING, ds, hf, notes, settings
from trainpace.configs import combine, parse_command, parse_config
from trainpace.configs.accelerate import NAMES as ACCELERATE_NAMES
from trainpace.configs.deepspeed import REMOVED, TOP_LEVEL, ZERO
from trainpace.core.errors import UnreadableInput

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"


def command(text):
    return {s.name: s.value for s in parse_command(text).settings}


def command_notes(text):
    return " | ".join(note.text for note in parse_command(text).notes)


def test_hugging_face_old_and_new_key_names_are_read():
    assert settings(hf(gradient_checkpointing=None, activation_checkpointing=True), "a.json")[
        "activation_checkpointing"
    ]
    with pytest.raises(UnreadableInput):
        parse_config(
            hf(activation_checkpointing=True), "a.json"
        )  # the example contains the old name
    text = notes(
        '{"num_train_epochs": 3, "group_by_length": true, "evaluation_strategy": "no"}', "a.json"
    )
    assert "now train_sampling_strategy" in text
    assert "the old name of eval_strategy" in text


def test_hugging_face_eval_steps_need_eval_strategy():
    assert notes('{"num_train_epochs": 3, "eval_steps": 500}', "a.json")
    # YAML reads an unquoted `no` as false
    text = "num_train_epochs: 3\neval_strategy: no\neval_steps: 500\n"
    assert settings(text, "a.yaml") == {"epochs": 3.0}
    assert notes(text, "a.yaml")
    assert notes(hf(eval_steps=0.1), "a.json")


def test_hugging_face_precision_is_read_only_if_stated():
    assert "precision" not in settings('{"num_train_epochs": 3, "bf16": false}', "a.json")
    assert notes('{"num_train_epochs": 3, "bf16": false}', "a.json")
    assert (
        settings('{"num_train_epochs": 3, "bf16": false, "fp16": false}', "a.json")["precision"]
        == "fp32"
    )
    assert settings('{"num_train_epochs": 3, "tf32": true}', "a.json")["precision"] == "tf32"
    with pytest.raises(UnreadableInput):  # Python treats the string "false" as true
        parse_config(hf(bf16="false"), "a.json")


def test_hugging_face_settings_under_a_key_keep_key_path():
    config = parse_config(
        "model: {name: x}\ntraining:\n  num_train_epochs: 3\n  seeed: 1\n", "c.yaml"
    )
    assert [(s.file, s.key) for s in config.settings] == [("c.yaml", "training.num_train_epochs")]
    assert "training.seeed" in {note.key for note in config.notes}
    # `trainer:` is a Lightning section unless it contains Hugging Face keys
    assert settings("trainer:\n  per_device_train_batch_size: 4\n", "c.yaml") == {"micro_batch": 4}
    with pytest.raises(UnreadableInput):
        parse_config("a: {num_train_epochs: 3}\nb: {num_train_epochs: 4}\n", "c.yaml")


def test_equivalent_optimizers_have_one_name():
    assert settings(hf(optim="adamw_torch_fused"), "a.json")["optimizer"] == "adamw"
    assert settings(ds(optimizer={"type": "Adam", "params": {}}), "ds.json")["optimizer"] == "adamw"
    assert (
        settings(ds(optimizer={"type": "Adam", "params": {"adam_w_mode": False}}), "ds.json")[
            "optimizer"
        ]
        == "adam"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_optimization": True}, {"zero_stage": 1}),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_stage": 2, "offload_optimizer": True},
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            {"offload_optimizer": False},
        ),
        ({"bf16": {"enabled": "auto"}}, {}),
        ({"bf16": None, "fp16": {"enabled": True}}, {"precision": "fp16"}),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {"precision": "fp32"}),
        (
            {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            {"precision": "amp_bf16"},
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, {"tp": 4}),
        ({"sequence_parallel_size": 2}, {"cp": 2}),
        ({"compile": {"deepcompile": True}}, {"compile": True}),
        ({"dataloader_drop_last": True}, {"drop_last": True}),
    ],
)
def test_deepspeed_sections_are_read(changes, expected):
    with_it, without = (
        settings(ds(**changes), "ds.json"),
        settings(ds(**dict.fromkeys(changes)), "ds.json"),
    )
    assert {name: value for name, value in with_it.items() if name not in without} == expected


def test_deepspeed_keys_that_prevent_training_are_noted():
    assert notes(ds(elasticity={"enabled": True}), "ds.json")
    assert notes(ds(zero_optimization={"stage": 3, "mics_shard_size": 8}), "ds.json")
    text = ds(activation_checkpointing={"partition_activations": True})
    assert notes(text, "ds.json")
    assert [
        s.value for s in parse_config(text, "ds.json").settings if s.name == "partition_activations"
    ] == [True]


def test_notes_follow_file_order():
    keys = [f"wrong_{i}" for i in range(20)]
    found = [note.key for note in parse_config(ds(**dict.fromkeys(keys, 1)), "ds.json").notes]
    assert [key for key in found if key.startswith("wrong")] == keys


@pytest.mark.parametrize(
    ("written", "expected", "words"),
    [
        ("devices: [4]", {"nproc_per_node": 1}, "not 4 devices"),
        ('devices: "4"', {"nproc_per_node": 4}, "written as text"),
        (
            "strategy: deepspeed_stage_3_offload",
            {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
            "",
        ),
        ("strategy: deepspeed", {}, "Lightning would use 2"),
        (
            "strategy: {class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {stage: 1}}",
            {"zero_stage": 1},
            "",
        ),
        ("strategy: fsdp", {"sharding": "fsdp"}, ""),
        (
            "strategy: {class_path: ModelParallelStrategy, init_args: {tensor_parallel_size: 2}}",
            {"sharding": "fsdp", "tp": 2},
            "",
        ),
        ("strategy: deepspeed_stage_7", {}, "not a strategy"),
        ("strategy: ddp_find_unused_parameters_true", {}, ""),
        ("precision: 64", {}, "not among the precisions"),
        ("val_check_interval: 1000", {}, "micro-batches"),
        ("val_check_interval: 0.25", {}, "share of an epoch"),
        (
            "val_check_interval: 1000\n  accumulate_grad_batches: 4",
            {"accumulation": 4, "evaluate_every_steps": 250},
            "250 steps",
        ),
        ("check_val_every_n_epoch: 5", {}, "every 5 epochs"),
        ("limit_train_batches: 1", {}, "shortens every epoch"),
        ("limit_train_batches: 1.0", {}, ""),
        ("fast_dev_run: true", {}, "shortens every epoch"),
        ("max_epochs: -1\n  max_steps: 500", {"max_steps": 500}, ""),
        (
            "max_epochs: 3\n  max_steps: 500",
            {"max_steps": 500, "epochs": 3},
            "whichever comes first",
        ),
        ("gpus: 4", {}, "not a Trainer argument"),
        ("num_nodes: 2", {"nnodes": 2}, "devices of each node"),
    ],
)
def test_lightning_trainer_settings_are_read(written, expected, words):
    text = f"trainer:\n  logger: true\n  {written}\n"
    assert settings(text, "t.yaml") == expected
    assert bool(words) == bool(notes(text, "t.yaml"))


def test_lightning_optimizer_and_data_are_read():
    text = (
        LIGHTNING
        + "optimizer:\n  class_path: torch.optim.SGD\n  init_args: {lr: 1e-2, momentum: 0.9}\n"
    )
    found = settings(text, "t.yaml")
    assert (found["optimizer"], found["learning_rate"]) == ("sgd_momentum", 1e-2)
    assert settings(
        "trainer: {devices: 1}\ndata: {train_batch_size: 6, drop_last: true}\n", "t.yaml"
    ) == {"nproc_per_node": 1, "micro_batch": 6, "drop_last": True}


def test_accelerate_sections_are_read():
    text = """
compute_environment: LOCAL_MACHINE
distributed_type: NO
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  zero_stage: 2
  deepspeed_config_file: ds.json
dynamo_config: {dynamo_backend: INDUCTOR}
mixed_precision: 'no'
num_processes: 8
parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 2}
num_machine: 2
"""
    assert settings(text, "a.yaml") == {
        "world_size": 8,
        "precision": "fp32",
        "accumulation": 4,
        "zero_stage": 2,
        "offload_optimizer": True,
        "tp": 2,
        "compile": True,
    }
    assert "nearest: num_machines" in notes(text, "a.yaml")
    fsdp = "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}\n"
    assert settings(fsdp, "a.yaml") == {"sharding": "fsdp", "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        (
            "accelerate launch --config_file conf/a.yaml --num_processes 8 t.py",
            {"world_size": 8},
            "conf/a.yaml is a file of its own",
        ),
        (
            "accelerate launch --multi_gpu --num_processes=8 --mixed_precision bf16 t.py",
            {"world_size": 8, "precision": "amp_bf16"},
            "",
        ),
        (
            "accelerate launch --use_fsdp --num_processes 2 t.py",
            {"sharding": "fsdp", "world_size": 2},
            "",
        ),
        ("accelerate launch t.py", {}, "--num_processes: not stated"),
        ("deepspeed --include localhost:0,1,2 t.py", {"nnodes": 1, "nproc_per_node": 3}, ""),
        ("deepspeed --include a:0,1@b:0,1 t.py", {"nnodes": 2, "nproc_per_node": 2}, ""),
        ("deepspeed --include a:0,1@b:0 t.py", {}, "not the same number"),
        ("deepspeed t.py --deepspeed ds.json", {}, "ds.json is a file of its own"),
        ("torchrun --nnodes 2:2 --nproc-per-node 4 t.py", {"nnodes": 2, "nproc_per_node": 4}, ""),
        (
            "torchrun --nproc-per-node 4 --nnodes $(wc -l < hosts) t.py",
            {"nproc_per_node": 4},
            "known only when it runs",
        ),
        ("torchrun --nproc-per-nodes 4 t.py", {}, "nearest: nproc-per-node"),
        (
            "torchrun --rdzv-endpoint $(hostname -i | head -n1):29500 --nproc-per-node 4 t.py",
            {"nproc_per_node": 4},
            "",
        ),
        ("torchrun --nproc-per-node 4 -m pkg.train --nnodes 7", {"nproc_per_node": 4}, ""),
        (
            "torchrun --nproc-per-node 4 a.py && torchrun --nproc-per-node 2 b.py --num_train_epochs 2",
            {"nproc_per_node": 4},
            "",
        ),
        (
            "torchrun --nproc-per-node 4 a.py --num_train_epochs 3 --bf16 --learning-rate=1e-4 --optim adafactor",
            {
                "nproc_per_node": 4,
                "epochs": 3.0,
                "precision": "amp_bf16",
                "learning_rate": 1e-4,
                "optimizer": "adafactor_transformers",
            },
            "",
        ),
        (
            "torchrun --nproc-per-node 4 a.py --num_train_epochs $EPOCHS",
            {"nproc_per_node": 4},
            "--num_train_epochs: $EPOCHS is known only",
        ),
    ],
)
def test_command_settings_and_notes_are_read(text, expected, words):
    assert command(text) == expected
    assert bool(words) == bool(command_notes(text))


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc-per-node 1:4 t.py",
        "torchrun --nproc-per-node -1 t.py",
        "torchrun --nnodes 2.5 t.py",
        "torchrun --nproc-per-node --nnodes 2 t.py",
        "torchrun --nnodes 2 --nnodes 3 t.py",
        "accelerate config",
        "accelerate launch --zero_stage 4 t.py",
        "accelerate launch --mixed_precision int4 t.py",
        "pip install deepspeed-mii",
        "torchrun --nproc-per-node 2 t.py --per_device_train_batch_size 2.5",
        "torchrun --nproc-per-node 2 t.py --num_train_epochs 2 --num_train_epochs 3",
        "x" * (1 << 21),
    ],
)
def test_invalid_commands_are_rejected(text):
    with pytest.raises(UnreadableInput):
        parse_command(text)


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        (
            "#SBATCH -N2 -n 8\n#SBATCH -t 1-0\nsrun python t.py",
            {"nproc_per_node": 4, "world_size": 8, "time_limit_s": 86400.0},
            "",
        ),
        ("#SBATCH --gres=gpu:a100:4,nvme:1\nsrun python t.py", {"gpus_per_node": 4}, ""),
        ("#SBATCH --gres=gpu:a100:4(S:0-1)\n", {"gpus_per_node": 4}, ""),
        ("#SBATCH --gres=gpu\n", {"gpus_per_node": 1}, ""),
        ("#SBATCH --gpus-per-node=h100:8\n", {"gpus_per_node": 8}, ""),
        ("#SBATCH --gpus=8\n", {"gpus_per_node": 4}, ""),
        ("#SBATCH --gpus=7\n", {}, "over all nodes"),
        ("#SBATCH --exclusive --job-name='a run' # why\n", {}, ""),
        ("#SBATCH --gpu-per-node=4\n", {}, "nearest: gpus-per-node"),
        ("#SBATCH --time=0\n", {}, "no limit"),
        ("#SBATCH --time=UNLIMITED\n", {}, "no limit"),
        ("#SBATCH --array=0-9\n", {}, "on its own"),
        ("module load cuda\n#SBATCH --time=5\n", {}, "Slurm ignores it"),
        (
            "#SBATCH --ntasks-per-node=4\nsrun --ntasks-per-node=2 python t.py",
            {"nproc_per_node": 2},
            "",
        ),
        (
            "#SBATCH --ntasks-per-node=4\nip=$(srun --ntasks=1 hostname)\nsrun --cpu-bind=none bash run.sh",
            {"nproc_per_node": 4},
            "",
        ),
        (
            "#SBATCH --ntasks-per-node=4\nsrun torchrun --nnodes 2 --nproc-per-node 4 t.py",
            {"nproc_per_node": 4},
            "1 is usual",
        ),
        ("srun torchrun --nproc-per-node 4 t.py", {"nproc_per_node": 4}, "has no --nnodes"),
        (
            "srun torchrun --nnodes ${SLURM_JOB_NUM_NODES} --nproc-per-node $GPUS t.py",
            {},
            "$GPUS is known only",
        ),
        (
            "torchrun --nnodes=2 \\\n  --nproc-per-node=4 \\\n  t.py\ntorchrun --nnodes=1 --nproc-per-node=1 e.py",
            {"nproc_per_node": 4},
            "only the first",
        ),
        (
            "#SBATCH --ntasks-per-node=1\nsrun bash -c 'torchrun --nnodes 2 \\\n --nproc-per-node 4 t.py'",
            {"nproc_per_node": 4},
            "",
        ),
        (
            '#SBATCH --ntasks-per-node=1\nsrun bash -c "\ncd x\ntorchrun --nnodes \\$SLURM_NNODES --nproc-per-node 4 t.py\necho 1"',
            {"nproc_per_node": 4},
            "",
        ),
        (
            "GPUS=4\nexport L=\"torchrun --nnodes=2 --nproc-per-node $GPUS\"\nARGS='t.py --x'\nsrun ${L} $ARGS",
            {"nproc_per_node": 4},
            "",
        ),
        (
            "GPUS=4\nsrun accelerate launch --num_processes $((SLURM_NNODES * GPUS)) t.py",
            {"world_size": 8},
            "",
        ),
        (
            "if true; then\n  GPUS=4\nfi\nsrun torchrun --nnodes 2 --nproc-per-node $GPUS t.py",
            {},
            "$GPUS is known only",
        ),
        ("#SBATCH --ntasks-per-node=1\nsrun ./run.sh", {}, "unknown number"),
        ("srun --ntasks=2 singularity run i.sif", {}, "unknown number"),
        ("#SBATCH --ntasks-per-node=1\nsrun python t.py", {"nproc_per_node": 1}, ""),
        (
            "srun torchrun --nnodes 2 --nproc-per-node 4 t.py --num_train_epochs 3 --max_seq_length 4096",
            {"nproc_per_node": 4, "epochs": 3.0, "sequence_length": 4096},
            "",
        ),
    ],
)
def test_sbatch_settings_and_notes_are_read(script, expected, words):
    text = HEAD + script
    assert settings(text, "j.sh") == {"nnodes": 2, **expected}
    assert bool(words) == bool(notes(text, "j.sh"))
    assert settings(text.replace("\n", "\r\n"), "j.sh") == {"nnodes": 2, **expected}


def test_unknown_number_of_processes_does_not_contradict_reserved_gpus():
    text = HEAD + "#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node=1\nsrun $UNKNOWN\n"
    combined = combine([parse_config(text, "j.sh")])
    assert combined.clashes == ()
    assert combined.values["nproc_per_node"].value == 4


def test_variables_of_a_script_that_double_in_each_line_are_read_quickly():
    lines = "".join(f'A{i + 1}="$A{i}$A{i}"\n' for i in range(100))
    text = HEAD + "A0=xxxxxxxx\n" + lines + "torchrun --nnodes 2 --nproc-per-node 4 t.py\n"
    assert settings(text, "j.sh") == {"nnodes": 2, "nproc_per_node": 4}


def test_shell_script_without_slurm_is_read():
    text = "# torchrun --nproc-per-node 9 old.py\nexport X='\nset -e\n'\ntorchrun \\\n --nproc-per-node 4 t.py\n"
    assert settings(text, "run.sh") == {"nproc_per_node": 4}
    assert settings("#!/bin/bash\n" + text, "run") == {"nproc_per_node": 4}


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n"
        + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 45)),
        "a: &a [*a]\n",
        "trainer: {devices: 0x" + "f" * 100_000 + "}\n",
        "trainer: {devices: " + "9" * 100_000 + "}\n",
    ],
    ids=["merge keys that double", "a list inside itself", "a long hexadecimal", "a long number"],
)
def test_hostile_yaml_is_rejected_quickly(text):
    start = time.perf_counter()
    with pytest.raises(UnreadableInput) as caught:
        parse_config(text, "a.yaml")
    assert time.perf_counter() - start < 5
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (json.dumps({**DS, **{f"wrong_{i}": i for i in range(20_000)}}), "ds.json"),
        (
            HEAD
            + "srun torchrun --nproc-per-node "
            + "$(a " * 50_000
            + "x"
            + ")" * 50_000
            + " t.py",
            "j.sh",
        ),
        (HEAD + "srun torchrun --nproc-per-node 4 t.py\n" * 10_000, "j.sh"),
        (json.dumps({**DS, "w" * 900_000: 1}), "ds.json"),
    ],
    ids=["unknown keys", "nested commands", "launch lines", "a long key"],
)
def test_large_files_are_read_quickly(text, file):
    start = time.perf_counter()
    try:
        config = parse_config(text, file)
        assert all(len(note.text) < 400 for note in config.notes)
    except UnreadableInput as error:
        assert len(str(error)) < 400
    assert time.perf_counter() - start < 10


def test_non_string_keys_are_noted():
    assert notes("train_batch_size: 8\nzero_optimization: {3: 4}\n", "a.yaml")
    assert notes("trainer: {on: 4, devices: 2}\n", "a.yaml")


def test_unpaired_surrogates_are_rejected():
    with pytest.raises(UnreadableInput):
        parse_config('{"num_train_epochs": 3, "\\ud800": 1}', "a.json")


def test_known_key_lists_are_complete():
    """A missing entry would turn a valid key into a warning."""
    assert len(ZERO) == 43 + 9  # the fields of DeepSpeedZeroConfig, and the aliases with stage3_
    assert not TOP_LEVEL & REMOVED
    for name in (
        "bf16",
        "zero_optimization",
        "torch_autocast",
        "wall_clock_breakdown",
        "data_types",
        "checkpoint",
    ):
        assert name in TOP_LEVEL
    assert all(
        re.fullmatch(r"[a-z0-9_]+", name) for name in TOP_LEVEL | REMOVED | ZERO | ACCELERATE_NAMES
    )


def test_example_files_have_no_warnings():
    for text, file in (
        (json.dumps(HF), "a.json"),
        (json.dumps(DS), "ds.json"),
        (LIGHTNING, "t.yaml"),
    ):
        assert [note for note in parse_config(text, file).notes if note.severity == "warning"] == []


@pytest.mark.slow
def test_accelerate_names_match_installed_accelerate():
    import dataclasses

    config = pytest.importorskip("accelerate.commands.config.config_args")
    assert {f.name for f in dataclasses.fields(config.ClusterConfig)} == ACCELERATE_NAMES


def test_accelerate_ignores_sections_of_other_distributed_types():
    head = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n"
    fsdp = head + "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}\n"
    assert settings(fsdp, "a.yaml") == {"world_size": 8}
    assert settings(fsdp.replace("MULTI_GPU", "FSDP"), "a.yaml") == {
        "world_size": 8,
        "sharding": "fsdp",
    }
    compiled = head + "distributed_type: DEEPSPEED\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    assert "compile" not in settings(compiled, "a.yaml")
    assert notes(compiled, "a.yaml")
    assert "compile" not in command(
        "accelerate launch --use_deepspeed --dynamo_backend inductor --num_processes 8 t.py"
    )


def test_accelerate_unquoted_no_is_noted():
    text = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: no\n"
    assert notes(text, "a.yaml")
    assert "mixed_precision" not in notes(text.replace("no\n", "'no'\n"), "a.yaml")


def test_offloaded_parameters_are_read():
    assert settings(
        ds(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}), "ds.json"
    )["offload_parameters"]
    text = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\ndeepspeed_config: {offload_param_device: nvme}\n"
    assert settings(text, "a.yaml")["offload_parameters"]
