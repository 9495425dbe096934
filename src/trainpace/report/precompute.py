"""Precomputing for the terminal: progress, what was done, what is damaged, and whether it is worth it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from trainpace.datapath.precompute import Damage, Precomputed, Progress
from trainpace.datapath.precompute_estimate import Estimate
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_duration, format_number

_LOG_EVERY_S = 10.0


class ProgressLine:
    """One line on stderr that is written anew, or in a log file a line now and then."""

    def __init__(self) -> None:
        self._terminal, self._told = sys.stderr.isatty(), time.monotonic()
        self._width = 0

    def __call__(self, p: Progress) -> None:
        """Show where it is."""
        if not self._terminal and time.monotonic() - self._told < _LOG_EVERY_S:
            return
        self._told = time.monotonic()
        rate = f", {format_number(p.new / p.seconds)}/s" if p.new and p.seconds else ""
        left = "" if p.left_s is None or p.done == p.wanted else f", {format_duration(p.left_s)} left"
        line = f"{p.done:,} of {p.wanted:,} samples{rate}{left}" + (f", {p.bad:,} bad" if p.bad else "")
        print(line.ljust(self._width), end="\r" if self._terminal else "\n", file=sys.stderr, flush=True)
        self._width = len(line)

    def end(self) -> None:
        """Leave the line clear for what comes next."""
        if self._terminal and self._width:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)


def print_precomputed(done: Precomputed, all_shards: int) -> None:
    """What there is now, and what comes next."""
    if done.shards_computed:
        rate = format_number(done.samples_computed / done.seconds)
        print_lines(
            f"Computed {done.samples_computed:,} samples in {format_duration(done.seconds)} ({rate}/s), as"
            f" {done.shards_computed} of {all_shards} shards."
        )
    else:
        print_lines("Nothing was left to compute.")
    if done.bad:
        print_lines(f"{done.bad:,} bad samples are left out; bad_samples.jsonl has their indices and reasons.")
    if done.finished:
        print_lines(
            f"{done.folder}: {done.samples:,} samples in {done.shards} shards, {format_bytes(done.total_bytes)}."
        )
        print_lines(
            f'Next: ShardDataset("{done.folder}", transform=...) or ShardStream, from trainpace.datapath.shard_dataset'
        )
    else:
        print_lines(f"{done.shards} of {all_shards} shards are there. The part that ends last writes the manifest.")


def print_damage(shards: int, damaged: Sequence[Damage], folder: str) -> None:
    """One line a damaged shard, and the verdict."""
    for one in damaged:
        print_lines(f"{one.file}: {one.problem}")
    if damaged:
        print_lines(
            f"{len(damaged)} of {shards} shards are damaged. Next: trainpace precompute --repair --out {folder}"
        )
    else:
        print_lines(f"All {shards} shards are as they were written.")


def print_estimate(e: Estimate) -> None:
    """What it costs, what it saves, and the verdict."""
    c = e.costs
    rows = [
        ("computing a sample", format_duration(c.compute_s), "one process"),
        ("reading it back", format_duration(c.read_s), f"from the page cache; {format_duration(c.read_cold_s)} from the disk"),
        ("precomputing once", format_duration(e.compute_once_s), f"{e.workers} workers"),
        ("on the disk", format_bytes(e.total_bytes), f"{format_bytes(c.free_bytes)} are free"),
        ("an epoch now", format_duration(e.epoch_now_s), f"{e.workers} workers"),
        ("an epoch after", format_duration(e.epoch_after_s), "from the page cache" if e.from_cache else "from the disk"),
    ]  # fmt: skip
    print_table(("", "", ""), rows, title=f"{c.samples:,} samples, {c.measured} of them measured")
    if e.pays:
        print_lines(
            f"Yes: an epoch becomes {format_duration(e.saved_per_epoch_s)} shorter, and after {e.epochs_to_pay:.1f} epochs it"
            " has paid."
        )
    else:
        print_lines(f"No: {e.reason}.")


def format_bytes(size: float) -> str:
    """MB below 100 MB, GB above."""
    return f"{format_number(size / 1e9)} GB" if size >= 1e8 else f"{format_number(size / 1e6)} MB"
