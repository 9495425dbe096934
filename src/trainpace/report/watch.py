"""A recorded training script for the terminal: the parts of its step, what is odd, and what next."""

import signal
from statistics import fmean

from trainpace.journal import Guarded, Pace
from trainpace.report.columns import Column, bar, words
from trainpace.report.phrases import bracketed, plural
from trainpace.report.terminal import BAR_WIDTH, print_head, print_lines, print_next, print_table, print_verdict
from trainpace.units import format_duration, format_number
from trainpace.watch import Rank, Recording

IN_WORDS = {
    "other": "the script's own code",
    "data": "waiting for data",
    "loader_start": "starting the loader",
    "host_to_device": "copies to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication between ranks",
    "synchronisation": "waiting for the device (.item())",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "trainpace": "overhead of this recording",
}
MOST_RANKS = 8


def print_recording(recording: Recording, folder: str) -> None:
    ranks = recording.ranks
    if not ranks:
        print_verdict(f"No training step was seen. {recording.seen}".rstrip(), good=False)
        print_lines("A step is a call of a torch optimizer's step().")
        return
    step_ms = fmean(r.step_ms for r in ranks)
    columns = [words("part of a step", least=18), Column("ms"), Column("share"), bar(1)]
    if len(ranks) > 1:
        columns += [Column(f"rank {r.rank}", 2) for r in ranks[:MOST_RANKS]]
    print_head(f"{' '.join(recording.command)}: recorded in {folder}")
    rows = _rows(ranks, step_ms)
    each = format_duration(step_ms / 1000)
    print_verdict(f"{plural(ranks[0].steps, 'step')}, {each} each; the largest part is {rows[0][0]} ({rows[0][2]}).")
    print_table(columns, rows)
    print_lines(*_remarks(recording, step_ms))
    print_next(
        ["trainpace", "diagnose", "--", *recording.command], "proves what slows it down, and says what to change"
    )


def print_guarded(guarded: Guarded) -> None:
    ratio = guarded.ratio
    between = ""
    if ratio.low is not None and ratio.high is not None:
        between = f" ({100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %)"
    faster = f", {1 / ratio.ratio:.3g} times as fast" if ratio.high is not None and ratio.high < 1 else ""
    print_verdict(
        f"{'Regressed' if guarded.regressed else 'No regression'}: the median step takes {_pace(guarded.now)}, and"
        f" {_pace(guarded.baseline)} in {guarded.baseline.run}: {100 * (ratio.ratio - 1):+.1f} %{between}{faster}; up to"
        f" {100 * guarded.tolerance:g} % beyond the noise is tolerated.",
        good=not guarded.regressed,
    )


def _pace(pace: Pace) -> str:
    return f"{format_number(pace.step_ms)} ms{bracketed(pace.interval_ms)}"


def _rows(ranks: tuple[Rank, ...], step_ms: float) -> list[list[str]]:
    means = {part: fmean([r.parts_ms[part] for r in ranks]) for part in IN_WORDS}
    return [
        [IN_WORDS[part], format_number(ms), f"{100 * ms / step_ms:.1f} %", "█" * round(BAR_WIDTH * ms / step_ms),
         *(format_number(r.parts_ms[part]) for r in ranks[:MOST_RANKS] if len(ranks) > 1)]
        for part, ms in sorted(means.items(), key=lambda item: -item[1]) if ms >= 0.0005 * step_ms
    ]  # fmt: skip


def _remarks(recording: Recording, step_ms: float) -> list[str]:
    first, code = recording.ranks[0], recording.exit_code
    lines = []
    if first.samples_per_step:
        total = sum(r.samples_per_step for r in recording.ranks)
        micro = f" in {first.micro_steps:.0f} micro-steps" if first.micro_steps > 1 else ""
        lines.append(f"{format_number(1000 * total / step_ms)} samples/s, {total:.0f} samples a step{micro}.")
    top = next((line for line in first.lines if line.part == "other"), None)
    if top is not None and first.parts_ms["other"] > 0.1 * step_ms:
        called = f", in {top.called}" if top.called else ""
        lines.append(f"Of the script's own code, {top.share:.0%} is at {top.line}{called}.")
    if first.reserved_gib:
        lines.append("Times are the host's: the device works asynchronously, until something waits for it.")
    if code is not None and code < 0 and -code in set(signal.Signals):
        lines.append(f"The command was stopped by {signal.Signals(-code).name}.")
    elif code:
        lines.append(f"The command ended with exit code {code}.")
    elif code is None or not all(r.complete for r in recording.ranks):
        lines.append("A process was killed; what it did until then is counted.")
    if len(recording.ranks) < first.world_size:
        lines.append(f"{len(recording.ranks)} of {first.world_size} ranks were recorded here.")
    return [*lines, recording.seen] if recording.seen else lines
