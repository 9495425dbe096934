"""Measurements beside the parts of a step: operators, best rates, losses, cores and page faults."""

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
"""Operators that compute longer than this on their thread are large.

Shorter ones mostly wait for their launch.

The thread's own clock counts, since a program that takes the core for a while makes any operator
long.
"""
REPEATS = 5
SIDE, SIDE_ON_ACCELERATOR = 1024, 8192
"""Side of the matmul that a rate is measured with: large enough to fill the device."""
LARGEST_COPY_BYTES = 2**30
"""Limit for copies of the optimizer and its variants in host memory.

An accelerator gives half of its free memory.
"""
LONGEST_NAME = 160
"""Characters of a kernel's name that are logged: enough to recognize its kind."""
VARIANTS = ("fused", "foreach")
LONGEST_GAP_NS = 100_000
"""Longest time between two operators that counts as calling the second one.

A judgement: longer gaps are other work.
"""
KEPT_OPERATORS = 12
"""Number of slowest operators that are logged.

Each (operator, line of the script) counts by itself.
"""


# ---- operators


def count_one_step(recorder: Recorder, note: str = "counted") -> Any:
    """Count the operators of forward and backward until the returned function is called.

    That function logs them under `note`. Compiled models are not counted. Times are the host's: if
    a device works asynchronously, all operators look short.
    """
    # a dispatch mode would break compiled models
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
    """Time of differentiable operators outside of modules, and of the work between them.

    That work is calling the next operator, or operators that prepare its arguments, such as an
    index.
    """

    def __init__(self) -> None:
        self.ns = self.reads = 0
        """Nanoseconds, and values that the script read between two operators."""
        self._held_ns = self._held_reads = self._since_ns = 0

    def sees(
        self, start_ns: int, ended_ns: int, *, is_outside: bool, flows: bool, reads: bool
    ) -> None:
        """Add one operator.

        Args:
            start_ns: Start of the operator.
            ended_ns: End of the operator.
            is_outside: It runs outside of forward and backward.
            flows: Gradients flow through it.
            reads: It reads a value out of a tensor.
        """
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
"""Operators that read the results of a forward pass, such as a loss for the log."""


def flows(args: Any) -> bool:
    """Return True if gradients flow through one of an operator's tensors.

    They do not if the script changes parameters by hand.
    """
    return sys.modules["torch"].is_grad_enabled() and any(
        getattr(one, "requires_grad", False)
        for arg in args
        for one in (arg if isinstance(arg, list | tuple) else (arg,))
    )


_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matmuls of aten, by the position of their first factor."""


def rows_of(function: Any, args: Any) -> int:
    """Return the rows of a matmul's first factor, or 0 for any other operator.

    In a forward pass they are the samples, or positions, that are computed together.
    """
    at = _FACTORS.get(function._overloadpacket.__name__)
    return 0 if at is None else math.prod(args[at].shape[:-1])


def profile_one_step(recorder: Recorder) -> Callable[[], None]:
    """Measure an accelerator's work by its own clock until the returned function is called."""
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
    """Log the FLOP/s of a large matmul with the script's own settings and number format.

    On an accelerator that computes in fp32, log also the formats that it could use instead.
    """
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
    """Return the best rate of a large matmul of this number format on the device in use, in
    GFLOP/s.
    """
    import torch

    from trainpace.measure import in_use

    device = in_use()
    side = SIDE if device == "cpu" else SIDE_ON_ACCELERATOR
    with torch.no_grad():
        a = torch.rand(side, side, device=device).to(dtype)
        times = [_time_ns(lambda: a @ a) for _ in range(REPEATS)]
    return 2 * side**3 / min(times)


def note_optimizers(recorder: Recorder, within_s: float = math.inf) -> None:
    """Log the times of the script's optimizer and its other implementations.

    They run on copies of the parameters and gradients, fewer times if that would take longer than
    `within_s`.
    """
    optimizer = recorder.optimizer() if recorder.optimizer is not None else None
    if optimizer is None or not _can_be_copied(optimizer):
        return
    stepping, first_ns = _variants_of(optimizer)
    repeats = int(max(1, min(REPEATS, within_s * 1e9 / max(1, first_ns * len(stepping)))))
    rounds = [{name: _time_ns(step) for name, step in stepping.items()} for _ in range(repeats)]
    medians = {name: sorted(each[name] for each in rounds)[repeats // 2] for name in stepping}
    recorder.log.note({"optimizer_variants_ms": {name: ns / 1e6 for name, ns in medians.items()}})


def _variants_of(optimizer: Any) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return the steps of copies by implementation, and the longest first step in ns."""
    variants = [variant for variant in VARIANTS if variant in optimizer.defaults]
    steps, longest_ns = {}, 0
    for name in ("as it is", *variants):
        chosen = {} if name == "as it is" else {v: v == name or None for v in variants}
        # an implementation may lack some devices and types
        with contextlib.suppress(Exception):
            step = _copy(optimizer, chosen).step
            longest_ns = max(longest_ns, _time_ns(step))
            steps[name] = step
    return steps, longest_ns


def _can_be_copied(optimizer: Any) -> bool:
    """Return True if the optimizer has variants, plain parameters, and enough free memory."""
    from trainpace.measure import free_gib, in_use

    device = in_use()
    free = free_gib(device) if device != "cpu" else None
    limit = LARGEST_COPY_BYTES if free is None else free * 2**30 / 2 / (1 + len(VARIANTS))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # parameters, gradients and two states
    needed = 4 * sum(p.numel() * p.element_size() for p in parameters)
    plain = sys.modules["torch"].nn.Parameter
    return (
        any(variant in optimizer.defaults for variant in VARIANTS)
        and needed <= limit
        and all(type(p) is plain for p in optimizer.param_groups[0]["params"])
    )


def _time_ns(work: Callable[[], Any]) -> int:
    from trainpace.measure import in_use, synchronize

    start = now_ns()
    work()
    synchronize(in_use())
    return now_ns() - start


def _copy(optimizer: Any, changed: dict[str, Any]) -> Any:
    groups = []
    for group in optimizer.param_groups:
        params = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                copied = sys.modules["torch"].nn.Parameter(parameter.detach().clone())
                copied.grad = parameter.grad.detach().clone()
                params.append(copied)
        settings = {k: v for k, v in group.items() if k in optimizer.defaults and k != "params"}
        groups.append(settings | changed | {"params": params})
    return type(optimizer)(groups)


# ---- losses

Backward = Callable[..., Any]


class Losses:
    """Collects losses on their device, so that nothing waits for them until the end.

    Under accumulation scripts divide their losses, so the sum is the mean over the step. DeepSpeed
    divides them itself.
    """

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self.torch = torch
        self.steps: list[Any] = []
        self._sum: Any = None
        self._inside = False
        self._whole = True
        recorder.after_step.append(lambda step: self._ends_step())

    def within(self, backward: Backward, engine: bool = False) -> Backward:
        """Wrap a backward function to record its losses. Calls inside it record nothing more."""

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
        """Wrap GradScaler.scale to remember the unscaled loss."""

        @functools.wraps(scale)
        def call(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, self.torch.Tensor):
                result._trainpace_unscaled = outputs.detach()
            return result

        return call

    def per_step(self) -> list[float]:
        """Return one loss per step, or nothing if the loss of any step was not seen."""
        return [float(value) for value in self.steps] if self._whole else []


# ---- cores and threads

SETTLED_STEP = 3
"""Step after which delays are counted. Before it, other programs import and compile."""
DELAYED = 0.1
"""Share of its time that the training thread waits for a core, from which on it is reported.

A judgement, not a measurement: in recordings of a busy day it was 0 to 0.03 without disturbance.
Nobody has measured the share that makes a verdict wrong.
"""
TRAINS_WITHIN_S = 10.0
"""Longest time since the last write of a process that still trains. Even a slow one flushes."""


class Scheduled(NamedTuple):
    """Nanoseconds since a thread began: on a core, and waiting for one."""

    thread: int
    ran_ns: int
    waited_ns: int


def scheduled(thread: int | None = None) -> Scheduled | None:
    """Return the times of this thread, or of `thread`. None if the system does not report them.

    Helper threads do not count. They give their core away while they wait for work, so they would
    seem to lack one.
    """
    thread = thread or threading.get_native_id()
    times = thread_times(thread)
    return None if times is None else Scheduled(thread, *times)


def begin_counting_delays(recorder: Recorder) -> None:
    recorder.scheduled = scheduled()


def delayed_share(since: Scheduled | None) -> float | None:
    """Return the share of runnable time since then without a core, or None if it is unknown."""
    if since is None or (now := scheduled(since.thread)) is None or now.ran_ns <= since.ran_ns:
        return None
    ran, waited = now.ran_ns - since.ran_ns, max(0, now.waited_ns - since.waited_ns)
    return waited / (ran + waited)


def own_threads() -> int:
    return int(sys.modules["torch"].get_num_threads())


def computes_with(threads: int) -> None:
    sys.modules["torch"].set_num_threads(threads)


def fewer_threads(recorder: Recorder) -> int:
    """Return how many threads to try instead of the script's own, or 0 if it has enough cores.

    With more threads than cores, threads wait for each other at the end of every operator. No clock
    of one thread shows that, so it takes an intervention.
    """
    threads = own_threads()
    fair = max(1, usable_cores() // (1 + len(training_beside(recorder.log.path))))
    if fair < threads:
        return fair
    waited = delayed_share(recorder.scheduled)
    return 1 if threads > 1 and waited is not None and waited >= DELAYED else 0


def training_beside(own_log: str) -> list[str]:
    """Return the logs of other processes of this command and host that train now."""
    folder, own = os.path.split(own_log)
    with contextlib.suppress(OSError):
        others = [
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name.startswith("process-") and name != own
        ]
        return [path for path in others if _trains(path)]
    return []


def _trains(path: str) -> bool:
    try:
        if time.time() - os.path.getmtime(path) > TRAINS_WITHIN_S:
            return False
        with open(path, "rb") as file:
            first, rest = file.readline(), file.read()
        if read_header(first).get("host") != socket.gethostname():
            return False
        return any(isinstance(record, Step) for record in records_from(rest, 0))
    except (OSError, ValueError):
        return False


# ---- page faults
#
# glibc gives the memory of large tensors back when they are freed. Linux clears each page of it
# again when the next tensor asks for it.

PAGES = 16 * 2**20 // mmap.PAGESIZE
ROUNDS = 3
GLIBC_SETTING = "MALLOC_MMAP_MAX_"
"""Environment variable that makes glibc keep freed memory."""


def page_faults() -> int | None:
    """Return the page faults of this process that needed no disk.

    None if its C library is not glibc, or if the user chose how memory is allocated.
    """
    try:
        import resource

        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ImportError, ValueError, OSError):
        return None
    chosen = GLIBC_SETTING in os.environ or "malloc" in os.environ.get("LD_PRELOAD", "")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if is_glibc and not chosen else None


def page_fault_ns() -> float | None:
    """Return the time of one page fault here, from the fastest of some rounds over new pages."""
    rounds = (_page_fault_round_ns() for _ in range(ROUNDS))
    return min((ns for ns in rounds if ns is not None), default=None)


def _page_fault_round_ns() -> float | None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        before, began = page_faults(), time.perf_counter_ns()
        memory[:: mmap.PAGESIZE] = bytes(PAGES)
        took, after = time.perf_counter_ns() - began, page_faults()
    return None if before is None or after is None or after <= before else took / (after - before)
