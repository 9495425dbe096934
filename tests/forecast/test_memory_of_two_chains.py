"""Peaks of models with two chains of blocks, beside the CPU allocator's count of the real module."""

import json

import pytest
from torch.profiler import ProfilerActivity, profile

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast import Forecaster, Target
from trainpace.workload import Variant
from trainpace.workload.specs import build_task
from trainpace.workload.task import recompute_activations
from trainpace.workload.trace import trace

BATCH, LENGTH = 4, 128
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 512,
    "num_heads": 4,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "vocab_size": 512,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
}
BART = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "d_model": 128,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": 512,
    "dropout": 0.0,
}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 64,
    "encoder_layers": 8,
    "decoder_layers": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "dropout": 0.0,
}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 6,
    "num_single_layers": 12,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 128,
    "axes_dims_rope": [4, 14, 14],
}
MODELS = {"T5": T5, "BART": BART, "Whisper": WHISPER, "Flux": FLUX}


def allocated_gib(spec, length):
    """Peak of the CPU allocator over a forward and a backward pass, parameters included."""
    task = build_task(spec, length, None, True)
    model = task.model.train()
    recompute_activations(model)
    batch = task.make_batch(BATCH)
    held = sum(p.numel() * p.element_size() for p in [*model.parameters(), *model.buffers()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task.loss(model, batch).backward()
    alive = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return (held + peak) / BYTES_PER_GIB


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_peak_with_checkpointing_matches_allocator(name, tmp_path):
    kind = "diffusers" if name == "Flux" else "transformers"
    pytest.importorskip(kind)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS[name]))
    spec, length = f"{kind}:{file}", LENGTH if name in ("T5", "BART") else None
    variant = Variant(sequence_length=length, mode="forward_backward", cpu=True)
    workload = trace(spec, ("fp32",), variant)
    target = Target(Cluster(device=find_device("A100")))
    execution = Execution(micro_batch=BATCH, activation_checkpointing="full")
    forecast = Forecaster(workload, target).memory(execution)
    measured = allocated_gib(spec, length)
    print(name, measured, forecast.allocated_gib)
    assert forecast.allocated_gib == pytest.approx(measured, rel=0.05)
