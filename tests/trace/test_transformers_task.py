"""Keys of a transformers configuration: each that changes a step is used, or named as one that is not."""

import json

import numpy as np
import pytest
import torch

from trainpace.errors import TrainpaceError
from trainpace.trace import stored_precision
from trainpace.trace.trace import trace
from trainpace.trace.transformers_task import transformers_task
from trainpace.workload import Variant

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
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
def test_the_precision_decides_and_not_the_dtype_of_the_stored_weights(spec, key):
    plain, stored = (trace(spec(**values), ("fp32", "amp"), STEP) for values in ({}, {key: "bfloat16"}))
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
    [({}, None), ({"dtype": "float32"}, None), ({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float16"}, "fp16"),
     ({"text_config": {"dtype": "bfloat16"}}, "bf16"), ({"dtype": 7}, None)],
)  # fmt: skip
def test_the_stored_precision(spec, values, precision):
    assert stored_precision(spec(**values)) == precision


def test_only_configurations_store_a_precision(tmp_path):
    assert stored_precision("resnet50") is None
    assert stored_precision(f"transformers:{tmp_path}/none.json") is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config is not used"),
        ({"gradient_checkpointing": True}, "--checkpointing full"),
        ({"attn_implementation": "paged|sdpa"}, "paged|sdpa is not known"),
        (
            {"num_layer": 3, "use_cach": True},
            "LlamaConfig does not know these keys, and they are not used: num_layer, use_cach",
        ),
    ],
)
def test_a_key_that_changes_nothing_here_is_named(spec, values, words):
    (note,) = notes(spec(**values))
    assert words in note


def test_a_downloaded_configuration_needs_no_notes(spec):
    downloaded = {
        "_name_or_path": "meta-llama/x", "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "rope_theta": 5e5,
        "use_cache": True, "bos_token_id": 1, "eos_token_id": [1, 2], "pretraining_tp": 1, "rope_scaling": None,
        "attention_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02, "attn_implementation": "sdpa",
    }  # fmt: skip
    assert notes(spec(**downloaded)) == ()


def test_eager_attention_is_traced_as_plain_products(spec):
    kinds = [trace(spec(**values), ("half",), STEP).forms["half"].operators.kind
             for values in ({}, {"attn_implementation": "eager"}, {"attn_implementation": "flash_attention_2"})]  # fmt: skip
    assert ["attention" in kind for kind in kinds] == [True, False, True]


def test_a_model_without_a_loss_is_refused_with_what_to_name(spec):
    with pytest.raises(TrainpaceError, match=r"LlamaModel computes no loss.*ForCausalLM"):
        notes(spec(architectures=["LlamaModel"]))
