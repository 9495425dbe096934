"""Measurements besides the parts of a step: operators, rates, losses, cores and page faults."""

import contextlib
import math
import mmap
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import trainpace.measure as accelerator
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
"""Least CPU time of a large operator in nanoseconds.

Shorter operators mostly wait for their launch. The thread's CPU clock is used, since wall time also
includes other programs that take the core.
"""
REPEATS = 5
"""Runs of each measurement. The optimizer gets fewer if time is short."""
SIDE, SIDE_ON_ACCELERATOR = 1024, 8192
"""Side of the matmuls that measure a rate. It is large enough to fill the device."""
LARGEST_COPY_BYTES = 2**30
"""Largest size of the copies of an optimizer and its variants in host memory, in bytes.

On an accelerator, half of the free memory is the limit.
"""
LONGEST_NAME = 160
"""Characters of a kernel's name that are logged, enough to recognize its kind."""
VARIANTS = ("fused", "foreach")
LONGEST_GAP_NS = 100_000
"""Longest time between two operators that counts as calling the second one, in nanoseconds.

A judgement: longer gaps are other work.
"""
KEPT_OPERATORS = 12
"""Number of slowest operators that are logged.

Each pair of (operator, line of the script) counts separately.
"""


# ---- operators


def count_one_step(recorder: Recorder, note: str = "counted") -> Any:
    """Count the operators of forward and backward until the returned function is called.

    That function logs the counts under `note`. Compiled models are not counted. Times are the
    host's, so all operators look short if a device works asynchronously.
    """
    # A dispatch mode would break compiled models.
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
                # A backward pass is called at one line, whichever operator runs.
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
        recorder.log.note(**{note: seen | {"outside_ns": float(outside.ns)}})
        if note == "counted" and every_ns:
            shares = [
                (each, line, ns / every_ns) for (each, line), ns in slow.most_common(KEPT_OPERATORS)
            ]
            recorder.log.note(slow_operators=shares)

    return end


class _OutsideModules:
    """Time of operators with gradients outside of modules, and of the work between them.

    Work between two operators is the call of the second one, or operators that prepare its
    arguments, such as an index.
    """

    def __init__(self) -> None:
        self.ns = self.reads = 0
        """Nanoseconds, and number of values that the script read between two operators."""
        self._held_ns = self._held_reads = self._since_ns = 0

    def sees(
        self, start_ns: int, ended_ns: int, *, is_outside: bool, flows: bool, reads: bool
    ) -> None:
        """Add one operator.

        Args:
            start_ns: Start of the operator.
            ended_ns: End of the operator.
            is_outside: The operator runs outside of forward and backward.
            flows: Gradients flow through the operator.
            reads: The operator reads a value out of a tensor.
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
"""Matmuls of aten, with the position of their first factor."""


def rows_of(function: Any, args: Any) -> int:
    """Return the number of rows of a matmul's first factor, or 0 for any other operator.

    In a forward pass, the rows are the samples, or positions, that are computed together.
    """
    at = _FACTORS.get(function._overloadpacket.__name__)
    return 0 if at is None else math.prod(args[at].shape[:-1])


def profile_one_step(recorder: Recorder) -> Callable[[], None]:
    """Measure an accelerator's work by its own clock until the returned function is called."""
    measured = accelerator.device_work(accelerator.in_use())

    def end() -> None:
        if measured is None or (work := measured()) is None:
            return
        kernels: defaultdict[str, float] = defaultdict(float)
        for name, ms in work.kernels_ms.items():
            kernels[name[:LONGEST_NAME]] += ms
        recorder.log.note(
            device_busy_ms=work.busy_ms, device_copies_ms=work.copies_ms, device_kernels_ms=kernels
        )

    return end


def note_rate(recorder: Recorder) -> None:
    """Log the GFLOP/s of a large matmul with the script's own settings and number format.

    If an accelerator computes in fp32, the rates of bf16 and tf32 are logged too.
    """
    import torch

    own = recorder.matmul_dtype or torch.float32
    recorder.log.note(matmul_gflops=matmul_rate_gflops(own))
    if accelerator.in_use() == "cpu" or own != torch.float32:
        return
    others = {"amp_bf16": matmul_rate_gflops(torch.bfloat16)}
    chosen = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        others["tf32"] = matmul_rate_gflops(own)
    finally:
        torch.set_float32_matmul_precision(chosen)
    recorder.log.note(other_gflops=others)


def matmul_rate_gflops(dtype: Any) -> float:
    """Return the best rate in GFLOP/s of a large matmul in this number format.

    It is measured on the device in use.
    """
    import torch

    device = accelerator.in_use()
    side = SIDE if device == "cpu" else SIDE_ON_ACCELERATOR
    with torch.no_grad():
        a = torch.rand(side, side, device=device).to(dtype)
        times = [_time_ns(lambda: a @ a) for _ in range(REPEATS)]
    return 2 * side**3 / min(times)


def note_optimizers(recorder: Recorder, within_s: float = math.inf) -> None:
    """Log the times of the script's optimizer and of its other implementations.

    They run on copies of the parameters and gradients. The number of repeats is reduced to stay
    within `within_s` seconds.
    """
    optimizer = recorder.optimizer() if recorder.optimizer is not None else None
    if optimizer is None or not _can_be_copied(optimizer):
        return
    stepping, first_ns = _variants_of(optimizer)
    repeats = int(max(1, min(REPEATS, within_s * 1e9 / max(1, first_ns * len(stepping)))))
    rounds = [{name: _time_ns(step) for name, step in stepping.items()} for _ in range(repeats)]
    medians = {name: sorted(each[name] for each in rounds)[repeats // 2] for name in stepping}
    recorder.log.note(optimizer_variants_ms={name: ns / 1e6 for name, ns in medians.items()})


def _variants_of(optimizer: Any) -> tuple[dict[str, Callable[[], Any]], int]:
    """Return the steps of optimizer copies by implementation, and the longest first step in ns."""
    variants = [variant for variant in VARIANTS if variant in optimizer.defaults]
    steps, longest_ns = {}, 0
    for name in ("as it is", *variants):
        chosen = {} if name == "as it is" else {v: v == name or None for v in variants}
        # An implementation may lack some devices and types.
        with contextlib.suppress(Exception):
            step = _copy(optimizer, chosen).step
            longest_ns = max(longest_ns, _time_ns(step))
            steps[name] = step
    return steps, longest_ns


def _can_be_copied(optimizer: Any) -> bool:
    """Return True if the optimizer has variants, plain parameters, and enough free memory."""
    device = accelerator.in_use()
    free = accelerator.free_gib(device) if device != "cpu" else None
    limit = LARGEST_COPY_BYTES if free is None else free * 2**30 / 2 / (1 + len(VARIANTS))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Parameters, gradients and two optimizer states.
    needed = 4 * sum(p.numel() * p.element_size() for p in parameters)
    plain = sys.modules["torch"].nn.Parameter
    return (
        any(variant in optimizer.defaults for variant in VARIANTS)
        and needed <= limit
        and all(type(p) is plain for p in optimizer.param_groups[0]["params"])
    )


def _time_ns(work: Callable[[], Any]) -> int:
    start = now_ns()
    work()
    accelerator.synchronize(accelerator.in_use())
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


class Losses:
    """Collects losses on their device, so that nothing waits for them until the end.

    Under gradient accumulation, scripts divide their losses, so the sum is the mean over the step.
    DeepSpeed divides them itself.
    """

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self.torch = torch
        self.steps: list[Any] = []
        self._sum: Any = None
        self._inside = False
        self._whole = True
        recorder.after_step.append(lambda step: self._ends_step())

    def backward(self, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a backward function and record its losses. Calls inside it are not recorded."""
        return self._within(plain, args, kwargs, 1.0, args)

    def engine_backward(
        self, plain: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call DeepSpeed's backward and record its loss."""
        parts = float(engine.gradient_accumulation_steps())
        return self._within(plain, (engine, *args), kwargs, parts, args[:1])

    def _within(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, parts: float, of: Any
    ) -> Any:
        outermost, self._inside = not self._inside, True
        if outermost:
            try:
                self._take(parts, of, kwargs)
            except Exception:
                self._whole = False
        try:
            return plain(*args, **kwargs)
        finally:
            self._inside = not outermost

    def _take(self, parts: float, args: Any, kwargs: Any) -> None:
        loss = _only(args[0] if args else kwargs.get("loss", kwargs.get("tensors")))
        if _only(args[1] if len(args) > 1 else kwargs.get("grad_tensors")) is not None:
            # These are gradients of a part of the model. The loss is not visible here.
            self._whole = False
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

    def scale(self, plain: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Call GradScaler.scale and remember the unscaled loss."""
        result = plain(scaler, outputs)
        if isinstance(result, self.torch.Tensor):
            result._trainpace_unscaled = outputs.detach()
        return result

    def per_step(self) -> list[float]:
        """Return one loss per step, or an empty list if the loss of any step was not seen."""
        return [float(value) for value in self.steps] if self._whole else []


def _only(value: Any) -> Any:
    """Return the only item of a list, or the value itself if it is not a list of one item."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


# ---- cores and threads

SETTLED_STEP = 3
"""Step after which delays are counted. Before it, other programs import and compile."""
DELAYED = 0.1
"""Least share of runnable time without a core at which a thread counts as delayed.

A judgement, not a measurement. In recordings of a busy day, the share was 0 to 0.03 without
disturbance. The share that makes a verdict wrong was never measured.
"""
TRAINS_WITHIN_S = 10.0
"""Longest time in seconds since the last write of a process that still trains.

Even a slow process flushes its log in this time.
"""


class Scheduled(NamedTuple):
    """Nanoseconds since a thread began: on a core, and waiting for a core."""

    thread: int
    ran_ns: int
    waited_ns: int


def scheduled(thread: int | None = None) -> Scheduled | None:
    """Return the times of a thread, by default this one. None if the system does not report them.

    Helper threads do not count. They give up their core while they wait for work, so they would
    seem to lack a core.
    """
    thread = thread or threading.get_native_id()
    times = thread_times(thread)
    return None if times is None else Scheduled(thread, *times)


def begin_counting_delays(recorder: Recorder) -> None:
    recorder.scheduled = scheduled()


def delayed_share(since: Scheduled | None) -> float | None:
    """Return the share of runnable time since `since` without a core, or None if unknown."""
    if since is None or (now := scheduled(since.thread)) is None or now.ran_ns <= since.ran_ns:
        return None
    ran, waited = now.ran_ns - since.ran_ns, max(0, now.waited_ns - since.waited_ns)
    return waited / (ran + waited)


def own_threads() -> int:
    return int(sys.modules["torch"].get_num_threads())


def computes_with(threads: int) -> None:
    sys.modules["torch"].set_num_threads(threads)


def fewer_threads(recorder: Recorder) -> int:
    """Return the number of threads to try, or 0 if the script has enough cores.

    With more threads than cores, threads wait for each other at the end of every operator. The
    clock of a single thread does not show this, so an intervention is needed.
    """
    threads = own_threads()
    fair = max(1, usable_cores() // (1 + len(training_beside(recorder.log.path))))
    if fair < threads:
        return fair
    waited = delayed_share(recorder.scheduled)
    return 1 if threads > 1 and waited is not None and waited >= DELAYED else 0


def training_beside(own_log: str) -> list[str]:
    """Return the logs of other processes of this command on this host that are training now."""
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
# glibc returns the memory of large tensors to the system when they are freed. Linux clears each
# page again when the next tensor needs it.

PAGES = 16 * 2**20 // mmap.PAGESIZE
"""Pages in one round of the measurement: 16 MiB."""
ROUNDS = 3
GLIBC_SETTING = "MALLOC_MMAP_MAX_"
"""Environment variable that makes glibc keep freed memory."""


def page_faults() -> int | None:
    """Return the number of page faults of this process that needed no disk.

    None if its C library is not glibc, or if the user chose how memory is allocated.
    """
    try:
        import resource

        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ImportError, ValueError, OSError):
        return None
    chosen = GLIBC_SETTING in os.environ or "malloc" in os.environ.get("LD_PRELOAD", "")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if is_glibc and not chosen else None


class PageFaults:
    """Page faults of the steps that Trainpace leaves alone: no counting, no other batches."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: int | None = None
        self._noted = False
        self._by_step: list[int] = []

    def begins_step(self) -> None:
        self._before = page_faults()

    def ends_step(self) -> None:
        """End a step, which counts if `begins_step` was called before it."""
        if self._before is not None and (now := page_faults()) is not None:
            self._by_step.append(now - self._before)
        self._before = None

    def note(self) -> None:
        """Log the median at the first call with counted steps."""
        if self._by_step and not self._noted:
            self._noted = True
            self._recorder.log.note(page_faults=float(statistics.median(self._by_step)))


def page_fault_ns() -> float | None:
    """Return the time of one page fault in ns, from the fastest of several rounds."""
    rounds = (_page_fault_round_ns() for _ in range(ROUNDS))
    return min((ns for ns in rounds if ns is not None), default=None)


def _page_fault_round_ns() -> float | None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        with contextlib.suppress(AttributeError, OSError):  # The system has no huge pages.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        before, began = page_faults(), time.perf_counter_ns()
        memory[:: mmap.PAGESIZE] = bytes(PAGES)
        took, after = time.perf_counter_ns() - began, page_faults()
    return None if before is None or after is None or after <= before else took / (after - before)
