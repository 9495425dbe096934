"""The operators of a step: their number, their FLOPs, and the time of those that exceed a launch; and the best rates of
this process's device and optimizer."""

import contextlib
import sys
from typing import Any

from trainpace.watch.inside.recorder import Recorder, now_ns
from trainpace.watch.inside.trail import BACKWARD, FORWARD

LONGEST_LAUNCH_NS = 20_000
"""Operators that take longer compute; shorter ones mostly wait for their launch."""
REPEATS = 5
SIDE = 1024
LARGEST_COPY_BYTES = 2**30
VARIANTS = ("fused", "foreach")


def count_one_step(recorder: Recorder) -> Any:
    """Count the operators of forward and backward; call the result at the step's end.

    Does nothing for compiled models, which a dispatch mode would break. Times are the host's: where a device works
    asynchronously, all operators look short.
    """
    if "torch._dynamo.eval_frame" in sys.modules and recorder.compiled:
        return lambda: None
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    seen = {"operators": 0, "flops": 0.0, "large_operators_ns": 0}

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            start = now_ns()
            result = function(*args, **(kwargs or {}))
            took = now_ns() - start
            if recorder.part not in (FORWARD, BACKWARD) or function.namespace in ("c10d", "_c10d_functional"):
                return result
            seen["operators"] += not function.is_view
            seen["large_operators_ns"] += took if took > LONGEST_LAUNCH_NS else 0
            formula = flop_registry.get(function._overloadpacket)
            if formula is not None:
                with contextlib.suppress(Exception):
                    seen["flops"] += formula(*args, **(kwargs or {}), out_val=result)
            return result

    mode = Counter()
    mode.__enter__()

    def end() -> None:
        mode.__exit__(None, None, None)
        recorder.trail.note({"counted": seen})

    return end


def note_rate(recorder: Recorder) -> None:
    """Write to the trail the FLOP/s of a large fp32 matrix product here, with the script's own settings."""
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
