"""Adapters and quantized weights: traces compared with the modules of peft and bitsandbytes."""

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
        "int8": Adaptation("lora", RANK, weights="int8", fp32_weights="none"),
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


def test_only_adapter_parameters_are_trained(traced):
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


def test_frozen_weights_have_only_input_gradients(traced):
    full, lora = traced["full"], traced["lora"]
    adapters = 2 * 64 * ADAPTERS  # forward: 2 FLOPs a number and token
    assert flops(lora, "forward") == flops(full, "forward") + adapters
    head = 2 * 64 * HIDDEN * WORDS
    # Input gradients of blocks and head. The first block's inputs get gradients only through adapters.
    inputs = 2 * 64 * LAYERS * BLOCK + head
    missing = (
        2 * 64 * 3 * HIDDEN**2 + 2 * 64 * 3 * RANK * HIDDEN
    )  # queries', keys' and values' of the first block
    assert flops(lora, "backward") == pytest.approx(inputs + 2 * adapters - missing, rel=1e-9)
    assert flops(full, "backward") == pytest.approx(2 * flops(full, "forward"), rel=1e-9)


def half_share(config, how, autocast=False):
    """Return the share of matmul FLOPs in 16 bits, and the bytes per sample of element-wise operators and casts."""
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


def test_adapter_matmuls_run_in_fp32_without_autocast(config):
    """PEFT casts an adapter's input to the adapter's dtype; autocast casts it back for the matmul."""
    alone, moved = half_share(config, Adaptation("lora", RANK))
    assert alone < 1.0
    under_autocast, _ = half_share(config, Adaptation("lora", RANK), autocast=True)
    like_the_model, least = half_share(config, Adaptation("lora", RANK, as_the_model=True))
    assert under_autocast == like_the_model == 1.0
    assert least < moved  # no casts


def test_kbit_preparation_keeps_activations_in_fp32(config):
    """peft.prepare_model_for_kbit_training casts unquantized weights to fp32, and thereby the activations between layers."""
    plain, moved = half_share(
        config, Adaptation("lora", RANK, weights="nf4", fp32_weights="none"), autocast=True
    )
    prepared, more = half_share(config, Adaptation("lora", RANK, weights="nf4"), autocast=True)
    assert plain == prepared == 1.0
    assert more > 1.2 * moved


def test_4_bit_weights_take_half_a_byte_plus_scales(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN) + 4 * ADAPTERS
    numbers = LAYERS * BLOCK
    plain, double = (traced[name].forms["half"].memory for name in ("nf4", "double"))
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    assert plain.parameter_bytes - buffers == rest + numbers / 2 + 4 * numbers / 64
    scales = sum(-(-n // 64 // 256) for n in [HIDDEN**2] * 4 + [HIDDEN * WIDE] * 3) * LAYERS
    assert double.parameter_bytes - buffers == rest + numbers / 2 + numbers / 64 + 4 * scales


def test_8_bit_weights_take_a_byte_and_a_scale_per_row(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN) + 4 * ADAPTERS
    rows = LAYERS * (5 * HIDDEN + 2 * WIDE)
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    held = traced["int8"].forms["half"].memory.parameter_bytes - buffers
    assert held == rest + LAYERS * BLOCK + 4 * rows
    assert traced["int8"].parameters == traced["lora"].parameters
    assert flops(traced["int8"], "backward") == flops(traced["lora"], "backward")
    assert any("8-bit" in note for note in traced["int8"].notes)


def test_unquantized_weights_and_block_outputs_can_stay_fp32(traced):
    none, norms, peft = (traced[name].forms["half"] for name in ("nf4", "norms", "peft"))
    of_norms, others = (2 * LAYERS + 1) * HIDDEN, 2 * WORDS * HIDDEN
    assert norms.memory.parameter_bytes - none.memory.parameter_bytes == 2 * of_norms
    assert peft.memory.parameter_bytes - none.memory.parameter_bytes == 2 * (of_norms + others)
    # Packed layers return the dtype of their input, which is that of the norm.
    hidden = [form.blocks.input_bytes[1] for form in (none, norms, peft)]
    assert hidden == [2 * 64 * HIDDEN, 4 * 64 * HIDDEN, 4 * 64 * HIDDEN]
    assert traced["peft"].adaptation == "LoRA of rank 8 over nf4, all other weights in fp32"


def test_gptq_memory_includes_scales_zeros_and_group_index(traced):
    rest = 2 * (2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN) + 4 * ADAPTERS
    numbers, rows = LAYERS * BLOCK, LAYERS * (6 * HIDDEN + WIDE)
    buffers = traced["full"].forms["half"].memory.parameter_bytes - 2 * traced["full"].parameters
    held = traced["gptq"].forms["half"].memory.parameter_bytes - buffers
    assert held == rest + numbers / 2 + numbers / 128 * (2 + 0.5) + 4 * rows
    assert traced["gptq"].parameters == traced["lora"].parameters


def test_fully_trained_modules_keep_a_frozen_copy(traced):
    lora, whole = traced["lora"], traced["whole"]
    copies = 2 * WORDS * HIDDEN
    assert whole.trainable_parameters == ADAPTERS + copies
    more = whole.forms["half"].memory.parameter_bytes - lora.forms["half"].memory.parameter_bytes
    assert more == 2 * copies
    assert whole.forms["half"].memory.optimizer_bytes == 2 * (4 * ADAPTERS + 2 * copies)
    assert whole.adaptation == "LoRA of rank 8, embed_tokens and lm_head trained whole"


def test_autocast_outputs_are_cast_to_fp32(traced):
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


def test_quantized_autocast_memory_equals_16_bit_memory(config):
    how = Adaptation("lora", RANK, weights="nf4", fp32_weights="norms")
    workload = trace(config, ("half", "amp", "fp32"), Variant("adamw", 64, adaptation=how))
    half, amp, fp32 = (workload.forms[name].memory for name in ("half", "amp", "fp32"))
    assert half.parameter_bytes == amp.parameter_bytes < fp32.parameter_bytes
    assert (half.peaks == amp.peaks).all()


def test_quantized_weights_are_dequantized_before_each_matmul(traced):
    o = traced["nf4"].forms["half"].operators
    made = {
        phase: sum(
            int(o.count[i])
            for i, name in enumerate(o.function)
            if name == "dequantize" and o.phase[i] == phase
        )
        for phase in ("forward", "backward")
    }
    assert made == {
        "forward": 7 * LAYERS,
        "backward": 7 * LAYERS - 3,
    }  # The first block's inputs need no gradients.
    i = o.function.index("dequantize")
    assert o.written_bytes[i, 0] == 2 * o.dims[i, 1, 0]
    for phase in ("forward", "backward"):
        assert flops(traced["nf4"], phase) == flops(traced["lora"], phase)
    assert traced["nf4"].forms["half"].blocks.count == LAYERS
    assert int((o.dims[:, GEMM.batch, 0] > 0).sum()) > 0


def test_dora_adds_weight_norms(traced):
    assert traced["dora"].trainable_parameters == ADAPTERS + LAYERS * (
        4 * HIDDEN + 2 * WIDE + HIDDEN
    )
    assert flops(traced["dora"], "forward") >= flops(traced["lora"], "forward")
    assert forecast(traced["dora"]).step.forward_ms > forecast(traced["lora"]).step.forward_ms


def test_zero_reduces_only_trained_gradients_and_states(traced):
    full, lora, nf4 = (
        forecast(traced[name], zero_stage=3, accumulation=2) for name in ("full", "lora", "nf4")
    )
    assert nf4.memory.parameters_gib < 0.6 * lora.memory.parameters_gib
    assert lora.memory.optimizer_states_gib < 0.3 * full.memory.optimizer_states_gib
    assert lora.memory.gradients_gib < full.memory.gradients_gib
    # There is no fp32 copy of frozen weights.
    assert forecast(traced["lora"], zero_stage=1).memory.optimizer_states_gib == pytest.approx(
        8 * ADAPTERS / 8 / 2**30, rel=0.01
    )


def test_unknown_adapter_targets_are_rejected_by_name(config):
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
