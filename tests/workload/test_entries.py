"""Every kind of task return value with the real libraries: the examples, traced in one process."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from trainpace.core.records import load
from trainpace.workload import Variant, Workload, at_batch, load_workload, trace_many

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "language_models": ("own_loss", "lora", "trainer", "trainer_8bit", "sft"),
    "lightning_modules": ("classifier", "gan"),
    "diffusion": ("text_to_image",),
    "several_models": ("gan", "distillation", "preference"),
    "graphs_sequences_tables": ("graphs", "sequences", "recommender"),
}
UNET = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
}
ATTENTION = {"attention_head_dim": 8, "num_attention_heads": 4, "sample_size": 8, "patch_size": 2}
CONFIGS = {
    "unet": UNET,
    "sdxl": UNET
    | {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 16,
        "projection_class_embeddings_input_dim": 160,
    },
    "dit": ATTENTION
    | {
        "_class_name": "DiTTransformer2DModel",
        "num_layers": 4,
        "in_channels": 4,
        "out_channels": 8,
        "norm_type": "ada_norm_zero",
        "num_embeds_ada_norm": 10,
    },
    "sd3": ATTENTION
    | {
        "_class_name": "SD3Transformer2DModel",
        "num_layers": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "caption_projection_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "pos_embed_max_size": 16,
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_layers": 1,
        "num_single_layers": 1,
        "in_channels": 16,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
        "guidance_embeds": True,
    },
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return {example or configuration: its workload, or the error message}."""
    folder = tmp_path_factory.mktemp("entries")
    specs = {
        name: f"{ROOT}/examples/tasks/{file}.py:{name}"
        for file, names in EXAMPLES.items()
        for name in names
    }
    specs |= {
        f"{file}/gan": f"{ROOT}/examples/tasks/{file}.py:gan"
        for file in ("lightning_modules", "several_models")
    }
    for name, values in CONFIGS.items():
        (folder / f"{name}.config").write_text(json.dumps(values))
        specs[name] = f"diffusers:{folder}/{name}.config"
    files = {name: str(folder / f"{name.replace('/', '.')}.json") for name in specs}
    assert (ROOT / ".zoo" / "trl").is_dir(), "make .zoo/installed .engines/installed"
    path = os.pathsep.join(str(ROOT / part) for part in (".zoo", ".engines", "tests/shims"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        reasons = trace_many(
            {files[name]: (spec, "amp", Variant()) for name, spec in specs.items()}
        )
    return {name: reasons.get(file) or load(file, Workload) for name, file in files.items()}


def products(workload, phase):
    """FLOPs per sample of matmuls and convolutions."""
    table = workload.forms["amp"].operators
    rows = np.array(
        [
            p == phase and k.startswith(("gemm", "conv", "attention"))
            for p, k in zip(table.phase, table.kind, strict=True)
        ]
    )
    return float(
        ((at_batch(table.flops, 101) - at_batch(table.flops, 100)) * table.count)[rows].sum()
    )


def test_all_examples_and_diffusion_models_are_traced(traced):
    assert {name: reason for name, reason in traced.items() if isinstance(reason, str)} == {}


def test_model_with_own_loss_has_expected_flops(traced):
    """Llama FLOPs per token: 4 layers of 4 d^2 + 3 d h, the head, and causal attention: half of 4 d T."""
    d, h, tokens, vocabulary, layers = 64, 128, 64, 512, 4
    expected = tokens * (
        layers * (2 * (4 * d * d + 3 * d * h) + 2 * tokens * d) + 2 * d * vocabulary
    )
    assert products(traced["own_loss"], "forward") == pytest.approx(expected, rel=1e-9)
    assert (traced["own_loss"].sequence_length, traced["own_loss"].optimizer) == (64, "adamw")
    assert traced["own_loss"].forms["amp"].blocks.count == layers


def test_lora_example_has_no_gradients_for_base_weights(traced):
    lora, full = traced["lora"], traced["own_loss"]
    assert lora.trainable_parameters == 4 * 2 * 8 * (64 + 64)
    assert products(lora, "forward") > products(full, "forward")
    assert products(lora, "backward") < 0.6 * products(full, "backward")
    assert lora.forms["amp"].memory.optimizer_bytes == 8 * lora.trainable_parameters


def test_trainer_arguments_become_task_settings(traced):
    trainer = traced["trainer"]
    assert trainer.settings == {
        "micro_batch": 4,
        "accumulation": 8,
        "precision": "amp_bf16",
        "activation_checkpointing": "full",
        "clip_gradients": True,
    }
    assert any("Trainer's arguments" in note and "accumulation 8" in note for note in trainer.notes)
    assert products(trainer, "backward") == products(
        traced["own_loss"], "backward"
    )  # the forecast recomputes blocks


def test_trainer_optimizer_with_missing_library_is_known_by_name(traced):
    by_name = traced["trainer_8bit"]
    assert by_name.optimizer == "adamw_8bit"
    assert not by_name.assumes_optimizer
    assert (
        by_name.forms["amp"].memory.optimizer_bytes
        < 0.3 * traced["own_loss"].forms["amp"].memory.optimizer_bytes
    )


def test_trl_trainer_is_traced_at_padded_length(traced):
    sft = traced["sft"]
    assert sft.settings["micro_batch"] == 4
    assert any("vary in size" in note for note in sft.notes)
    assert 30 < sft.sequence_length <= 64
    # The backward pass recomputes the head because its logits are not kept.
    d, layers, tokens = 64, 4, sft.sequence_length
    blocks = (
        tokens * (layers * 2 * (4 * d * d + 3 * d * 128)) + layers * 4 * tokens**2 * d
    )  # with a mask all pairs are computed
    head = 2 * d * 512 * (tokens - 1)
    assert products(sft, "forward") == pytest.approx(blocks + head, rel=0.01)


def test_lightning_automatic_optimization_is_traced(traced):
    classifier = traced["classifier"]
    assert products(classifier, "forward") == 2 * (32 * 64 + 64 * 10)
    assert classifier.settings == {"micro_batch": 64}
    assert not classifier.whole_step


def test_lightning_manual_optimization_trains_toggled_parameters(traced):
    """Like the plain GAN, but the discriminator's weights get no gradients from the generator's loss."""
    manual, plain = traced["lightning_modules/gan"], traced["several_models/gan"]
    assert manual.whole_step
    assert products(manual, "forward") == products(plain, "forward")
    assert products(plain, "backward") - products(manual, "backward") == 2 * (32 * 64 + 64)


def test_frozen_diffusion_parts_have_no_backward(traced):
    model = traced["text_to_image"]
    table = model.forms["amp"].operators
    weights = {
        m.split(".")[0]
        for m, k, p in zip(table.module, table.kind, table.phase, strict=True)
        if p == "backward" and k in ("conv_wgrad", "gemm")
    }
    assert weights == {"unet"}
    assert {"vae", "text_encoder"} <= {m.split(".")[0] for m in table.module}
    assert model.forms["amp"].memory.optimizer_bytes == 8 * model.trainable_parameters


@pytest.mark.parametrize("name", ["unet", "sdxl", "dit", "sd3", "flux"])
def test_diffusion_models_are_traced_from_configuration(traced, name):
    model = traced[name]
    assert 1.8 < products(model, "backward") / products(model, "forward") < 2.5
    assert model.image_side == (1024 if name == "flux" else 64)
    assert "VAE" in model.notes[0]


def test_graph_batches_have_expected_flops(traced):
    nodes, head = 40, 2 * 128 * 8
    assert products(traced["graphs"], "forward") == 2 * 2 * nodes * (64 * 128 + 128 * 128) + head


def test_sparse_embeddings_move_only_used_rows(traced):
    recommender = traced["recommender"]
    table = recommender.forms["amp"].operators
    moved = (at_batch(table.read_bytes, 1) + at_batch(table.written_bytes, 1)) * table.count
    assert moved.max() < 0.01 * recommender.forms["amp"].memory.parameter_bytes
    assert "sparse_add_" in table.function


@pytest.mark.parametrize(
    ("values", "word"),
    [({"a": 1}, "_class_name"), ({"_class_name": "UNet3D"}, "Nearest: UNet2DModel")],
)
def test_unknown_diffusion_configuration_is_rejected(tmp_path, monkeypatch, values, word):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".zoo"))
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=word):
        load_workload(f"diffusers:{tmp_path}/config.json", ("fp32",))
