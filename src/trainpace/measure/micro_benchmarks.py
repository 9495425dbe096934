"""Process that times operators on this machine's CPU to calibrate forecasts.

It is started as ``python -m trainpace.measure.micro_benchmarks``. The timed operators are parts of
small blocks of layers, drawn by seed from the shapes that people train. No block is a real model.
The process times blocks instead of single operators because the time of an operator depends on
what ran before it: outputs go to fresh memory, and backward reads what forward wrote. Each block
has an optimizer step, so forward, backward and update are all timed.
"""

import math
import platform
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from msgspec.structs import replace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Device, Figure
from trainpace.core.records import to_json
from trainpace.core.worker import serve
from trainpace.forecast import (
    FUSED,
    CalibratedKernels,
    Forecaster,
    MachineModel,
    MachineRoofline,
    OperatorTimings,
    Target,
    fit_classes,
)
from trainpace.measure.calibration import MachineProfile
from trainpace.measure.detection import Machine, environment
from trainpace.measure.networks import NETWORKS
from trainpace.workload import (
    MOST_SIZES,
    Row,
    Task,
    Variant,
    make_optimizer,
    map_tensors,
    rows_of,
    trace_task,
)

BLOCKS_OF_A_GROUP = 10
PASSES = 4
"""Number of timed passes of every group, after a warm-up pass.

The second fastest pass counts, because disturbances only add time.
"""
BLOCKS_SHARE = 0.7
"""Share of the time that is spent on blocks. The rest is spent on whole networks."""
MOST_OF_A_CLASS = 200
SECONDS_OF_A_NETWORK = 0.8
FEWEST_STEPS = 5
WARMUP_STEPS = 2


def _calibrate(seconds: float, machine: Machine) -> MachineProfile:
    """Calibrate this machine for about `seconds`, with torch's current number of threads."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    form = _roofline()
    timed: list[TimedRow] = []
    spreads: list[float] = []
    # Timing the same group at the start, in the middle and at the end shows the machine's drift.
    canaries = [_canary_s()]
    seed = 0
    for share in (BLOCKS_SHARE / 2, BLOCKS_SHARE):
        while not timed or time.perf_counter() - begin < share * seconds:
            rows, spread = _time_group(range(seed, seed + BLOCKS_OF_A_GROUP))
            timed += rows
            spreads.append(spread)
            seed += BLOCKS_OF_A_GROUP
        canaries.append(_canary_s())
    timings, device = _timings(timed, form), _device(form, machine)
    per_operator, per_view, per_module = _host_us()
    operators = MachineModel(
        timings=timings,
        flop_per_s=form.flop_per_s,
        bytes_per_s=form.bytes_per_s,
        start_us=1e6 * form.start_s,
        host_us_per_operator=per_operator,
        host_us_per_view=per_view,
        host_us_per_module=per_module,
        basis=f"{len(timings)} operators timed on this machine",
    )
    return MachineProfile(
        device=device,
        kernels=replace(
            operators, step_factors=tuple(_step_factors(operators, device, begin + seconds))
        ),
        environment=environment("cpu"),
        machine=machine,
        spread=statistics.median(spreads),
        drift=max(canaries) / min(canaries) - 1,
    )


class TimedRow(NamedTuple):
    row: Row
    seconds: float


class OperatorTimer(TorchDispatchMode):
    """Dispatch mode that times every ATen call below autograd.

    `rows` are the rows of a trace, with seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[TimedRow] = []
        self.seconds = 0.0
        """Total time in operators, without the time between them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.convolution_backward.default:
            return self._time(func, args, kwargs or {})
        # Make one call per gradient, since a trace has a row for each gradient.
        *others, mask = args
        of_input = self._time(func, (*others, [mask[0], False, False]), {})[0] if mask[0] else None
        if not (mask[1] or mask[2]):
            return of_input, None, None
        _, of_weight, of_bias = self._time(func, (*others, [False, mask[1], mask[2]]), {})
        return of_input, of_weight, of_bias

    def _time(self, func: Any, args: Any, kwargs: Any) -> Any:
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        rows = rows_of(func, *(map_tensors(_on_meta, tree) for tree in (args, kwargs, out)))
        if rows:  # the first row stands for the whole call, including extras on a CPU (a bias)
            self.rows.append(TimedRow(rows[0], seconds))
        return out


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _step_of_blocks(seeds: range) -> Callable[[], list[TimedRow]]:
    """Return a function that runs and times a step of these blocks, as if they were one network.

    All blocks run forward, then backward in reverse order, then the optimizers. So saved tensors,
    caches and the allocator are in the same state as in a training.
    """
    blocks = [block(seed) for seed in seeds]
    optimizers: list[torch.optim.Optimizer] = []
    for seed, made in zip(seeds, blocks, strict=True):
        parameters = made.module.train().parameters()
        sgd = seed % 2
        optimizers.append(
            torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
            if sgd
            else torch.optim.AdamW(parameters, lr=1e-3)
        )

    def step() -> list[TimedRow]:
        inputs = [made.make_input() for made in blocks]
        timer = OperatorTimer()
        with timer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for stepper in optimizers:
                stepper.zero_grad(set_to_none=True)
            losses = [made.module(x) for made, x in zip(blocks, inputs, strict=True)]
            for loss in reversed(losses):
                loss.backward()
            for stepper in optimizers:
                stepper.step()
        return timer.rows

    return step


def _time_group(seeds: range) -> tuple[list[TimedRow], float]:
    """Time a group of blocks.

    Returns:
        Every operator with its second fastest time over the passes, and the spread of the total
        time, (median - fastest) / fastest.
    """
    step = _step_of_blocks(seeds)
    step()  # warm up, and create the optimizers' states
    passes = [step() for _ in range(PASSES)]
    rows = [
        TimedRow(same[0].row, sorted(timed.seconds for timed in same)[1])
        for same in zip(*passes, strict=True)
    ]
    totals = [sum(timed.seconds for timed in rows) for rows in passes]
    return rows, statistics.median(totals) / min(totals) - 1


def _timings(timed: list[TimedRow], form: MachineRoofline) -> OperatorTimings:
    """Collect timed operators with a fit for each class.

    At most MOST_OF_A_CLASS operators per class are kept, which makes forecasts fast.
    """
    on_device = [
        t for t in timed if t.row.launches > 0 and t.row.function not in FUSED and t.seconds > 0
    ]
    classes = _table(on_device).classes()
    seen: Counter[str] = Counter()
    chosen = []
    for i in np.random.default_rng(0).permutation(len(on_device)).tolist():
        seen[classes[i]] += 1
        if seen[classes[i]] <= MOST_OF_A_CLASS:
            chosen.append(on_device[i])
    table = _table(chosen)
    return replace(table, fits=fit_classes(table, form))


def _table(timed: list[TimedRow]) -> OperatorTimings:
    rows = [t.row for t in timed]
    return OperatorTimings(
        kind=tuple(r.kind for r in rows),
        function=tuple(r.function for r in rows),
        half=np.array([r.half for r in rows]),
        flops=np.array([r.flops for r in rows]),
        bytes=np.array([r.read_bytes + r.written_bytes for r in rows]),
        dims=np.array([[*r.dims, *([0] * (MOST_SIZES - len(r.dims)))] for r in rows], dtype=float),
        seconds=np.array([float(f"{t.seconds:.4g}") for t in timed]),
        fits={},
    )


def _roofline() -> MachineRoofline:
    """Measure the highest FLOP/s and bandwidth of large operators, and the time of a tiny one."""
    square = torch.randn(1024, 1024)
    x = torch.randn(4 * 2**20)
    one = torch.ones(1)
    return MachineRoofline(
        flop_per_s=2 * 1024.0**3 / _fastest_s(lambda: square @ square),
        # Write a new output each time, as in training. On a CPU, page faults of fresh memory take
        # longer than the memory traffic itself.
        bytes_per_s=2 * 4.0 * x.numel() / _fastest_s(lambda: torch.relu(x)),
        start_s=_fastest_s(lambda: torch.relu(one)),
    )


def _fastest_s(work: Callable[[], Any], rounds: int = 7) -> float:
    work()
    start = time.perf_counter()
    work()
    calls = max(1, int(0.02 / max(time.perf_counter() - start, 1e-7)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def _canary_s() -> float:
    return sum(timed.seconds for timed in _time_group(range(BLOCKS_OF_A_GROUP))[0])


def _host_us() -> tuple[float, float, float]:
    """Measure the host's overhead per operator, view and module in us, with tiny operators."""
    layers = 20
    parts = lambda *more: [m for _ in range(layers) for m in (nn.Linear(4, 4), nn.ReLU(), *more)]  # noqa: E731
    plain = _fastest_s(step := tiny_step(parts()))
    timer = OperatorTimer()
    with timer:
        step()
    device_s = sum(t.seconds for t in timer.rows if t.row.launches > 0)
    launches = sum(t.row.launches for t in timer.rows)
    modules = _fastest_s(tiny_step(parts(nn.Identity(), nn.Identity()))) - plain
    # An Unflatten and a Flatten are two modules and, including backward, four views.
    views = _fastest_s(tiny_step(parts(nn.Unflatten(1, (2, 2)), nn.Flatten()))) - plain - modules
    module_us = max(0.0, 1e6 * modules / (2 * layers))
    operator_us = max(0.0, 1e6 * (plain - device_s) - module_us * 2 * layers) / launches
    return operator_us, max(0.0, 1e6 * views / (4 * layers)), module_us


def _device(form: MachineRoofline, machine: Machine) -> Device:
    gib = machine.memory_limit_gib or machine.memory_gib

    def measured(value: float) -> Figure:
        return Figure(value=value, source="micro-benchmark on this machine", kind="measured")

    return Device(
        name=machine.cpu.name or platform.machine(),
        vendor="",
        architecture=platform.machine(),
        kind="cpu",
        fp32_tflops=measured(form.flop_per_s / 1e12),
        memory_bandwidth_gb_per_s=measured(form.bytes_per_s / 1e9),
        memory_gib=None if gib is None else measured(gib),
    )


def _step_factors(model: MachineModel, device: Device, end: float) -> Iterator[float]:
    """Yield measured / forecast step time for at least three networks, and for more until `end`.

    The ratio covers colder caches, the allocator and the interpreter between operators. It corrects
    every forecast for this machine, and its scatter gives the interval of forecasts.
    """
    target = Target(Cluster(device=device), CalibratedKernels(model))
    for i, (build, batch) in enumerate(NETWORKS):
        if i >= 3 and time.perf_counter() > end:
            return
        task = build()
        workload = trace_task(task, ("fp32",), Variant("sgd_momentum", cpu=True))
        forecast = Forecaster(workload, target).forecast(Execution(micro_batch=batch))
        if forecast.step is None:
            raise TrainpaceError(
                f"calibration failed: the reference model {task.name} cannot be forecast"
                f" ({forecast.reason})"
            )
        yield _step_ms(build(), batch) / forecast.step.total_ms


def _step_ms(task: Task, batch: int) -> float:
    stepper = make_optimizer("sgd_momentum", task.model.train())
    samples = task.make_batch(batch)
    times: list[float] = []
    end = time.perf_counter() + SECONDS_OF_A_NETWORK
    while len(times) < WARMUP_STEPS + FEWEST_STEPS or time.perf_counter() < end:
        start = time.perf_counter()
        stepper.zero_grad(set_to_none=True)
        task.loss(task.model, samples).backward()
        stepper.step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARMUP_STEPS:])


def _work(request: dict[str, Any]) -> str:
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    return to_json(_calibrate(request["seconds"], msgspec.convert(request["machine"], Machine)))


LARGEST_FLOPS = 1e9
"""Maximum FLOPs of one operator of a block. It takes about 10 ms on a small CPU.

Larger operators have the same efficiency.
"""
LARGEST_BYTES = 5e7
FEWEST_FLOPS = 2e6

_ACTIVATIONS: list[Callable[[], nn.Module]] = [
    lambda: nn.ReLU(inplace=True),
    nn.ReLU,
    lambda: nn.ReLU6(inplace=True),
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.Tanh,
]


class Block(NamedTuple):
    """Module with a scalar loss as its output, and a function that makes its input."""

    module: nn.Module
    make_input: Callable[[], torch.Tensor]


def block(seed: int) -> Block:
    """Draw a random block by seed.

    On average, 57 of 100 blocks are convolutional, 22 are linear, 10 are attention, 8 are
    embeddings with a loss over a vocabulary, and 3 have large parameters with little computation.
    """
    draw = random.Random(f"kit:{seed}")
    kinds: tuple[Callable[[random.Random], Block], ...] = (
        _convolutional,
        _linear,
        _attention,
        _language_head,
        _large_parameters,
    )
    kind = draw.choices(kinds, weights=(57, 22, 10, 8, 3))[0]
    return kind(draw)


class _Loss(nn.Module):
    """Sequence of layers with an optional residual addition. The loss is the mean of the output."""

    def __init__(self, layers: list[nn.Module], residual_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.residual_at = residual_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.residual_at:
                x = x + x.detach()
        return x.mean()


class _Shape(NamedTuple):
    """Shape of a convolution: batch size, image side, channels and options of the layer."""

    n: int
    side: int
    c_in: int
    c_out: int
    kernel: int
    stride: int
    groups: int

    @property
    def out(self) -> int:
        return -(-self.side // self.stride)

    @property
    def is_usual(self) -> bool:
        """True if people train such shapes, and the operator is neither too slow nor too fast."""
        weights = self.c_out * (self.c_in // self.groups) * self.kernel**2
        flops = 2.0 * self.n * self.out**2 * weights
        traffic = 4.0 * self.n * (self.c_in * self.side**2 + self.c_out * self.out**2)
        small = flops <= LARGEST_FLOPS and traffic <= LARGEST_BYTES and weights <= 3e6
        return self.kernel <= self.side and small and flops + 20 * traffic > FEWEST_FLOPS


def _shape(draw: random.Random) -> _Shape:
    while True:
        n, side = (
            draw.choice([1, 2, 4, 8, 16, 32]),
            draw.choice([4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 112]),
        )
        kernel, stride = draw.choice([1, 1, 1, 3, 3, 3, 3, 5, 7]), draw.choice([1, 1, 1, 2])
        c_in = draw.choice([3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
        c_out = draw.choice([16, 24, 32, 64, 96, 128, 160, 256, 512, 768, 1024, 2048])
        groups = 1
        family = draw.random()
        if family < 0.25:
            groups, c_out, kernel = c_in, c_in, draw.choice([3, 3, 5, 7])
        elif family < 0.33 and c_in % 16 == 0 and c_out % 16 == 0:
            groups = draw.choice([2, 4, 8, 16])
        shape = _Shape(n, side, c_in, c_out, kernel, stride, groups)
        if shape.is_usual:
            return shape


def _convolutional(draw: random.Random) -> Block:
    n, side, c_in, c_out, kernel, stride, groups = shape = _shape(draw)
    before: nn.Module = nn.BatchNorm2d(c_in) if draw.random() < 0.5 else nn.Identity()
    bias = draw.random() < 0.3
    layers = [before, nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=bias)]
    norm = draw.random()
    if norm < 0.85:
        layers.append(
            nn.GroupNorm(8, c_out) if norm > 0.75 and c_out % 8 == 0 else nn.BatchNorm2d(c_out)
        )
    residual_at = len(layers) - 1 if draw.random() < 0.4 else None
    layers.append(draw.choice(_ACTIVATIONS)())
    pooling = draw.random()
    if pooling < 0.2 and shape.out >= 4:
        layers.append(draw.choice([nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)]))
    elif pooling < 0.35:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Block(
        _Loss(layers, residual_at), lambda: torch.randn(n, c_in, side, side, requires_grad=True)
    )


def _linear(draw: random.Random) -> Block:
    while True:
        rows = draw.choice([1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
        width = draw.choice([32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 4096])
        out = draw.choice([10, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192])
        if 1e5 < 2.0 * rows * width * out < 1.2 * LARGEST_FLOPS and width * out < 1.3e7:
            break
    samples = draw.choice([1, 2, 4, 8])
    shape = (
        (samples, rows // samples, width)
        if rows % samples == 0 and rows > samples
        else (rows, width)
    )
    layers: list[nn.Module] = [nn.LayerNorm(width)] if draw.random() < 0.5 else []
    layers.append(nn.Linear(width, out, bias=draw.random() < 0.7))
    after: list[Callable[[], nn.Module]] = [
        nn.GELU,
        nn.ReLU,
        nn.SiLU,
        lambda: nn.Dropout(0.1),
        nn.Identity,
    ]
    layers.append(draw.choice(after)())
    return Block(_Loss(layers, len(layers) - 1), lambda: torch.randn(shape, requires_grad=True))


class _Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int, explicit: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.explicit, self.causal = heads, head_dim, explicit, causal
        self.qkv = nn.Linear(heads * head_dim, 3 * heads * head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if self.explicit:
            y = ((q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(n, tokens, -1)


def _attention(draw: random.Random) -> Block:
    heads, head_dim = draw.choice([2, 4, 6, 8, 12]), draw.choice([32, 48, 64, 64, 128])
    n, tokens = draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 64, 128, 197, 256, 512])
    while 4.0 * n * heads * tokens**2 * head_dim > LARGEST_FLOPS:
        tokens //= 2
    layer = _Attention(heads, head_dim, explicit=draw.random() < 0.4, causal=draw.random() < 0.4)
    return Block(
        _Loss([layer]), lambda: torch.randn(n, tokens, heads * head_dim, requires_grad=True)
    )


class _LanguageHead(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), tokens.flatten())


def _language_head(draw: random.Random) -> Block:
    vocabulary, width = (
        draw.choice([100, 1000, 5000, 20000, 32000]),
        draw.choice([64, 128, 256, 384]),
    )
    n, tokens = draw.choice([1, 4, 8]), draw.choice([16, 32, 64, 128])
    while 2.0 * n * tokens * vocabulary * width > LARGEST_FLOPS:
        tokens //= 2
    return Block(
        _LanguageHead(vocabulary, width), lambda: torch.randint(0, vocabulary, (n, tokens))
    )


class _LargeParameters(nn.Module):
    """Module with as many parameters as a whole model.

    It is for timing optimizers, because their operators update all parameters at once.
    """

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(elements) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part * x).sum() for part in self.parts)


def _large_parameters(draw: random.Random) -> Block:
    tensors = draw.choice([4, 10, 40, 150])
    elements = int(10 ** draw.uniform(6.0, 7.6)) // tensors
    return Block(_LargeParameters(tensors, elements), lambda: torch.ones(1))


def tiny_step(layers: list[nn.Module]) -> Callable[[], Any]:
    """Return a function that runs forward and backward of these layers on 2 samples.

    The layers must take 4 features.
    """
    model = nn.Sequential(*layers)
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step


if __name__ == "__main__":
    serve(_work)
