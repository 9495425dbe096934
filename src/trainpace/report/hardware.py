"""The hardware catalogue for the terminal."""

from collections.abc import Sequence

from trainpace.hardware import Device, Figure
from trainpace.report.columns import Column, words
from trainpace.report.terminal import print_lines, print_next, print_table, print_verdict


def print_catalogue(devices: Sequence[Device]) -> None:
    rows = [
        (d.name, d.architecture, _short(d.memory_gib), _short(d.memory_bandwidth_gb_per_s), _short(d.fp32_tflops),
         _short(d.tf32_tensor_tflops), _short(d.fp16_tensor_tflops), _short(d.fp8_tensor_tflops), _short(d.tdp_w))
        for d in devices
    ]  # fmt: skip
    print_verdict(f"{len(devices)} devices.")
    columns = (
        words("GPU", least=20), words("architecture", 2), Column("GiB"), Column("GB/s"), Column("fp32"), Column("tf32", 1),
        Column("16-bit"), Column("fp8", 3), Column("W", 4),
    )  # fmt: skip
    print_table(columns, rows)
    print_lines("Rates in TFLOP/s, dense, with fp32 accumulation.")
    if devices:
        print_next(["trainpace", "gpus", devices[0].name], "every figure of one device, with its source")


def print_device(device: Device) -> None:
    print_verdict(f"{device.name} ({device.vendor} {device.architecture}, {device.form_factor})")
    if device.aliases:
        print_lines(f"Also known as: {', '.join(device.aliases)}")
    figures = ((name, getattr(device, name)) for name in device.__struct_fields__)
    rows = [(name, f"{f.value:g}", f.kind, f.source) for name, f in figures if isinstance(f, Figure)]
    print_table((words("figure", least=16), Column("value"), words("kind", 1, 6), words("source", least=16)), rows)
    print_next(
        ["trainpace", "forecast", "resnet50", "--gpu", device.name],
        "a step of a model on it; FILE.py:FUNCTION for your own model",
    )


def _short(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:g}"
