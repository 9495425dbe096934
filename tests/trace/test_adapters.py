"""Adapters and quantised weights: what peft and bitsandbytes make of a model, beside what the trace holds of it."""

import json

import numpy as np
import pytest

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.execution import Execution
from trainpace.forecast import Forecaster, Target
from trainpace.hardware import Cluster, find_device
from trainpace.trace.trace import trace
from trainpace.workload import GEMM, Adaptation, Variant

HIDDEN, WIDE, LAYERS, WORDS, RANK = 128, 256, 4, 500, 8
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": 4,
    "num_hidden_layers": LAYERS, "num_key_value_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64,
}  # fmt: skip
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * WIDE
ADAPTERS = LAYERS * RANK * (4 * 2 * HIDDEN + 3 * (HIDDEN + WIDE))
A100 = Cluster(device=find_device("A100"), devices_per_node=8)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return f"transformers:{path}"


@pytest.fixture(scope="module")
def traced(config):
    ways = {
        "full": Adaptation(), "lora": Adaptation("lora", RANK), "dora": Adaptation("dora", RANK),
        "nf4": Adaptation("lora", RANK, weights="nf4"), "double": Adaptation("lora", RANK, weights="nf4_double"),
    }  # fmt: skip
    return {name: trace(config, ("half",), Variant("adamw", 64, adaptation=how)) for name, how in ways.items()}


def flops(workload, phase):
    o = workload.forms["half"].operators
    rows = (np.array(o.phase) == phase) & (np.array(o.kind) == "gemm")
    return float((o.flops[rows, 1] * o.count[rows]).sum())


def forecast(workload, **changes):
    e = Execution(
        **{"micro_batch": 4, "precision": "bf16", "nproc_per_node": 8, "optimizer": workload.optimizer, **changes}
    )
    return Forecaster(workload, Target(A100)).forecast(e)


def test_only_adapters_are_trained(traced):
    full, lora, nf4 = (traced[name] for name in ("full", "lora", "nf4"))
    assert (lora.trainable_parameters, nf4.trainable_parameters) == (ADAPTERS, ADAPTERS)
    assert lora.parameters == nf4.parameters == full.parameters + ADAPTERS
    for workload in (lora, nf4):
        memory = workload.forms["half"].memory
        assert memory.optimizer_bytes == 2 * 2 * ADAPTERS
        assert memory.peaks[:, 0].max() == 2 * ADAPTERS
    assert (lora.adaptation, nf4.adaptation) == ("LoRA of rank 8", "LoRA of rank 8 over nf4")


def test_frozen_weights_have_gradients_of_their_inputs_alone(traced):
    full, lora = traced["full"], traced["lora"]
    adapters = 2 * 64 * ADAPTERS  # forward: 2 FLOPs a number and token
    assert flops(lora, "forward") == flops(full, "forward") + adapters
    head = 2 * 64 * HIDDEN * WORDS
    # inputs' gradients of blocks and head; nothing flows to the first block's inputs but through what has adapters
    inputs = 2 * 64 * LAYERS * BLOCK + head
    missing = 2 * 64 * 3 * HIDDEN**2 + 2 * 64 * 3 * RANK * HIDDEN  # queries', keys' and values' of the first block
    assert flops(lora, "backward") == pytest.approx(inputs + 2 * adapters - missing, rel=1e-9)
    assert flops(full, "backward") == pytest.approx(2 * flops(full, "forward"), rel=1e-9)


def test_weights_in_4_bits_take_half_a_byte_and_their_scales(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN + ADAPTERS)
    numbers = LAYERS * BLOCK
    plain, double = (traced[name].forms["half"].memory for name in ("nf4", "double"))
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    assert plain.parameter_bytes - buffers == rest + numbers / 2 + 4 * numbers / 64
    scales = sum(-(-n // 64 // 256) for n in [HIDDEN**2] * 4 + [HIDDEN * WIDE] * 3) * LAYERS
    assert double.parameter_bytes - buffers == rest + numbers / 2 + numbers / 64 + 4 * scales


def test_every_product_of_a_quantised_weight_makes_it_first(traced):
    o = traced["nf4"].forms["half"].operators
    made = {
        phase: sum(
            int(o.count[i]) for i, name in enumerate(o.function) if name == "dequantize_4bit" and o.phase[i] == phase
        )
        for phase in ("forward", "backward")
    }
    assert made == {
        "forward": 7 * LAYERS,
        "backward": 7 * LAYERS - 3,
    }  # of the first block's inputs nobody wants gradients
    i = o.function.index("dequantize_4bit")
    assert o.written_bytes[i, 0] == 2 * o.dims[i, 1, 0]
    for phase in ("forward", "backward"):
        assert flops(traced["nf4"], phase) == flops(traced["lora"], phase)
    assert traced["nf4"].forms["half"].blocks.count == LAYERS
    assert int((o.dims[:, GEMM.batch, 0] > 0).sum()) > 0


def test_dora_also_takes_norms_of_whole_weights(traced):
    assert traced["dora"].trainable_parameters == ADAPTERS + LAYERS * (4 * HIDDEN + 2 * WIDE + HIDDEN)
    assert flops(traced["dora"], "forward") >= flops(traced["lora"], "forward")
    assert forecast(traced["dora"]).step.forward_ms > forecast(traced["lora"]).step.forward_ms


def test_sharding_gathers_what_is_kept_and_exchanges_what_is_trained(traced):
    full, lora, nf4 = (forecast(traced[name], zero_stage=3, accumulation=2) for name in ("full", "lora", "nf4"))
    assert nf4.memory.parameters_gib < 0.6 * lora.memory.parameters_gib
    assert lora.memory.optimizer_states_gib < 0.3 * full.memory.optimizer_states_gib
    assert lora.memory.gradients_gib < full.memory.gradients_gib
    # no fp32 copy of frozen weights
    assert forecast(traced["lora"], zero_stage=1).memory.optimizer_states_gib == pytest.approx(
        12 * ADAPTERS / 8 / 2**30, rel=0.01
    )


def test_what_the_model_does_not_have_is_refused_by_name(config):
    with pytest.raises(UnknownName, match=r"qproj.*q_proj"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=Adaptation("lora", targets="qproj")))
    with pytest.raises(TrainpaceError, match="cannot be trained"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=Adaptation(weights="nf4")))
    with pytest.raises(TrainpaceError, match="DoRA over nf4"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=Adaptation("dora", weights="nf4")))
