"""Health checks of this machine.

Each part of the examination measures something in its own process. A part that fails, crashes or
hangs does not stop the others. The checks that judge the measured values are pure functions.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from trainpace.core.errors import TimedOut, TrainpaceError
from trainpace.core.hardware import Device
from trainpace.core.outcome import Interval, Measurement
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated
from trainpace.measure import (
    Conditions,
    Machine,
    clock_in_words,
    device_here,
    measure,
    measure_allreduce,
    measure_storage,
    warnings_of,
)
from trainpace.watch import read_recording, watch

Status = Literal["ok", "note", "problem", "failed"]
PARTS_MODULE = "trainpace.diagnose.health_probes"
PART_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 180.0
WRITTEN_BYTES = 64 * 2**20
MODEL, BATCH, BATCH_ALONE = "resnet18", 64, 4
"""Model and batch size of the known step, the training step that every device is measured with.

BATCH_ALONE is the batch size for CPUs, and for devices without a forecast to compare with.
"""
ALLOCATED_GIB = 64 / 1024
CLOCKS_AGREE = 0.1
"""Tolerated relative difference between the device's clock and the host's clock.

The host's clock also sees the launch of the first kernel and the wait for the last kernel.
"""
LEAST_MATMUL_SHARE = 0.45
"""Minimum share of the datasheet's peak that a healthy card reaches in large matmuls.

Matmuls of about 1 TFLOP reach medians of 0.50 to 0.95 of the peak on cards from A100 to B300,
depending on the library (measurements of NVIDIA's aiconfigurator).
"""
LEAST_PINNED_SHARE = 0.5
"""Minimum share of the PCIe rate that copies from pinned memory reach on a healthy machine."""
ELSEWHERE_SHARE = 0.6
"""Share of the nearest public measurement below which the comparison becomes a note."""
PCIE_GB_PER_S_A_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe rate in GB/s per lane and direction, by generation.

Source: PCI-SIG, PCI Express Base Specification.
"""
LEAST_SHARED_MEMORY_GIB = 1.0
"""Minimum size of shared memory for loader workers, in GiB.

Batches of images need hundreds of MiB. Docker gives containers 64 MiB, and loader workers then end
with "bus error".
"""
_PEAKS = {
    "fp32": ("fp32_tflops",),
    "tf32": ("tf32_tensor_tflops",),
    "bf16": ("bf16_tensor_tflops",),
    "fp16": ("fp16_tensor_tflops", "fp16_tflops"),
}
WATCHED = """import signal
signal.alarm({seconds})  # a device that hangs ends this part alone
import torch
model = torch.nn.Linear(64, 64).to("{kind}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="{kind}")).sum().backward()
    optimizer.step()
"""
STEPS_WATCHED = 12
REPORT_IT = "please send this report to us."

Tell = Callable[[str, int, int], None]
"""Progress callback: (name of the part that starts, number of finished parts, number of parts)."""


class Check(Record):
    """One finding of a part of the examination.

    Attributes:
        status: "ok", "note" (worth knowing), "problem" (costs speed or gives wrong numbers) or
            "failed" (the part itself did not work).
        finding: What was found, or the reason of a failure.
        advice: What to do about a problem.
    """

    part: str
    status: Status
    finding: str
    advice: str = ""


class Elsewhere(Record):
    """Public measurement of a related model on the same kind of card.

    `differences` lists how its conditions differ from the known step.
    """

    model: str
    batch: int
    samples_per_second: float
    source: str
    differences: tuple[str, ...] = ()


class Expected(Record):
    """Forecast of the known step on a healthy device, with public measurements.

    `elsewhere` starts with the nearest measurement.
    """

    step_ms: float
    interval_ms: Interval | None = None
    elsewhere: tuple[Elsewhere, ...] = ()


class Examination(Record):
    """All checks of one device, an accelerator or the CPU.

    `traces` has the stack traces of failed parts.
    """

    kind: str
    device: str
    checks: tuple[Check, ...]
    traces: dict[str, str]

    @property
    def is_well(self) -> bool:
        """True if no check found a problem or failed."""
        return not any(check.status in ("problem", "failed") for check in self.checks)


def _ok(part: str, finding: str) -> Check:
    return Check(part=part, status="ok", finding=finding)


def _note(part: str, finding: str) -> Check:
    return Check(part=part, status="note", finding=finding)


def _problem(part: str, finding: str, advice: str) -> Check:
    return Check(part=part, status="problem", finding=finding, advice=advice)


def _failed(part: str, finding: str, advice: str | None = None) -> Check:
    return Check(part=part, status="failed", finding=finding, advice=advice or "")


class _PartFailed(Exception):
    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


def unusable(kind: str, machine: Machine, error: TrainpaceError) -> Examination:
    """Return the examination of a machine on which torch crashes or hangs when it lists devices.

    It has the checks that do not need torch, and a failed "torch" check with the error.
    """
    failed = _failed("torch", error.message, error.hint)
    checks = (*machine_checks(machine), failed)
    return Examination(kind=kind, device=machine.cpu.name or "CPU", checks=checks, traces={})


def examine(
    kind: str,
    machine: Machine,
    device: Device | None,
    expected: Callable[[Measurement], Expected | None],
    tell: Tell,
) -> Examination:
    """Run every part of the examination on a device of this kind.

    Args:
        kind: Device type in torch, such as "cuda" or "cpu".
        machine: Hardware and system of this machine.
        device: Entry of the device in the catalog, or None if it has none.
        expected: Function that returns the forecast of a measured known step.
        tell: Callback for progress.
    """
    name = machine.cpu.name or "CPU"
    if kind != "cpu":
        try:
            name = device_here(kind).name or kind
        except TrainpaceError as error:
            return unusable(kind, machine, error)
    found, traces = list(machine_checks(machine)), dict[str, str]()
    parts = tuple(_parts(kind, machine, device, expected))
    for done, (part, checks) in enumerate(parts):
        tell(part, done, len(parts))
        try:
            found += checks()
        except TimedOut:
            found.append(_failed(part, "This part hung or took too long, and was ended."))
        except TrainpaceError as error:
            found.append(_failed(part, error.message, error.hint))
        except OSError as error:
            found.append(_failed(part, f"This part failed: {error}."))
        except _PartFailed as error:
            found.append(_failed(part, f"This part failed: {error}"))
            traces[part] = error.trace
    return Examination(kind=kind, device=name, checks=tuple(found), traces=traces)


def _parts(
    kind: str,
    machine: Machine,
    device: Device | None,
    expected: Callable[[Measurement], Expected | None],
) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    """Yield the name of each part with the function that runs the part and returns its checks."""
    yield "torch", lambda: software_check(_values("software", kind), machine, kind)
    yield "products", lambda: products_check(_values("products", kind), device)
    if kind != "cpu":
        yield "clock", lambda: (clock_check(_values("clock", kind)),)
        yield "copies", lambda: (copies_check(_values("copies", kind), machine),)
    yield "memory", lambda: (memory_check(_values("memory", kind), ALLOCATED_GIB),)
    batch = BATCH if device is not None else BATCH_ALONE
    yield "step", lambda: step_check(*_step(kind, batch, expected))
    yield "watch", lambda: (_watched(kind),)
    yield "loader", lambda: (_loaded(_values("loader", "cpu")),)
    yield "storage", lambda: (_stored(),)
    count = len(machine.gpus)
    if kind == "cuda" and count > 1:
        yield "links", lambda: (_linked(count),)


def _values(part: str, kind: str) -> dict[str, Any]:
    request = {"part": part, "kind": kind}
    answer = json.loads(run_isolated(PARTS_MODULE, request, PART_TIMEOUT_S, f"the part {part}"))
    if "error" in answer:
        raise _PartFailed(answer["error"], answer["trace"])
    values: dict[str, Any] = answer["values"]
    return values


def _step(
    kind: str, batch: int, expected: Callable[[Measurement], Expected | None]
) -> tuple[Measurement, Expected | None]:
    conditions = Conditions(
        model=MODEL,
        device=kind,
        precision="fp32" if kind == "cpu" else "torch_fp32",
        optimizer="sgd_momentum",
        timeout_s=STEP_TIMEOUT_S,
    )
    measured = measure(conditions, batch)
    return measured, expected(measured)


def _watched(kind: str) -> Check:
    with tempfile.TemporaryDirectory() as folder:
        script, recording = Path(folder, "train.py"), Path(folder, "recording")
        script.write_text(
            WATCHED.format(kind=kind, steps=STEPS_WATCHED, seconds=int(PART_TIMEOUT_S))
        )
        code = watch([sys.executable, str(script)], recording)
        ranks = read_recording(recording).ranks
    seen = ranks[0].steps if ranks else 0
    if code == 0 and seen >= STEPS_WATCHED - 3:  # the first steps are warm-up and not counted
        return _ok("watch", "watch records an unchanged script here.")
    return _problem(
        "watch",
        f"watch saw {seen} of {STEPS_WATCHED} steps of a small script, which ended with exit code"
        f" {code}.",
        REPORT_IT.capitalize(),
    )


def _loaded(values: dict[str, Any]) -> Check:
    return _ok(
        "loader",
        f"A DataLoader with two workers delivers {values['samples_per_s']:,.0f} images of 224 x 224"
        " per second.",
    )


def _stored() -> Check:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        s = measure_storage(folder, WRITTEN_BYTES)
    cached = ", from the page cache" if s.read_from_cache else ""
    kind = f" ({s.filesystem})" if s.filesystem else ""
    return _ok(
        "storage",
        f"The current folder's storage{kind} writes {s.write_gb_per_s:.2g} GB/s and reads"
        f" {s.read_gb_per_s:.2g}{cached}.",
    )


def _linked(count: int) -> Check:
    links = measure_allreduce(count, "nccl")
    rate = "" if links.bandwidth_gb_per_s is None else f" and {links.bandwidth_gb_per_s:.0f} GB/s"
    return _ok(
        "links",
        f"An all-reduce between {count} GPUs takes at least {links.latency_us:.0f} µs{rate}.",
    )


def machine_checks(machine: Machine) -> Iterator[Check]:
    """Report conditions of the system and the driver that disturb or limit measurements."""
    found = warnings_of(replace(machine, gpu_problem=None))
    for sentence in found:
        yield _note("machine", sentence[0].upper() + sentence[1:])
    mute = [
        str(index)
        for index, gpu in enumerate(machine.gpus)
        if gpu.name is None and gpu.memory_gib is None
    ]
    problem = machine.gpu_problem or (f"GPU {' and '.join(mute)} gives no figures" if mute else "")
    if problem:
        yield _problem(
            "driver",
            f"The NVIDIA driver does not answer as it should: {problem}.",
            "Check that nvidia-smi works. After an update of the driver restart the machine; a"
            " container must be started with its GPUs (--gpus all).",
        )
    elif not found:
        yield _ok("machine", "The machine is idle; clocks and cores are not limited.")


def software_check(values: Mapping[str, Any], machine: Machine, kind: str) -> Iterator[Check]:
    """Check that torch fits the driver, supports collectives, and has enough shared memory."""
    yield _ok("torch", _torch_in_words(values, kind))
    if values["accelerator"] is None and machine.gpus:
        yield _problem(
            "torch",
            f"The driver shows {machine.gpus[0].name or 'a GPU'}, but this torch sees no GPU.",
            "Install a build of torch for CUDA: pytorch.org/get-started.",
        )
    driver = next((gpu.cuda for gpu in machine.gpus), None)
    built = values["versions"].get("cuda")
    if _major(built) > _major(driver) > 0:
        yield _problem(
            "torch",
            f"torch is built for CUDA {built}, and the driver supports CUDA up to {driver}.",
            "Update the driver, or install a build of torch for an older CUDA.",
        )
    if values["count"] > 1 and not values["backend"]:
        yield _problem(
            "torch",
            "This torch has no library for collectives between its devices.",
            "Install a build of torch with NCCL (RCCL on AMD GPUs).",
        )
    shared = values["shared_memory_gib"]
    if shared is not None and shared < LEAST_SHARED_MEMORY_GIB:
        yield _problem(
            "loader",
            "Shared memory (/dev/shm), through which workers of a DataLoader send batches, has"
            f" {1024 * shared:.0f} MiB.",
            "Start the container with --shm-size=8g or --ipc=host.",
        )


def _torch_in_words(values: Mapping[str, Any], kind: str) -> str:
    devices = f"{values['count']} x {values['name'] or kind}"
    if kind == "cpu":
        other = values["accelerator"]
        devices = f"a device of kind {other}, not examined" if other else "no accelerator"
    versions = [f"{name} {v}" for name, v in values["versions"].items() if name != "gpu"]
    return ", ".join([f"torch {values['torch']} sees {devices}", *versions]) + "."


def _major(version: str | None) -> int:
    return int((version or "0").split(".")[0])


def clock_check(values: Mapping[str, float]) -> Check:
    """Check that device events and the host's clock give the same duration."""
    device_ms, host_ms = values["device_ms"], values["host_ms"]
    if abs(device_ms / host_ms - 1) <= CLOCKS_AGREE:
        return _ok(
            "clock",
            f"Device events and the host's clock agree: {device_ms:.0f} and {host_ms:.0f} ms.",
        )
    return _problem(
        "clock",
        f"Device events show {device_ms:.0f} ms and the host's clock shows {host_ms:.0f}.",
        f"Measured step times cannot be trusted here; {REPORT_IT}",
    )


def products_check(
    values: Mapping[str, Mapping[str, Any]], device: Device | None
) -> Iterator[Check]:
    """Compare large matmuls with the datasheet's peaks, and report number formats that fail."""
    yield _speed_check(values["tflops"], device)
    for name, reason in values["failed"].items():
        if device is None:  # without a datasheet, the hardware may lack the format
            yield _note("formats", f"Matmuls in {name} do not work here: {reason}.")
        elif _peak_tflops(device, name) or name == "fp32":
            yield _problem(
                "formats",
                f"Matmuls in {name} fail, which a {device.name} supports: {reason}.",
                "Install a build of torch for this card and its driver; if it still fails, train in"
                " another format.",
            )


def _speed_check(values: Mapping[str, float], device: Device | None) -> Check:
    parts, low = [], []
    for name in [n for n in _PEAKS if n in values]:
        peak = _peak_tflops(device, name)
        parts.append(f"{name} {_tflops(values[name], peak)}")
        if peak and values[name] < LEAST_MATMUL_SHARE * peak:
            low.append(name)
    if not parts:
        return _failed("products", "No matrix product could be computed.")
    finding = f"Large matrix products reach {', '.join(parts)}."
    if not low:
        return _ok("products", finding)
    return _problem(
        "products",
        finding,
        f"Matmuls in {' and '.join(low)} are far below what such a card does: look for a power"
        " limit, capped or throttled clocks, another program on the card, or a build of torch"
        " without kernels for it.",
    )


def copies_check(values: Mapping[str, float], machine: Machine) -> Check:
    """Compare the copy rate from pinned memory with the rate of the PCIe slot."""
    pinned, plain = values["to_device_pinned"], values["to_device"]
    finding = (
        f"Copies to the device run at {pinned:.1f} GB/s from pinned memory and {plain:.1f} from"
        " pageable memory."
    )
    slots = {(gpu.pcie_generation_max or 0, gpu.pcie_width_max or 0) for gpu in machine.gpus}
    # If the GPUs have different slots, the slot of this device is unknown and nothing is compared.
    generation, width = slots.pop() if len(slots) == 1 else (0, 0)
    slot = PCIE_GB_PER_S_A_LANE.get(generation, 0.0) * width
    if pinned >= LEAST_PINNED_SHARE * slot:
        return _ok("copies", finding)
    return _problem(
        "copies",
        f"{finding} The slot (PCIe {generation} x{width}) supports {slot:.0f}.",
        "Reseat the card or look for a riser, a slot of fewer lanes, or a BIOS setting.",
    )


def memory_check(values: Mapping[str, Any], expected_gib: float) -> Check:
    """Check that the reported memory is right, and that the device recovers from running out."""
    allocated = values["allocated_gib"]
    if allocated is None:
        return _note("memory", "The system does not report how much memory a process took.")
    if values.get("recovered") is False:
        return _problem(
            "memory",
            "After running out of memory the device gives wrong results.",
            "Restart the machine; if it stays, the card or its driver is faulty.",
        )
    if not 0.9 * expected_gib <= allocated <= 1.5 * expected_gib + 0.02:
        return _problem(
            "memory",
            f"A tensor of {1024 * expected_gib:.0f} MiB raises the peak of memory by"
            f" {1024 * allocated:.0f} MiB.",
            f"Measured peaks of memory cannot be trusted here; {REPORT_IT}",
        )
    recovered = ", and the device recovers from running out of it" if "recovered" in values else ""
    return _ok("memory", f"The peak of memory is counted correctly{recovered}.")


def step_check(measured: Measurement, expected: Expected | None) -> Iterator[Check]:
    """Compare the known step with its forecast and with the nearest public measurement.

    Also report the clock rate of the device during the step, if it is remarkable.
    """
    yield _speed_of_step(measured, expected)
    if expected is not None and expected.elsewhere:
        yield _elsewhere_check(measured, expected.elsewhere[0])
    clock = "" if measured.run is None else clock_in_words(measured.run)
    if clock:
        yield _note("clocks", f"During the known step: {clock[0].lower()}{clock[1:]}")


def _elsewhere_check(measured: Measurement, other: Elsewhere) -> Check:
    """Compare the known step with one public measurement.

    A slow result is only a note, because the conditions differ.
    """
    share = measured.samples_per_second / other.samples_per_second
    differs = f" ({', '.join(other.differences)})" if other.differences else ""
    return (_ok if share >= ELSEWHERE_SHARE else _note)(
        "others",
        f"The known step runs at {measured.samples_per_second:,.0f} samples/s, {share:.2g} times"
        f" what another such card gave: {other.model} at batch {other.batch},"
        f" {other.samples_per_second:,.0f} samples/s{differs}; {other.source}.",
    )


def _speed_of_step(measured: Measurement, expected: Expected | None) -> Check:
    what = (
        f"A training step of {measured.model} at batch {measured.execution.micro_batch} takes"
        f" {measured.median_ms:.1f} ms"
    )
    if expected is None:
        return _ok("step", f"{what}. There is no forecast for this device.")
    speed = 100 * expected.step_ms / measured.median_ms
    finding = (
        f"{what}: {speed:.0f}% of the expected speed, from other people's measurements"
        f" ({expected.step_ms:.1f} ms)."
    )
    interval = expected.interval_ms
    if interval is None or measured.median_ms <= interval.high:
        return _ok("step", finding)
    return _problem(
        "step",
        f"{finding} That is outside the forecast's 90% interval.",
        "The notes may say why: clocks held down, a power limit, another program, too few cores for"
        " the host's work.",
    )


def _peak_tflops(device: Device | None, name: str) -> float | None:
    figures = [getattr(device, field) for field in _PEAKS[name]] if device is not None else []
    return next((float(figure.value) for figure in figures if figure is not None), None)


def _tflops(value: float, peak: float | None) -> str:
    of_peak = f" ({100 * value / peak:.0f}% of the datasheet)" if peak else ""
    rate = f"{value:.3g} TFLOP/s" if value >= 1 else f"{1e3 * value:.3g} GFLOP/s"
    return f"{rate}{of_peak}"
