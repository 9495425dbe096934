"""A settings file while it is being changed: its text, what it states, and why something was left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpace.configs.editing import Path, Syntax, set_key
from trainpace.configs.parsing import parse_json, parse_yaml
from trainpace.configs.settings import Value

ELSEWHERE = "another file states it"


class Draft:
    """`beside`: formats of the other files. `may_add`: settings that no other file states, so that this one may."""

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
        """The file as it now reads; of JSON and YAML."""
        if self._parsed is None or self._parsed[0] != self.text:
            parse = parse_json if self.syntax == "json" else parse_yaml
            self._parsed = (self.text, parse(self.text.removeprefix("\ufeff"), self.file))
        found = self._parsed[1]
        for key in self.prefix:
            found = found[key]
        return dict(found)

    def get(self, path: Path) -> Any:
        """What stands at a path; None where nothing does."""
        found: Any = self.data
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def put(self, path: Path, value: Value) -> None:
        """Write one key, without asking."""
        assert self.syntax is not None  # shell texts are edited as words
        self.text = set_key(self.text, self.file, self.syntax, (*self.prefix, *path), value)

    def place(self, name: str, path: Path, value: Value, adds: bool = True) -> bool:
        """Write a setting where the file has it already, or where it may be added. Says whether the file now has it."""
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
        """Remember that this file does not take a setting, and why."""
        self.left[name] = why

    def note(self, text: str) -> None:
        """Remember what the change asks for beside the file."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_all(self, names: frozenset[str], reasons: Mapping[str, str]) -> None:
        """The same for every name of a format that it cannot say."""
        for name in sorted(names & reasons.keys()):
            self.leave(name, reasons[name])
