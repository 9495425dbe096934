"""Several files beside each other."""

import json

import pytest

from trainpace.configs import combine, parse_command, parse_config


def check(*files):
    return combine(
        [parse_command(f) if f.startswith("torchrun") else parse_config(f, name) for name, f in files_named(files)]
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
        ((hf(), ds(train_micro_batch_size_per_gpu=4)), ["micro_batch", "8 in 0.json (per_device_train_batch_size)", "4 in 1.json"]),
        ((hf(gradient_accumulation_steps=2), ds(), "torchrun --nproc-per-node 4 t.py"), ["256 (1.json, train_batch_size)", "= 64"]),
        ((hf(fp16=True), ds(bf16={"enabled": True})), ["precision", "amp_fp16 in 0.json (fp16)", "bf16 in 1.json (bf16.enabled)"]),
        (("num_processes: 16\nnum_machines: 2\ncompute_environment: x\n", "torchrun --nnodes 2 --nproc-per-node 4 t.py"), ["16", "8"]),
        (("num_processes: 8\ndistributed_type: FSDP\n", ds(zero_optimization={"stage": 3})), ["ZeRO", "FSDP"]),
    ],
)  # fmt: skip
def test_contradictions_name_files_and_keys(files, words):
    combined = check(*files)
    text = " ".join(clash.text for clash in combined.clashes)
    assert text
    assert [word for word in words if word not in text] == []


def test_agreement():
    combined = check(
        hf(bf16=True, gradient_accumulation_steps=4), ds(bf16={"enabled": True}), "torchrun --nproc-per-node 8 t.py"
    )
    assert combined.clashes == ()
    assert combined.values["global_batch"].value == 256


def test_auto_takes_the_other_files_value():
    combined = check(hf(), ds(train_micro_batch_size_per_gpu="auto"))
    assert combined.clashes == ()
    assert combined.values["micro_batch"].file == "0.json"
