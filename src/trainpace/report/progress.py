"""Progress of long work on stderr, without anything that takes long to import."""

from __future__ import annotations

import sys
import time

from trainpace.datapath.shard_work import Progress
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
