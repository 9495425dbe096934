"""Today's architectures in full size on the meta device: traced or refused, and their FLOPs beside an independent count.

The count looks at the functions that a model calls (linear, matmul, convolutions, attention, grouped products) and takes their
FLOPs from the shapes that go in and come out; the trace looks at ATen calls below autograd. Both are of a forward pass on two
samples; a causal mask halves nothing here. Run it with `make bench-architectures`.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainpace.errors import TrainpaceError
from trainpace.trace.cuda_mapping import python_functions_see_through, unpacked_sequences
from trainpace.trace.specs import build_task
from trainpace.trace.trace import trace
from trainpace.workload import ATTENTION, Variant, Workload, at_batch

RESULT = Path(__file__).parent / "results" / "architectures.md"
SAMPLES, TOKENS = 2, 512
WITHIN = 0.01

LANGUAGE = {
    "llama": "LlamaForCausalLM", "llama4_text": "Llama4ForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "mamba2": "Mamba2ForCausalLM",
    "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM", "falcon": "FalconForCausalLM", "bloom": "BloomForCausalLM", "opt": "OPTForCausalLM",
    "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "modernbert": "ModernBertForMaskedLM",
    "t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration", "whisper": "WhisperForConditionalGeneration",
    "clip": "CLIPModel", "sam": "SamModel", "rt_detr": "RTDetrForObjectDetection",
}  # fmt: skip
"""Types of transformers' configurations, each with the sizes of its class's own defaults, and the class that is trained."""
OTHERS = (
    "timm:vit_large_patch16_224", "timm:convnext_base", "timm:swin_base_patch4_window7_224", "timm:efficientnetv2_m",
    "timm:maxvit_base_tf_224", "timm:mixer_b16_224", "torchvision:resnet50", "random:rnn:3",
    "examples/tasks/graphs_sequences_tables.py:graph_sage", "examples/tasks/graphs_sequences_tables.py:dlrm",
)  # fmt: skip
_CONVOLUTIONS = {name: getattr(torch, name) for name in ("conv1d", "conv2d", "conv3d")}
_TRANSPOSED = {name: getattr(torch, name) for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")}


class FunctionFlops(TorchFunctionMode):
    """Adds up the FLOPs of the products that functions make, from their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "__name__", ""))
        if formula is not None:
            self.flops += 2.0 * formula(out, args, kwargs or {})
        return out


def _attention(out: Any, args: Any, kwargs: Any) -> float:
    q, k, v = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key", "value")))
    return float(prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _einsum(out: Any, args: Any, kwargs: Any) -> float:
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if len(operands) < 2:
        return 0.0
    sizes: dict[str, int] = {}
    for letters, operand in zip(args[0].replace(" ", "").partition("->")[0].split(","), operands, strict=True):
        sizes |= dict(zip(letters, operand.shape, strict=True)) if "." not in letters else {}
    return float(prod(sizes.values()))


def _convolution(out: Any, args: Any, kwargs: Any) -> float:
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    return float(out.numel() * prod(weight.shape[1:]))


FORMULAS: dict[str, Callable[[Any, Any, Any], float]] = {
    "linear": lambda out, args, _: out.numel() * args[0].shape[-1],
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), lambda out, args, _: out.numel() * args[0].shape[-1]),
    **dict.fromkeys(("addmm", "baddbmm"), lambda out, args, _: out.numel() * args[1].shape[-1]),
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), lambda out, args, _: out.numel() * args[0].shape[-1]),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_TRANSPOSED, lambda out, args, _: args[0].numel() * prod(args[1].shape[1:])),
}
"""By the name of a function: multiplications from its result and arguments."""


def counted(spec: str, length: int | None) -> float:
    """FLOPs of a forward pass by the functions that are called."""
    with torch.device("meta"), python_functions_see_through(), unpacked_sequences():
        task = build_task(spec, length)
        batch = task.make_batch(SAMPLES)
        with FunctionFlops() as mode, torch.no_grad():
            task.loss(task.model.train().to("meta"), batch)
    return mode.flops


def traced_flops(workload: Workload) -> float:
    """The same of a trace, without halving what a causal mask leaves out."""
    operators = workload.forms["half"].operators
    forward = (operators.is_matrix) & ([phase == "forward" for phase in operators.phase])
    causal = [kind.startswith("attention") for kind in operators.kind] & (operators.dims[:, ATTENTION.causal, 0] > 0)
    flops = at_batch(operators.flops, SAMPLES) * operators.count * (1.0 + causal)
    return float(flops[forward].sum())


def specs(folder: Path) -> Iterator[tuple[str, str, int | None]]:
    """(name, spec, tokens) of every architecture."""
    for kind, architecture in LANGUAGE.items():
        path = folder / f"{kind}.json"
        path.write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
        yield kind, f"transformers:{path}", TOKENS if kind != "whisper" else 448
    for spec in OTHERS:
        yield spec, spec, None


def row_of(name: str, spec: str, length: int | None) -> str:
    start = time.perf_counter()
    try:
        workload = trace(spec, ("half",), Variant(sequence_length=length))
    except TrainpaceError as error:
        return f"| {name} | | | | refused: {str(error).splitlines()[0][:160]} |"
    seconds = time.perf_counter() - start
    ours = traced_flops(workload)
    try:
        theirs = counted(spec, length)
        difference = f"{100 * (ours / theirs - 1):+.2f} %" if theirs else "none counted"
    except Exception as error:
        difference = f"not counted: {type(error).__name__}"
    notes = " ".join(workload.notes)
    return f"| {name} | {workload.parameters / 1e9:.3g} | {ours / 1e12:.4g} | {difference} | {seconds:.1f} s. {notes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names, of all if none is given")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, spec, length in specs(Path(folder)):
            if not options.only or any(word in name for word in options.only):
                rows.append(row_of(name, spec, length))
                print(rows[-1], flush=True)
    if not options.only:
        head = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {SAMPLES} samples of {TOKENS} tokens."
        table = (
            "| model | parameters, billions | forward TFLOPs | against the count | traced in |\n|---|--:|--:|--:|---|\n"
        )
        RESULT.write_text(
            f"# Architectures traced (`make bench-architectures`)\n\n{head}\n\n{table}" + "\n".join(rows) + "\n"
        )


if __name__ == "__main__":
    main()
