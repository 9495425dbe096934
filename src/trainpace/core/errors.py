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
from collections.abc import Iterable, Iterator


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
        return f"{self.message} {self.hint}".strip()


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
