"""This machine, what a calibration found on it, and the hardware catalogue, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainpace.core.hardware import Device, Figure, HostLinks
from trainpace.forecast import step_factor
from trainpace.measure import Machine, MachineProfile
from trainpace.report.phrases import number, percent
from trainpace.report.screen import in_details, is_brief
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_named,
    print_next,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried

if TYPE_CHECKING:
    from trainpace.verbs.calibrate import CalibrateRequest
    from trainpace.verbs.gpus import GpusRequest

USUAL = ("RTX 3090", "RTX 4090", "T4", "A100 SXM 40GB", "H100 SXM")
"""Devices that stay in a catalogue that is cut."""
STEADY, SHAKY = 0.1, 0.3
"""Drift and spread up to the first are good; beyond the second the figures say little."""


def print_machine(machine: Machine) -> None:
    cpu = machine.cpu
    cores = [
        cpu.physical_cores and f"{cpu.physical_cores} cores",
        cpu.usable_cores and f"{cpu.usable_cores:g} usable",
    ]
    caches = [
        size and f"{name} {size / 2**20:g} MiB"
        for name, size in (("L2", cpu.l2_bytes), ("L3", cpu.l3_bytes))
    ]
    whole, limit = machine.memory_gib, machine.memory_limit_gib
    lines: list[tuple[str, list[Any]]] = [
        ("processor", [cpu.name, *cores, *caches]),
        ("memory", [whole and f"{whole:.1f} GiB", limit and f"limited to {limit:.1f} GiB"]),
    ]
    for gpu in machine.gpus:
        link = (
            gpu.pcie_generation
            and gpu.pcie_width
            and f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}"
        )
        power = gpu.power_limit_w and f"{gpu.power_limit_w:g} W"
        size, driver = (
            gpu.memory_gib and f"{gpu.memory_gib:.0f} GiB",
            gpu.driver and f"driver {gpu.driver}",
        )
        lines.append(("GPU", [gpu.name, size, link, power, driver]))
    if machine.storage is not None:
        s = machine.storage
        reads = (
            f"reads {s.read_gb_per_s:.2f}"
            f" GB/s{' (from the page cache)' if s.read_from_cache else ''}"
        )
        lines.append(("storage", [s.filesystem, f"writes {s.write_gb_per_s:.2f} GB/s", reads]))
    lines.append(("system", [machine.operating_system, machine.kernel, f"Python {machine.python}"]))
    print_named("", [(name, ", ".join(part for part in parts if part)) for name, parts in lines])


def print_profile(
    profile: MachineProfile, file: str, asked: CalibrateRequest | None = None
) -> None:
    m = profile.kernels
    rows = [
        ("matrix multiplication, fp32", f"{m.flop_per_s / 1e9:.0f} GFLOP/s"),
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
    print_verdict(
        f"The machine was {steady}. Repeated passes differ by {percent(profile.spread)} (median),"
        f" and the machine drifted by {percent(profile.drift)}.{shaky}"
    )
    print_table((words("measured"), ""), rows)
    if m.step_factors:
        scatter = float(np.std(np.log(m.step_factors), ddof=1)) if len(m.step_factors) > 1 else 0.0
        print_lines(
            f"{len(m.step_factors)} whole random networks took {step_factor(m):.2f} times the sum"
            f" of their operators, with a scatter of {percent(scatter)}: forecasts are multiplied"
            " by that factor, and the intervals rest on the scatter."
        )
    print_lines(f"Profile: {file}")
    where = ["--calibrated", file] if asked is not None and asked.output else ["--gpu", "cpu"]
    print_next(
        ["trainpace", "forecast", "resnet50", *where],
        "a step on this machine; FILE.py:FUNCTION for your own model",
    )


def print_host_links(links: HostLinks, file: str, asked: CalibrateRequest | None = None) -> None:
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
    print_verdict(f"The hosts send {links.gb_per_s:.3g} GB/s to each other.")
    print_table((words("between hosts, gloo"), ""), rows)
    print_lines(f"Profile: {file}")
    where = ["--calibrated", file] if asked is not None and asked.output else ["--gpu", "cpu"]
    print_next(
        ["trainpace", "forecast", "resnet50", *where, "--nodes", "2"], "a step on two such hosts"
    )


def print_catalogue(devices: Sequence[Device], asked: GpusRequest | None = None) -> None:
    rows = [
        (
            d.name,
            d.architecture,
            _short(d.memory_gib),
            _short(d.memory_bandwidth_gb_per_s),
            _short(d.fp32_tflops),
            _short(d.tf32_tensor_tflops),
            _short(d.fp16_tensor_tflops),
            _short(d.fp8_tensor_tflops),
            _short(d.tdp_w),
        )
        for d in devices
    ]
    print_verdict(f"{len(devices)} devices.")
    columns = (
        words("GPU", least=20),
        words("architecture", 2),
        Column("GiB"),
        Column("GB/s"),
        Column("fp32"),
        Column("tf32", 1),
        Column("16-bit"),
        Column("fp8", 3),
        Column("W", 4),
    )
    print_table(columns, rows, keep=[i for i, d in enumerate(devices) if d.name in USUAL])
    print_lines("Rates in TFLOP/s, dense, with fp32 accumulation.")
    if devices:
        own = [] if asked is None else carried(asked, type(asked))
        print_next(
            ["trainpace", "gpus", devices[0].name, *own],
            "every figure of one device, with its source",
        )


def print_device(device: Device, asked: GpusRequest | None = None) -> None:
    print_verdict(f"{device.name} ({device.vendor} {device.architecture}, {device.form_factor})")
    if device.aliases:
        print_lines(f"Also known as: {', '.join(device.aliases)}")
    figures = ((name, getattr(device, name)) for name in device.__struct_fields__)
    rows = [
        (name, f"{f.value:g}", f.kind, f.source) for name, f in figures if isinstance(f, Figure)
    ]
    with in_details("the source of every figure"):
        print_table(
            (
                words("figure", least=16),
                Column("value"),
                words("kind", 1, 6),
                words("source", least=16),
            ),
            rows,
        )
    if is_brief():
        print_table(
            (words("figure", least=16), Column("value"), words("kind", least=6)),
            [row[:3] for row in rows],
        )
    own = [] if asked is None else carried(asked, type(asked))
    forecast = ["trainpace", "forecast", "resnet50", "--gpu", device.name, *own]
    print_next(forecast, "a step of a model on it; FILE.py:FUNCTION for your own model")


def _short(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:g}"
