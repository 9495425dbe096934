"""A recorded training script for the terminal: the parts of its step, what is odd, and what next."""

from __future__ import annotations

from statistics import fmean

from trainpace.journal.guard import Guarded, Pace
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_number
from trainpace.watch.recording import Rank, Recording

BAR = 24
IN_WORDS = {
    "other": "the script's own code",
    "data": "waiting for data",
    "loader_start": "starting the loader",
    "host_to_device": "copies to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "exchange between ranks",
    "synchronisation": "waiting for the device (.item())",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "trainpace": "this recording",
}


def print_recording(recording: Recording, folder: str) -> None:
    """The table of parts, a line on each oddity, and where the recording is."""
    if not recording.ranks:
        print_lines(
            f"No training step was seen. {recording.seen}", "Next: a step is a call of a torch optimizer's step()."
        )
        return
    ranks = recording.ranks
    step = fmean(r.step_ms for r in ranks)
    columns = ["part of a step", "", "ms", "share"]
    if len(ranks) > 1:
        columns += [f"rank {r.rank}" for r in ranks[:8]]
    title = f"{' '.join(recording.command)}: {ranks[0].steps:,} steps of {format_number(step)} ms"
    print_table(columns, _rows(ranks, step), left=2, title=title)
    print_lines(*_said(recording, step), f"Recorded in {folder}.",
                f"Next: trainpace diagnose -- {' '.join(recording.command)}, which proves what slows it down.")  # fmt: skip


def print_guarded(found: Guarded) -> None:
    """Against the baseline, with both intervals."""
    ratio = found.ratio
    change = 100 * (ratio.ratio - 1)
    between = (
        ""
        if ratio.low is None or ratio.high is None
        else f" ({100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %)"
    )
    word = "Regressed" if found.regressed else "No regression"
    print_lines(
        f"{word}: the median step takes {_pace(found.now)}, and {_pace(found.baseline)} in {found.baseline.run}: {change:+.1f} %"
        f"{between}; up to {100 * found.tolerance:g} % beyond the noise is let through."
    )


def _pace(pace: Pace) -> str:
    i = pace.interval_ms
    between = "" if i is None else f" ({format_number(i.low)} to {format_number(i.high)})"
    return f"{format_number(pace.step_ms)} ms{between}"


def _rows(ranks: tuple[Rank, ...], step: float) -> list[list[str]]:
    rows = []
    means = {part: fmean([r.parts_ms[part] for r in ranks]) for part in IN_WORDS}
    for part, ms in sorted(means.items(), key=lambda item: -item[1]):
        if ms < 0.0005 * step:
            continue
        row = [IN_WORDS[part], "█" * round(BAR * ms / step), format_number(ms), f"{ms / step:.1%}"]
        rows.append(row + ([format_number(r.parts_ms[part]) for r in ranks[:8]] if len(ranks) > 1 else []))
    return rows


def _said(recording: Recording, step: float) -> list[str]:
    first = recording.ranks[0]
    lines = []
    if first.samples_per_step:
        total = sum(r.samples_per_step for r in recording.ranks)
        lines.append(f"{format_number(1000 * total / step)} samples/s, {total:.0f} a step"
                     + (f" in {first.micro_steps:.0f} micro-steps." if first.micro_steps > 1 else "."))  # fmt: skip
    top = next((line for line in first.lines if line.part == "other"), None)
    if top is not None and first.parts_ms["other"] > 0.1 * step:
        lines.append(
            f"The script's own code: {top.share:.0%} of it at {top.line}{', in ' + top.called if top.called else ''}."
        )
    if first.reserved_gib:
        lines.append("Times are the host's: a device works on behind them, until something waits for it.")
    if recording.exit_code not in (0, None):
        lines.append(f"The command ended with exit code {recording.exit_code}.")
    elif recording.exit_code is None or not all(r.complete for r in recording.ranks):
        lines.append("A process was killed; what it did up to its last moments is counted.")
    if len(recording.ranks) < first.world_size:
        lines.append(f"{len(recording.ranks)} of {first.world_size} ranks were recorded here.")
    if recording.seen:
        lines.append(recording.seen)
    return lines
