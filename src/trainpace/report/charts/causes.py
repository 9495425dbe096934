"""A diagnosis: what takes a step's time, and the interventions that prove it."""

from trainpace.diagnose import Diagnosis
from trainpace.report.charts.chart import Bar, BarChart, BarGroup, Segment
from trainpace.units import format_number

LEAST_SHARE = 0.005
_TONES = {
    "data": "data",
    "host_to_device": "host_to_device",
    "launch": "host_overhead",
    "compute": "forward",
    "optimizer": "optimizer",
    "communication": "communication",
    "straggler": "communication",
    "logging": "backward",
}
_PROOFS = {
    "cached_batch": "the same batch again and again",
    "no_sync": "no communication between ranks",
    "muted": "no output",
    "few_samples": "a tiny batch",
}


def shares_chart(d: Diagnosis) -> BarChart:
    """A bar a cause, the longest first; together they are the step."""
    shown = [s for s in d.shares if s.share >= LEAST_SHARE]
    top = next((s for s in shown if s.cause == d.verdict), shown[0])
    return BarChart(
        title="Where a step's time goes",
        finding=f"{top.share:.0%} of a step is {top.in_words}.",
        label="time of the mean step",
        unit="ms",
        groups=(
            BarGroup(
                title="",
                bars=tuple(
                    Bar(
                        label=s.in_words,
                        said=f"{format_number(s.ms)} ms, {s.share:.1%}{', proved' if s.proved else ''}",
                        segments=(
                            Segment(name="of the step", tone=_TONES.get(s.cause, "muted"), value=max(s.ms, 0.0)),
                        ),
                    )
                    for s in shown
                ),
            ),
        ),
        note="Proved: an intervention removed the cause, and the step became shorter by this much.",
    )


def proofs_chart(d: Diagnosis) -> BarChart | None:
    """The step as it is beside the step without a cause; None where no intervention was tried."""
    if not d.proofs:
        return None
    strongest = max(d.proofs, key=lambda p: p.saved_ms)
    groups = tuple(
        BarGroup(
            title=f"With {_PROOFS.get(p.trial, p.trial)}",
            bars=(
                Bar(
                    label="as it is",
                    segments=(Segment(name="as it is", tone="muted", value=p.plain_ms),),
                    said=f"{format_number(p.plain_ms)} ms",
                ),
                Bar(
                    label="without",
                    segments=(Segment(name="without", tone="best", value=p.without_ms),),
                    low=max(p.plain_ms - p.high_ms, 0.0),
                    high=max(p.plain_ms - p.low_ms, 0.0),
                    said=f"{format_number(p.without_ms)} ms, {format_number(p.saved_ms)} less",
                ),
            ),
        )
        for p in d.proofs
    )
    return BarChart(
        title="Proved by removing the cause",
        label="time of a step",
        unit="ms",
        groups=groups,
        finding=f"With {_PROOFS.get(strongest.trial, strongest.trial)} a step takes {format_number(strongest.without_ms)} ms"
        f" instead of {format_number(strongest.plain_ms)}.",
        note="Whiskers: 90 % interval of the step without the cause, from alternating blocks of steps.",
    )
