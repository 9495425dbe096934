"""A small handmade public journal with known contents."""

from trainpace.forecast import PublicRun


def public(model="resnet50", device="T4", ms=100.0, forecast_ms=110.0, **fields):
    """A run whose forecast interval is 20 % to either side."""
    ends = (None, None) if forecast_ms is None else (0.8 * forecast_ms, 1.2 * forecast_ms)
    usual = {
        "id": "0a1b2c3d4e",
        "model": model,
        "model_kind": "convolutions",
        "device": device,
        "gpus": 1,
        "nodes": 1,
        "mode": "train",
        "micro_batch": 8,
        "accumulation": 1,
        "sequence_length": None,
        "image_size": 224,
        "precision": "fp32",
        "compile": "eager",
        "optimizer": "sgd_momentum",
        "parallelism": None,
        "software": "torch 2.1",
        "step_time_ms": ms,
        "peak_memory_gib": 3.0,
        "source": "Some Bench: training",
        "url": "https://example.org/bench",
        "licence": "MIT",
        "date": "2024-05",
        "trust": "A",
        "notes": "",
        "forecast_ms": forecast_ms,
        "low_ms": ends[0],
        "high_ms": ends[1],
        "in_fit": False,
        "why_no_forecast": "" if forecast_ms else "nobody traced it.",
        "global_batch": 8,
    }
    return PublicRun(**{**usual, **fields})


RUNS = (
    public(),
    public(id="1111111111", ms=200.0, forecast_ms=150.0, micro_batch=16, in_fit=True),
    public(id="1122222222", device="RTX 3090", ms=50.0, forecast_ms=52.0, precision="amp_fp16"),
    public(
        "GPT-2 124M",
        id="3333333333",
        device="A100 SXM 80GB",
        model_kind="transformers",
        ms=1000.0,
        forecast_ms=None,
        gpus=8,
        precision="bf16",
        optimizer="adamw",
        sequence_length=1024,
        image_size=None,
        source="Other Lab: table 3",
        parallelism="dp=8,fsdp=8",
        global_batch=64,
    ),
    public(id="4444444444", mode="inference", ms=30.0, forecast_ms=33.0, optimizer=None),
)
