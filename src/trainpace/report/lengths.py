"""Forecasts of several sequence lengths: which is the longest that fits, and what length costs."""

from collections.abc import Sequence

from trainpace.core.outcome import Forecast
from trainpace.report.charts import SERIES_TONES, Axis, Chart, Mark, series
from trainpace.report.phrases import devices, listed, number, sentence
from trainpace.report.sweep_charts import best_of, by_device, provenance


def lengths_of(rows: Sequence[Forecast]) -> tuple[int, ...]:
    """The lengths of the rows, shortest first, where there are several; else nothing."""
    lengths = sorted({row.sequence_length for row in rows if row.sequence_length is not None})
    return tuple(lengths) if len(lengths) > 1 else ()


def samples_of(rows: Sequence[Forecast], sample: str) -> str:
    """The lengths in words; `sample`, a workload's own words, where there are no several."""
    lengths = [f"{length:,}" for length in lengths_of(rows)]
    return (
        f"{listed(lengths)} tokens"
        if 1 < len(lengths) < 7
        else (
            f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens"
            if lengths
            else sample
        )
    )


def place(f: Forecast) -> str:
    return f"{devices(f.num_devices, f.device)} at batch {f.execution.micro_batch:,}"


def sizes(f: Forecast, several: bool) -> str:
    """The batch size, and the length where there are `several`."""
    batch = f"batch {f.execution.micro_batch}"
    return f"{f.sequence_length:,} tokens, {batch}" if several and f.sequence_length else batch


def lengths_verdict(fitting: Sequence[Forecast]) -> str:
    """The longest sequence that fits, and how much slower a token of it is than where tokens are fastest."""
    longest = max(fitting, key=lambda f: (f.sequence_length or 0, f.tokens_per_second or 0.0))
    best = best_of(fitting) or longest
    reach = f"The longest sequence that fits has {longest.sequence_length:,} tokens"
    answer = f"{reach}: {place(longest)}, {number(longest.tokens_per_second)} tokens/s."
    if best is longest:
        return f"{answer} No shorter one has more tokens/s."
    more = f"{number(best.tokens_per_second)} tokens/s with {best.sequence_length:,} tokens"
    return f"{answer} Most tokens/s: {more} ({place(best)})."


def lengths_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Tokens/s against the length, a line a GPU on which something fits, each at its best batch that does; None with fewer than
    two lengths. More devices than there are tones are left out, and counted in the note."""
    if not lengths_of(rows):
        return None
    lines, marks, findings, drawn = [], [], [], []
    for name, some in by_device(rows).items():
        bests = [
            best_of([f for f in some if f.sequence_length == length]) for length in lengths_of(some)
        ]
        points = [
            (f.sequence_length or 0, f.tokens_per_second or 0.0) for f in bests if f is not None
        ]
        drawn += [(name, points, len(points) < len(bests))] if points else []
    for tone, (name, points, ends) in zip(SERIES_TONES, drawn, strict=False):
        lines.append(series(name, "line", tone, points))
        (longest, rate), fastest = points[-1], max(rate for _, rate in points)
        findings.append(
            f"{name}: {number(rate)} tokens/s at {longest:,} tokens, of {number(fastest)} at most"
        )
        if ends:
            marks.append(
                Mark(axis="x", at=longest, text=f"{name}: longest that fits", tone="limit")
            )
    if not lines:
        return None
    left_out = [name for name, *_ in drawn[len(lines) :]]
    said = f" Not drawn: {', '.join(left_out)}." if left_out else ""
    return Chart(
        title="Throughput against the sequence length",
        finding=sentence(f"{'; '.join(findings)}."),
        x=Axis(label="sequence length", unit="tokens", scale="log2"),
        y=Axis(label="throughput", unit="tokens/s", low=0),
        series=tuple(lines),
        marks=tuple(marks),
        note=provenance(rows) + said,
    )
