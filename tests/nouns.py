"""Small examples of every record type for the tests."""

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Device, Figure, find_device
from trainpace.core.outcome import Interval, Measurement, StepTime
from trainpace.forecast import (
    CalibratedKernels,
    FittedKernels,
    Forecaster,
    Grid,
    MachineModel,
    Target,
    fitted_constants,
)
from trainpace.forecast.memory import MemoryModel
from trainpace.forecast.timings import MachineRoofline, OperatorTimings, fit_classes
from trainpace.job import ASSUMED, JobConditions, Question, Schedule, answer, with_job
from trainpace.measure import MachineProfile
from trainpace.measure.detection import detect
from trainpace.plan import Change, Plan
from trainpace.workload import Blocks, MemoryProfile, Operators, TracedForm, Workload, form_of

FORM = MachineRoofline(flop_per_s=1e11, bytes_per_s=1e10, start_s=1e-6)
"""Of an invented CPU."""


def operators(m=4096, n=4096, k=4096, half=False) -> Operators:
    """One GEMM whose m grows with the batch, forward and backward, and an optimizer row."""
    size = 2 if half else 4
    dims = np.zeros((3, 16, 2))
    dims[:2, 0, 0], dims[:2, 1, 1], dims[:2, 2, 0], dims[:2, 3, 0] = 1, m, n, k
    elements = float(n * k)
    return Operators(
        kind=("gemm", "gemm", "optimizer"),
        function=("addmm", "mm", "_foreach_add_"),
        phase=("forward", "backward", "optimizer"),
        module=("layer", "layer", ""),
        half=np.array([half, half, False]),
        count=np.array([1, 2, 1]),
        launches=np.array([1, 1, 1]),
        flops=np.array([[0, 2.0 * m * n * k], [0, 2.0 * m * n * k], [elements, 0]]),
        read_bytes=np.array(
            [[size * elements, size * m * k], [size * elements, size * m * k], [12 * elements, 0]]
        ),
        written_bytes=np.array([[0.0, size * m * n], [0.0, size * m * n], [8 * elements, 0]]),
        dims=dims,
    )


def blocks(count=4) -> Blocks:
    """Blocks of a transformer whose only row inside the blocks is the first."""
    return Blocks(
        module="layers",
        count=count,
        heads=8,
        key_value_heads=2,
        parameters=2**20,
        tensor_parameters=2**19,
        outside_parameters=2**20,
        outside_tensor_parameters=2**18,
        tied_parameters=0,
        operator_counts=np.array([1, 0, 0]),
        roles=("column", "", ""),
        input_bytes=(0.0, 100.0),
        saved_bytes=(8.0, 1000.0),
        sharded_saved_bytes=(0.0, 800.0),
        attention_saved_bytes=(0.0, 300.0),
        working_bytes=(0.0, 400.0),
        outside_saved_bytes=(0.0, 500.0),
    )


def workload(**sizes) -> Workload:
    """A model of one linear layer."""
    traced = {}
    for form, half in (("fp32", False), ("amp", True), ("half", True)):
        memory = MemoryProfile(
            parameter_bytes=2.0**26,
            optimizer_bytes=2.0**26,
            peaks=np.array([[0.0, 100.0, 2.0**24], [2.0**26, 10.0, 2.0**20]]),
        )
        traced[form] = TracedForm(operators=operators(half=half, **sizes), memory=memory)
    return Workload(
        model="one layer",
        parameters=2**24,
        trainable_parameters=2**24,
        optimizer="sgd_momentum",
        sample="a vector",
        sequence_length=None,
        traced_batches=(2, 3, 5),
        forms=traced,
    )


HIDDEN, TOKENS, VOCABULARY, HEADS, LAYERS = 1024, 512, 8192, 16, 8
"""Of the invented transformer below."""


def _stacked_form(half: bool, h: int) -> TracedForm:
    """LAYERS blocks of a column matmul, fused attention, a row matmul and a norm, between embedding and head."""
    size, t = (2 if half else 4), TOKENS
    rows: list[tuple] = []  # kind, function, phase, role, count, dims, flops, read, written

    def product(phase, role, count, m, n, k, tokens):
        dims = np.zeros((16, 2))
        dims[0, 0] = 1
        for axis, length in ((1, m), (2, n), (3, k)):
            dims[axis, 1 if axis == tokens else 0] = length
        read, written = np.zeros(2), np.zeros(2)
        for (i, j), into in (((1, 3), read), ((3, 2), read), ((1, 2), written)):
            into[1 if tokens in (i, j) else 0] += size * dims[i].sum() * dims[j].sum()
        rows.append(("gemm", "mm", phase, role, count, dims, (0, 2.0 * m * n * k), read, written))

    def weight(role, count, inputs, outputs):
        product("forward", role, count, t, outputs, inputs, 1)
        product("backward", role, count, t, inputs, outputs, 1)
        product("backward", role, count, outputs, inputs, t, 3)

    weight("column", LAYERS, h, 3 * h)
    weight("row", LAYERS, h, h)
    weight("column", 1, h, VOCABULARY)
    for kind, phase, products in (
        ("attention", "forward", 2),
        ("attention_backward", "backward", 5),
    ):
        dims = np.zeros((16, 2))
        dims[0, 1], dims[1:6, 0] = 1, (HEADS, t, t, h // HEADS, 1)
        rows.append(
            (
                kind,
                kind,
                phase,
                "sharded",
                LAYERS,
                dims,
                (0, products * 1.0 * t * t * h),
                (0, 3 * size * t * h),
                (0, size * t * h),
            )
        )
    for phase in ("forward", "backward"):
        moved = (0, 2 * size * t * h)
        rows.append(
            (
                "norm",
                "native_layer_norm",
                phase,
                "replicated",
                LAYERS,
                np.zeros((16, 2)),
                (0, 5.0 * t * h),
                moved,
                moved,
            )
        )
        rows.append(
            ("embedding", "embedding", phase, "", 1, np.zeros((16, 2)), (0, 0), moved, moved)
        )
    block, outside = 4 * h * h + h, 2 * VOCABULARY * h
    numbers = LAYERS * block + outside
    rows.append(
        (
            "optimizer",
            "_foreach_add_",
            "optimizer",
            "",
            1,
            np.zeros((16, 2)),
            (4.0 * numbers, 0),
            (12.0 * numbers, 0),
            (8.0 * numbers, 0),
        )
    )
    kind, function, phase, roles, count, dims, flops, read, written = zip(*rows, strict=True)
    table = Operators(
        kind=kind,
        function=function,
        phase=phase,
        module=("",) * len(rows),
        half=np.array([half and p != "optimizer" for p in phase]),
        count=np.array(count),
        launches=np.ones(len(rows), int),
        flops=np.array(flops, float),
        read_bytes=np.array(read, float),
        written_bytes=np.array(written, float),
        dims=np.stack(dims),
    )
    saved, hidden = 8.0 * size * t * h, float(size * t * h)
    head, working = 2.0 * size * t * VOCABULARY, 3.0 * size * t * h
    activations = LAYERS * saved + head + working
    blocks = Blocks(
        module="layers",
        count=LAYERS,
        heads=HEADS,
        key_value_heads=HEADS // 2,
        parameters=block,
        tensor_parameters=4 * h * h,
        outside_parameters=outside,
        outside_tensor_parameters=outside,
        tied_parameters=0,
        operator_counts=np.array([LAYERS if n == LAYERS else 0 for n in count]),
        roles=roles,
        input_bytes=(0.0, hidden),
        saved_bytes=(0.0, saved),
        sharded_saved_bytes=(0.0, 0.6 * saved),
        attention_saved_bytes=(0.0, 0.0),
        working_bytes=(0.0, working),
        outside_saved_bytes=(0.0, head),
        after_saved_bytes=(0.0, head),
    )
    peaks = np.array([[0.0, 0.0, activations], [float(size * numbers), 0.0, hidden]])
    memory = MemoryProfile(
        parameter_bytes=float(size * numbers), optimizer_bytes=2.0 * size * numbers, peaks=peaks
    )
    return TracedForm(operators=table, memory=memory, blocks=blocks)


def stacked(hidden: int = HIDDEN) -> Workload:
    """A small transformer with repeated blocks."""
    forms = {"fp32": _stacked_form(False, hidden), "half": _stacked_form(True, hidden)}
    assert forms["half"].blocks is not None
    numbers = int(forms["half"].memory.parameter_bytes / 2)
    return Workload(
        model="eight blocks",
        parameters=numbers,
        trainable_parameters=numbers,
        optimizer="adam",
        sample="a text",
        sequence_length=TOKENS,
        traced_batches=(2, 3, 5),
        forms=forms,
    )


def forecast(workload, execution, cluster, schedule=None, model=None, host_factor=1.0):
    """One forecast by its own forecaster. `model` is the calibration of a machine."""
    kernels = FittedKernels(host_factor=host_factor) if model is None else CalibratedKernels(model)
    priced = replace(ASSUMED, price_usd_per_device_hour=cluster.price_usd_per_device_hour)
    alone = Forecaster(workload, Target(cluster, kernels)).forecast(execution)
    return with_job(alone, workload, schedule, priced)


def measurement() -> Measurement:
    return Measurement(
        model="one layer",
        device="cpu",
        execution=Execution(micro_batch=8),
        step_times_ms=(3.0, 3.1, 3.2),
        warmup_ms=(9.0,),
        step=StepTime(forward_ms=1.0, backward_ms=2.0, idle_ms=0.1),
        median_ms=3.1,
        interval_ms=Interval(low=3.0, high=3.2, coverage=0.9, basis="three steps"),
        peak_memory_gib=None,
        losses=(1.0, 0.5),
        environment={"torch": "2"},
    )


def timed_products(n=60, slowdown=1.5, noise=0.02, seed=0) -> OperatorTimings:
    """Matmuls that take `slowdown` times the roofline."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.uniform(np.log(32), np.log(4096), (n, 3)))
    dims = np.zeros((n, 16))
    dims[:, 0], dims[:, 1:4] = 1, sizes
    flops = 2 * sizes.prod(axis=1)
    traffic = 4 * (
        sizes[:, 0] * sizes[:, 1] + sizes[:, 1] * sizes[:, 2] + sizes[:, 0] * sizes[:, 2]
    )
    kind = ("gemm",) * n
    seconds = FORM.seconds(kind, flops, traffic) * slowdown * np.exp(draw.normal(0, noise, n))
    table = OperatorTimings(
        kind=kind,
        function=("mm",) * n,
        half=np.zeros(n, bool),
        flops=flops,
        bytes=traffic,
        dims=dims,
        seconds=seconds,
        fits={},
    )
    return replace(table, fits=fit_classes(table, FORM))


def at_peak(memory: MemoryProfile, batch: int) -> tuple[float, float]:
    """Return (gradient bytes, activation bytes) at the peak memory of a step."""
    activation = memory.peaks[:, 1] + memory.peaks[:, 2] * batch
    peak = int(np.argmax(memory.peaks[:, 0] + activation))
    return float(memory.peaks[peak, 0]), float(activation[peak])


def machine_model(**changes) -> MachineModel:
    model = MachineModel(
        timings=timed_products(),
        flop_per_s=FORM.flop_per_s,
        bytes_per_s=FORM.bytes_per_s,
        start_us=1.0,
        host_us_per_operator=2.0,
        host_us_per_view=1.0,
        host_us_per_module=3.0,
        basis="a test",
    )
    return replace(model, **changes)


def cpu() -> Device:
    figure = Figure(value=0.1, source="micro-benchmark", kind="measured")
    return Device(
        name="this CPU",
        vendor="",
        architecture="",
        kind="cpu",
        fp32_tflops=figure,
        memory_bandwidth_gb_per_s=replace(figure, value=10.0),
    )


def machine_profile() -> MachineProfile:
    return MachineProfile(
        device=cpu(),
        kernels=machine_model(),
        environment={},
        machine=detect(),
        spread=0.1,
        drift=0.05,
    )


def every_noun():
    schedule = Schedule(samples=1000, epochs=3.0)
    conditions = JobConditions(evaluate_every_steps=10, evaluation_s=2.0)
    a100 = Cluster(device=find_device("A100"), price_usd_per_device_hour=1.5)
    start = Execution(micro_batch=8)
    return [
        machine_model(),
        machine_profile(),
        schedule,
        conditions,
        start,
        a100,
        a100.device,
        workload(),
        StepTime(forward_ms=1.5),
        measurement(),
        fitted_constants(),
        forecast(workload(), start, a100, schedule),
        Plan(
            start=start,
            changes=(
                Change(title="bf16", execution=Execution(precision="bf16"), forecast_saved_s=3.0),
            ),
        ),
        answer(Question(schedule=schedule, conditions=conditions, micro_batch=8, step_time_s=0.1)),
    ]


def memory_model(form, execution):
    return MemoryModel(form, form_of(execution.precision) == "half")


def step_memory(form, execution, is_gpu):
    return memory_model(form, execution).at(Grid.of([execution]), is_gpu).record(0)
