"""The hardware catalogue for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace.hardware import Device, Figure
from trainpace.report.terminal import print_lines, print_table


def print_catalogue(devices: Sequence[Device]) -> None:
    """One line a device."""
    rows = [
        (d.name, d.architecture, _short(d.memory_gib), _short(d.memory_bandwidth_gb_per_s), _short(d.fp32_tflops),
         _short(d.tf32_tensor_tflops), _short(d.fp16_tensor_tflops), _short(d.fp8_tensor_tflops), _short(d.tdp_w))
        for d in devices
    ]  # fmt: skip
    print_table(("GPU", "architecture", "GiB", "GB/s", "fp32", "tf32", "16-bit", "fp8", "W"), rows, left=2)
    print_lines("Rates in TFLOP/s, dense, with fp32 accumulation. `trainpace gpus NAME` shows every figure's source.")


def print_device(device: Device) -> None:
    """Every figure with its source."""
    print_lines(f"{device.name} ({device.vendor} {device.architecture}, {device.form_factor})")
    if device.aliases:
        print_lines(f"also: {', '.join(device.aliases)}")
    figures = ((name, getattr(device, name)) for name in device.__struct_fields__)
    rows = [(name, f"{f.value:g}", f.kind, f.source) for name, f in figures if isinstance(f, Figure)]
    print_table(("figure", "value", "kind", "source"), rows, left=4)


def _short(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:g}"
