"""Today's architectures in full size on the meta device: traced or refused, and their FLOPs beside an independent count.

The count looks at the functions that a model calls (linear, matmul, convolutions, attention, grouped products) and takes their
FLOPs from the shapes that go in and come out; the trace looks at ATen calls below autograd. Both are of a forward pass on two
samples, and take a causal mask for half of all scores. Scores inside of windows and chunks are counted in the masks that
transformers makes of true values. A whole step with its backward passes is held against torch.utils.flop_counter. Run it with
`python -m benchmarks architectures`; each architecture runs in a process of its own.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from architecture_list import LONG, TOKENS, Architecture, architectures
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Form, Variant, Workload, at_batch
from trainpace.workload.cuda_mapping import answered, taken_for_finite
from trainpace.workload.specs import build_task
from trainpace.workload.task import Task
from trainpace.workload.trace import meta_batch, trace

RESULT = Path(__file__).parent / "results" / "architectures.md"
SAMPLES = 2
WITHIN = 0.01
_CONVOLUTIONS = {name: getattr(torch, name) for name in ("conv1d", "conv2d", "conv3d")}
_TRANSPOSED = {
    name: getattr(torch, name)
    for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
}


class FunctionFlops(TorchFunctionMode):
    """Adds up the FLOPs of the products that functions make, from their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("_grouped_mm", "grouped_mm"):  # torch runs it without values in bf16 alone
            a, b = args[:2]
            self.flops += 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]
            return a.new_empty(a.shape[-2], b.shape[-1])
        out = (taken_for_finite(func, args) or func)(*args, **kwargs)
        formula = FORMULAS.get(name)
        if formula is not None:
            self.flops += 2.0 * formula(out, args, kwargs)
        return out


def _given(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs[name]


def _attention(out: Any, args: Any, kwargs: Any) -> float:
    q, k, v = (_given(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    return float(prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])) * (
        0.5 if causal else 1.0
    )


def _einsum(out: Any, args: Any, kwargs: Any) -> float:
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if len(operands) < 2:
        return 0.0
    sizes: dict[str, int] = {}
    for letters, operand in zip(
        args[0].replace(" ", "").partition("->")[0].split(","), operands, strict=True
    ):
        sizes |= dict(zip(letters, operand.shape, strict=True)) if "." not in letters else {}
    return float(prod(sizes.values()))


def _convolution(out: Any, args: Any, kwargs: Any) -> float:
    return float(out.numel() * prod(_given(args, kwargs, 1, "weight").shape[1:]))


def _recurrent(out: Any, args: Any, kwargs: Any) -> float:
    """All time steps' products with the weights of inputs and of the hidden state."""
    x, weights = args[0], args[2]
    return float(
        x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)
    )


FORMULAS: dict[str, Callable[[Any, Any, Any], float]] = {
    "linear": lambda out, args, _: out.numel() * args[0].shape[-1],
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(
        ("matmul", "__matmul__", "bmm", "mm"), lambda out, args, _: out.numel() * args[0].shape[-1]
    ),
    "addmm": lambda out, args, kwargs: out.numel() * _given(args, kwargs, 1, "mat1").shape[-1],
    "baddbmm": lambda out, args, kwargs: out.numel() * _given(args, kwargs, 1, "batch1").shape[-1],
    **dict.fromkeys(("lstm", "gru", "rnn_tanh"), _recurrent),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_TRANSPOSED, lambda out, args, _: args[0].numel() * prod(args[1].shape[1:])),
}
"""By the name of a function: multiplications from its result and arguments."""


def counted(spec: str, length: int | None) -> float:
    """FLOPs of a forward pass by the functions that are called; of a whole step by torch's counter."""
    if spec.rpartition(":")[0].endswith(".py"):
        task = build_task(spec)
    else:
        with torch.device("meta"):
            task = build_task(spec, length)
    batch = meta_batch(task, SAMPLES, "fp32")
    with torch.device("meta"), answered(False, task.pads):
        if task.step is not None:
            return _whole_step(task)
        with FunctionFlops() as mode, torch.no_grad():
            task.loss(task.model.train().to("meta"), batch)
    return mode.flops + windowed(spec, length)


def _whole_step(task: Task) -> float:
    assert task.step is not None
    task.model.cpu()
    with torch.device("cpu"), FlopCounterMode(display=False) as mode:
        task.step.run(task.make_batch(SAMPLES))
    return float(mode.get_total_flops())


def windowed(spec: str, length: int | None) -> float:
    """FLOPs of attention whose masks leave out more than later keys, where its kernels skip them: by the masks' true values."""
    if not spec.startswith("transformers:"):
        return 0.0
    values = json.loads(Path(spec.partition(":")[2]).read_text())
    if values.get("attn_implementation", "sdpa") == "sdpa":
        return 0.0
    import transformers
    from transformers import masking_utils

    own = ("attn_implementation", "experts_implementation")
    config = transformers.AutoConfig.for_model(**{k: v for k, v in values.items() if k not in own})
    config._attn_implementation = "sdpa"
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    two_sided = values["model_type"] == "modernbert"
    makers: dict[str, Any] = {
        "chunked_attention": masking_utils.create_chunked_causal_mask,
        "sliding_attention": masking_utils.create_bidirectional_sliding_window_mask
        if two_sided
        else masking_utils.create_sliding_window_causal_mask,
    }
    embeddings = torch.empty(1, length or TOKENS, 1)
    more: dict[str, Any] = {} if two_sided else {"past_key_values": None}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = 0.0
    for kind in set(kinds) & makers.keys():
        mask = makers[kind](config=config, inputs_embeds=embeddings, attention_mask=None, **more)
        if mask is not None:
            scores = float(mask.sum(dtype=torch.int64))
            total += 4.0 * SAMPLES * kinds.count(kind) * config.num_attention_heads * size * scores
    return total


def traced_flops(workload: Workload, form: Form = "half") -> float:
    """The same of a trace."""
    operators = workload.forms[form].operators
    wanted = operators.is_matrix
    if not workload.whole_step:
        wanted &= [phase == "forward" for phase in operators.phase]
    return float((at_batch(operators.flops, SAMPLES) * operators.count)[wanted].sum())


def difference(architecture: Architecture, form: Form = "half") -> tuple[Workload, float, float]:
    """(workload, FLOPs traced, FLOPs counted). Raises TrainpaceError where the trace refuses."""
    workload = trace(architecture.spec, (form,), Variant(sequence_length=architecture.tokens))
    return workload, traced_flops(workload, form), counted(architecture.spec, architecture.tokens)


def row_of(architecture: Architecture) -> str:
    name = architecture.name
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    try:
        workload = trace(architecture.spec, ("half",), Variant(sequence_length=architecture.tokens))
    except TrainpaceError as error:
        return f"| {name} | | | | | | | refused: {' '.join(str(error).split())} |"
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ours, theirs = traced_flops(workload), counted(architecture.spec, architecture.tokens)
    figures = (
        f"{workload.parameters / 1e9:.4g}",
        f"{ours / 1e12:.5g}",
        f"{theirs / 1e12:.5g}",
        f"{100 * (ours / theirs - 1):+.2f} %",
        f"{seconds:.1f}",
        f"{memory:.0f} ({memory - before:.0f})",
        " ".join(workload.notes),
    )
    return f"| {name} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names, of all if none is given")
    parser.add_argument("--tiny", action="store_true", help="the tiny ones that the tests trace")
    parser.add_argument("--one", help="one name, in this process")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        every = list(architectures(Path(folder), options.tiny))
        if options.one:
            print(row_of(next(one for one in every if one.name == options.one)))
            return
        for name in [one.name for one in every]:
            if options.only and not any(word in name for word in options.only):
                continue
            command = [sys.executable, __file__, "--one", name, *["--tiny"] * options.tiny]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = f"| {name} | | | | | | | failed: {(done.stderr.strip().splitlines() or ['nothing said'])[-1][:300]} |"
            rows.append(done.stdout.strip().splitlines()[-1] if done.returncode == 0 else failed)
            print(rows[-1], flush=True)
    if not options.only and not options.tiny:
        RESULT.write_text(page(rows))


def page(rows: list[str]) -> str:
    head = (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}. A forward pass of"
        f" {SAMPLES} samples in 16 bits, of {TOKENS} tokens where they are text, of {LONG:,} where the attention is named."
        " Seconds are of the trace of a whole training step. MiB are the most that its process took, and in brackets the part"
        " beyond what it took before."
    )
    table = (
        "| model | parameters, billions | TFLOPs traced | TFLOPs counted | difference | seconds | MiB | notes |\n"
        "|---|--:|--:|--:|--:|--:|--:|---|\n"
    )
    return (
        f"# Architectures traced (`python -m benchmarks architectures`)\n\n{head}\n\n{table}"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
