"""Train many models for some steps on this machine's GPU: step time, memory, the host's share, and
every kernel of a step.

Run where a GPU is: python -m fitting.gpu_steps FOLDER [--seconds 540] [--set NAME]. FOLDER gets
steps.jsonl, a line a configuration, and kernels.parquet, a row for each distinct kernel of a
profiled step, with the ATen call that launched it.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainpace.core.execution import Precision
from trainpace.measure import place_batch, set_up_device
from trainpace.workload import build_task, make_optimizer

WARM_UP = 3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FEWEST, MOST = 6, 60


_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
_BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522}
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 2048}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3b": _LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-400m": _LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "qwen3-600m": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 8192,
    },
    "bert-base": _BERT,
    "roberta-large": _BERT
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 50265,
        "max_position_embeddings": 1024,
    },
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM"],
        "max_position_embeddings": 1024,
    },
    "t5-base": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 768,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "decoder_start_token_id": 0,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "ffn_dim": 8192,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
    },
    "mpt-350m": {
        "model_type": "mpt",
        "architectures": ["MptForCausalLM"],
        "d_model": 1024,
        "n_heads": 16,
        "n_layers": 24,
        "max_seq_len": 2048,
    },
}
"""Sizes of well-known models, as transformers' configurations; the weights are random."""


class Case(NamedTuple):
    """One configuration. `precision` is trainpace's word; `image` and `length` None are the model's own."""

    model: str
    batch: int
    precision: Precision = "amp_bf16"
    channels_last: bool = False
    compile: bool = False
    optimizer: str = "adamw"
    length: int | None = None
    image: int | None = None
    checkpoint: bool = False
    seconds: float = 0.7
    profiled: bool = True


def measure(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Time the case's steps; its profiled kernels are added to `rows`."""
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    built = time.perf_counter()
    task = _task(case)
    set_up_device("cuda", case.precision)
    memory_format = torch.channels_last if case.channels_last else torch.preserve_format
    model: Any = task.model.to(
        "cuda", _DTYPES.get(case.precision), memory_format=memory_format
    ).train()
    if case.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = make_optimizer(case.optimizer, model)
    forward = torch.compile(model) if case.compile else model
    with torch.device("cuda"):
        batches = [
            place_batch(task.make_batch(case.batch), "cuda", case.precision, case.channels_last)
            for _ in range(2)
        ]
    scaler = torch.amp.GradScaler("cuda") if case.precision == "amp_fp16" else None
    count = 0
    events: list[list[Any]] = []
    host_ms: list[float] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events[-1].append(event)

    def step() -> None:
        nonlocal count
        events.append([])
        started = time.perf_counter()
        mark()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            "cuda",
            _DTYPES.get(case.precision[4:], torch.bfloat16),
            case.precision.startswith("amp_"),
        ):
            loss = task.loss(forward, batches[count % 2])
        mark()
        (loss if scaler is None else scaler.scale(loss)).backward()
        mark()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        mark()
        host_ms.append(1e3 * (time.perf_counter() - started))
        count += 1

    warm_started = time.perf_counter()
    for _ in range(WARM_UP):
        step()
        torch.cuda.synchronize()
    warm_s = time.perf_counter() - warm_started
    alone_ms = host_ms[-1]
    events.clear()
    host_ms.clear()
    end = time.perf_counter() + case.seconds
    while count - WARM_UP < FEWEST or (time.perf_counter() < end and count < MOST):
        step()
        if count % 10 == 0:
            torch.cuda.synchronize()
    clock_mhz, power_w = _clock_and_power()
    torch.cuda.synchronize()
    parts = [[a.elapsed_time(b) for a, b in itertools.pairwise(e)] for e in events]
    totals = sorted(e[0].elapsed_time(e[-1]) for e in events)
    answer = case._asdict() | {
        "median_ms": statistics.median(totals),
        "p10_ms": totals[len(totals) // 10],
        "p90_ms": totals[(9 * len(totals)) // 10],
        "forward_ms": statistics.median(p[0] for p in parts),
        "backward_ms": statistics.median(p[1] for p in parts),
        "optimizer_ms": statistics.median(p[2] for p in parts),
        "host_ms": statistics.median(host_ms),
        "host_alone_ms": alone_ms,
        "steps": len(totals),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "clock_mhz": clock_mhz,
        "power_w": power_w,
        "warm_s": warm_s,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if case.profiled:
        answer |= profile(step, case, rows)
    return answer | {"whole_s": time.perf_counter() - built}


def _clock_and_power() -> tuple[float | None, float | None]:
    """(MHz, W) at this moment; None where NVML does not answer."""
    try:
        return torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
    except (RuntimeError, ImportError):
        return None, None


def _task(case: Case) -> Any:
    """The task, made on the GPU."""
    kind, _, name = case.model.partition(":")
    with torch.device("cuda"), tempfile.TemporaryDirectory() as folder:
        if kind != "transformers":
            return build_task(case.model, case.length, case.image)
        path = Path(folder, f"{name}.json")
        path.write_text(json.dumps(CONFIGURATIONS[name]))
        return build_task(f"transformers:{path}", case.length, case.image)


def profile(step: Any, case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Profile one step:

    kernels by the ATen call that launched them, the GPU's busy time and the span from first to
    last.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as start

    torch.cuda.synchronize()
    with start(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as made:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        made.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return _kernels(events, case, rows)


def _kernels(
    events: list[dict[str, Any]], case: Case, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    launched_by: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            launched_by[event["args"].get("External id")] = event
    groups: dict[tuple[Any, ...], list[float]] = collections.defaultdict(list)
    spans = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        call = launched_by.get(event["args"].get("External id"), {})
        told = call.get("args", {})
        key = (
            call.get("name", ""),
            json.dumps(told.get("Input Dims", [])),
            json.dumps(told.get("Input type", [])),
            json.dumps(told.get("Input Strides", [])),
            json.dumps(told.get("Concrete Inputs", [])),
            event["name"][:160],
        )
        groups[key].append(event["dur"])
        spans.append((event["ts"], event["ts"] + event["dur"]))
    names = ("call", "dims", "types", "strides", "concrete", "kernel")
    case_json = json.dumps(case._asdict())
    for key, durations in groups.items():
        rows.append(
            {
                "case": case_json,
                **dict(zip(names, key, strict=True)),
                "count": len(durations),
                "mean_us": statistics.fmean(durations),
                "median_us": statistics.median(durations),
            }
        )
    spans.sort()
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "kernels": len(spans),
        "busy_ms": busy / 1e3,
        "kernel_ms": sum(b - a for a, b in spans) / 1e3,
        "span_ms": (reached - spans[0][0]) / 1e3 if spans else 0.0,
    }


def _images(names: str, batches: tuple[int, ...], **options: Any) -> Iterator[Case]:
    for name in names.split():
        for batch in batches:
            yield Case(name, batch, **options)


def _texts(names: str, batches: tuple[int, ...], length: int, **options: Any) -> Iterator[Case]:
    for name in names.split():
        for batch in batches:
            yield Case(f"transformers:{name}", batch, length=length, **options)


def wide() -> Iterator[Case]:
    """Many models under the usual settings, one batch size that fills the card and one that does
    not.
    """
    yield from _images("resnet50 timm:vit_base_patch16_224", (64,), optimizer="sgd_momentum")
    yield from _texts("gpt2 llama-1b", (8,), 1024)
    zoo = """resnet50 resnet18 vgg16 mobilenet_v2 torchvision:densenet121 torchvision:efficientnet_b0 timm:convnext_tiny
    timm:vit_base_patch16_224 timm:swin_tiny_patch4_window7_224 timm:regnety_032 timm:mixer_b16_224 timm:deit_small_patch16_224
    torchvision:inception_v3 timm:efficientnet_b3 torchvision:resnet152 timm:vit_large_patch16_224 torchvision:shufflenet_v2_x1_0
    timm:nfnet_f0 timm:resnext50_32x4d timm:mobilenetv3_large_100 timm:maxvit_tiny_tf_224 timm:convnextv2_base"""
    texts = "gpt2 gpt2-medium bert-base llama-1b qwen3-600m t5-base opt-1.3b roberta-large distilbert mpt-350m gemma3-1b"
    yield from _images(zoo, (64,), channels_last=True)
    yield from _texts(texts, (8,), 512)
    yield from _images(zoo, (64,), precision="fp32", optimizer="sgd_momentum")
    yield from _texts(texts, (16,), 1024)
    yield from _images(zoo, (256,), channels_last=True)
    yield from _images(zoo, (32,), precision="tf32")
    yield from _texts(texts, (2,), 512)
    yield from _texts("llama-1b qwen3-600m gpt2 gpt2-medium", (4,), 2048, precision="bf16")
    yield from _texts("llama-1b qwen3-600m gpt2 llama-3b", (1,), 4096, precision="bf16")
    yield from _texts("bert-base gpt2 roberta-large", (32,), 128, precision="amp_fp16")
    yield from _texts(
        "llama-1b llama-3b gpt2-medium", (8,), 2048, precision="bf16", checkpoint=True
    )
    yield from _images(zoo, (8,))
    yield from _texts(texts, (8,), 512, precision="fp32")
    yield from _images(zoo, (128,), precision="amp_fp16", optimizer="sgd_momentum")


def compiled() -> Iterator[Case]:
    """torch.compile beside eager, models that people compile."""
    yield from _texts("gpt2 llama-1b", (8,), 1024, compile=True)
    yield from _images(
        "resnet50 timm:vit_base_patch16_224", (64,), compile=True, channels_last=True
    )
    yield from _texts("bert-base", (8,), 512, compile=True)
    yield from _images("timm:convnext_tiny mobilenet_v2", (64,), compile=True, channels_last=True)
    yield from _texts("gpt2 llama-1b", (2,), 512, compile=True)


def sweep() -> Iterator[Case]:
    """The Calculator's own experiment:

    five networks over batch sizes 1 to 70, in fp32 with TF32 as torch sets it.
    """
    for name in "vgg16 resnet50 mobilenet_v2 timm:mobilenetv1_100".split():
        yield from (
            Case(
                name,
                batch,
                precision="fp32",
                optimizer="sgd_momentum",
                seconds=0.25,
                profiled=False,
            )
            for batch in range(1, 71)
        )


SETS = {"wide": wide, "compiled": compiled, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--set", default="wide", choices=SETS)
    parser.add_argument("--skip", type=int, default=0, help="cases of the set that are done")
    options = parser.parse_args()
    import pandas as pd

    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.seconds
    rows: list[dict[str, Any]] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    with Path(options.folder, f"{options.set}.jsonl").open("a") as out:
        for number, case in enumerate(SETS[options.set]()):
            if number < options.skip:
                continue
            if time.perf_counter() > end:
                print(f"stopped before case {number}")
                break
            try:
                answer = measure(case, rows)
                times = f"{answer['median_ms']:9.2f} ms, busy {answer.get('busy_ms', 0):9.2f}"
                print(f"{number} {times}, {answer['whole_s']:5.1f} s {case}", flush=True)
            except (
                Exception
            ) as error:  # a model that this torch, library or card cannot train is an answer too
                answer = case._asdict() | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                print(f"{number} {answer['error'][:150]} {case}")
                torch._dynamo.reset()
            out.write(json.dumps(answer | about) + "\n")
            out.flush()
    pd.DataFrame(rows).to_parquet(
        options.folder / f"{options.set}-kernels.parquet", compression="zstd"
    )


if __name__ == "__main__":
    main()
