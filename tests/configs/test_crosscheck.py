"""Settings of several files are combined and checked for contradictions."""

import json

import pytest

from trainpace.configs import combine, parse_command, parse_config


def check(*files):
    return combine(
        [
            parse_command(f) if f.startswith("torchrun") else parse_config(f, name)
            for name, f in files_named(files)
        ]
    )


def files_named(files):
    return [(f"{i}.json" if f.startswith("{") else f"{i}.yaml", f) for i, f in enumerate(files)]


def hf(**values):
    return json.dumps({"output_dir": "o", "per_device_train_batch_size": 8, **values})


def ds(**values):
    return json.dumps({"train_batch_size": 256, **values})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            (hf(), ds(train_micro_batch_size_per_gpu=4)),
            ["micro_batch", "8 in 0.json (per_device_train_batch_size)", "4 in 1.json"],
        ),
        (
            (hf(gradient_accumulation_steps=2), ds(), "torchrun --nproc-per-node 4 t.py"),
            ["256 (1.json, train_batch_size)", "= 64"],
        ),
        (
            (hf(fp16=True), ds(bf16={"enabled": True})),
            ["precision", "amp_fp16 in 0.json (fp16)", "bf16 in 1.json (bf16.enabled)"],
        ),
        (
            (
                "num_processes: 16\nnum_machines: 2\ncompute_environment: x\n",
                "torchrun --nnodes 2 --nproc-per-node 4 t.py",
            ),
            ["16", "8"],
        ),
        (
            ("num_processes: 8\ndistributed_type: FSDP\n", ds(zero_optimization={"stage": 3})),
            ["ZeRO", "FSDP"],
        ),
    ],
)
def test_contradictions_name_files_and_keys(files, words):
    combined = check(*files)
    text = " ".join(clash.text for clash in combined.clashes)
    assert text
    assert [word for word in words if word not in text] == []


def test_consistent_files_have_no_clashes():
    combined = check(
        hf(bf16=True, gradient_accumulation_steps=4),
        ds(bf16={"enabled": True}),
        "torchrun --nproc-per-node 8 t.py",
    )
    assert combined.clashes == ()
    assert combined.values["global_batch"].value == 256


def test_auto_takes_value_from_other_file():
    combined = check(hf(), ds(train_micro_batch_size_per_gpu="auto"))
    assert combined.clashes == ()
    assert combined.values["micro_batch"].file == "0.json"


def test_sbatch_is_checked_against_its_launch_command():
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n"
    good = "srun torchrun --nnodes 2 --nproc-per-node $SLURM_GPUS_ON_NODE t.py\n"
    assert combine([parse_config(head + good, "j.sh")]).clashes == ()
    for bad, words in (
        (
            good.replace("--nnodes 2", "--nnodes 4"),
            ["nnodes is 2 in j.sh (#SBATCH --nodes), 4 in j.sh (--nnodes)"],
        ),
        (
            good.replace("$SLURM_GPUS_ON_NODE", "8"),
            ["8 (j.sh, --nproc-per-node)", "4 (j.sh, #SBATCH --gpus-per-node)"],
        ),
    ):
        text = " ".join(clash.text for clash in combine([parse_config(head + bad, "j.sh")]).clashes)
        assert [word for word in words if word not in text] == []
    accelerate = parse_config("num_processes: 4\ncompute_environment: x\n", "a.yaml")
    script = parse_config(head + "srun accelerate launch --config_file a.yaml t.py\n", "j.sh")
    (clash,) = combine([script, accelerate]).clashes
    assert "world size 4 (a.yaml, num_processes)" in clash.text
    assert "= 8" in clash.text


@pytest.mark.parametrize("reserved", [True, False])
def test_wrong_global_batch_names_the_value_that_agrees(reserved):
    head = "#!/bin/bash\n#SBATCH --nodes=1\n" + "#SBATCH --gpus-per-node=4\n" * reserved
    command = "torchrun --nproc-per-node 4 t.py --per_device_train_batch_size 2 --gradient_accumulation_steps 1\n"
    ds = parse_config('{"train_batch_size": 4, "zero_optimization": {}}', "ds.json")
    (clash,) = combine([parse_config(head + command, "j.sh"), ds]).clashes
    assert "train_batch_size to 8" in clash.text
    assert ("--num_gpus 2" in clash.text) is not reserved


def test_unknown_values_do_not_clash():
    batch = [
        parse_config(ds(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1), "ds.json")
    ]
    for command in (
        "torchrun --nnodes 1:4 --nproc-per-node 8 t.py",  # 256 = 8 x 1 x 32 with 4 nodes
        "torchrun --nnodes $N --nproc-per-node 8 t.py",
        "torchrun --nnodes 4 --nproc-per-node gpu t.py",
    ):
        assert combine([*batch, parse_command(command)]).clashes == ()
    assert (
        combine([*batch, parse_command("torchrun --nnodes 3 --nproc-per-node 8 t.py")]).clashes
        != ()
    )


def test_clash_is_reported_once():
    """If two files disagree about the nodes, the batch is not checked."""
    files = [
        parse_command(f"torchrun --nnodes {n} --nproc-per-node 8 t.py", f"c{n}") for n in (2, 4)
    ]
    ds_file = parse_config(
        ds(train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1), "ds.json"
    )
    assert [clash.name for clash in combine([*files, ds_file]).clashes] == ["nnodes"]


def test_tensor_parallelism_divides_the_data_parallel_size():
    files = [
        parse_config(
            ds(train_micro_batch_size_per_gpu=32, gradient_accumulation_steps=1), "ds.json"
        ),
        parse_config(
            "num_processes: 16\nnum_machines: 1\nparallelism_config: {tp_size: 2}\n", "a.yaml"
        ),
    ]
    assert combine(files).clashes == ()
    files[1] = parse_config(
        "num_processes: 16\nnum_machines: 1\nparallelism_config: {tp_size: 3}\n", "a.yaml"
    )
    (clash,) = combine(files).clashes
    assert "3 (a.yaml, parallelism_config.tp_size)" in clash.text


def test_auto_note_names_resolved_value():
    combined = check(hf(), ds(train_micro_batch_size_per_gpu="auto"))
    assert any("8 (0.json, per_device_train_batch_size)" in note.text for note in combined.notes)


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        (hf(bf16=True), ds(bf16={"enabled": True}), True),
        (hf(fp16=True), ds(fp16={"enabled": True}), True),
        (hf(fp16=True), ds(bf16={"enabled": True}), False),
        (hf(), ds(bf16={"enabled": True}), True),  # a missing setting is not a contradiction
        (
            hf(bf16=True),
            "trainer: {precision: bf16-true}\n",
            False,
        ),  # without DeepSpeed, the two precisions differ
        (hf(optim="adamw_torch"), ds(optimizer={"type": "AdamW"}), True),
        (hf(optim="adafactor"), ds(optimizer={"type": "AdamW"}), False),
        (hf(num_train_epochs=3), "trainer: {max_epochs: 3}\n", True),
        (hf(learning_rate=1e-4), ds(optimizer={"type": "SGD", "params": {"lr": "1e-4"}}), True),
    ],
)
def test_equivalent_settings_in_two_files_do_not_clash(first, second, agree):
    assert (check(first, second).clashes == ()) is agree


def test_zero_stage_0_does_not_clash_with_fsdp():
    fsdp = "num_processes: 8\ndistributed_type: FSDP\n"
    assert check(fsdp, ds(zero_optimization={"stage": 0})).clashes == ()
