"""A recorded training script for the terminal: the parts of its step, what is odd, and what next."""

from __future__ import annotations

from statistics import fmean

from trainpace.journal import Guarded, Pace
from trainpace.report.columns import Column, bar, words
from trainpace.report.terminal import BAR_WIDTH, print_head, print_lines, print_next, print_table, print_verdict
from trainpace.units import format_number
from trainpace.watch import Rank, Recording

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
        print_verdict(f"No training step was seen. {recording.seen}".rstrip(), good=False)
        print_lines("A step is a call of a torch optimizer's step().")
        return
    ranks = recording.ranks
    step = fmean(r.step_ms for r in ranks)
    columns = [words("part of a step", least=18), Column("ms"), Column("share"), bar(1)]
    if len(ranks) > 1:
        columns += [Column(f"rank {r.rank}", 2) for r in ranks[:8]]
    print_head(f"{' '.join(recording.command)}: recorded in {folder}")
    rows = _rows(ranks, step)
    print_verdict(f"{ranks[0].steps:,} steps of {format_number(step)} ms; most of it is {rows[0][0]} ({rows[0][2]}).")
    print_table(columns, rows)
    print_lines(*_said(recording, step))
    print_next(
        ["trainpace", "diagnose", "--", *recording.command], "proves what slows it down, and says what to change"
    )


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
    faster = f", {1 / ratio.ratio:.3g} times as fast" if ratio.high is not None and ratio.high < 1 else ""
    print_verdict(
        f"{word}: the median step takes {_pace(found.now)}, and {_pace(found.baseline)} in {found.baseline.run}: {change:+.1f} %"
        f"{between}{faster}; up to {100 * found.tolerance:g} % beyond the noise is let through.",
        good=not found.regressed,
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
        row = [IN_WORDS[part], format_number(ms), f"{100 * ms / step:.1f} %", "█" * round(BAR_WIDTH * ms / step)]
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
