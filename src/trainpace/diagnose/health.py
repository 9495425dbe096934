"""An examination: every part in a process of its own, so that one which fails, crashes or hangs stops no other."""

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
CLOCKS_AGREE = 0.1
"""The device's events and the host's clock, which also sees the launch of the first kernel and the wait for the last."""
LEAST_PRODUCT_SHARE = 0.45
"""Of the datasheet's peak. Products of about 1 TFLOP reach medians of 0.50 to 0.95 of it on cards from A100 to B300, by library
(measurements of NVIDIA's aiconfigurator)."""
LEAST_PINNED_SHARE = 0.5
ELSEWHERE_SHARE = 0.6
"""Of the nearest public measurement's samples per second, below which the comparison is put among what is worth knowing."""
PCIE_GB_PER_S_A_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""By generation, one direction (PCI-SIG, PCI Express Base Specification)."""
LEAST_SHARED_MEMORY_GIB = 1.0
"""Docker gives containers 64 MiB, in which a loader's workers end with "bus error"; batches of images take hundreds of MiB."""
UNJUDGED = ("fp8",)
"""Formats whose speed is not held against the datasheet: torch's own product of fp8 accumulates more exactly than that counts."""
_PEAKS = {
    "fp32": ("fp32_tflops",),
    "tf32": ("tf32_tensor_tflops",),
    "bf16": ("bf16_tensor_tflops",),
    "fp16": ("fp16_tensor_tflops", "fp16_tflops"),
    "fp8": ("fp8_tensor_tflops",),
}


class Check(Record):
    """One part of the examination. ok: as it should be; note: worth knowing; problem: costs speed or gives wrong numbers, and
    `advice` says what to do; failed: the part itself did not work, for the reason that `finding` gives.
    """

    part: str
    status: Status
    finding: str
    advice: str = ""


class Elsewhere(Record):
    """A step of a kindred model that somebody else measured on such a card. `differences`: in words, from the known step."""

    model: str
    batch: int
    samples_per_second: float
    source: str
    differences: tuple[str, ...] = ()


class Expected(Record):
    """What Trainpace forecasts for the known step on a healthy device of this name, and what others measured there, the nearest
    first."""

    step_ms: float
    interval_ms: Interval | None = None
    elsewhere: tuple[Elsewhere, ...] = ()


def machine_checks(machine: Machine) -> Iterator[Check]:
    """Whatever will disturb or limit measurements, by what the system and the driver say."""
    found = warnings_of(replace(machine, gpu_problem=None))
    for sentence in found:
        yield Check(part="machine", status="note", finding=sentence[0].upper() + sentence[1:])
    mute = [
        str(index)
        for index, gpu in enumerate(machine.gpus)
        if gpu.name is None and gpu.memory_gib is None
    ]
    problem = machine.gpu_problem or (f"GPU {' and '.join(mute)} gives no figures" if mute else "")
    if problem:
        yield Check(
            part="driver",
            status="problem",
            finding=f"The NVIDIA driver does not answer as it should: {problem}.",
            advice=(
                "See whether nvidia-smi works. After an update of the driver restart the machine; a"
                " container must be started with its GPUs (--gpus all)."
            ),
        )
    if not found and not problem:
        yield Check(
            part="machine",
            status="ok",
            finding="Nothing else runs, and nothing holds clocks or cores back.",
        )


def software_check(values: Mapping[str, Any], machine: Machine, kind: str) -> Iterator[Check]:
    versions = values["versions"]
    named = [f"{name} {version}" for name, version in versions.items() if name != "gpu"]
    what = f"{values['count']} x {values['name'] or kind}"
    if kind == "cpu":
        what = (
            "no accelerator"
            if values["accelerator"] is None
            else f"a device of kind {values['accelerator']}, not examined"
        )
    yield Check(
        part="torch",
        status="ok",
        finding=", ".join([f"torch {values['torch']} sees {what}", *named]) + ".",
    )
    driver = next((gpu.cuda for gpu in machine.gpus if gpu.cuda), None)
    if values["accelerator"] is None and machine.gpus:
        shown = machine.gpus[0].name or "a GPU"
        yield Check(
            part="torch",
            status="problem",
            finding=f"The driver shows {shown}, but this torch sees no GPU.",
            advice="Install a build of torch for CUDA: pytorch.org/get-started.",
        )
    if (
        driver
        and (built := versions.get("cuda"))
        and int(built.split(".")[0]) > int(driver.split(".")[0])
    ):
        yield Check(
            part="torch",
            status="problem",
            finding=f"torch is built for CUDA {built}, and the driver knows CUDA up to {driver}.",
            advice="Update the driver, or install a build of torch for an older CUDA.",
        )
    if values["count"] > 1 and not values["backend"]:
        yield Check(
            part="torch",
            status="problem",
            finding="This torch has no library for exchanges between its devices.",
            advice="Install a build of torch with NCCL (RCCL on AMD GPUs).",
        )
    shared = values["shared_memory_gib"]
    if shared is not None and shared < LEAST_SHARED_MEMORY_GIB:
        yield Check(
            part="loader",
            status="problem",
            finding=(
                "Shared memory (/dev/shm), through which workers of a DataLoader give batches, has"
                f" {1024 * shared:.0f} MiB."
            ),
            advice="Start the container with --shm-size=8g or --ipc=host.",
        )


def clock_check(values: Mapping[str, float]) -> Check:
    device_ms, host_ms = values["device_ms"], values["host_ms"]
    if abs(device_ms / host_ms - 1) <= CLOCKS_AGREE:
        said = (
            f"Events of the device and the host's clock agree: {device_ms:.0f} and"
            f" {host_ms:.0f} ms."
        )
        return Check(part="clock", status="ok", finding=said)
    return Check(
        part="clock",
        status="problem",
        finding=(
            f"The device's events say {device_ms:.0f} ms where the host's clock says {host_ms:.0f}."
        ),
        advice="Measured step times cannot be trusted here; please send this report to us.",
    )


def products_check(
    values: Mapping[str, Mapping[str, Any]], device: Device | None
) -> Iterator[Check]:
    """TFLOP/s of large products, and beside the datasheet's peaks where the device is in the catalogue; formats that fail."""
    yield _speed_check(values["tflops"], device)
    for name, reason in values["failed"].items():
        if device is None:  # whether it has the format is not known
            yield Check(
                part="formats",
                status="note",
                finding=f"Products in {name} do not work here: {reason}.",
            )
        elif _peak_tflops(device, name) or name == "fp32":
            yield Check(
                part="formats",
                status="problem",
                finding=f"Products in {name} fail, which a {device.name} has: {reason}.",
                advice=(
                    "Install a build of torch for this card and its driver; if it stays, train in"
                    " another format."
                ),
            )


def _speed_check(values: Mapping[str, float], device: Device | None) -> Check:
    parts, low = [], []
    for name in _PEAKS:
        if name not in values:
            continue
        peak = _peak_tflops(device, name)
        share = values[name] / peak if peak else None
        parts.append(
            f"{name} {_tflops(values[name])}"
            + (f" ({100 * share:.0f} % of the datasheet)" if share else "")
        )
        if share is not None and share < LEAST_PRODUCT_SHARE and name not in UNJUDGED:
            low.append(name)
    if not parts:
        return Check(
            part="products", status="failed", finding="No matrix product could be computed."
        )
    said = f"Large matrix products reach {', '.join(parts)}."
    if not low:
        return Check(part="products", status="ok", finding=said)
    return Check(
        part="products",
        status="problem",
        finding=said,
        advice=(
            f"Products in {' and '.join(low)} are far below what such a card does: look for a power"
            " limit, capped or throttled clocks, another program on the card, or a build of torch"
            " without kernels for it."
        ),
    )


def copies_check(values: Mapping[str, float], machine: Machine) -> Check:
    pinned, plain = values["to_device_pinned"], values["to_device"]
    said = (
        f"Copies to the device run at {pinned:.1f} GB/s from pinned memory and {plain:.1f} from"
        " pageable memory."
    )
    slots = {(gpu.pcie_generation_max, gpu.pcie_width_max) for gpu in machine.gpus}
    gpu = (
        machine.gpus[0] if len(slots) == 1 else None
    )  # which of unlike slots is the device's is not known
    lanes = None if gpu is None else PCIE_GB_PER_S_A_LANE.get(gpu.pcie_generation_max or 0)
    if gpu is None or lanes is None or not gpu.pcie_width_max:
        return Check(part="copies", status="ok", finding=said)
    slot = lanes * gpu.pcie_width_max
    if pinned >= LEAST_PINNED_SHARE * slot:
        return Check(part="copies", status="ok", finding=said)
    return Check(
        part="copies",
        status="problem",
        finding=(
            f"{said} The slot (PCIe {gpu.pcie_generation_max} x{gpu.pcie_width_max}) can do"
            f" {slot:.0f}."
        ),
        advice="Reseat the card or look for a riser, a slot of fewer lanes, or a BIOS setting.",
    )


def memory_check(values: Mapping[str, Any], expected_gib: float) -> Check:
    allocated = values["allocated_gib"]
    if allocated is None:
        return Check(
            part="memory",
            status="note",
            finding="The system does not say how much memory a process has taken.",
        )
    if values.get("recovered") is False:
        return Check(
            part="memory",
            status="problem",
            finding="After running out of memory the device gives wrong results.",
            advice="Restart the machine; if it stays, the card or its driver is faulty.",
        )
    if not 0.9 * expected_gib <= allocated <= 1.5 * expected_gib + 0.02:
        return Check(
            part="memory",
            status="problem",
            finding=(
                f"A tensor of {1024 * expected_gib:.0f} MiB shows as {1024 * allocated:.0f} MiB in"
                " the peak of memory."
            ),
            advice=(
                "Measured peaks of memory cannot be trusted here; please send this report to us."
            ),
        )
    recovered = ", and running out of memory is survived" if values.get("recovered") else ""
    return Check(
        part="memory", status="ok", finding=f"The peak of memory is counted right{recovered}."
    )


def step_check(measured: Measurement, expected: Expected | None) -> Iterator[Check]:
    """The known step beside its forecast, which rests on what others measured on such cards, and the clock meanwhile."""
    yield _speed_of_step(measured, expected)
    if expected is not None and expected.elsewhere:
        yield _elsewhere_check(measured, expected.elsewhere[0])
    clock = "" if measured.run is None else clock_in_words(measured.run)
    if clock:
        yield Check(
            part="clocks",
            status="note",
            finding=f"During the known step: {clock[0].lower()}{clock[1:]}",
        )


def _elsewhere_check(measured: Measurement, other: Elsewhere) -> Check:
    """It judges nothing: conditions differ, and the forecast's interval takes account of that."""
    share = measured.samples_per_second / other.samples_per_second
    differs = f" ({', '.join(other.differences)})" if other.differences else ""
    finding = (
        f"The known step runs at {measured.samples_per_second:,.0f} samples/s, {share:.2g} times"
        f" what another such card gave: {other.model} at batch {other.batch},"
        f" {other.samples_per_second:,.0f} samples/s{differs}; {other.source}."
    )
    return Check(
        part="others", status="ok" if share >= ELSEWHERE_SHARE else "note", finding=finding
    )


def _speed_of_step(measured: Measurement, expected: Expected | None) -> Check:
    what = (
        f"A training step of {measured.model} at batch {measured.execution.micro_batch} takes"
        f" {measured.median_ms:.1f} ms"
    )
    if expected is None:
        return Check(
            part="step",
            status="ok",
            finding=f"{what}; no forecast stands beside it for this device.",
        )
    speed = 100 * expected.step_ms / measured.median_ms
    said = (
        f"{what}: {speed:.0f} % of the speed that measurements of others lead to expect"
        f" ({expected.step_ms:.1f} ms)."
    )
    interval = expected.interval_ms
    if interval is None or measured.median_ms <= interval.high:
        return Check(part="step", status="ok", finding=said)
    return Check(
        part="step",
        status="problem",
        finding=f"{said} That is beyond the forecast's 90 % interval.",
        advice=(
            "The notes may say why: clocks held down, a power limit, another program, too few cores"
            " for the host's work."
        ),
    )


def _peak_tflops(device: Device | None, name: str) -> float | None:
    for field in _PEAKS[name] if device is not None else ():
        figure = getattr(device, field)
        if figure is not None:
            return float(figure.value)
    return None


def _tflops(value: float) -> str:
    return f"{value:.3g} TFLOP/s" if value >= 1 else f"{1e3 * value:.3g} GFLOP/s"


PARTS_MODULE = "trainpace.diagnose.health_probes"
PART_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 180.0
WRITTEN_BYTES = 64 * 2**20
MODEL, BATCH, BATCH_ALONE = "resnet18", 64, 4
"""The known step; BATCH_ALONE on a CPU, and where no forecast of a healthy device can stand beside it."""
ALLOCATED_GIB = 64 / 1024
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

Tell = Callable[[str, int, int], None]
"""(the part that is tried now, how many are done, of how many)"""


class Examination(Record):
    """What was examined and found. `device`: the accelerator's name, or the CPU's. `traces`: of parts that failed."""

    kind: str
    device: str
    checks: tuple[Check, ...]
    traces: dict[str, str]

    @property
    def is_well(self) -> bool:
        return not any(check.status in ("problem", "failed") for check in self.checks)


class _PartFailed(Exception):
    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


def unusable(kind: str, machine: Machine, error: TrainpaceError) -> Examination:
    """What can be said where torch itself crashes or hangs when it is asked for its devices."""
    failed = Check(part="torch", status="failed", finding=error.message, advice=error.hint or "")
    name = machine.cpu.name or "CPU"
    return Examination(kind=kind, device=name, checks=(*machine_checks(machine), failed), traces={})


def examine(
    kind: str,
    machine: Machine,
    device: Device | None,
    expected: Callable[[Measurement], Expected | None],
    tell: Tell,
) -> Examination:
    """Try every part on a device of that kind. `device`: its catalogue entry; `expected`: the forecast of the known step."""
    found: list[Check] = list(machine_checks(machine))
    traces: dict[str, str] = {}
    name = machine.cpu.name or "CPU"
    if kind != "cpu":
        try:
            name = device_here(kind).name or kind
        except TrainpaceError as error:
            return unusable(kind, machine, error)
    parts = tuple(_parts(kind, machine, device, expected))
    for done, (part, judged) in enumerate(parts):
        tell(part, done, len(parts))
        try:
            found += judged()
        except TimedOut:
            found.append(
                Check(
                    part=part,
                    status="failed",
                    finding="This part hung or took too long, and was ended.",
                )
            )
        except TrainpaceError as error:
            found.append(
                Check(part=part, status="failed", finding=error.message, advice=error.hint or "")
            )
        except OSError as error:
            found.append(Check(part=part, status="failed", finding=f"This part failed: {error}."))
        except _PartFailed as error:
            found.append(Check(part=part, status="failed", finding=f"This part failed: {error}"))
            traces[part] = error.trace
    return Examination(kind=kind, device=name, checks=tuple(found), traces=traces)


def _parts(
    kind: str,
    machine: Machine,
    device: Device | None,
    expected: Callable[[Measurement], Expected | None],
) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    """(name, what tries and judges it)."""
    yield "torch", lambda: software_check(_values("software", kind), machine, kind)
    yield "products", lambda: products_check(_values("products", kind), device)
    if kind != "cpu":
        yield "clock", lambda: (clock_check(_values("clock", kind)),)
        yield "copies", lambda: (copies_check(_values("copies", kind), machine),)
    yield "memory", lambda: (memory_check(_values("memory", kind), ALLOCATED_GIB),)
    yield (
        "step",
        lambda: step_check(*_step(kind, BATCH if device is not None else BATCH_ALONE, expected)),
    )
    yield "watch", lambda: (_watched(kind),)
    yield "loader", lambda: (_loaded(_values("loader", "cpu")),)
    yield "storage", lambda: (_stored(),)
    count = len(machine.gpus)
    if kind == "cuda" and count > 1:
        yield "links", lambda: (_linked(count),)


def _values(part: str, kind: str) -> dict[str, Any]:
    answer = json.loads(
        run_isolated(PARTS_MODULE, {"part": part, "kind": kind}, PART_TIMEOUT_S, f"the part {part}")
    )
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
    if code == 0 and seen >= STEPS_WATCHED - 3:  # the first ones start the model
        return Check(part="watch", status="ok", finding="watch records an unchanged script here.")
    return Check(
        part="watch",
        status="problem",
        finding=(
            f"watch saw {seen} of {STEPS_WATCHED} steps of a small script, which ended with exit"
            f" code {code}."
        ),
        advice="Please send this report to us.",
    )


def _loaded(values: dict[str, Any]) -> Check:
    said = (
        f"A DataLoader with two workers hands over {values['samples_per_s']:,.0f} images of 224 x"
        " 224 a second."
    )
    return Check(part="loader", status="ok", finding=said)


def _stored() -> Check:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        s = measure_storage(folder, WRITTEN_BYTES)
    cached = ", from the page cache" if s.read_from_cache else ""
    kind = f" ({s.filesystem})" if s.filesystem else ""
    said = (
        f"The current folder's storage{kind} writes {s.write_gb_per_s:.2g} GB/s and reads"
        f" {s.read_gb_per_s:.2g}{cached}."
    )
    return Check(part="storage", status="ok", finding=said)


def _linked(count: int) -> Check:
    links = measure_allreduce(count, "nccl")
    rate = "" if links.bandwidth_gb_per_s is None else f" and {links.bandwidth_gb_per_s:.0f} GB/s"
    said = f"An all-reduce between {count} GPUs takes {links.latency_us:.0f} µs at least{rate}."
    return Check(part="links", status="ok", finding=said)
