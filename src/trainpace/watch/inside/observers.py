"""What is measured beside the parts of a step: operators, best rates, losses, cores and page faults."""

import contextlib
import functools
import math
import mmap
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from trainpace.core.host import thread_times, usable_cores
from trainpace.watch.inside.event_log import (
    BACKWARD,
    FORWARD,
    OTHER,
    Step,
    read_header,
    records_from,
)
from trainpace.watch.inside.recorder import Recorder, now_ns
from trainpace.watch.inside.script import line_of

LONGEST_LAUNCH_NS = 20_000
"""Operators that compute longer than this on their thread are large; shorter ones mostly wait for their launch. By the thread's
own clock, since a program that takes the core for a while makes any operator long."""
REPEATS = 5
SIDE, SIDE_ON_ACCELERATOR = 1024, 8192
"""Of the matrix product that a rate is measured with: large enough to fill the device."""
LARGEST_COPY_BYTES = 2**30
"""Of the optimizer and its variants in the host's memory; on an accelerator, half of what is free there."""
LONGEST_NAME = 160
"""Characters of a kernel's name that are kept: enough to tell what kind it is."""
VARIANTS = ("fused", "foreach")
LONGEST_GAP_NS = 100_000
"""Between two operators, which the host takes for calling the second one. A judgement: longer ones are other work."""
KEPT_OPERATORS = 12
"""Of those that take longest in a step, each at a line of the script of its own."""


# ---- operators


def count_one_step(recorder: Recorder, note: str = "counted") -> Any:
    """Count the operators of forward and backward; call the result at the step's end, which notes them under `note`.

    Does nothing for compiled models, which a dispatch mode would break. Times are the host's: where a device works
    asynchronously, all operators look short.
    """
    if "torch._dynamo.eval_frame" in sys.modules and recorder.compiled:
        return lambda: None
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    seen = {"operators": 0, "flops": 0.0, "large_operators_ns": 0}
    seen |= {"forward_flops": 0.0, "product_flops": 0.0, "one_row_flops": 0.0, "products_ns": 0}
    seen |= {"large_outside_ns": 0.0, "values_read": 0}
    slow: Counter[tuple[str, str]] = Counter()
    every_ns, outside = 0, _OutsideModules()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            start, computed = now_ns(), time.thread_time_ns()
            result = function(*args, **(kwargs or {}))
            ended = now_ns()
            took, computed = ended - start, time.thread_time_ns() - computed
            nonlocal every_ns
            name, part = str(function._overloadpacket), recorder.part
            is_models = part == OTHER and name not in _NO_FORWARD and flows(args)
            outside.sees(
                start, ended, is_outside=part == OTHER, flows=is_models, reads=name == _READS
            )
            seen["values_read"] += name == _READS and part == FORWARD
            if part not in (FORWARD, BACKWARD) and not is_models:
                return result
            if function.namespace in ("c10d", "_c10d_functional"):
                return result
            seen["operators"] += not function.is_view
            every_ns += took
            if computed > LONGEST_LAUNCH_NS:
                seen["large_outside_ns" if is_models else "large_operators_ns"] += took
                # a backward pass is called at one line, whatever operator runs
                line = "" if part == BACKWARD else line_of(sys._getframe())[0]
                slow[name, line] += took
            formula = flop_registry.get(function._overloadpacket)
            if formula is not None:
                with contextlib.suppress(Exception):
                    recorder.matmul_dtype = args[0].dtype
                    flops = formula(*args, **(kwargs or {}), out_val=result)
                    seen["flops"] += flops
                    rows = rows_of(function, args)
                    seen["products_ns"] += took if rows else 0
                    if part != BACKWARD:
                        seen["forward_flops"] += flops
                        seen["product_flops"] += flops if rows else 0
                        seen["one_row_flops"] += flops if rows == 1 else 0
            return result

    mode = Counting()
    mode.__enter__()

    def end() -> None:
        mode.__exit__(None, None, None)
        seen["values_read"] += outside.reads
        recorder.log.note({note: seen | {"outside_ns": float(outside.ns)}})
        if note == "counted" and every_ns:
            shares = [
                (each, line, ns / every_ns) for (each, line), ns in slow.most_common(KEPT_OPERATORS)
            ]
            recorder.log.note({"slow_operators": shares})

    return end


class _OutsideModules:
    """The time of operators outside of modules that gradients flow through, with what runs between two of them: calling the next
    one, and operators on what gave them values, such as an index."""

    def __init__(self) -> None:
        self.ns = self.reads = 0
        """Their time, and the values that were read between two of them."""
        self._held_ns = self._held_reads = self._since_ns = 0

    def sees(
        self, start_ns: int, ended_ns: int, *, is_outside: bool, flows: bool, reads: bool
    ) -> None:
        """Take an operator into account. `flows`: whether it is one of them. `reads`: whether it reads a value."""
        follows = start_ns - self._since_ns < LONGEST_GAP_NS
        self._held_ns += min(start_ns - self._since_ns, LONGEST_GAP_NS) if self._since_ns else 0
        if flows:
            self.ns += self._held_ns + ended_ns - start_ns
            self.reads += self._held_reads
            self._held_ns, self._held_reads, self._since_ns = 0, 0, ended_ns
        elif is_outside and follows:
            self._held_ns += ended_ns - start_ns
            self._held_reads += reads
            self._since_ns = ended_ns
        else:
            self.ns += min(self._held_ns, LONGEST_GAP_NS)
            self._held_ns = self._held_reads = self._since_ns = 0


_READS = "aten._local_scalar_dense"
_NO_FORWARD = ("aten.detach", _READS)
"""Operators that read what a forward pass gave, such as a loss for the log."""


def flows(args: Any) -> bool:
    """Whether gradients flow through one of an operator's tensors: not so where a script changes parameters by hand."""
    return sys.modules["torch"].is_grad_enabled() and any(
        getattr(one, "requires_grad", False)
        for arg in args
        for one in (arg if isinstance(arg, list | tuple) else (arg,))
    )


_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products of aten, by the position of their first factor."""


def rows_of(function: Any, args: Any) -> int:
    """The rows of a matrix product's first factor, which in a forward pass are the samples, or the positions, that are computed
    together; 0 for any other operator."""
    at = _FACTORS.get(function._overloadpacket.__name__)
    return 0 if at is None else math.prod(args[at].shape[:-1])


def profile_one_step(recorder: Recorder) -> Callable[[], None]:
    """Measure what an accelerator does in a step, by its own clock; call the result at the step's end."""
    from trainpace.measure import device_work, in_use

    measured = device_work(in_use())

    def end() -> None:
        if measured is None or (work := measured()) is None:
            return
        kernels: defaultdict[str, float] = defaultdict(float)
        for name, ms in work.kernels_ms.items():
            kernels[name[:LONGEST_NAME]] += ms
        note = {
            "device_busy_ms": work.busy_ms,
            "device_copies_ms": work.copies_ms,
            "device_kernels_ms": kernels,
        }
        recorder.log.note(note)

    return end


def note_rate(recorder: Recorder) -> None:
    """Write to the trail the FLOP/s of a large matrix product here, with the script's own settings and number format; on an
    accelerator that computes in fp32, also in the formats that it could use instead."""
    import torch

    from trainpace.measure import in_use

    own = recorder.matmul_dtype or torch.float32
    recorder.log.note({"matmul_gflops": matmul_rate_gflops(own)})
    if in_use() == "cpu" or own != torch.float32:
        return
    others = {"amp_bf16": matmul_rate_gflops(torch.bfloat16)}
    chosen = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        others["tf32"] = matmul_rate_gflops(own)
    finally:
        torch.set_float32_matmul_precision(chosen)
    recorder.log.note({"other_gflops": others})


def matmul_rate_gflops(dtype: Any) -> float:
    """The best rate of a large matrix product of this number format on the device in use."""
    import torch

    from trainpace.measure import in_use

    device = in_use()
    side = SIDE if device == "cpu" else SIDE_ON_ACCELERATOR
    with torch.no_grad():
        a = torch.rand(side, side, device=device).to(dtype)
        times = [_time_ns(lambda: a @ a) for _ in range(REPEATS)]
    return 2 * side**3 / min(times)


def note_optimizers(recorder: Recorder, within_s: float = math.inf) -> None:
    """Time the script's optimizer and its other implementations on copies of its parameters and gradients, fewer times where that
    would take longer."""
    import torch

    optimizer = recorder.optimizer() if recorder.optimizer is not None else None
    if optimizer is None or not any(v in optimizer.defaults for v in VARIANTS):
        return
    held = sum(p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
    if 4 * held > _room_bytes() or any(
        type(p) is not torch.nn.Parameter for p in optimizer.param_groups[0]["params"]
    ):
        return
    stepping, took_ns = {}, 0
    for name in ("as it is", *(v for v in VARIANTS if v in optimizer.defaults)):
        with contextlib.suppress(
            Exception
        ):  # not every implementation exists for every device and type
            stepping[name] = _copy(
                torch,
                optimizer,
                {} if name == "as it is" else {**dict.fromkeys(VARIANTS), name: True},
            )
            took_ns = max(took_ns, _time_ns(stepping[name].step))
    repeats = int(max(1, min(REPEATS, within_s * 1e9 / max(1, took_ns * len(stepping)))))
    times: dict[str, list[int]] = {name: [] for name in stepping}
    for _ in range(repeats):
        for name, copied in stepping.items():
            times[name].append(_time_ns(copied.step))
    recorder.log.note(
        {
            "optimizer_variants_ms": {
                name: sorted(t)[repeats // 2] / 1e6 for name, t in times.items()
            }
        }
    )


def _room_bytes() -> float:
    """For the parameters, gradients and states of one variant."""
    from trainpace.measure import free_gib, in_use

    device = in_use()
    free = free_gib(device) if device != "cpu" else None
    return LARGEST_COPY_BYTES if free is None else free * 2**30 / 2 / (1 + len(VARIANTS))


def _time_ns(work: Callable[[], Any]) -> int:
    from trainpace.measure import in_use, synchronize

    start = now_ns()
    work()
    synchronize(in_use())
    return now_ns() - start


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
        groups.append(
            settings
            | {k: v for k, v in changed.items() if k in optimizer.defaults}
            | {"params": params}
        )
    return type(optimizer)(groups)


# ---- losses

Backward = Callable[..., Any]


class Losses:
    """Keeps losses on their device until the end, so that nothing waits for them. Under accumulation scripts divide
    their losses, so that the sum is the mean over the step; DeepSpeed divides them itself."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self.torch = torch
        self.steps: list[Any] = []
        self._sum: Any = None
        self._inside = False
        self._whole = True
        recorder.after_step.append(lambda step: self._ends_step())

    def within(self, backward: Backward, engine: bool = False) -> Backward:
        """A backward function that records its losses; calls inside it record nothing more."""

        @functools.wraps(backward)
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True
            if outermost:
                try:
                    self._take(args, kwargs, engine)
                except Exception:
                    self._whole = False
            try:
                return backward(*args, **kwargs)
            finally:
                self._inside = not outermost

        return call

    def _take(self, args: Any, kwargs: Any, engine: bool) -> None:
        parts = 1.0
        if engine:
            parts, args = float(args[0].gradient_accumulation_steps()), args[1:]
        loss = args[0] if args else kwargs.get("loss", kwargs.get("tensors"))
        loss = loss[0] if isinstance(loss, list | tuple) and len(loss) == 1 else loss
        given = args[1] if len(args) > 1 and not engine else kwargs.get("grad_tensors")
        if given is not None and any(
            g is not None for g in (given if isinstance(given, list | tuple) else (given,))
        ):
            self._whole = False  # a part of a larger gradient, whose loss is nowhere
            return
        value = getattr(loss, "_trainpace_unscaled", loss).detach().float() / parts
        if value.numel() != 1:
            raise ValueError("no loss")
        value = value.reshape(())
        self._sum = value if self._sum is None else self._sum + value

    def _ends_step(self) -> None:
        self._whole = self._whole and self._sum is not None
        self.steps.append(self._sum)
        self._sum = None

    def scaled(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        """GradScaler.scale, with the unscaled loss remembered for its result."""

        @functools.wraps(scale)
        def call(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, self.torch.Tensor):
                result._trainpace_unscaled = outputs.detach()
            return result

        return call

    def per_step(self) -> list[float]:
        """One loss per step; empty where any step's loss was not seen."""
        return [float(value) for value in self.steps] if self._whole else []


SETTLED_STEP = 3
"""What it waited before, while others were still importing and compiling, says nothing of the steps."""


class Scheduled(NamedTuple):
    """Nanoseconds that a thread was on a core, and that it waited for one, since it began."""

    thread: int
    ran_ns: int
    waited_ns: int


def scheduled(thread: int | None = None) -> Scheduled | None:
    """Of this thread, or the one of that number; None where the system does not say. Threads that only help it are left out:
    while they wait for work they give their core away again and again, and would seem to have none.
    """
    thread = thread or threading.get_native_id()
    times = thread_times(thread)
    return None if times is None else Scheduled(thread, *times)


def delayed_share(since: Scheduled) -> float | None:
    """The share of the time since then, in which the thread could have run, that it had no core; None where it is not known."""
    if (now := scheduled(since.thread)) is None or now.ran_ns <= since.ran_ns:
        return None
    ran, waited = now.ran_ns - since.ran_ns, max(0, now.waited_ns - since.waited_ns)
    return waited / (ran + waited)


DELAYED = 0.1
"""Share of its time in which the training thread waits for a core, from which on it is said, and others are taken to need cores
too. A judgement, not a measurement: in recordings of a busy day it was 0 to 0.03 where nothing disturbed; from which share on a
verdict is wrong, nobody measured."""
TRAINS_WITHIN_S = 10.0
"""Since another process last wrote to its trail: several of its flushes, also where it is slow."""


def own_threads() -> int:
    return int(_torch().get_num_threads())


def fewer_threads(recorder: Recorder) -> int:
    """How many threads to try instead of the script's own; 0 where it has a core for each."""
    threads, cpus = own_threads(), usable_cores()
    fair = max(1, cpus // (1 + len(beside(recorder.log.path))))
    if fair < threads:
        return fair
    waited = delayed_share(recorder.scheduled) if recorder.scheduled is not None else None
    return 1 if threads > 1 and waited is not None and waited >= DELAYED else 0


def computes_with(threads: int) -> None:
    _torch().set_num_threads(threads)


def beside(own_trail: str) -> list[str]:
    """The trails of other processes of this command and host that are training now."""
    folder, name = os.path.split(own_trail)
    try:
        others = os.listdir(folder)
    except OSError:
        return []
    return [
        path
        for other in others
        if other.startswith("process-")
        and other != name
        and _trains(path := os.path.join(folder, other))
    ]


def _trains(path: str) -> bool:
    try:
        if time.time() - os.path.getmtime(path) > TRAINS_WITHIN_S:
            return False
        with open(path, "rb") as file:
            first = file.readline()
            rest = file.read()
        if read_header(first).get("host") != socket.gethostname():
            return False
        return any(isinstance(record, Step) for record in records_from(rest, 0))
    except (OSError, ValueError):
        return False


def _torch() -> Any:
    return sys.modules["torch"]


PAGES = 16 * 2**20 // mmap.PAGESIZE
ROUNDS = 3
COVERING = "MALLOC_MMAP_MAX_"
"""The variable under which glibc keeps freed memory."""


def count() -> int | None:
    """How many this process has had so far that needed no disk; None where its C library is not glibc, or its allocator was
    chosen by the user."""
    try:
        import resource

        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ImportError, ValueError, OSError):
        return None
    if COVERING in os.environ or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if is_glibc else None


def cost_ns() -> float | None:
    """Nanoseconds that one takes here and now, by the fastest of some rounds over new pages; None where they are not counted."""
    rounds = [_round_ns() for _ in range(ROUNDS)]
    known = [ns for ns in rounds if ns is not None]
    return min(known, default=None)


def _round_ns() -> float | None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        with contextlib.suppress(AttributeError, OSError):  # of a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        before, began = count(), time.perf_counter_ns()
        memory[:: mmap.PAGESIZE] = bytes(PAGES)
        took, after = time.perf_counter_ns() - began, count()
    return None if before is None or after is None or after <= before else took / (after - before)
