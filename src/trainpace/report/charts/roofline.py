"""The heaviest operators under a device's roofs."""

from trainpace.forecast import Roofline
from trainpace.report.charts.chart import Axis, Chart, Mark, Series
from trainpace.units import format_number

NAMED = 4


def roofline_chart(r: Roofline, device: str) -> Chart:
    """Points as large as their share of time, the roofs of memory and of arithmetic, the heaviest named."""
    ridge = r.peak_tflops * 1e3 / r.bandwidth_gb_per_s
    xs = [p.intensity for p in r.points]
    left, right = min([*xs, ridge / 4]) / 1.5, max([*xs, ridge * 4]) * 1.5
    roof = [(x, min(r.peak_tflops, x * r.bandwidth_gb_per_s / 1e3)) for x in (left, ridge, right)]
    longest = max(p.time_ms for p in r.points)
    kinds = {True: "bound by compute", False: "bound by memory bandwidth"}
    series = [
        Series(
            name="roofs of the datasheet",
            kind="line",
            tone="ideal",
            x=tuple(x for x, _ in roof),
            y=tuple(y for _, y in roof),
        )
    ]
    for right_of, tone in ((False, "first"), (True, "second")):
        some = [p for p in r.points if (p.intensity >= ridge) is right_of]
        if some:
            series.append(
                Series(
                    name=f"operators {kinds[right_of]}",
                    kind="points",
                    tone=tone,
                    x=tuple(p.intensity for p in some),
                    y=tuple(p.tflops for p in some),
                    labels=tuple(f"{p.name}: {format_number(p.time_ms)} ms" for p in some),
                    sizes=tuple(p.time_ms / longest for p in some),
                )
            )
    marks = [
        Mark(axis="point", at=p.intensity, y=p.tflops, text=p.name, tone="second" if p.intensity >= ridge else "first")
        for p in r.points[:NAMED]
    ]
    shown = sum(p.time_ms for p in r.points)
    bound = sum(p.time_ms for p in r.points if p.intensity < ridge) / shown
    return Chart(
        title=f"Roofline of {device}",
        finding=f"Of these operators' time, {bound:.0%} is bound by memory bandwidth and {1 - bound:.0%} by compute.",
        x=Axis(label="arithmetic intensity", unit="FLOP/byte", scale="log10"),
        y=Axis(label="rate", unit="TFLOP/s", scale="log10"),
        series=tuple(series),
        marks=tuple(marks),
        nearest="point",
        note=f"The {len(r.points)} heaviest groups of similar operators, {r.share:.0%} of the device's forecast time; larger"
        f" points take longer. Roofs of the datasheet: {format_number(r.peak_tflops)} TFLOP/s and"
        f" {format_number(r.bandwidth_gb_per_s)} GB/s."
        " Caches, and algorithms with fewer multiplications (Winograd), can lift a point above a roof.",
    )
