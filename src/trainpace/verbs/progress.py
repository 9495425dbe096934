"""What a verb tells while it works, to whoever asked: remarks, and how far long work has come."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Work(Protocol):
    """Long work that goes on."""

    def to(self, done: float, total: float | None = None, words: str = "", new: float | None = None) -> None:
        """Say how much is done of `total`, and `new`, how much of that by this run (all unless said). `words`: what is on now."""

    def say(self, line: str) -> None:
        """Give a line that stays."""


class Progress(Protocol):
    """Where a verb's remarks go."""

    def note(self, text: str) -> None:
        """Give a remark that stays, beside the answer."""

    def work(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> AbstractContextManager[Work]:
        """Begin long work: `with progress.work("tracing") as work:`. `seconds`: work that is known to take so long."""


class Silent:
    """Tells nobody."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def work(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> Iterator[Work]:
        yield _NoWork()


class _NoWork:
    def to(self, done: float, total: float | None = None, words: str = "", new: float | None = None) -> None:
        pass

    def say(self, line: str) -> None:
        pass
