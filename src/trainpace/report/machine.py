"""Report sections for this machine: parts, calibration, health, and the hardware catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from trainpace.core.hardware import Device, Figure, HostLinks
from trainpace.core.records import to_jsonable
from trainpace.diagnose import Check, Examination
from trainpace.forecast import step_factor
from trainpace.measure import Machine, MachineProfile
from trainpace.report.phrases import given, number, percent
from trainpace.report.sections import (
    Column,
    Headline,
    Lines,
    Next,
    Section,
    Table,
    Verbatim,
    brief,
    details,
    named,
    say,
    tabulate,
    words,
)
from trainpace.verbs.request import forwarded

if TYPE_CHECKING:
    from trainpace.verbs.machine import CalibrateRequest, GpusRequest

USUAL = ("RTX 3090", "RTX 4090", "T4", "A100 SXM 40GB", "H100 SXM")
"""Devices that stay in a truncated table."""
STEADY, SHAKY = 0.1, 0.3
"""Limits of drift and spread. Values up to the first are good, and beyond the second unreliable."""


def machine_sections(machine: Machine) -> Iterator[Section]:
    """Convert the description of this machine to sections."""
    cpu = machine.cpu
    lines: list[tuple[str, list[str]]] = [
        (
            "processor",
            [
                given(cpu.name),
                given(cpu.physical_cores, "{} cores"),
                given(cpu.usable_cores, "{:g} usable"),
                given((cpu.l2_bytes or 0) / 2**20, "L2 {:g} MiB"),
                given((cpu.l3_bytes or 0) / 2**20, "L3 {:g} MiB"),
            ],
        ),
        (
            "memory",
            [
                given(machine.memory_gib, "{:.1f} GiB"),
                given(machine.memory_limit_gib, "limited to {:.1f} GiB"),
            ],
        ),
        *(("GPU", _gpu_facts(gpu)) for gpu in machine.gpus),
    ]
    if (s := machine.storage) is not None:
        cached = " (from the page cache)" if s.read_from_cache else ""
        rates = f"writes {s.write_gb_per_s:.2f} GB/s, reads {s.read_gb_per_s:.2f} GB/s{cached}"
        lines.append(("storage", [given(s.filesystem), rates]))
    system = [given(machine.operating_system), given(machine.kernel), f"Python {machine.python}"]
    lines.append(("system", system))
    yield named("", [(name, ", ".join(filter(None, parts))) for name, parts in lines])


def _gpu_facts(gpu: Any) -> list[str]:
    link = gpu.pcie_generation and gpu.pcie_width
    return [
        given(gpu.name),
        given(gpu.memory_gib, "{:.0f} GiB"),
        f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}" if link else "",
        given(gpu.power_limit_w, "{:g} W"),
        given(gpu.driver, "driver {}"),
    ]


def profile_sections(
    profile: MachineProfile, file: str, asked: CalibrateRequest | None = None
) -> Iterator[Section]:
    """Convert a machine's calibration to sections."""
    m = profile.kernels
    rows = [
        ("matmul, fp32", f"{m.flop_per_s / 1e9:.0f} GFLOP/s"),
        ("memory bandwidth in an operator", f"{m.bytes_per_s / 1e9:.1f} GB/s"),
        ("smallest operator", f"{m.start_us:.1f} µs"),
        ("host time per operator", f"{m.host_us_per_operator:.1f} µs"),
        ("operators timed", f"{len(m.timings):,}"),
    ]
    if profile.allreduce is not None:
        a = profile.allreduce
        bandwidth = "" if a.bandwidth_gb_per_s is None else f", {number(a.bandwidth_gb_per_s)} GB/s"
        rows.append(
            (f"all-reduce, {a.ranks} ranks, {a.backend}", f"{number(a.latency_us)} µs{bandwidth}")
        )
    worst = max(profile.spread, profile.drift)
    steady = "steady" if worst <= STEADY else "fairly steady" if worst <= SHAKY else "not steady"
    shaky = (
        " Other work ran at the same time: calibrate again when the machine is idle."
        if worst > SHAKY
        else ""
    )
    yield Headline(
        f"The machine's speed was {steady}. Repeated measurements differ by"
        f" {percent(profile.spread)} (median), the first pass and the last by"
        f" {percent(profile.drift)}.{shaky}"
    )
    yield Table((words("measured"), Column("")), rows)
    if m.step_factors:
        scatter = float(np.std(np.log(m.step_factors), ddof=1)) if len(m.step_factors) > 1 else 0.0
        line = (
            f"{len(m.step_factors)} whole random networks took {step_factor(m):.2f} times the sum"
            f" of their operators, with a scatter of {percent(scatter)}: forecasts are multiplied"
            " by that factor, and the scatter determines their intervals."
        )
        yield Lines([line])
    yield Lines([f"Profile: {file}"])
    why = "a step on this machine; FILE.py:FUNCTION for your own model"
    yield Next(_forecast_here(file, asked), why)


def _forecast_here(file: str, asked: CalibrateRequest | None) -> list[str]:
    where = ["--calibrated", file] if asked is not None and asked.output else ["--gpu", "cpu"]
    return ["trainpace", "forecast", "resnet50", *where]


def host_links_sections(
    links: HostLinks, file: str, asked: CalibrateRequest | None = None
) -> Iterator[Section]:
    worst = max(links.host_us_per_mib.values(), default=0.0)
    rows = [
        (
            "bandwidth of a host",
            f"{links.gb_per_s:.3g} GB/s, of which {percent(links.link_share)} is payload",
        ),
        ("start of a collective", f"{links.start_us:.0f} µs"),
        ("latency of each of its steps", f"{links.message_us:.0f} µs"),
        ("host time per MiB", f"up to {worst:.0f} µs"),
    ]
    yield Headline(f"The hosts send {links.gb_per_s:.3g} GB/s to each other.")
    yield Table((words("between hosts, gloo"), Column("")), rows)
    yield Lines([f"Profile: {file}"])
    yield Next([*_forecast_here(file, asked), "--nodes", "2"], "a step on two such hosts")


def catalogue_sections(
    devices: Sequence[Device], asked: GpusRequest | None = None
) -> Iterator[Section]:
    """Convert devices of the hardware catalogue to sections."""

    def rate(name: str, field: str, rank: int = 0) -> Column:
        return Column(name, rank, cell=lambda d: _short(getattr(d, field)))

    columns = (
        words("GPU", least=20, cell="name"),
        words("architecture", 2, cell="architecture"),
        rate("GiB", "memory_gib"),
        rate("GB/s", "memory_bandwidth_gb_per_s"),
        rate("fp32", "fp32_tflops"),
        rate("tf32", "tf32_tensor_tflops", 1),
        rate("16-bit", "fp16_tensor_tflops"),
        rate("fp8", "fp8_tensor_tflops", 3),
        rate("W", "tdp_w", 4),
    )
    yield Headline(f"{len(devices)} devices.")
    yield tabulate(devices, columns, keep=[i for i, d in enumerate(devices) if d.name in USUAL])
    yield Lines(["Rates in TFLOP/s, dense, with fp32 accumulation."])
    if devices:
        own = [] if asked is None else forwarded(asked, type(asked))
        why = "every figure of one device, with its source"
        yield Next(["trainpace", "gpus", devices[0].name, *own], why)


def device_sections(device: Device, asked: GpusRequest | None = None) -> Iterator[Section]:
    yield Headline(f"{device.name} ({device.vendor} {device.architecture}, {device.form_factor})")
    yield say(device.aliases and f"Also known as: {', '.join(device.aliases)}")
    columns = (
        words("figure", least=16, cell=lambda row: row[0]),
        Column("value", cell=lambda row: f"{row[1].value:g}"),
        words("kind", 1, 6, lambda row: row[1].kind),
        words("source", least=16, cell=lambda row: row[1].source),
    )
    figures = [(name, getattr(device, name)) for name in device.__struct_fields__]
    rows = [row for row in figures if isinstance(row[1], Figure)]
    yield from brief(tabulate(rows, columns[:3]))
    yield from details("the source of every figure", tabulate(rows, columns))
    own = [] if asked is None else forwarded(asked, type(asked))
    forecast = ["trainpace", "forecast", "resnet50", "--gpu", device.name, *own]
    yield Next(forecast, "a step of a model on it; FILE.py:FUNCTION for your own model")


def _short(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:g}"


ORDER = ("failed", "problem", "note", "ok")
TITLES = {"failed": "Failed", "problem": "To fix", "note": "Worth knowing", "ok": "In order"}


def examination_sections(
    examination: Examination, trace_file: str | None = None
) -> Iterator[Section]:
    """Convert the checks of `trainpace doctor` to sections."""
    yield Headline(examination_verdict(examination), good=examination.is_well)
    checks = sorted(examination.checks, key=lambda check: ORDER.index(check.status))
    for status, same in groupby(checks, key=lambda check: check.status):
        yield named(TITLES[status], [(check.part, _words(check)) for check in same])
    if examination.traces:
        where = f"are in {trace_file}" if trace_file else "can be saved with --trace FILE.txt"
        yield Lines([f"The stack traces of failed checks {where}; please send them to us."])
    for part, trace in examination.traces.items():
        yield Verbatim(trace, only="page", aside=f"stack trace of {part}")
    if examination.is_well:
        kind = [] if examination.kind == "cpu" else ["--device", examination.kind]
        yield Next(
            ["trainpace", "measure", "resnet18", *kind],
            "real steps over batch sizes; FILE.py:FUNCTION for your own model",
        )


def examination_verdict(examination: Examination) -> str:
    if examination.is_well:
        return f"{examination.device} is in order, and measuring works on it."
    bad = sum(check.status in ("failed", "problem") for check in examination.checks)
    count = "one thing" if bad == 1 else f"{bad} things"
    return f"Not all is well with {examination.device}: {count} to look at."


def examination_json(examination: Examination) -> dict[str, Any]:
    return to_jsonable(examination) | {"well": examination.is_well}


def _words(check: Check) -> str:
    return f"{check.finding} {check.advice}".strip()
