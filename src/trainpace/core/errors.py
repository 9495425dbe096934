"""Exceptions for errors that a user can cause.

    TrainpaceError (a ValueError)   misuse: one sentence, what to try, exit code 2
     ├── UnknownName                a name that is not in a catalogue; lists similar names
     ├── Contradiction              numbers or files that cannot all be right
     ├── UnreadableInput            a file, config or record that cannot be read
     └── UserCodeError              the user's model or data raised or died
          ├── OutOfMemory           ... out of memory
          └── TimedOut              ... or exceeded its time limit

A negative result (does not fit, misses the deadline) is a value, not an exception. Bugs are caught
by ``assert``.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

LONGEST_MESSAGE = 300
"""Maximum length of a quoted message, in characters. Longer ones are cut."""
_PRINTED_MODULE = re.compile(r"\(\n(?:[ \t].*\n)*\)")


class TrainpaceError(ValueError):
    """Error for unusable input.

    The message is one sentence for the user, and ``hint`` says what to try.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        separator = "\n" if "\n" in self.message else " "
        return f"{self.message}{separator}{self.hint}".strip()


class Contradiction(TrainpaceError):
    """Error for numbers, options or files that contradict each other."""


class UnreadableInput(TrainpaceError):
    """Error for a file or record that is missing, malformed or of another schema version."""


class UserCodeError(TrainpaceError):
    """Error for the user's own code that raised, ran out of time or ended its process."""


class OutOfMemory(UserCodeError):
    """Error for the user's own code that ran out of memory on the device or the machine."""


class TimedOut(UserCodeError):
    """Error for the user's own code that exceeded its time limit."""


class UnknownName(TrainpaceError):
    """Error for an unknown name. The message lists the most similar known names."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        near = nearest_names(name, known)
        suggestion = f"Nearest: {', '.join(near)}." if near else ""
        super().__init__(f"unknown {what} {name!r}.", f"{suggestion} {hint}".strip())
        self.nearest = near


@contextlib.contextmanager
def ending_with(exit_code: int) -> Iterator[None]:
    """Give errors raised in this context the exit code of a command that ended before."""
    try:
        yield
    except TrainpaceError as error:
        error.exit_code = exit_code
        raise


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
    """Return the text as one line of at most `most` characters, cut after a whole word."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    return f"{line[:most].rpartition(' ')[0] or line[:most]} …"


def message_of(error: BaseException) -> str:
    """Return the message of an exception as one short line.

    Only the first line is used. If it starts to print a module over several lines, the module is
    abbreviated as "Name(...)".
    """
    try:
        text = _PRINTED_MODULE.sub("(...)", str(error))
    except Exception:
        return "unreadable message"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    # a DataLoader worker sends its whole traceback; the last line is the exception
    is_traceback = any(line.startswith("Original Traceback") for line in lines)
    line = lines[-1].removeprefix(f"{type(error).__name__}: ") if is_traceback else lines[0]
    return shortened(line)


def as_sentence(text: str) -> str:
    """Return the text with a full stop, if it has no other final punctuation."""
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def os_reason(error: OSError) -> str:
    """Return the reason of an OSError in lower case, for the middle of a sentence."""
    return (error.strerror or str(error)).lower()


def nearest_names(name: str, known: Iterable[str], limit: int = 5) -> list[str]:
    """Return at most `limit` known names that resemble `name`, the most similar first.

    Case is ignored.
    """
    by_folded = {k.casefold(): k for k in known}
    folded = name.casefold()
    close = difflib.get_close_matches(folded, by_folded, n=limit, cutoff=0.45)
    containing = [k for k in by_folded if len(folded) > 1 and folded in k and k not in close]
    return [by_folded[k] for k in [*close, *sorted(containing, key=len)]][:limit]
