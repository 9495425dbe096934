"""The positions of a launch command's words in a text, so that one flag can be changed and nothing else moves."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from trainpace.configs.command import ENDS, LAUNCHERS, Launcher, has_launcher, starts_at

_WORD = re.compile(
    r"""(?:\$\((?:[^()]|\([^()]*\))*\) | `[^`]*` | \\[^\r\n] | "(?:\\.|[^"\\])*" | '[^']*' | [^\s"'`\\])+""",
    re.VERBOSE | re.DOTALL,
)
_BETWEEN = re.compile(r"(?:\s|\\\r?\n)+|\\")
_LINE = re.compile(r"[ \t]*\#[^\n]*|(?:[^\\\n]|\\\r?\n|\\.)+", re.DOTALL)


class Word(NamedTuple):
    """Characters `start` to `end` of the text, and the word that the shell makes of them."""

    start: int
    end: int
    value: str


class Flag(NamedTuple):
    """A flag from `start` to `end`; `value` is None for a flag without one."""

    start: int
    end: int
    written: str
    value: Word | None
    equals: bool = False


class Launch(NamedTuple):
    """A launch command in a text. `flags`: the launcher's, by name with dashes for underscores; `script`: the script's,
    by name with underscores. New flags go to `flags_end` and `script_end`."""

    name: str
    launcher: Launcher
    flags: dict[str, Flag]
    script: dict[str, Flag]
    flags_end: int
    script_end: int
    start: int


def words_of(text: str, start: int = 0, end: int | None = None) -> list[Word]:
    """The words that a shell would make, up to a comment or the end."""
    words, at = [], start
    end = len(text) if end is None else end
    while at < end:
        space = _BETWEEN.match(text, at, end)
        if space:
            at = space.end()
            continue
        match = _WORD.match(text, at, end)
        if match is None or text[at] == "#":
            break
        raw, at = match.group(), match.end()
        closes = raw.endswith(";") and len(raw) > 1
        try:
            value = "".join(shlex.split(raw[:-1] if closes else raw))
        except ValueError:  # quotes within a substitution
            value = raw
        words.append(Word(match.start(), at - closes, value))
        if closes:
            words.append(Word(at - 1, at, ";"))
    return words


def lines_of(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every command line of a script; lines continued by a backslash are one."""
    for match in _LINE.finditer(text):
        if not match.group().lstrip().startswith("#"):
            yield match.span()


def find_launch(text: str) -> Launch | None:
    for start, end in lines_of(text):
        if has_launcher(re.sub(r"\\\r?\n", " ", text[start:end])):
            words = words_of(text, start, end)
            names = [word.value.rpartition("/")[2] for word in words]
            at = next((i for i, name in enumerate(names) if starts_at(names, i, name)), None)
            if at is not None:
                return _launch(words, at, names[at])
    return None


def _launch(words: list[Word], at: int, name: str) -> Launch:
    launcher, first = LAUNCHERS[name], at + (2 if name == "accelerate" else 1)
    stop = next((i for i in range(first, len(words)) if words[i].value in ENDS), len(words))
    flags: dict[str, Flag] = {}
    i = first
    while i < stop and words[i].value.startswith("-") and words[i].value != "-":
        flag, used = _flag(words, i, stop, launcher)
        flags.setdefault(flag.written.lstrip("-").replace("_", "-"), flag)
        i += used
    script: dict[str, Flag] = {}
    for j in range(i, stop):
        if words[j].value.startswith("--"):
            flag, _ = _flag(words, j, stop, None)
            script.setdefault(flag.written.lstrip("-").replace("-", "_"), flag)
    return Launch(name, launcher, flags, script, words[i - 1].end, words[stop - 1].end, words[at].start)


def _flag(words: list[Word], i: int, stop: int, launcher: Launcher | None) -> tuple[Flag, int]:
    """The flag at word `i`, and the number of words that it takes. `launcher`: None for a script's flags."""
    word = words[i]
    written, has_value, value = word.value.partition("=")
    if has_value:
        return Flag(word.start, word.end, written, Word(word.end - len(value), word.end, value), True), 1
    alone = launcher is not None and written.lstrip("-").replace("_", "-") in launcher.alone
    if alone or i + 1 >= stop or re.match(r"-{1,2}[A-Za-z]", words[i + 1].value):
        return Flag(word.start, word.end, written, None), 1
    following = words[i + 1]
    return Flag(word.start, following.end, written, following), 2


def with_value(text: str, flag: Flag, value: str) -> str:
    if flag.value is None:
        return f"{text[: flag.end]} {value}{text[flag.end :]}"
    if flag.equals:  # quotes may be around the value or the whole word
        return f"{text[: flag.start]}{flag.written}={value}{text[flag.end :]}"
    return text[: flag.value.start] + value + text[flag.value.end :]


def with_flag(text: str, at: int, beside: dict[str, Flag], written: str, value: str | None) -> str:
    """`text` with a new flag at `at`, in the spelling of the flags `beside` it: = or space, dashes or underscores."""
    others = list(beside.values())
    equals = any(flag.equals for flag in others)
    if any("_" in flag.written for flag in others) != any("-" in flag.written.lstrip("-") for flag in others):
        separator = "_" if any("_" in flag.written for flag in others) else "-"
        written = "--" + re.sub("[-_]", separator, written.lstrip("-"))
    new = written if value is None else f"{written}{'=' if equals else ' '}{value}"
    return f"{text[:at]} {new}{text[at:]}"


def without(text: str, flag: Flag) -> str:
    """`text` without a flag and the space before it."""
    before = re.sub(r"[ \t]+$", "", text[: flag.start])
    return before + text[flag.end :]
