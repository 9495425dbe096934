"""Measurements for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace.outcome import Measurement
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_number


def print_measurements(measurements: Sequence[Measurement]) -> None:
    """One line a batch size, then which one is best."""
    rows = [
        (str(m.execution.micro_batch), f"{format_number(m.median_ms)}",
         f"{format_number(m.interval_ms.low)} to {format_number(m.interval_ms.high)}",
         format_number(m.step.forward_ms), format_number(m.step.backward_ms), format_number(m.step.optimizer_ms),
         format_number(m.samples_per_second), str(len(m.step_times_ms)))
        for m in measurements
    ]  # fmt: skip
    first = measurements[0]
    columns = ("batch", "step ms", "90 % interval", "forward", "backward", "optimizer", "samples/s", "steps timed")
    print_table(
        columns, rows, title=f"{first.model} on {first.device}, {first.environment['threads']} threads, measured"
    )
    best = max(measurements, key=lambda m: m.samples_per_second)
    if len(measurements) > 1:
        print_lines(
            f"Best throughput: batch {best.execution.micro_batch}, {format_number(best.samples_per_second)} samples/s."
        )
