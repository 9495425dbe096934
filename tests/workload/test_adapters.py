"""Adapters and quantised weights: what peft and bitsandbytes make of a model, beside what the trace holds of it."""

import json

import numpy as np
import pytest

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.workload import GEMM, Adaptation, Variant
from trainpace.workload.trace import trace

HIDDEN, WIDE, LAYERS, WORDS, RANK = 128, 256, 4, 500, 8
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
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
        "full": Adaptation(),
        "lora": Adaptation("lora", RANK),
        "dora": Adaptation("dora", RANK),
        "nf4": Adaptation("lora", RANK, weights="nf4", fp32_weights="none"),
        "double": Adaptation("lora", RANK, weights="nf4_double", fp32_weights="none"),
        "gptq": Adaptation("lora", RANK, weights="gptq", fp32_weights="none"),
        "whole": Adaptation("lora", RANK, whole="embed_tokens,lm_head"),
        "norms": Adaptation("lora", RANK, weights="nf4", fp32_weights="norms"),
        "peft": Adaptation("lora", RANK, weights="nf4"),
    }
    return {
        name: trace(config, ("half",), Variant("adamw", 64, adaptation=how))
        for name, how in ways.items()
    }


def flops(workload, phase):
    o = workload.forms["half"].operators
    rows = (np.array(o.phase) == phase) & (np.array(o.kind) == "gemm")
    return float((o.flops[rows, 1] * o.count[rows]).sum())


def forecast(workload, **changes):
    e = Execution(
        **{
            "micro_batch": 4,
            "precision": "bf16",
            "nproc_per_node": 8,
            "optimizer": workload.optimizer,
            **changes,
        }
    )
    return Forecaster(workload, Target(A100)).forecast(e)


def test_only_adapters_are_trained(traced):
    full, lora, nf4 = (traced[name] for name in ("full", "lora", "nf4"))
    assert (lora.trainable_parameters, nf4.trainable_parameters) == (ADAPTERS, ADAPTERS)
    assert lora.parameters == nf4.parameters == full.parameters + ADAPTERS
    for workload in (lora, nf4):
        memory = workload.forms["half"].memory
        assert memory.optimizer_bytes == 2 * 4 * ADAPTERS  # in fp32, as peft keeps them
        assert memory.peaks[:, 0].max() == 4 * ADAPTERS
    assert (lora.adaptation, nf4.adaptation) == (
        "LoRA of rank 8",
        "LoRA of rank 8 over nf4, all other weights in 16 bits",
    )


def test_frozen_weights_have_gradients_of_their_inputs_alone(traced):
    full, lora = traced["full"], traced["lora"]
    adapters = 2 * 64 * ADAPTERS  # forward: 2 FLOPs a number and token
    assert flops(lora, "forward") == flops(full, "forward") + adapters
    head = 2 * 64 * HIDDEN * WORDS
    # inputs' gradients of blocks and head; nothing flows to the first block's inputs but through what has adapters
    inputs = 2 * 64 * LAYERS * BLOCK + head
    missing = (
        2 * 64 * 3 * HIDDEN**2 + 2 * 64 * 3 * RANK * HIDDEN
    )  # queries', keys' and values' of the first block
    assert flops(lora, "backward") == pytest.approx(inputs + 2 * adapters - missing, rel=1e-9)
    assert flops(full, "backward") == pytest.approx(2 * flops(full, "forward"), rel=1e-9)


def half_share(config, how, autocast=False):
    """The share of products' FLOPs in 16 bits, and bytes that element-wise operators and casts move for a sample."""
    o = (
        trace(config, ("half",), Variant("adamw", 64, adaptation=how, autocast=autocast))
        .forms["half"]
        .operators
    )
    products = np.array(o.kind) == "gemm"
    flops = o.flops[:, 1] * o.count * products
    moving = np.isin(o.kind, ("elementwise", "copy")) & (np.array(o.phase) != "optimizer")
    moved = ((o.read_bytes + o.written_bytes)[:, 1] * o.count)[moving].sum()
    return flops[o.half].sum() / flops.sum(), moved


def test_adapters_multiply_in_fp32_but_under_autocast_or_where_they_are_in_16_bits(config):
    """PEFT casts an adapter's input to the adapter's dtype; autocast casts it back for the product."""
    alone, moved = half_share(config, Adaptation("lora", RANK))
    assert alone < 1.0
    under_autocast, _ = half_share(config, Adaptation("lora", RANK), autocast=True)
    like_the_model, least = half_share(config, Adaptation("lora", RANK, as_the_model=True))
    assert under_autocast == like_the_model == 1.0
    assert least < moved  # no casts


def test_a_model_prepared_for_training_in_4_bits_has_activations_in_fp32(config):
    """peft.prepare_model_for_kbit_training casts what is not quantised to fp32, and with it what flows between the layers."""
    plain, moved = half_share(
        config, Adaptation("lora", RANK, weights="nf4", fp32_weights="none"), autocast=True
    )
    prepared, more = half_share(config, Adaptation("lora", RANK, weights="nf4"), autocast=True)
    assert plain == prepared == 1.0
    assert more > 1.2 * moved


def test_weights_in_4_bits_take_half_a_byte_and_their_scales(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN) + 4 * ADAPTERS
    numbers = LAYERS * BLOCK
    plain, double = (traced[name].forms["half"].memory for name in ("nf4", "double"))
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    assert plain.parameter_bytes - buffers == rest + numbers / 2 + 4 * numbers / 64
    scales = sum(-(-n // 64 // 256) for n in [HIDDEN**2] * 4 + [HIDDEN * WIDE] * 3) * LAYERS
    assert double.parameter_bytes - buffers == rest + numbers / 2 + numbers / 64 + 4 * scales


def test_weights_beside_packed_ones_may_stay_in_fp32_and_so_may_what_blocks_hand_on(traced):
    none, norms, peft = (traced[name].forms["half"] for name in ("nf4", "norms", "peft"))
    of_norms, others = (2 * LAYERS + 1) * HIDDEN, 2 * WORDS * HIDDEN
    assert norms.memory.parameter_bytes - none.memory.parameter_bytes == 2 * of_norms
    assert peft.memory.parameter_bytes - none.memory.parameter_bytes == 2 * (of_norms + others)
    # packed layers give back the format they are given, which is their norm's
    hidden = [form.blocks.input_bytes[1] for form in (none, norms, peft)]
    assert hidden == [2 * 64 * HIDDEN, 4 * 64 * HIDDEN, 4 * 64 * HIDDEN]
    assert traced["peft"].adaptation == "LoRA of rank 8 over nf4, all other weights in fp32"


def test_gptq_has_a_scale_and_a_zero_for_128_numbers_and_each_rows_group(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN) + 4 * ADAPTERS
    numbers, rows = LAYERS * BLOCK, LAYERS * (6 * HIDDEN + WIDE)
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    held = traced["gptq"].forms["half"].memory.parameter_bytes - buffers
    assert held == rest + numbers / 2 + numbers / 128 * (2 + 0.5) + 4 * rows
    assert traced["gptq"].parameters == traced["lora"].parameters


def test_modules_trained_whole_are_a_copy_beside_the_frozen_one(traced):
    lora, whole = traced["lora"], traced["whole"]
    copies = 2 * WORDS * HIDDEN
    assert whole.trainable_parameters == ADAPTERS + copies
    more = whole.forms["half"].memory.parameter_bytes - lora.forms["half"].memory.parameter_bytes
    assert more == 2 * copies
    assert whole.forms["half"].memory.optimizer_bytes == 2 * (4 * ADAPTERS + 2 * copies)
    assert whole.adaptation == "LoRA of rank 8, embed_tokens and lm_head trained whole"


def test_results_come_back_in_fp32_from_under_autocast(traced):
    for name, copies in (("nf4", 1), ("lora", 0)):
        o = traced[name].forms["half"].operators
        casts = [
            int(o.count[i])
            for i, function in enumerate(o.function)
            if function == "_to_copy"
            and o.phase[i] == "forward"
            and o.written_bytes[i, 1] == 4 * 64 * WORDS
        ]
        assert sum(casts) == 1 + copies  # the loss takes one


def test_autocast_has_the_same_weights_as_16_bits(config):
    how = Adaptation("lora", RANK, weights="nf4", fp32_weights="norms")
    workload = trace(config, ("half", "amp", "fp32"), Variant("adamw", 64, adaptation=how))
    half, amp, fp32 = (workload.forms[name].memory for name in ("half", "amp", "fp32"))
    assert half.parameter_bytes == amp.parameter_bytes < fp32.parameter_bytes
    assert (half.peaks == amp.peaks).all()


def test_every_product_of_a_quantised_weight_makes_it_first(traced):
    o = traced["nf4"].forms["half"].operators
    made = {
        phase: sum(
            int(o.count[i])
            for i, name in enumerate(o.function)
            if name == "dequantize_4bit" and o.phase[i] == phase
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
    assert traced["dora"].trainable_parameters == ADAPTERS + LAYERS * (
        4 * HIDDEN + 2 * WIDE + HIDDEN
    )
    assert flops(traced["dora"], "forward") >= flops(traced["lora"], "forward")
    assert forecast(traced["dora"]).step.forward_ms > forecast(traced["lora"]).step.forward_ms


def test_sharding_gathers_what_is_kept_and_exchanges_what_is_trained(traced):
    full, lora, nf4 = (
        forecast(traced[name], zero_stage=3, accumulation=2) for name in ("full", "lora", "nf4")
    )
    assert nf4.memory.parameters_gib < 0.6 * lora.memory.parameters_gib
    assert lora.memory.optimizer_states_gib < 0.3 * full.memory.optimizer_states_gib
    assert lora.memory.gradients_gib < full.memory.gradients_gib
    # no fp32 copy of frozen weights
    assert forecast(traced["lora"], zero_stage=1).memory.optimizer_states_gib == pytest.approx(
        8 * ADAPTERS / 8 / 2**30, rel=0.01
    )


def test_what_the_model_does_not_have_is_refused_by_name(config):
    with pytest.raises(UnknownName, match=r"qproj.*q_proj"):
        trace(
            config, ("half",), Variant("adamw", 64, adaptation=Adaptation("lora", targets="qproj"))
        )
    with pytest.raises(UnknownName, match=r"head.*lm_head"):
        trace(
            config, ("half",), Variant("adamw", 64, adaptation=Adaptation("lora", whole="lmhead"))
        )
    packed = Adaptation("lora", weights="nf4", whole="q_proj")
    with pytest.raises(TrainpaceError, match="q_proj"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=packed))
    with pytest.raises(TrainpaceError, match="frozen"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=Adaptation(weights="nf4")))
    with pytest.raises(TrainpaceError, match="DoRA"):
        trace(config, ("half",), Variant("adamw", 64, adaptation=Adaptation("dora", weights="nf4")))
