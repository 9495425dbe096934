"""Throughput against the number of devices, beside what perfect scaling would give."""

from collections.abc import Sequence

from trainpace.outcome import Forecast
from trainpace.report.charts.chart import Axis, Chart, Series, ideal_line
from trainpace.report.charts.step_time import provenance
from trainpace.units import format_number


def scaling_chart(rows: Sequence[Forecast]) -> Chart | None:
    """`rows`: the same micro-batches on ever more devices. None with fewer than two that can be forecast."""
    done = [f for f in rows if f.step is not None and f.samples_per_second is not None]
    if len(done) < 2:
        return None
    done.sort(key=lambda f: f.num_devices)
    x = tuple(float(f.num_devices) for f in done)
    y = tuple(f.samples_per_second or 0.0 for f in done)
    per_device = y[0] / x[0]
    bounds = [f.step_time_interval_ms for f in done]
    low = tuple(1e3 * f.execution.global_batch / b.high for f, b in zip(done, bounds, strict=True) if b is not None)
    high = tuple(1e3 * f.execution.global_batch / b.low for f, b in zip(done, bounds, strict=True) if b is not None)
    whole = len(low) == len(x)
    kept = y[-1] / (per_device * x[-1])
    return Chart(
        title="Scaling over devices",
        finding=f"{int(x[-1])} devices give {format_number(y[-1])} samples/s, {kept:.0%} of {int(x[-1] / x[0])} times the"
        f" throughput of {'one' if x[0] == 1 else int(x[0])}.",
        x=Axis(label="devices", scale="log2"),
        y=Axis(label="throughput", unit="samples/s", scale="log2"),
        series=(
            ideal_line(x, tuple(per_device * n for n in x)),
            Series(
                name="forecast, 90 % interval",
                kind="line",
                tone="forecast",
                x=x,
                y=y,
                low=low if whole else (),
                high=high if whole else (),
            ),
            Series(name="forecast", kind="points", tone="forecast", x=x, y=y),
        ),
        note=f"The same micro-batch on every device, so that the global batch grows with them. {provenance(done)}",
    )
