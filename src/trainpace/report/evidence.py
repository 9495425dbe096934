"""Public measurements beside a forecast: as lines, as JSON and as rows of a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainpace.report.phrases import devices, number
from trainpace.report.terminal import console, print_lines, wrapped

if TYPE_CHECKING:
    from trainpace.forecast import Near, Nearness, PublicRun

MOST_DIFFERENCES = 3
MOST_LINES = 4
"""Below the title, on a terminal."""
TITLE = "Measured by others"


def print_evidence(evidence: Sequence[Nearness]) -> None:
    """A line for each of the nearest runs, with the forecast of the same run, and a line where none is near."""
    shown = [near for nearness in evidence for near in nearness.runs]
    if shown:
        fitted = " (* it was in the fit)" if any(near.run.in_fit for near in shown) else ""
        print_lines(
            f"{TITLE}, and the forecast of the same{fitted}:",
            *_fitting([f"  {_line(near)}" for near in shown]),
        )
    far = (_none_near(nearness, len(evidence) > 1) for nearness in evidence if not nearness.runs)
    print_lines(*filter(None, far))


def nearest_in_brief(evidence: Sequence[Nearness]) -> list[str]:
    """The nearest run in a line; nothing where none is near."""
    near = next((near for nearness in evidence for near in nearness.runs), None)
    if near is None:
        return []
    fitted = " It was in the fit." if near.run.in_fit else ""
    return [f"{TITLE}: {_line(near).replace('*)', ')')}.{fitted}"]


def _fitting(lines: list[str]) -> list[str]:
    """The first, and further ones as far as they stay short on this terminal; --json and pages have all."""
    width, taken = console().width, 0
    for n, line in enumerate(lines):
        taken += len(wrapped(line, width).splitlines())
        if n and taken > MOST_LINES:
            return lines[:n]
    return lines


def _line(near: Near) -> str:
    run = near.run
    measured, unit = rate(run, run.step_time_ms)
    text = f"{what(run)}: {number(measured)} {unit}"
    if run.forecast_ms is not None:
        forecast, _ = rate(run, run.forecast_ms)
        text += (
            f", forecast {number(forecast)} ({100 * (forecast / measured - 1):+.0f}"
            f" %{'*' if run.in_fit else ''})"
        )
    more = [word for word in near.unlike if not _IN_WHAT.search(word)]
    return f"{text}; {', '.join(more)}" if more else text


def _none_near(nearness: Nearness, with_device: bool) -> str:
    closest = nearness.closest
    if closest is None:
        return ""
    where = f" on {nearness.device}" if with_device else ""
    return (
        f"{TITLE}: nothing near{where}. The nearest is {what(closest.run)}"
        f" ({', '.join(closest.unlike[:2])})."
    )


def what(run: PublicRun) -> str:
    """The run by its main conditions."""
    mode = {"inference": ", forward", "forward_backward": ", no optimizer"}.get(run.mode, "")
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision}{mode}"


def rate(run: PublicRun, ms: float) -> tuple[float, str]:
    """(number, unit) of a step: what it does a second, of all GPUs, or its milliseconds where no batch is known."""
    if not run.global_batch:
        return ms, "ms a step"
    samples = 1e3 * run.global_batch / ms
    if run.sequence_length:
        return samples * run.sequence_length, "tokens/s"
    return samples, "images/s" if run.image_size else "samples/s"


def differences(near: Near) -> str:
    """What it is like, and where it differs most."""
    return ", ".join((*near.alike, *near.unlike[:MOST_DIFFERENCES])) or "the same"


_IN_WHAT = re.compile(
    r"^(batch [\d,]+|[\d,]+ GPUs?|\w*(16|32|8)) instead of | card\b|^a card|a forward pass|the"
    r" optimizer$"
)
"""Words for what stands in `what` too."""


def evidence_rows(evidence: Sequence[Nearness]) -> list[dict[str, Any]]:
    """For a page's table: the runs that are near, and of each GPU without any the nearest one."""
    rows = []
    for nearness in evidence:
        shown = nearness.runs or ((nearness.closest,) if nearness.closest is not None else ())
        for near in shown:
            measured, unit = rate(near.run, near.run.step_time_ms)
            forecast = (
                None if near.run.forecast_ms is None else rate(near.run, near.run.forecast_ms)[0]
            )
            off = None if forecast is None else f"{100 * (forecast / measured - 1):+.0f} %"
            rows.append(
                {
                    "what": what(near.run),
                    "measured": measured,
                    "unit": unit,
                    "forecast": forecast,
                    "off": off,
                    "in_fit": near.run.in_fit,
                    "differences": differences(near),
                    "is_near": near.is_near,
                    "source": near.run.source,
                    "url": near.run.url,
                    "licence": near.run.licence,
                    "date": near.run.date or "",
                    "trust": near.run.trust,
                }
            )
    return rows
