"""How many operators a step launches and how many FLOPs they do, and what this process' device does at best."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from trainpace.watch.inside.recorder import Recorder, now_ns

REPEATS = 5
SIDE = 1024
LARGEST_COPY_BYTES = 2**30
VARIANTS = ("fused", "foreach")


def count_one_step(recorder: Recorder) -> Any:
    """Begin to count; call the result at the step's end. Does nothing for compiled models, which a mode would break."""
    import torch

    if "torch._dynamo.eval_frame" in sys.modules and recorder.compiled:
        return lambda: None
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    seen = {"operators": 0, "flops": 0.0}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if not function.is_view:
                seen["operators"] += 1
            formula = flop_registry.get(function._overloadpacket)
            if formula is not None:
                with contextlib.suppress(Exception):
                    seen["flops"] += formula(*args, **(kwargs or {}), out_val=result)
            return result

    mode = Counter()
    mode.__enter__()

    def end() -> None:
        mode.__exit__(None, None, None)
        recorder.trail.note(
            {**seen, "dtype": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled() else ""}
        )

    return end


def note_rate(recorder: Recorder) -> None:
    """Leave in the trail the FLOP/s that a large product of fp32 matrices reaches here, with the script's own settings."""
    import torch

    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    times = []
    with torch.no_grad():
        a = torch.ones(SIDE, SIDE, device=device)
        for _ in range(REPEATS):
            start = now_ns()
            a @ a
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(now_ns() - start)
    recorder.trail.note({"matmul_gflops": 2 * SIDE**3 / min(times)})


def note_optimizers(recorder: Recorder) -> None:
    """Time the script's optimizer and its other implementations on copies of its parameters and gradients."""
    import torch

    optimizer = recorder.optimizer() if recorder.optimizer is not None else None
    if optimizer is None or not any(v in optimizer.defaults for v in VARIANTS):
        return
    held = sum(p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
    if 4 * held > LARGEST_COPY_BYTES or any(
        type(p) is not torch.nn.Parameter for p in optimizer.param_groups[0]["params"]
    ):
        return
    times: dict[str, list[float]] = {}
    stepping = {}
    for name in ("as it is", *(v for v in VARIANTS if v in optimizer.defaults)):
        with contextlib.suppress(Exception):  # not every implementation exists for every device and type
            stepping[name] = _copy(
                torch, optimizer, {} if name == "as it is" else {**dict.fromkeys(VARIANTS), name: True}
            )
            stepping[name].step()
    for _ in range(REPEATS):
        for name, copied in stepping.items():
            start = now_ns()
            copied.step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            times.setdefault(name, []).append((now_ns() - start) / 1e6)
    recorder.trail.note({"optimizer_variants_ms": {name: sorted(t)[len(t) // 2] for name, t in times.items()}})


def _copy(torch: Any, optimizer: Any, changed: dict[str, Any]) -> Any:
    groups = []
    for group in optimizer.param_groups:
        params = []
        for parameter in group["params"]:
            copied = torch.nn.Parameter(parameter.detach().clone())
            if parameter.grad is not None:
                copied.grad = parameter.grad.detach().clone()
                params.append(copied)
        settings = {k: v for k, v in group.items() if k in optimizer.defaults and k != "params"}
        groups.append({**settings, **{k: v for k, v in changed.items() if k in optimizer.defaults}, "params": params})
    return type(optimizer)(groups)
