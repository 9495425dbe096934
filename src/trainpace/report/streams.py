"""Standard streams: what an encoding lacks becomes ASCII; long work shows a bar, and in a log file a line now and then."""

from __future__ import annotations

import codecs
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Self

from trainpace.core.units import format_duration, format_number
from trainpace.report.screen import screen

if TYPE_CHECKING:
    from rich.progress import Progress

_ERRORS = "trainpace"
PLAIN = dict(zip("█▓▒░─│└┤┬├┼●○▲▼·…◀▶×µ–—’²", "##=:-|+++++*o^v.~<>xu--'2", strict=True))
"""ASCII for each drawing character, one for one, so that columns stay columns."""
LOG_EVERY_S = 10.0
REFRESHES_PER_S = 1.0
"""Few, since what runs meanwhile is often being timed on the same cores."""
LEAST_RATE = 1.0
"""Fewer a second are better said by the time left."""
WAIT_S = 0.5
"""What ends sooner needs no bar."""


def plain(text: str) -> str:
    """The same number of characters, all of them ASCII."""
    return "".join(c if c.isascii() else PLAIN.get(c) or _dots(c) for c in text)


def _dots(c: str) -> str:
    """The place of a braille character's dots: above, below, or both; a question mark for what is none."""
    bits = ord(c) - 0x2800
    if not 0 < bits < 256:
        return "?"
    above, below = bits & 0b0001_1011, bits & 0b1110_0100
    return ":" if above and below else "'" if above else "."


_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
    | dict.fromkeys(
        [
            *range(0x80, 0xA0),
            *range(0x202A, 0x202F),
            *range(0x2066, 0x206A),
            *range(0xD800, 0xE000),
        ],
        "\ufffd",
    )
    | {0x7F: "\u2421"}
)
"""Control characters that a terminal would obey, marks that reverse what is read, and halves of surrogate pairs."""


def visible(text: str) -> str:
    """Text with a picture in place of every control character, one for one, so that nothing from a file or an exception can
    move the cursor, clear the screen or name the window."""
    return text.translate(_VISIBLE)


def tell(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print a line, made `visible`."""
    held = None if err else screen()
    out = held.end if held is not None else sys.stderr if err else sys.stdout
    print(visible(str(text)), file=out, end="\n" if nl else "", flush=True)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def open_closed_streams() -> None:
    """Where a program was started with its input or output closed, nothing is read or written there; else the next file that it
    opens would take the place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def never_fail_to_encode() -> None:
    """stdout and stderr write what their encoding has, and ASCII in place of the rest."""
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or ""
        if hasattr(stream, "reconfigure") and not encoding.lower().startswith("utf"):
            stream.reconfigure(errors=_ERRORS)


def left_s(done: float, total: float | None, new: float, elapsed_s: float) -> float | None:
    """Seconds left at the rate of what this run has done, `new` of `done`; None before there is a rate."""
    if total is None or new <= 0 or elapsed_s <= 0:
        return None
    return max(0.0, total - done) * elapsed_s / new


class Bar:
    """`with Bar("tracing", total) as bar:`, then `bar.to(done)` and `bar.say(line)` for lines that stay.

    Without a total it shows that work goes on, and for how long. `seconds`: work that takes so long is shown by the clock alone.
    Of work within other work the outer is shown: two bars would write over each other.
    """

    _outermost: ClassVar[Bar | None] = None

    def __init__(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> None:
        self._what, self._total, self._unit, self._seconds = what, total, unit, seconds
        self._begun = time.monotonic()
        self._last_line = -LOG_EVERY_S + self._begun
        self._terminal = sys.stderr.isatty()
        self._shown: Progress | None = None
        self._start = threading.Timer(WAIT_S, self._show)
        self._lock = threading.Lock()
        self._words, self._done, self._new = "", 0.0, 0.0

    def __enter__(self) -> Self:
        if Bar._outermost is None:
            Bar._outermost = self
            if self._terminal:
                self._start.daemon = True
                self._start.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def to(
        self, done: float, total: float | None = None, words: str = "", new: float | None = None
    ) -> None:
        """`done` of `total`, of which this run did `new` (all of it unless given); `words`: what it works on now."""
        self._total = self._total if total is None else total
        self._words, self._done, self._new = words, done, done if new is None else new
        if not self._terminal and time.monotonic() - self._last_line >= LOG_EVERY_S:
            self._last_line = time.monotonic()
            tell(self.line(), err=True)

    def say(self, line: str) -> None:
        outer = Bar._outermost
        if outer is not None and outer is not self:
            outer.say(line)
            return
        with self._lock:
            if self._shown is None:
                tell(line, err=True)
            else:
                self._shown.console.print(
                    visible(line), markup=False, highlight=False, soft_wrap=True
                )

    def end(self) -> None:
        if Bar._outermost is self:
            Bar._outermost = None
        self._start.cancel()
        with self._lock:
            self._terminal = False
            if self._shown is not None:
                self._shown.stop()
                self._shown = None

    def line(self) -> str:
        parts = []
        elapsed_s = time.monotonic() - self._begun
        if self._seconds is not None:
            parts.append(f"about {format_duration(max(0.0, self._seconds - elapsed_s))} left")
        elif self._total is None:
            parts += [f"{format_duration(round(elapsed_s))} so far"] if elapsed_s >= 1 else []
        else:
            unit = f" {self._unit}" if self._unit else ""
            parts.append(f"{self._done:,.0f} of {self._total:,.0f}{unit}")
            rate = self._new / elapsed_s if self._unit and elapsed_s > 0 else 0.0
            parts += [f"{format_number(rate)}/s"] if rate >= LEAST_RATE else []
            left = left_s(self._done, self._total, self._new, elapsed_s)
            if left is not None and self._done < self._total:
                parts.append(f"about {format_duration(round(left) if left >= 1 else left)} left")
        now = f" ({self._words})" if self._words else ""
        return f"{self._what}{': ' if parts else ''}{', '.join(parts)}{now}"

    def _show(self) -> None:
        with self._lock:
            if self._terminal:
                self._shown = _made(self)
                self._shown.start()

    def share(self) -> float | None:
        """Done, from 0 to 1; None where nobody knows."""
        if self._seconds is not None:
            return min(1.0, (time.monotonic() - self._begun) / self._seconds)
        return min(1.0, self._done / self._total) if self._total else None


class TerminalProgress:
    def note(self, text: str) -> None:
        tell(text, err=True)

    def work(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> Bar:
        return Bar(what, total, unit, seconds)


def _made(bar: Bar) -> Progress:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.table import Column
    from rich.text import Text

    class Line(ProgressColumn):
        def render(self, task: Task) -> RenderableType:
            share = bar.share()
            task.total, task.completed = (None, 0.0) if share is None else (1.0, share)
            return Text(visible(bar.line()))

    # where there is no room, what is on now gives way to how far it is
    text = Line(table_column=Column(no_wrap=True, overflow="ellipsis"))
    out = Console(stderr=True)
    shown = Progress(
        BarColumn(16), text, console=out, transient=True, refresh_per_second=REFRESHES_PER_S
    )
    shown.add_task("")
    return shown
