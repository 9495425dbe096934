"""The default precision of a forecast follows PyTorch or the dtype of the configuration."""

import json

import pytest

from trainpace.cli.program import main

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 256,
    "n_head": 4,
    "n_positions": 64,
}


def row_of(capsys, *words, gpu="A100"):
    with pytest.raises(SystemExit) as ended:
        main(["forecast", *words, "--gpu", gpu, "--no-journal", "--json"])
    assert not ended.value.code
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return row


@pytest.mark.parametrize(("gpu", "precision"), [("A100", "torch_fp32"), ("T4", "fp32")])
def test_default_precision_matches_pytorch_defaults(capsys, gpu, precision):
    assert row_of(capsys, "resnet18", gpu=gpu)["precision"] == precision


@pytest.mark.slow
def test_torch_fp32_uses_tf32_for_convolutions_but_not_matmuls(capsys, tmp_path):
    def step_ms(model, precision):
        return row_of(capsys, model, "--precision", precision, "--batch", "64", gpu="A100")[
            "step_time_ms"
        ]

    plain, torchs, tf32 = (
        step_ms("resnet50", precision) for precision in ("fp32", "torch_fp32", "tf32")
    )
    assert tf32 < torchs < 0.7 * plain
    assert torchs < 1.05 * tf32
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    plain, torchs, tf32 = (
        step_ms(f"transformers:{path}", precision) for precision in ("fp32", "torch_fp32", "tf32")
    )
    assert tf32 < torchs == plain


def test_config_dtype_sets_the_default_precision(capsys, tmp_path):
    config = GPT2 | {"n_layer": 1, "n_embd": 64, "n_head": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    rows = [
        row_of(capsys, f"transformers:{path}", *options)
        for options in ((), ("--precision", "amp_bf16"))
    ]
    assert [row["precision"] for row in rows] == ["bf16", "amp_bf16"]
    assert rows[0]["peak_memory_gib"] < rows[1]["peak_memory_gib"]
    assert rows[0]["notes"] == []
