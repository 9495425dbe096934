"""Launch commands in a text, as words and flags with their positions, so that one can be changed and nothing else moves.

Flags: torch 2.13's torch/distributed/run.py, accelerate 1.15's commands/launch.py, DeepSpeed 0.19's launcher/runner.py.
A launcher's own flags end at the first word that is neither a flag nor a flag's value: the script.
"""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from trainpace.configs.settings import SettingName, Value, names
from trainpace.core.errors import UnreadableInput

ENDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "2>", "2>&1", "&>", "<"))
_WORD = re.compile(
    r"""(?:\$\((?:[^()]|\([^()]*\))*\) | `[^`]*` | \\[^\r\n] | "(?:\\.|[^"\\])*" | '[^']*' | [^\s"'`\\])+""",
    re.VERBOSE | re.DOTALL,
)
_BETWEEN = re.compile(r"(?:\s|\\\r?\n)+|\\")
_LINE = re.compile(r"[ \t]*\#[^\n]*|(?:[^\\\n]|\\\r?\n|\\.)+", re.DOTALL)
_LAUNCHER = re.compile(
    r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate[\s\\]+launch|deepspeed)\b"
)


class Launcher(NamedTuple):
    """A launcher's flags: those that state settings, those without a value, and the others that take one."""

    reads: dict[str, SettingName]
    alone: frozenset[str]
    others: frozenset[str] | None = None  # None: too many to list


TORCHRUN = Launcher(
    {"nnodes": "nnodes", "nproc-per-node": "nproc_per_node"},
    frozenset(names("torchrun", "flags_without_value")),
    frozenset(names("torchrun", "other_flags")),
)
ACCELERATE = Launcher(
    {
        "num-processes": "world_size",
        "num-machines": "nnodes",
        "mixed-precision": "precision",
        "gradient-accumulation-steps": "accumulation",
        "zero-stage": "zero_stage",
        "parallelism-config-tp-size": "tp",
        "parallelism-config-cp-size": "cp",
        "fsdp-activation-checkpointing": "activation_checkpointing",
        "offload-optimizer-device": "offload_optimizer",
        "offload-param-device": "offload_parameters",
        "dynamo-backend": "compile",
        "use-fsdp": "sharding",
    },
    frozenset(names("accelerate_launch", "flags_without_value")),
)
DEEPSPEED = Launcher(
    {
        "num-nodes": "nnodes",
        "num-gpus": "nproc_per_node",
        "num-accelerators": "nproc_per_node",
        "include": "nproc_per_node",
        "i": "nproc_per_node",
    },
    frozenset(names("deepspeed_launcher", "flags_without_value")),
    frozenset(names("deepspeed_launcher", "other_flags")),
)
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
}


class Word(NamedTuple):
    """Characters `start` to `end` of the text, and the word that the shell makes of them."""

    start: int
    end: int
    value: str

    def replaced(self, text: str, value: str) -> str:
        return text[: self.start] + value + text[self.end :]


class Flag(NamedTuple):
    """A flag from `start` to `end`, which is `written` with its dashes; `value` is None for a flag without one."""

    start: int
    end: int
    written: str
    value: Word | None
    equals: bool = False

    @property
    def name(self) -> str:
        """The name without leading dashes, with dashes for underscores."""
        return self.written.lstrip("-").replace("_", "-")


class Launch(NamedTuple):
    """A launch command. `line`: start and end of its line, `flags`: the launcher's, `script`: the flags of the script that it
    starts. New flags go to `flags_end` and `script_end`."""

    name: str
    line: tuple[int, int]
    flags: tuple[Flag, ...]
    script: tuple[Flag, ...]
    flags_end: int
    script_end: int

    @property
    def launcher(self) -> Launcher:
        return LAUNCHERS[self.name]

    def flag(self, *names: str) -> Flag | None:
        """The launcher's first flag of one of these names."""
        return next((flag for flag in self.flags if flag.name in names), None)

    def names_of(self, setting: str) -> tuple[str, ...]:
        return tuple(flag for flag, name in self.launcher.reads.items() if name == setting)

    def find(self, path: str) -> Flag | None:
        """The launcher's `--flag`, or the script's own flag for an `argument` without dashes."""
        flags = self.flags if path.startswith("-") else self.script
        return next(
            (flag for flag in flags if flag.name == path.lstrip("-").replace("_", "-")), None
        )


def is_open(value: str) -> bool:
    """Whether only the shell knows the value, when it runs."""
    return "$" in value or "`" in value


def words_of(text: str, start: int = 0, end: int | None = None) -> list[Word]:
    """The words that a shell would make, up to a comment or the end. A substitution stays one word. Raises ValueError for
    a quote that is not closed."""
    words, at = [], start
    end = len(text) if end is None else end
    while at < end:
        space = _BETWEEN.match(text, at, end)
        if space:
            at = space.end()
            continue
        if text[at] == "#":
            break
        match = _WORD.match(text, at, end)
        if match is None:
            raise ValueError("a quote is not closed")
        raw, at = match.group(), match.end()
        closes = raw.endswith(";") and len(raw) > 1
        raw = raw[:-1] if closes else raw
        plain = "$(" in raw or "`" in raw or not re.search(r"""['"\\]""", raw)
        value = raw if plain else "".join(shlex.split(raw))
        words.append(Word(match.start(), at - closes, value))
        if closes:
            words.append(Word(at - 1, at, ";"))
    return words


def lines_of(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every command line of a script; lines continued by a backslash are one."""
    for match in _LINE.finditer(text):
        if not match.group().lstrip().startswith("#"):
            yield match.span()


def find_launch(text: str, file: str) -> Launch | None:
    """The first launch command in a text. Raises UnreadableInput for a line that cannot be split into words."""
    for start, end in lines_of(text):
        try:
            launch = launch_in(text, start, end)
        except ValueError as error:
            raise UnreadableInput(
                f"{file}: the command cannot be split into words: {error}."
            ) from None
        if launch is not None:
            return launch
    return None


def launch_in(text: str, start: int, end: int) -> Launch | None:
    """The launch command in one line. Raises ValueError for a quote that is not closed."""
    if not _LAUNCHER.search(text, start, end):
        return None
    words = words_of(text, start, end)
    names = [word.value.rpartition("/")[2] for word in words]
    at = next((i for i in range(len(names)) if _starts_at(names, i)), None)
    if at is None:
        return None
    launcher, i = LAUNCHERS[names[at]], at + (2 if names[at] == "accelerate" else 1)
    stop = next((j for j in range(i, len(words)) if words[j].value in ENDS), len(words))
    flags = []
    while i < stop and words[i].value.startswith("-") and words[i].value != "-":
        flag, used = _flag_at(words[i : min(i + 2, stop)], launcher.alone)
        flags.append(flag)
        i += used
    script = [
        _flag_at(words[j : min(j + 2, stop)])[0]
        for j in range(i, stop)
        if words[j].value.startswith("--")
    ]
    return Launch(
        names[at], (start, end), tuple(flags), tuple(script), words[i - 1].end, words[stop - 1].end
    )


def _starts_at(names: list[str], i: int) -> bool:
    if names[i] == "accelerate":
        return names[i + 1 : i + 2] == ["launch"]
    return names[i] in LAUNCHERS and (
        not names[i].startswith("torch.distributed.") or names[i - 1 : i] == ["-m"]
    )


def _flag_at(words: list[Word], alone: frozenset[str] = frozenset()) -> tuple[Flag, int]:
    """The flag that begins with the first word, and the number of words that it takes. Flags in `alone` take no value."""
    word = words[0]
    written, has_value, value = word.value.partition("=")
    if has_value:
        return (
            Flag(word.start, word.end, written, Word(word.end - len(value), word.end, value), True),
            1,
        )
    flag = Flag(word.start, word.end, written, None)
    if flag.name in alone or len(words) < 2 or re.match(r"-{1,2}[A-Za-z]|--$", words[1].value):
        return flag, 1
    return flag._replace(end=words[1].end, value=words[1]), 2


def flag_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_setting(text: str, launch: Launch, path: str, value: str) -> str:
    """`text` with the flag at `path` (see `Launch.find`) set to `value`, in place or as a new flag."""
    flag = launch.find(path)
    if flag is None and path.startswith("-"):
        return with_flag(text, launch.flags_end, launch.flags, path, value)
    if flag is None:
        return with_flag(text, launch.script_end, launch.script, f"--{path}", value)
    if flag.value is None:
        return f"{text[: flag.end]} {value}{text[flag.end :]}"
    if flag.equals:  # quotes may be around the value or the whole word
        return f"{text[: flag.start]}{flag.written}={value}{text[flag.end :]}"
    return flag.value.replaced(text, value)


def with_flag(text: str, at: int, others: tuple[Flag, ...], written: str, value: str | None) -> str:
    """`text` with a new flag at `at`, in the spelling of the `others` beside it: = or space, dashes or underscores."""
    equals = any(flag.equals for flag in others)
    if any("_" in flag.written for flag in others) != any(
        "-" in flag.written.lstrip("-") for flag in others
    ):
        separator = "_" if any("_" in flag.written for flag in others) else "-"
        written = "--" + re.sub("[-_]", separator, written.lstrip("-"))
    new = written if value is None else f"{written}{'=' if equals else ' '}{value}"
    return f"{text[:at]} {new}{text[at:]}"


def without(text: str, flag: Flag) -> str:
    before = re.sub(r"[ \t]+$", "", text[: flag.start])
    return before + text[flag.end :]
