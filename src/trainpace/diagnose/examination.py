"""An examination: every part in a process of its own, so that one which fails, crashes or hangs stops no other."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainpace.core.cluster import Device
from trainpace.core.errors import TimedOut, TrainpaceError
from trainpace.core.outcome import Measurement
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated
from trainpace.diagnose import health_checks as checks
from trainpace.diagnose.health_checks import Check, Expected
from trainpace.measure import (
    Conditions,
    Machine,
    device_here,
    measure,
    measure_allreduce,
    measure_storage,
)
from trainpace.watch import read_recording, watch

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
    return Examination(
        kind=kind, device=name, checks=(*checks.machine_checks(machine), failed), traces={}
    )


def examine(
    kind: str,
    machine: Machine,
    device: Device | None,
    expected: Callable[[Measurement], Expected | None],
    tell: Tell,
) -> Examination:
    """Try every part on a device of that kind. `device`: its catalogue entry; `expected`: the forecast of the known step."""
    found: list[Check] = list(checks.machine_checks(machine))
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
    yield "torch", lambda: checks.software_check(_values("software", kind), machine, kind)
    yield "products", lambda: checks.products_check(_values("products", kind), device)
    if kind != "cpu":
        yield "clock", lambda: (checks.clock_check(_values("clock", kind)),)
        yield "copies", lambda: (checks.copies_check(_values("copies", kind), machine),)
    yield "memory", lambda: (checks.memory_check(_values("memory", kind), ALLOCATED_GIB),)
    yield (
        "step",
        lambda: checks.step_check(
            *_step(kind, BATCH if device is not None else BATCH_ALONE, expected)
        ),
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
