"""Standard streams and progress bars.

Characters that the encoding lacks are replaced by ASCII. Long work shows a bar in a terminal, and a
line every ten seconds in a log file.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from trainpace.core.units import format_duration, format_number

if TYPE_CHECKING:
    from rich.progress import Progress

_ERRORS = "trainpace"
PLAIN = dict(zip("█▓▒░─│└┤┬├┼●○▲▼·…◀▶×µ–—’²", "##=:-|+++++*o^v.~<>xu--'2", strict=True))
"""ASCII replacements of drawing characters. All have one character, so columns stay aligned.
"""
LOG_EVERY_S = 10.0
REFRESHES_PER_S = 1.0
"""Screen updates per second. The rate is low, because measured work may use the same cores.
"""
LEAST_RATE = 1.0
"""Lowest rate per second that is shown. For slower work, only the remaining time is useful."""
WAIT_S = 0.5
"""Seconds before a bar appears."""


def plain(text: str) -> str:
    """Replace all non-ASCII characters by ASCII. The number of characters stays the same."""
    return "".join(c if c.isascii() else PLAIN.get(c) or _dots(c) for c in text)


def _dots(c: str) -> str:
    """Return an ASCII mark for the dots of a braille character. "?" for other characters."""
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
"""Visible replacements of control characters, direction marks and surrogates."""


def visible(text: str) -> str:
    """Replace every control character by a visible symbol.

    Otherwise text from a file or an exception could move the cursor, clear the screen or rename the
    window.
    """
    return text.translate(_VISIBLE)


def tell(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print a line with control characters made visible."""
    out = sys.stderr if err else sys.stdout
    print(visible(str(text)), file=out, end="\n" if nl else "", flush=True)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def open_closed_streams() -> None:
    """Open closed standard streams on the null device.

    Otherwise the next opened file would get the number of the closed stream.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def never_fail_to_encode() -> None:
    """Make stdout and stderr replace characters that their encoding lacks by ASCII."""
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or ""
        if hasattr(stream, "reconfigure") and not encoding.lower().startswith("utf"):
            stream.reconfigure(errors=_ERRORS)


def left_s(done: float, total: float | None, new: float, elapsed_s: float) -> float | None:
    """Return the remaining seconds, at the rate of the `new` part of `done`.

    None if there is no rate yet.
    """
    if total is None or new <= 0 or elapsed_s <= 0:
        return None
    return max(0.0, total - done) * elapsed_s / new


class Bar:
    """Progress bar.

    Use `with Bar("tracing", total) as bar:`, then `bar.to(done)`, and `bar.say(line)` for lines
    that stay on the screen. Without a total it shows the elapsed time. Only the outermost of nested
    bars is shown, because two bars would overwrite each other.
    """

    _outermost: ClassVar[Bar | None] = None

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self._what, self._total, self._unit = what, total, unit
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
        """Report that `done` of `total` is finished.

        `new` is the part that this run did, and `words` names the current item.
        """
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
        parts = ", ".join(self._progress(time.monotonic() - self._begun))
        now = f" ({self._words})" if self._words else ""
        return f"{self._what}{': ' if parts else ''}{parts}{now}"

    def _progress(self, elapsed_s: float) -> Iterator[str]:
        if self._total is None:
            if elapsed_s >= 1:
                yield f"{format_duration(round(elapsed_s))} so far"
            return
        yield f"{self._done:,.0f} of {self._total:,.0f} {self._unit}".rstrip()
        rate = self._new / elapsed_s if self._unit and elapsed_s > 0 else 0.0
        if rate >= LEAST_RATE:
            yield f"{format_number(rate)}/s"
        left = left_s(self._done, self._total, self._new, elapsed_s)
        if left:
            yield f"about {format_duration(round(left) if left >= 1 else left)} left"

    def _show(self) -> None:
        with self._lock:
            if self._terminal:
                self._shown = _made(self)
                self._shown.start()

    def share(self) -> float | None:
        """Return the finished share from 0 to 1, or None if the total is unknown."""
        return min(1.0, self._done / self._total) if self._total else None


class TerminalProgress:
    def note(self, text: str) -> None:
        tell(text, err=True)

    def work(self, what: str, total: float | None = None, unit: str = "") -> Bar:
        return Bar(what, total, unit)


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

    # In a narrow terminal, the name of the current item is cut before the progress.
    text = Line(table_column=Column(no_wrap=True, overflow="ellipsis"))
    out = Console(stderr=True)
    shown = Progress(
        BarColumn(16), text, console=out, transient=True, refresh_per_second=REFRESHES_PER_S
    )
    shown.add_task("")
    return shown
