"""Packed rows beside the same documents in padded batches, for the terminal, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainpace.report.phrases import devices, interval, number, percent, sentence
from trainpace.report.terminal import Column, print_lines, print_table, words

if TYPE_CHECKING:
    from trainpace.verbs.traced import PaddedBatch


def print_padded(padded: Sequence[PaddedBatch]) -> None:
    """A table of the padded batches, and in sentences what packing saves."""
    if not padded:
        return
    columns = (
        words("padded instead, on"),
        Column("documents"),
        Column("tokens"),
        Column("padding"),
        Column("step ms"),
        Column("90 % interval", 2),
        Column("GiB", 3),
        words("fits", 1, least=3),
        Column("packing saves"),
    )
    print_table(columns, [_cells(one) for one in padded], spaced=False)
    print_lines(*packing_in_words(padded))


def packing_in_words(padded: Sequence[PaddedBatch]) -> list[str]:
    """What packing saves where packed rows are fastest, and what that depends on."""
    timed = [one for one in padded if one.saved is not None]
    if not timed:
        return (
            [sentence(f"padded batches have no forecast: {padded[0].padded.reason}")]
            if padded
            else []
        )
    fitting = [
        one for one in timed if one.packed.fits is not False and one.padded.fits is not False
    ]
    one = max(fitting or timed, key=lambda one: one.packed_rate or 0.0)
    saved, rate, before = one.saved or 0.0, one.packed_rate, one.padded_rate
    where = (
        f"{devices(one.packed.num_devices, one.packed.device)} at batch"
        f" {one.packed.execution.micro_batch}"
    )
    return [
        f"Packing {'saves' if saved >= 0 else 'costs'} {percent(abs(saved))} of the time that a"
        f" document's token takes in padded batches on {where}: {number(rate)} tokens of"
        f" documents/s against {number(before)}. Of the padded batch {percent(one.padding)} is"
        f" padding, of packed rows {percent(one.packed_padding)}. Padded batches hold documents of"
        " the same lengths, drawn at random, and their attention is forecast without the cost of a"
        " mask."
    ]


def _cells(one: PaddedBatch) -> list[str]:
    f = one.padded
    return [
        devices(f.num_devices, f.device),
        f"{one.documents:,}",
        f"{one.length:,}",
        percent(one.padding),
        "-" if f.step is None else number(f.step.total_ms),
        interval(f.step_time_interval_ms),
        "-" if f.memory is None else number(f.memory.allocated_gib),
        {None: "?", True: "yes", False: "NO"}[f.fits],
        percent(one.saved),
    ]
