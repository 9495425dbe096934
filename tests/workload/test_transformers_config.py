"""Keys of a transformers configuration: each key that changes a step is used or reported as ignored."""

import json

import numpy as np
import pytest
import torch

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.workload import Variant, stored_precision
from trainpace.workload.hugging_face import transformers_task
from trainpace.workload.trace import trace

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
STEP = Variant("adamw", 32)


@pytest.fixture
def spec(tmp_path):
    def write(**values):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA | values))
        return f"transformers:{path}"

    return write


def notes(spec):
    with torch.device("meta"):
        return transformers_task(spec.partition(":")[2], 32, None, True).notes


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_traced_precision_overrides_stored_dtype(spec, key):
    plain, stored = (
        trace(spec(**values), ("fp32", "amp"), STEP) for values in ({}, {key: "bfloat16"})
    )
    for form in ("fp32", "amp"):
        ours, theirs = plain.forms[form], stored.forms[form]
        assert (
            ours.memory.parameter_bytes
            == theirs.memory.parameter_bytes
            == pytest.approx(4 * plain.parameters, rel=0.001)
        )
        assert np.array_equal(ours.operators.flops, theirs.operators.flops)
        assert np.array_equal(ours.operators.half, theirs.operators.half)


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({}, None),
        ({"dtype": "float32"}, None),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"dtype": 7}, None),
    ],
)
def test_stored_precision_is_read_from_configuration(spec, values, precision):
    assert stored_precision(spec(**values)) == precision


def test_only_configurations_have_stored_precision(tmp_path):
    assert stored_precision("resnet50") is None
    assert stored_precision(f"transformers:{tmp_path}/none.json") is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"gradient_checkpointing": True}, "--checkpointing full"),
        ({"attn_implementation": "paged|sdpa"}, "paged|sdpa"),
        ({"num_layer": 3, "use_cach": True}, "num_layer, use_cach"),
    ],
)
def test_ignored_configuration_key_is_noted(spec, values, words):
    (note,) = notes(spec(**values))
    assert words in note


def test_downloaded_configuration_gives_no_notes(spec):
    downloaded = {
        "_name_or_path": "meta-llama/x",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "rope_theta": 5e5,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "pretraining_tp": 1,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "attn_implementation": "sdpa",
    }
    assert notes(spec(**downloaded)) == ()


def test_eager_attention_is_traced_as_matmuls(spec):
    kinds = [
        trace(spec(**values), ("half",), STEP).forms["half"].operators.kind
        for values in (
            {},
            {"attn_implementation": "eager"},
            {"attn_implementation": "flash_attention_2"},
        )
    ]
    assert ["attention" in kind for kind in kinds] == [True, False, True]


def test_architecture_without_loss_is_rejected_with_suggestion(spec):
    with pytest.raises(TrainpaceError, match=r"LlamaModel.*ForCausalLM"):
        notes(spec(architectures=["LlamaModel"]))


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
M2M = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_layerdrop": 0.5}


@pytest.mark.parametrize(
    ("kind", "architecture", "values"),
    [
        ("bert", "BertForPreTraining", TINY),
        ("bert", "BertForNextSentencePrediction", TINY),
        ("deberta-v2", "DebertaV2ForMaskedLM", TINY),  # its padding check reads token ids
        ("llama", "LlamaForSequenceClassification", TINY),
        ("deberta-v2", "DebertaV2ForSequenceClassification", TINY),
        ("t5", "T5ForSequenceClassification", T5),
        ("canine", "CanineForSequenceClassification", TINY | {"num_hash_functions": 2}),
        ("m2m_100", "M2M100ForConditionalGeneration", M2M | {"vocab_size": 100}),
    ],
)
def test_heads_and_layers_that_ask_for_values_are_traced(tmp_path, kind, architecture, values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture], **values}))
    assert trace(f"transformers:{path}", ("fp32",), STEP).parameters > 10_000


@pytest.mark.parametrize(
    ("architecture", "word"),
    [("BertForMultipleChoice", "several choices"), ("BertModel", "no loss from labels")],
)
def test_a_head_without_a_known_batch_is_refused_by_name(tmp_path, architecture, word):
    path = tmp_path / "config.json"
    values = {"model_type": "bert", "architectures": [architecture], **TINY}
    path.write_text(json.dumps(values))
    with pytest.raises(TrainpaceError, match=f"{architecture}.*{word}"):
        trace(f"transformers:{path}", ("fp32",), STEP)


def test_configuration_that_cannot_be_built_is_unreadable(tmp_path):
    path = tmp_path / "config.json"
    values = {"model_type": "esm", "architectures": ["EsmForMaskedLM"], **TINY, "vocab_size": None}
    path.write_text(json.dumps(values))
    with pytest.raises(UnreadableInput, match="EsmForMaskedLM"):
        trace(f"transformers:{path}", ("fp32",), STEP)


def test_selective_scan_is_one_kernel_for_any_length(tmp_path):
    path = tmp_path / "config.json"
    values = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 4}
    path.write_text(json.dumps(values | TINY))
    short, long = (
        trace(f"transformers:{path}", ("fp32",), Variant("adamw", n)).forms["fp32"].operators
        for n in (16, 64)
    )
    assert {"selective_scan", "selective_scan_backward"} <= set(long.function)
    assert long.function == short.function


def test_key_value_cache_is_off_in_training(spec):
    with torch.device("meta"):
        task = transformers_task(spec(use_cache=True).partition(":")[2], 32, None, True)
    assert task.model.config.use_cache is False


def of_class(tmp_path, kind, architecture):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    return f"transformers:{path}"


def test_unsupported_image_architectures_are_rejected_by_name(tmp_path):
    pytest.importorskip("transformers")
    model = of_class(tmp_path, "segformer", "SegformerForSemanticSegmentation")
    with pytest.raises(
        TrainpaceError, match="SegformerForSemanticSegmentation takes images"
    ) as refused:
        trace(model, ("fp32",), Variant("sgd"))
    assert "CLIPModel" in refused.value.hint


def test_image_model_has_no_sequence_length(tmp_path):
    path = of_class(tmp_path, "vit", "ViTForImageClassification").partition(":")[2]
    with torch.device("meta"), pytest.raises(TrainpaceError, match="takes no tokens"):
        transformers_task(path, 128, None, True)


def test_clip_note_states_omitted_flops_per_step(tmp_path):
    path = of_class(tmp_path, "clip", "CLIPModel").partition(":")[2]
    with torch.device("meta"):
        task = transformers_task(path, 16, None, True)
    a_product = 2 * task.model.config.projection_dim
    assert (
        f"{3 * a_product} FLOPs per training step" in task.notes[-1]
    )  # forward, and backward for both of its sides
    assert task.sequence_length == 16


@pytest.mark.parametrize(
    ("kind", "architecture", "instead"),
    [("falcon", "FalconForCausalLM", "sdpa"), ("gptj", "GPTJForCausalLM", "eager")],
)
def test_unsupported_flash_attention_falls_back_with_note(tmp_path, kind, architecture, instead):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": kind,
                "architectures": [architecture],
                "attn_implementation": "flash_attention_2",
                "hidden_size": 64,
                "n_embd": 64,
                "num_hidden_layers": 1,
                "n_layer": 1,
                "num_attention_heads": 4,
                "n_head": 4,
                "vocab_size": 100,
                "rotary_dim": 16,
            }
        )
    )
    with torch.device("meta"):
        task = transformers_task(str(path), 32, None, True)
    assert any(architecture in note and note.endswith(f"{instead}.") for note in task.notes)
    assert task.model.config._attn_implementation == instead


@pytest.mark.slow
def test_model_without_checkpointing_support_is_rejected(tmp_path):
    pytest.importorskip("transformers")
    model = of_class(tmp_path, "resnet", "ResNetForImageClassification")
    with pytest.raises(TrainpaceError, match="does not support activation checkpointing"):
        trace(model, ("fp32",), Variant("sgd", image_size=64, checkpointing=True))


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        },
        {
            "model_type": "bart",
            "architectures": ["BartForConditionalGeneration"],
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
    ],
)
def test_encoders_with_decoders_are_traced_in_both_modes(spec, values, mode):
    pytest.importorskip("transformers")
    workload = trace(
        spec(**values), ("fp32",), Variant("sgd" if mode == "train" else None, 16, mode=mode)
    )
    assert "gemm" in workload.forms["fp32"].operators.kind


def test_assumed_optimizer_and_sequence_length_are_noted(spec):
    """AdamW and 1,024 of the model's 4,096 tokens are assumed. Earlier versions silently assumed SGD."""
    workload = trace(spec(max_position_embeddings=4096, rope_theta=1e4), ("fp32",), Variant())
    assert workload.optimizer_in_words == "adamw (assumed)"
    assert workload.sequence_length == 1024
    said = [note for note in workload.notes if "are assumed" in note]
    (note,) = said
    assert "1,024" in note
    assert "4,096" in note
    asked = trace(
        spec(max_position_embeddings=4096, rope_theta=1e4), ("fp32",), Variant(None, 1024)
    )
    assert not any("are assumed" in note for note in asked.notes)
    short = trace(spec(max_position_embeddings=128), ("fp32",), Variant())
    assert not any("are assumed" in note for note in short.notes)
