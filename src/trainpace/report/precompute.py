"""Precomputing for the terminal: progress, what was done, what is damaged, and whether it is worth it."""

from collections.abc import Sequence

from trainpace.report.columns import words
from trainpace.report.terminal import print_lines, print_next, print_table, print_verdict
from trainpace.shards import Damage, Estimate, Precomputed
from trainpace.units import format_duration, format_number


def print_precomputed(done: Precomputed) -> None:
    if done.shards_computed:
        rate = format_number(done.samples_computed / done.seconds)
        print_verdict(
            f"Computed {done.samples_computed:,} samples in {format_duration(done.seconds)} ({rate}/s), as"
            f" {done.shards_computed} of {done.shards_planned} shards."
        )
    else:
        print_verdict("There was nothing left to compute.")
    if done.bad:
        print_lines(f"{done.bad:,} bad samples were skipped; bad_samples.jsonl lists their indices and the reasons.")
    if done.finished:
        print_lines(
            f"{done.folder}: {done.samples:,} samples in {done.shards} shards, {format_bytes(done.total_bytes)}."
        )
        print_lines(
            f'To read them: ShardDataset("{done.folder}", transform=...) or ShardStream, from trainpace.shards.'
        )
        print_next(["trainpace", "precompute", "--verify", "--out", str(done.folder)], "checks every byte")
    else:
        print_lines(
            f"{done.shards} of {done.shards_planned} shards are written. The part that finishes last writes the manifest."
        )


def print_damage(shards: int, damaged: Sequence[Damage], folder: str) -> None:
    if not damaged:
        print_verdict(f"Yes: all {shards} shards are intact.", good=True)
        return
    print_verdict(f"No: {len(damaged)} of {shards} shards are damaged.", good=False)
    print_lines(*(f"{one.file}: {one.problem}" for one in damaged))
    print_next(["trainpace", "precompute", "--repair", "--out", folder], "computes them again")


def print_estimate(e: Estimate) -> None:
    c = e.costs
    rows = [
        ("computing a sample", format_duration(c.compute_s), "one process"),
        ("reading it back", format_duration(c.read_s), f"from the page cache; {format_duration(c.read_cold_s)} from disk"),
        ("precomputing once", format_duration(e.compute_once_s), f"{e.workers} workers"),
        ("space on disk", format_bytes(e.total_bytes), f"{format_bytes(c.free_bytes)} free"),
        ("an epoch now", format_duration(e.epoch_now_s), f"{e.workers} workers"),
        ("an epoch after", format_duration(e.epoch_after_s), "from the page cache" if e.from_cache else "from disk"),
    ]  # fmt: skip
    if e.pays:
        print_verdict(
            f"Yes: every epoch becomes {format_duration(e.saved_per_epoch_s)} shorter, which pays for itself after"
            f" {e.epochs_to_pay:.1f} epochs.", good=True,
        )  # fmt: skip
    else:
        print_verdict(f"No: {e.reason}.", good=False)
    columns = (words(""), "", words("", least=16))
    print_table(columns, rows, title=f"{c.samples:,} samples, {c.measured} of them measured")


def format_bytes(size: float) -> str:
    """MB below 100 MB, GB above."""
    return f"{format_number(size / 1e9)} GB" if size >= 1e8 else f"{format_number(size / 1e6)} MB"
