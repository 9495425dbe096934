"""Hugging Face keys that choose kernels set the software of a forecast or give a note."""

import json

import pytest
from msgspec.structs import replace

import trainpace
from nouns import stacked
from trainpace.configs import parse_config
from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.records import save

BASE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": True}


def read(**keys):
    file = parse_config(json.dumps(BASE | keys), "hf.json")
    return {s.name: s.value for s in file.settings}, [note.text for note in file.notes]


@pytest.mark.parametrize(
    ("keys", "name", "value"),
    [
        ({"attn_implementation": "eager"}, "attention", "eager"),
        ({"attn_implementation": "flash_attention_2"}, "attention", "flash2"),
        ({"attn_implementation": "flash_attention_3"}, "attention", "flash3"),
        ({"attn_implementation": "sdpa"}, "attention", None),
        ({"optim": "adamw_torch_fused"}, "optimizer_implementation", "fused"),
        ({"optim": "adamw_torch"}, "optimizer_implementation", None),
        ({"use_liger_kernel": True}, "cross_entropy", "chunked"),
        (
            {
                "use_liger_kernel": True,
                "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": True},
            },
            "cross_entropy",
            "fused_fp32",
        ),
        (
            {
                "use_liger_kernel": True,
                "liger_kernel_config": {"fused_linear_cross_entropy": False},
            },
            "cross_entropy",
            None,
        ),
        ({"use_liger_kernel": False}, "cross_entropy", None),
    ],
)
def test_kernel_keys_set_software(keys, name, value):
    assert read(**keys)[0].get(name) == value


def test_unsupported_kernel_keys_are_noted():
    assert read(attn_implementation="flex_attention")[1]
    assert read(use_liger_kernel=True)[1]
    for keys in ({"attn_implementation": 3}, {"use_liger_kernel": "yes"}):
        with pytest.raises(TrainpaceError):
            read(**keys)


def test_plan_uses_kernels_from_config(tmp_path):
    model, config = tmp_path / "model.json", tmp_path / "hf.json"
    forms = {"amp": stacked().forms["half"], "fp32": stacked().forms["fp32"]}
    save(replace(stacked(), forms=forms, optimizer="adamw"), model)

    def now_s(**keys):
        config.write_text(json.dumps(BASE | {"max_steps": 100} | keys))
        return trainpace.plan(str(model), gpu="A100", config=[str(config)], batch=4).now.job_s

    plain = now_s()
    assert now_s(attn_implementation="eager") > plain
    assert now_s(optim="adamw_torch_fused") != plain
    config.write_text(json.dumps(BASE | {"max_steps": 100, "attn_implementation": "eager"}))
    with pytest.raises(Contradiction):
        trainpace.plan(str(model), gpu="A100", config=[str(config)], batch=4, attention="flash2")
