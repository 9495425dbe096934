"""A settings file while it is being changed: its text, the settings written, and those left out with their reasons."""

from collections.abc import Mapping
from typing import Any

from trainpace.configs.editing import Path, Syntax, set_key
from trainpace.configs.parsing import parse
from trainpace.configs.settings import Value

ELSEWHERE = "another file states it"


class Draft:
    """`beside`: formats of the training's other files. `may_add`: settings that no other file states, so that this one
    may gain them."""

    def __init__(
        self, text: str, file: str, syntax: Syntax | None, beside: frozenset[str], may_add: frozenset[str]
    ) -> None:
        self.text = text
        self.file = file
        self.syntax = syntax
        self.beside = beside
        self.may_add = may_add
        self.prefix: Path = ()
        self._parsed: tuple[str, Any] | None = None
        self.wrote: set[str] = set()
        self.left: dict[str, str] = {}
        self.notes: list[str] = []

    @property
    def data(self) -> dict[str, Any]:
        """The parsed content of the current text (JSON and YAML only)."""
        if self._parsed is None or self._parsed[0] != self.text:
            assert self.syntax is not None  # shell texts are edited as words
            self._parsed = (self.text, parse(self.text, self.file, self.syntax))
        section = self._parsed[1]
        for key in self.prefix:
            section = section[key]
        return dict(section)

    def get(self, path: Path) -> Any:
        value: Any = self.data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, path: Path, value: Value) -> None:
        """Set one key unconditionally."""
        assert self.syntax is not None  # shell texts are edited as words
        self.text = set_key(self.text, self.file, self.syntax, (*self.prefix, *path), value)

    def place(self, name: str, path: Path, value: Value, adds: bool = True) -> bool:
        """Set a setting where the file states it or may gain it; returns whether the file now states it."""
        old = self.get(path)
        if old == "auto":
            self.leave(name, f'{".".join(path)} is "auto": another file or the run decides')
        elif old is not None or (adds and name in self.may_add):
            if old != value or isinstance(old, bool) != isinstance(value, bool):
                self.put(path, value)
            self.wrote.add(name)
            return True
        elif name not in self.may_add:
            self.leave(name, ELSEWHERE)
        return False

    def leave(self, name: str, why: str) -> None:
        self.left[name] = why

    def note(self, text: str) -> None:
        """Record what the user must do beside the file."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_all(self, names: frozenset[str], reasons: Mapping[str, str]) -> None:
        for name in sorted(names & reasons.keys()):
            self.leave(name, reasons[name])
