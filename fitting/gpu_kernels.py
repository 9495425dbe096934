"""Time single kernels on this machine's GPU: products, attention, convolutions, norms and what
stands between them.

Run where a GPU is: python -m fitting.gpu_kernels OUT.parquet [--seconds 240]. Each row is one call
by its median over a few batches of back-to-back launches between two CUDA events, on random data,
after a warm-up. The figures are of short bursts: a card that is limited by its power runs slower in
a long training, which `sustained` rows show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

BURST_MS = 3.0
BURSTS = 3
LAUNCH_BOUND_US = 150.0
CALLS_A_GRAPH = 20
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
Case = tuple[str, str, dict[str, Any], Callable[[], Callable[[], Any]]]
"""Operator, number format, sizes, and what makes its inputs and returns the call to time."""


def time_call(call: Callable[[], Any], graphs: bool = True) -> tuple[float, float]:
    """(microseconds of one call, spread of the bursts as a share of it). Short calls are replayed
    from a CUDA graph, since the host could not launch them fast enough.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def burst(function: Callable[[], Any], repeats: int) -> float:
        first.record()
        for _ in range(repeats):
            function()
        second.record()
        second.synchronize()
        return 1e3 * first.elapsed_time(second) / repeats

    calls, once = 1, burst(call, 3)
    if graphs and once < LAUNCH_BOUND_US:
        graph = torch.cuda.CUDAGraph()
        with (
            contextlib.suppress(RuntimeError),
            torch.cuda.graph(graph, stream=torch.cuda.current_stream()),
        ):
            for _ in range(CALLS_A_GRAPH):
                call()
            calls = CALLS_A_GRAPH
        torch.cuda.synchronize()
        if calls > 1:
            call, once = graph.replay, burst(graph.replay, 1)
    repeats = max(3, min(200, int(1e3 * BURST_MS / once)))
    times = sorted(burst(call, repeats) / calls for _ in range(BURSTS))
    middle = statistics.median(times)
    return middle, (times[-1] - times[0]) / middle


def _size(draw: random.Random, low: int, high: int, step: int) -> int:
    """Log-uniform between the two, most often a multiple of `step`."""
    value = low * (high / low) ** draw.random()
    return max(1, round(value / step) * step) if draw.random() < 0.85 else max(1, round(value))


def products(draw: random.Random) -> Iterator[Case]:
    """Matrix products in the three layouts of a linear layer:

    forward (TN), input gradient (NN), weight gradient (NT).
    """
    while True:
        m, n, k = _size(draw, 64, 32768, 64), _size(draw, 64, 16384, 64), _size(draw, 64, 16384, 64)
        layout, fmt = (
            draw.choice(("TN", "NN", "NT")),
            draw.choice(("bf16", "bf16", "tf32", "tf32", "fp16", "fp32")),
        )
        if not 2e7 < m * n * k < (4e12 if fmt != "fp32" else 3e11):
            continue

        def make(
            m: int = m, n: int = n, k: int = k, layout: str = layout, fmt: str = fmt
        ) -> Callable[[], Any]:
            a = torch.randn((k, m) if layout == "NT" else (m, k), device="cuda", dtype=DTYPES[fmt])
            b = torch.randn((n, k) if layout == "TN" else (k, n), device="cuda", dtype=DTYPES[fmt])
            left, right = a.t() if layout == "NT" else a, b.t() if layout == "TN" else b
            return lambda: left @ right

        yield "gemm", fmt, {"m": m, "n": n, "k": k, "trans": layout}, make


def batched_products(draw: random.Random) -> Iterator[Case]:
    """Batched products, as eager attention makes them."""
    while True:
        b, s, d = (
            _size(draw, 8, 1024, 8),
            _size(draw, 32, 4096, 32),
            draw.choice((32, 64, 80, 96, 128)),
        )
        m, n, k = draw.choice(((s, s, d), (s, d, s), (d, s, s)))
        fmt = draw.choice(("bf16", "bf16", "tf32", "fp32"))
        if not 2e7 < b * m * n * k < 3e11 or b * m * n > 1e9:
            continue

        def make(
            b: int = b, m: int = m, n: int = n, k: int = k, fmt: str = fmt
        ) -> Callable[[], Any]:
            x = torch.randn(b, m, k, device="cuda", dtype=DTYPES[fmt])
            y = torch.randn(b, k, n, device="cuda", dtype=DTYPES[fmt])
            return lambda: torch.bmm(x, y)

        yield "batched_gemm", fmt, {"b": b, "m": m, "n": n, "k": k}, make


def scaled_products(draw: random.Random) -> Iterator[Case]:
    """Products in fp8, with one scale a tensor or one a row."""
    while True:
        m, n, k = (
            _size(draw, 128, 32768, 128),
            _size(draw, 128, 16384, 128),
            _size(draw, 128, 16384, 128),
        )
        m, n, k = (16 * max(1, round(v / 16)) for v in (m, n, k))
        rowwise = draw.random() < 0.4
        if not 1e9 < m * n * k < 8e12:
            continue

        def make(m: int = m, n: int = n, k: int = k, rowwise: bool = rowwise) -> Callable[[], Any]:
            a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
            sa = torch.ones((m, 1) if rowwise else (), device="cuda")
            sb = torch.ones((1, n) if rowwise else (), device="cuda")
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16
            )

        yield "gemm", "fp8_row" if rowwise else "fp8", {"m": m, "n": n, "k": k, "trans": "TN"}, make


def attention(draw: random.Random) -> Iterator[Case]:
    """Scaled-dot-product attention by implementation, forward, and backward as (both - forward) is
    left to the reader.
    """
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    while True:
        s, d, h = (
            _size(draw, 64, 16384, 64),
            draw.choice((32, 64, 64, 96, 128, 128, 128, 256)),
            draw.choice((8, 12, 16, 32)),
        )
        b = max(1, round(2 ** draw.uniform(10, 15) / s))
        causal, name = (
            draw.random() < 0.6,
            draw.choice(("flash", "flash", "cudnn", "cudnn", "efficient", "math")),
        )
        fmt = (
            draw.choice(("bf16", "bf16", "bf16", "fp16", "tf32"))
            if name in ("efficient", "math")
            else "bf16"
        )
        if b * h * s * s * d > 4e11 or (name == "math" and b * h * s * s > 6e8):
            continue
        sizes = {"b": b, "heads": h, "m": s, "head_dim": d, "causal": causal, "kernel": name}
        for backward in (False, True):

            def make(
                b: int = b,
                h: int = h,
                s: int = s,
                d: int = d,
                causal: bool = causal,
                name: str = name,
                fmt: str = fmt,
                backward: bool = backward,
            ) -> Callable[[], Any]:
                q, k, v = (
                    torch.randn(
                        b, h, s, d, device="cuda", dtype=DTYPES[fmt], requires_grad=backward
                    )
                    for _ in range(3)
                )
                with sdpa_kernel(backends[name]):
                    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                    gradient = torch.randn_like(out)
                if backward:
                    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

                def forward() -> Any:
                    with sdpa_kernel(backends[name]):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                return forward

            yield f"attention_{'bwd' if backward else 'fwd'}", fmt, sizes, make


def convolutions(draw: random.Random) -> Iterator[Case]:
    """Convolutions by pass, number format and layout, by cuDNN's heuristics (benchmark off, torch's
    default).
    """
    while True:
        side, kernel = draw.choice((7, 14, 28, 56, 112)), draw.choice((1, 1, 3, 3, 5, 7))
        stride = draw.choice((1, 1, 1, 2))
        inner, outer = (
            draw.choice((16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048))
            for _ in range(2)
        )
        depthwise = draw.random() < 0.2
        groups = inner if depthwise else 1
        outer = inner if depthwise else outer
        batch = round(2 ** draw.uniform(2, 8))
        work = batch * (side / stride) ** 2 * inner * outer * kernel**2 / groups
        if not 1e7 < work < 5e11 or batch * side**2 * max(inner, outer) > 4e8:
            continue
        fmt, layout = draw.choice(("bf16", "tf32", "tf32", "fp32")), draw.choice(("NCHW", "NHWC"))
        sizes = {
            "b": batch,
            "cin": inner,
            "cout": outer,
            "side": side,
            "kernel_size": kernel,
            "stride": stride,
            "groups": groups,
            "layout": layout,
        }
        for index, name in enumerate(("conv_dgrad", "conv_wgrad", "conv_fwd")):

            def make(
                batch: int = batch,
                inner: int = inner,
                outer: int = outer,
                side: int = side,
                kernel: int = kernel,
                stride: int = stride,
                groups: int = groups,
                fmt: str = fmt,
                layout: str = layout,
                index: int = index,
            ) -> Callable[[], Any]:
                form = torch.channels_last if layout == "NHWC" else torch.contiguous_format
                x = torch.randn(batch, inner, side, side, device="cuda", dtype=DTYPES[fmt]).to(
                    memory_format=form
                )
                w = torch.randn(
                    outer, inner // groups, kernel, kernel, device="cuda", dtype=DTYPES[fmt]
                ).to(memory_format=form)
                pad = kernel // 2
                if index == 2:
                    return lambda: F.conv2d(x, w, None, stride, pad, 1, groups)
                g = torch.randn_like(F.conv2d(x, w, None, stride, pad, 1, groups))
                mask = [index == 0, index == 1, False]
                return lambda: torch.ops.aten.convolution_backward(
                    g, x, w, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups, mask
                )

            yield name, fmt, sizes, make


def rows_of_numbers(draw: random.Random) -> Iterator[Case]:
    """What is bound by memory: norms, softmax, losses, element-wise operators, embeddings, copies; forward and backward."""
    while True:
        rows, width = _size(draw, 256, 65536, 256), _size(draw, 64, 16384, 64)
        if not 1e5 < rows * width < 6e8:
            continue
        fmt = draw.choice(("bf16", "fp32"))
        name = draw.choice(sorted(_ROWS))
        for backward in (False, True):
            if backward and name in _FORWARD_ONLY:
                continue

            def make(
                rows: int = rows,
                width: int = width,
                fmt: str = fmt,
                name: str = name,
                backward: bool = backward,
            ) -> Callable[[], Any]:
                x = torch.randn(
                    rows, width, device="cuda", dtype=DTYPES[fmt], requires_grad=backward
                )
                function = _ROWS[name](x)
                if not backward:
                    return lambda: function(x)
                out = function(x)
                gradient = torch.randn_like(out)
                return lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)

            yield f"{name}_{'bwd' if backward else 'fwd'}", fmt, {"m": rows, "hidden": width}, make


def _with(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=x.dtype)


def _layer_norm(x: torch.Tensor) -> Callable[..., Any]:
    w, b = _with(x, x.shape[1:]), _with(x, x.shape[1:])
    return lambda t: F.layer_norm(t, t.shape[1:], w, b)


def _batch_norm(x: torch.Tensor) -> Callable[..., Any]:
    """The width becomes channels of 14 x 14 pictures, as far as it goes."""
    channels = max(1, x.numel() // (196 * 32))
    w, b = (torch.randn(channels, device="cuda") for _ in range(2))

    def run(t: torch.Tensor) -> Any:
        picture = t.flatten()[: 32 * channels * 196].view(32, channels, 14, 14)
        return F.batch_norm(picture, None, None, w, b, training=True)

    return run


def _cross_entropy(x: torch.Tensor) -> Callable[..., Any]:
    target = torch.randint(0, x.shape[1], (x.shape[0],), device="cuda")
    return lambda t: F.cross_entropy(t, target)


def _embedding(x: torch.Tensor) -> Callable[..., Any]:
    rows = torch.randint(0, x.shape[0], (8192,), device="cuda")
    return lambda t: F.embedding(rows, t)


def _rms_norm(x: torch.Tensor) -> Callable[..., Any]:
    w = _with(x, x.shape[1:])
    return lambda t: F.rms_norm(t, t.shape[1:], w)


def _binary(function: Callable[..., Any]) -> Callable[[torch.Tensor], Callable[..., Any]]:
    def with_other(x: torch.Tensor) -> Callable[..., Any]:
        other = torch.randn_like(x)
        return lambda t: function(t, other)

    return with_other


_ROWS: dict[str, Callable[[torch.Tensor], Callable[..., Any]]] = {
    "layernorm": _layer_norm,
    "rmsnorm": _rms_norm,
    "batchnorm": _batch_norm,
    "softmax": lambda _: lambda t: F.softmax(t, -1),
    "log_softmax": lambda _: lambda t: F.log_softmax(t, -1),
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "gelu": lambda _: F.gelu,
    "silu": lambda _: F.silu,
    "relu": lambda _: F.relu,
    "dropout": lambda _: lambda t: F.dropout(t, 0.1),
    "add": _binary(torch.add),
    "mul": _binary(torch.mul),
    "cast": lambda x: (
        lambda t: t.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16)
    ),
    "copy": lambda _: torch.clone,
    "transpose_copy": lambda _: lambda t: t.t().contiguous(),
    "sum_rows": lambda _: lambda t: t.sum(0),
    "cat": _binary(lambda t, o: torch.cat((t, o), -1)),
}
_FORWARD_ONLY = {"copy", "transpose_copy"}


def optimizers(draw: random.Random) -> Iterator[Case]:
    """One update of many parameters:

    AdamW and SGD, fused and by lists (foreach, torch's default).
    """
    while True:
        count, width = draw.choice((4, 16, 64, 200)), _size(draw, 64, 4096, 64)
        kind, way = draw.choice(("adamw", "sgd_momentum")), draw.choice(("fused", "foreach"))
        fmt = draw.choice(("fp32", "bf16"))
        if count * width**2 > 1.5e9:
            continue

        def make(
            count: int = count, width: int = width, kind: str = kind, way: str = way, fmt: str = fmt
        ) -> Callable[[], Any]:
            parameters = [
                torch.nn.Parameter(torch.randn(width, width, device="cuda", dtype=DTYPES[fmt]))
                for _ in range(count)
            ]
            for p in parameters:
                p.grad = torch.randn_like(p)
            options: dict[str, Any] = {way: True}
            made: Any = (
                torch.optim.AdamW(parameters, **options)
                if kind == "adamw"
                else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options)
            )
            return lambda: made.step()

        yield f"{kind}_step", fmt, {"b": count, "m": width, "n": width, "kernel": way}, make


FAMILIES: dict[str, tuple[Callable[[random.Random], Iterator[Case]], float]] = {
    "products": (products, 0.24),
    "batched_products": (batched_products, 0.06),
    "scaled_products": (scaled_products, 0.08),
    "attention": (attention, 0.2),
    "convolutions": (convolutions, 0.24),
    "rows": (rows_of_numbers, 0.12),
    "optimizers": (optimizers, 0.06),
}
"""Family by name, with its share of the time."""


def sustained(seconds: float) -> Iterator[dict[str, Any]]:
    """One large product over and over:

    its rate in a burst, and after the card has come to its steady power.
    """
    for fmt in ("bf16", "tf32"):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPES[fmt]) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = fmt == "tf32"
        start, end = time.perf_counter(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(50):
                a @ b
            second.record()
            second.synchronize()
            yield _row(
                "sustained_gemm",
                fmt,
                {"m": 8192, "n": 8192, "k": 8192, "seconds": round(time.perf_counter() - start, 2)},
                20.0 * first.elapsed_time(second),
                0.0,
            )


def _row(
    operator: str, fmt: str, sizes: dict[str, Any], us: float, spread: float
) -> dict[str, Any]:
    return {
        "op": operator,
        "dtype": fmt,
        "sizes": json.dumps(sizes),
        "latency_us": us,
        "spread": spread,
    }


def measure(seconds: float, names: list[str], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of the families named for about so many seconds; a call that this torch or GPU cannot make is left out."""
    stream = torch.cuda.Stream()
    whole = sum(FAMILIES[name][1] for name in names)
    for number, (family, share) in enumerate(FAMILIES[name] for name in names):
        cases = family(random.Random(seed + number))
        end = time.perf_counter() + share / whole * seconds
        for operator, fmt, sizes, make in cases:
            if time.perf_counter() > end:
                break
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fmt == "tf32"
            try:
                with torch.cuda.stream(
                    stream
                ):  # whose work a graph can capture, unlike the default stream's
                    us, spread = time_call(make(), graphs=family is not optimizers)
            except (RuntimeError, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
                continue
            yield _row(operator, fmt, sizes, us, spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import pandas as pd

    short = min(8.0, options.seconds / 10)
    rows = [
        *measure(options.seconds - 2 * short, options.families, options.seed),
        *sustained(short),
    ]
    table = pd.DataFrame(rows).assign(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    table.to_parquet(options.out)
    print(table.groupby(["op", "dtype"]).latency_us.agg(["count", "median"]).to_string())


if __name__ == "__main__":
    main()
