"""Checks and notes that all readers of settings formats share."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainpace.configs.settings import ConfigFile, Note, Setting, SettingName, Severity, Value
from trainpace.errors import UnreadableInput, nearest_names

LARGEST = 10**15
_LONGEST_NAME = 80
_MOST_SUGGESTIONS = 50


class Reading:
    """Collects the settings and notes of one file.

    `prefix` heads every key, for a section inside a file of another kind. `understands_auto`: the tool takes the word
    "auto" as "stated elsewhere"; every other tool would stop at it.
    """

    def __init__(self, file: str, format_name: str, prefix: str = "", understands_auto: bool = False) -> None:
        self.file = file
        self.format = format_name
        self.prefix = prefix
        self.understands_auto = understands_auto
        self._settings: list[Setting] = []
        self._notes: list[Note] = []

    def done(self) -> ConfigFile:
        return ConfigFile(file=self.file, format=self.format, settings=tuple(self._settings), notes=tuple(self._notes))

    def stated(self, name: SettingName) -> Value | None:
        """The first value recorded under `name`, if any."""
        return next((s.value for s in self._settings if s.name == name), None)

    def note(self, key: str, text: str, severity: Severity = "info", leaves_open: SettingName | None = None) -> None:
        key = self.prefix + key
        text = f"{key}: {text}"
        self._notes.append(Note(file=self.file, key=key, text=text, severity=severity, leaves_open=leaves_open))

    def warn(self, key: str, text: str) -> None:
        """Record a note that the user should act on."""
        self.note(key, text, "warning")

    def put(self, name: SettingName, value: Value, key: str) -> None:
        """Record a setting that has been checked."""
        self._settings.append(Setting(name=name, value=value, file=self.file, key=self.prefix + key))

    def fail(self, key: str, value: Any, expected: str) -> UnreadableInput:
        """The error for an impossible value."""
        return UnreadableInput(f"{self.file}: {self.prefix}{key} is {_shown(value)}; it should be {expected}.")

    def count(self, name: SettingName, value: Any, key: str, least: int = 1, most: int = LARGEST) -> None:
        """Record a whole number."""
        number = self.whole(value, key, least, most, name)
        if number is not None:
            self.put(name, number, key)

    def whole(
        self, value: Any, key: str, least: int = 1, most: int = LARGEST, name: SettingName | None = None
    ) -> int | None:
        """A whole number, or None where it is not stated; "8" in quotes is accepted with a note."""
        if value is None or self._is_auto(value, key, name):
            return None
        number = value
        if isinstance(number, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", number):
            self.note(key, f"written as text, {number!r}")
            number = int(number)
        if isinstance(number, float) and math.isfinite(number) and number == int(number):
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            expected = f"a whole number from {least}" + ("" if most == LARGEST else f" to {most}")
            raise self.fail(key, value, expected)
        return number

    def number(self, name: SettingName, value: Any, key: str) -> None:
        """Record a number above 0; YAML reads 1e-4 as text, which every trainer turns into a number."""
        if value is None or self._is_auto(value, key, name):
            return
        number = value
        if isinstance(number, str):
            try:
                number = float(number)
            except ValueError:
                raise self.fail(key, value, "a number above 0") from None
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < LARGEST:
            raise self.fail(key, value, "a number above 0")
        self.put(name, float(number), key)

    def flag(self, name: SettingName, value: Any, key: str) -> None:
        """Record true or false."""
        state = self.truth(value, key, name)
        if state is not None:
            self.put(name, state, key)

    def truth(self, value: Any, key: str, name: SettingName | None = None) -> bool | None:
        if value is None or self._is_auto(value, key, name):
            return None
        if isinstance(value, bool):
            return value
        raise self.fail(key, value, "true or false")

    def section(self, value: Any, key: str) -> dict[str, Any]:
        """A nested table, empty where it is not stated."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, value, "a section with keys of its own")
        return value

    def word(self, value: Any, key: str, choices: Iterable[str] | None = None) -> str | None:
        """A word, one of `choices` where they are given; None where it is not stated."""
        if value is None:
            return None
        if choices is not None and value not in (allowed := list(choices)):
            raise self.fail(key, value, f"one of {', '.join(allowed)}")
        if not isinstance(value, str) or not value.strip():
            raise self.fail(key, value, "a word")
        return value

    def flag_unknown(self, keys: Mapping[str, Any], known: Iterable[str], text: str, section: str = "") -> None:
        """Warn of every key that is not in `known`, with the nearest known names."""
        names = set(known)
        unknown = [str(key)[:_LONGEST_NAME] for key in keys if key not in names]
        for key in unknown[:_MOST_SUGGESTIONS]:  # a search among the names for each: not for a thousand keys
            near = nearest_names(key, sorted(names), 2)
            self.warn(section + key, text + (f"; nearest: {', '.join(near)}" if near else ""))
        for key in unknown[_MOST_SUGGESTIONS:]:
            self.warn(section + key, text)

    def _is_auto(self, value: Any, key: str, name: SettingName | None) -> bool:
        if not (self.understands_auto and isinstance(value, str) and value == "auto"):
            return False
        self.note(key, '"auto": another file or the run decides', leaves_open=name)
        return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
