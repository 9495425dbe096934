"""Parsers for JSON, YAML and launch commands that keep positions, to change single values in place.

JSON and YAML are parsed more strictly than usual: a duplicate key is an error. Both standard
parsers would keep the last one. Positions of values are PyYAML's marks, for JSON too. A round-trip
library would reformat the document. ruamel.yaml reads YAML 1.2, in which
`no` is text, but the tools that own these files read YAML 1.1.

The flags of launchers come from torch 2.13 (torch/distributed/run.py), accelerate 1.15
(commands/launch.py) and DeepSpeed 0.19 (launcher/runner.py). A launcher's own flags end at the
script, which is the first word that is neither a flag nor the value of a flag.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from textwrap import dedent
from typing import Any, Literal, NamedTuple

from trainpace.configs.settings import PYTHON, SettingName, Value, names
from trainpace.core.errors import TrainpaceError, UnreadableInput, message_of, shortened
from trainpace.core.intake import json_of

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 50
MOST_NODES = 200_000
"""Largest number of keys and values after aliases are expanded.

A file of 1 MiB without aliases is far below this limit.
"""
_LONGEST_WHOLE_NUMBER_BITS = 128
Syntax = Literal["json", "yaml"]
Path = tuple[str, ...]
"""Keys from the top of a document to a value."""


def parse(text: str, file: str, syntax: Syntax) -> Any:
    """Parse a text as "json" or "yaml". The text may begin with a byte-order mark."""
    text = text.removeprefix("\ufeff")
    if syntax == "yaml":
        return parse_yaml(text, file)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_unique((key for key, _ in pairs), file)
        return dict(pairs)

    return checked(json_of(text, file, object_pairs_hook=unique), file)


def parse_yaml(text: str, file: str) -> Any:
    """Parse YAML like PyYAML's safe loader, which Hugging Face, Lightning and accelerate use."""
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            return None
        _count(node, file, {})
        return checked(yaml.SafeLoader("").construct_document(node), file)
    except UnreadableInput:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UnreadableInput(
            f"{file} is not valid YAML{where}: {shortened(problem, 200)}."
        ) from None
    except RecursionError:
        raise _too_deep(file) from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadableInput(f"{file} is not valid YAML: {message_of(error)}.") from None


def _count(node: Any, file: str, counts: dict[int, int], depth: int = 0) -> int:
    """Return the number of YAML nodes in a tree with its aliases expanded.

    The nodes are counted before values are built, because nested aliases can stand for 2**50
    values.

    Args:
        node: Top of the tree.
        file: Name for errors.
        counts: Numbers of the nodes counted so far, by their identity.
        depth: Number of nodes above this one.

    Raises:
        UnreadableInput: If the tree is too large or too deep, or has a duplicate key.
    """
    if depth > DEEPEST:
        raise _too_deep(file)
    if id(node) not in counts:
        if node.id == "mapping":
            _check_unique(
                ((key.tag, key.value) for key, _ in node.value if key.id == "scalar"), file
            )
        parts = _parts(node)
        counts[id(node)] = 1 + sum(_count(part, file, counts, depth + 1) for part in parts)
    if counts[id(node)] > MOST_NODES:
        raise UnreadableInput(f"{file} expands to more than {MOST_NODES:,} keys and values.")
    return counts[id(node)]


def _parts(node: Any) -> list[Any]:
    """Return the keys and values of a YAML mapping, or the items of a sequence."""
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return list(node.value) if node.id == "sequence" else []


def _check_unique(keys: Iterable[Any], file: str) -> None:
    """Raise UnreadableInput if a key is given twice."""
    seen = set()
    for key in keys:
        if key in seen:
            text = key if isinstance(key, str) else key[1]
            raise UnreadableInput(f"{file}: the key {text[:60]!r} is given twice.", "Keep one.")
        seen.add(key)


def checked(value: Any, file: str, depth: int = 0) -> Any:
    """Return a parsed value if a settings file may contain it.

    Raises:
        UnreadableInput: For NaN, infinity, huge integers, lone surrogates, NUL or deep nesting.
    """
    if depth > DEEPEST:
        raise _too_deep(file)
    if problem := _problem_of(value):
        raise UnreadableInput(f"{file} holds {problem}.")
    if isinstance(value, dict):
        checked([*value, *value.values()], file, depth)
    elif isinstance(value, list):
        for part in value:
            checked(part, file, depth + 1)
    return value


def _problem_of(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which cannot be a setting"
    if isinstance(value, int) and value.bit_length() > _LONGEST_WHOLE_NUMBER_BITS:
        return f"a whole number of {value.bit_length()} bits, which cannot be a setting"
    if isinstance(value, str) and re.search("[\ud800-\udfff\x00]", value):
        return f"{value[:40]!r}, which is not valid text"
    return ""


def _too_deep(file: str) -> UnreadableInput:
    return UnreadableInput(f"{file} is nested more than {DEEPEST} levels deep.")


def set_key(text: str, file: str, syntax: Syntax, path: Path, value: Value) -> str:
    """Return the text with a new value at `path`.

    An existing value is replaced in place. A new one gets its own line after its last neighbor.

    Raises:
        TrainpaceError: If the value is behind a YAML alias, anchor or tag, which only a person can
            change.
    """
    import yaml

    # JSON without tabs is also YAML. Tabs stand only between its values.
    try:
        node = yaml.compose(text.replace("\t", " ") if syntax == "json" else text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise TrainpaceError(f"{file} cannot be changed in place: {message_of(error)}.") from None
    pairs = _pairs_on(node, path)
    for depth, (_, found) in enumerate(pairs, 1):
        if re.match(r"[&*!|>]", text[found.start_mark.index :]):
            raise TrainpaceError(
                f"{file}: {'.'.join(path[:depth])} is written with an alias, an anchor or a tag."
            )
    above = [node, *(found for _, found in pairs)]
    node, tree = above.pop(), _nested(path[len(pairs) :], value)
    if len(pairs) < len(path) and node.id == "mapping":
        return _added(text, node, tree, syntax)
    key = pairs[-1][0]
    start, end = node.start_mark.index, _end(node)
    colon = text.index(":", key.end_mark.index) + 1
    gap = text[colon:start]
    if isinstance(tree, dict) and not any(node.flow_style for node in above):
        gap = _newline(text)
        new = _block(tree, _indent(text, key) + _unit(text), gap)
    else:
        gap = " " if "\n" in gap else gap or " "
        new = _inline(tree, syntax, text[start:end])
    return text[:colon] + gap + new + text[max(colon, end) :]


def _pairs_on(node: Any, path: Path) -> list[tuple[Any, Any]]:
    """Return the pairs of key and value along a path, as far as the document has them."""
    pairs: list[tuple[Any, Any]] = []
    for name in path:
        children = node.value if node.id == "mapping" else []
        pair = next((pair for pair in children if pair[0].value == name), None)
        if pair is None:
            break
        pairs.append(pair)
        node = pair[1]
    return pairs


def _nested(path: Path, value: Value) -> Any:
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    return tree


def _end(node: Any) -> int:
    """Return the end of a value. PyYAML's own end of a block includes the comments after it."""
    if node.id == "scalar" or node.flow_style:
        return int(node.end_mark.index)
    # An alias has the position of its anchor, which may stand before this block.
    ends = [_end(part) for part in _parts(node) if part.start_mark.index >= node.start_mark.index]
    return max(ends, default=node.end_mark.index)


def _added(text: str, node: Any, tree: dict[str, Any], syntax: Syntax) -> str:
    """Return the text with a new pair in a mapping.

    In a block, and in JSON's braces that span several lines, the pair gets its own line.
    """
    newline, outer = _newline(text), _indent(text, node)
    indent = _indent(text, node.value[0][0]) if node.value else outer + _unit(text)
    if not node.flow_style:
        at = text.find("\n", _end(node)) + 1 or len(text)  # Skip a comment on the last line.
        before = "" if text[at - 1] == "\n" else newline
        return f"{text[:at]}{before}{_block(tree, indent, newline)}{newline}{text[at:]}"
    start, end = node.start_mark.index, node.end_mark.index
    around = text[start:end] if node.value else text.strip()
    if syntax == "json" and "\n" in around:
        lines = dedent(_inline(tree, syntax, indent=_unit(text))[1:-1]).strip("\n")
        pair = newline + _indented(lines, indent, newline)
        separator, close = ",", newline + outer
    else:
        pair, separator, close = _inline(tree, syntax)[1:-1], ", ", ""
    if not node.value:
        return f"{text[:start]}{{{pair}{close}}}{text[end:]}"
    at = _end(node.value[-1][1])
    return text[:at] + separator + pair + text[at:]


def _indent(text: str, node: Any) -> str:
    """Return the indentation of the line on which a node starts."""
    line = text[text.rfind("\n", 0, node.start_mark.index) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """Return one level of indentation, taken from the first indented line."""
    match = re.search(r"^([ \t]+)[^\s#]", text, re.MULTILINE)
    return match.group(1) if match else "  "


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _indented(lines: str, indent: str, newline: str) -> str:
    return textwrap.indent(lines, indent).replace("\n", newline)


def _block(tree: dict[str, Any], indent: str, newline: str) -> str:
    """Return a section as indented YAML lines."""
    return _indented(_yaml(tree, flow=False).rstrip("\n"), indent, newline)


def _inline(tree: Any, syntax: Syntax, old: str = "", indent: str | None = None) -> str:
    """Return a value for one line, in the style of the old one: its quotes, and its case of True.

    With `indent`, a JSON section spans several lines.
    """
    if syntax == "json":
        return json.dumps(tree, ensure_ascii=False, indent=indent)
    if isinstance(tree, bool) and old in ("True", "False"):
        return str(tree)
    quote = old[:1] if isinstance(tree, str) and old.startswith(("'", '"')) else None
    return _yaml([tree], flow=True, quote=quote)[1:-2]


def _yaml(tree: Any, flow: bool, quote: str | None = None) -> str:
    import yaml

    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
    written: str = yaml.safe_dump(tree, default_flow_style=flow, default_style=quote, **options)
    return written


ENDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "2>", "2>&1", "&>", "<"))
"""Words that end the arguments of a command in a shell."""
_TOKEN = re.compile(
    r"""(?:\s|\\\r?\n)+ | \#.* |
    (?P<word>
      (?:\$\((?:[^()]|\([^()]*\))*\) | `[^`]*` | \\[^\r\n]
        | "(?:\\.|[^"\\])*" | '[^']*' | [^\s"'`\\;])+
      | ;
    ) | \\ | (?P<open_quote>.)""",
    re.VERBOSE | re.DOTALL,
)
_SHELL = re.compile(r"""\b(?:ba|z|da)?sh\s+-\w*c\s+(?:'([^']*)'|"((?:\\.|[^"\\])*)")""", re.DOTALL)
"""Script in quotes that a shell starts, as in `srun bash -c '...'`."""
_LINE = re.compile(rf"[ \t]*\#[^\n]*|(?:{_SHELL.pattern}|[^\\\n]|\\\r?\n|\\.)+", re.DOTALL)
_ASSIGNED = re.compile(
    r"""^(?P<indent>[ \t]*)(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?:"(?P<double>(?:\\.|[^"\\])*)"
    |'(?P<single>[^']*)'|(?P<plain>\$\([^\n]*\)|[^\s"'`();|&]*))
    [ \t]*(?:;[ \t]*)?(?:\#[^\n]*)?\r?$""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_VARIABLE = re.compile(r"\$(?P<brace>\{)?(?P<name>[A-Za-z_]\w*)(?(brace)\})")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_LONGEST_VALUE = 4_000
_LAUNCHER = re.compile(
    r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate[\s\\]+launch|deepspeed)\b"
)


_PYTHON = re.compile(r"\bpython[0-9.]*(?=\s|$)")
_BEFORE = re.compile(r"[A-Za-z_]\w*=.*|exec|nohup|time|env|uv|poetry|run", re.DOTALL)
"""Words before python that start nothing but this one process."""


class Launcher(NamedTuple):
    """Flags of a launcher.

    They are the flags that state settings, the flags without a value, and all others with a value.
    """

    reads: dict[str, SettingName]
    alone: frozenset[str]
    others: frozenset[str] | None = None  # None means that there are too many to list.


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
    PYTHON: Launcher({}, frozenset(names("python", "flags_without_value"))),
}
"""Launcher for each name in a command."""


class Word(NamedTuple):
    """Word at characters `start` to `end`. `value` has no shell quotes."""

    start: int
    end: int
    value: str

    def replaced(self, text: str, value: str) -> str:
        """Return `text` with this word replaced by `value`."""
        return text[: self.start] + value + text[self.end :]


class Flag(NamedTuple):
    """Flag at characters `start` to `end`, `written` with its dashes.

    `value` is None if the flag has no value. `equals` is True for --flag=value.
    """

    start: int
    end: int
    written: str
    value: Word | None
    equals: bool = False

    @property
    def name(self) -> str:
        """Name without leading dashes, and with dashes instead of underscores."""
        return self.written.lstrip("-").replace("_", "-")

    @property
    def text(self) -> str:
        """Value as text. It is "true" for a flag without a value."""
        return "true" if self.value is None else self.value.value


class Launch(NamedTuple):
    """Launch command in a text.

    Attributes:
        line: Start and end of its line.
        flags: Flags of the launcher.
        script: Flags of the script that the launcher starts.
        flags_end: Position for new flags of the launcher.
        script_end: Position for new flags of the script.
    """

    name: str
    line: tuple[int, int]
    flags: tuple[Flag, ...]
    script: tuple[Flag, ...]
    flags_end: int
    script_end: int

    @property
    def launcher(self) -> Launcher:
        """Flags that the launcher knows."""
        return LAUNCHERS[self.name]

    def flag(self, *names: str) -> Flag | None:
        """Return the launcher's first flag with one of these names, or None."""
        return next((flag for flag in self.flags if flag.name in names), None)

    def names_of(self, setting: str) -> tuple[str, ...]:
        """Return the names of the launcher's flags for a setting."""
        return tuple(flag for flag, name in self.launcher.reads.items() if name == setting)

    def find(self, path: str) -> Flag | None:
        """Return a flag by its path, or None.

        `--flag` names a flag of the launcher. `argument`, without dashes, names a flag of the
        script.
        """
        flags = self.flags if path.startswith("-") else self.script
        return next(
            (flag for flag in flags if flag.name == path.lstrip("-").replace("_", "-")), None
        )


def is_open(value: str) -> bool:
    """Return True if a value is known only to the shell at run time."""
    return "$" in value or "`" in value


def words_of(text: str, start: int = 0, end: int | None = None) -> list[Word]:
    """Split a text into words as a shell would, up to a comment. A substitution stays one word.

    Raises:
        ValueError: If a quote is not closed.
    """
    words = []
    for match in _TOKEN.finditer(text, start, len(text) if end is None else end):
        if match["open_quote"]:
            raise ValueError("a quote is not closed")
        if raw := match["word"]:
            is_substitution = "$(" in raw or "`" in raw
            value = raw if is_substitution else "".join(shlex.split(raw))
            words.append(Word(*match.span(), value))
    return words


def resolved(text: str, values: Mapping[str, str] | None = None) -> str:
    """Return a shell script with the values of its variables in place of their names.

    Lines that only assign a variable are removed. A variable with an indented assignment keeps its
    name, because the assignment may depend on a condition. So does a variable with a very long
    value, and every variable if the script would become larger than a settings file.

    Args:
        text: The script.
        values: Values of variables that the script does not assign.
    """
    known = dict(values or {})
    for match in _ASSIGNED.finditer(text):
        value = _filled(re.sub(r"\\(.)", r"\1", match["double"] or ""), known)
        value = value or match["single"] or _filled(match["plain"] or "", known)
        known.pop(match["name"], None)
        if not match["indent"] and len(value) < _LONGEST_VALUE:
            known[match["name"]] = value
    return _filled(_ASSIGNED.sub("", text), known)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace variables by their values, and products in $((...)) by their results."""
    uses = (values.get(match["name"], "") for match in _VARIABLE.finditer(text))
    if sum(map(len, uses)) > LARGEST_FILE_BYTES:
        return text
    text = _VARIABLE.sub(lambda match: values.get(match["name"], match[0]), text)
    return _ARITHMETIC.sub(lambda match: _product(match, values), text)


def _product(match: re.Match[str], values: Mapping[str, str]) -> str:
    factors = [values.get(word, word) for word in re.split(r"\s*\*\s*", match[1].strip())]
    known = all(re.fullmatch("[0-9]{1,9}", factor) for factor in factors)
    return str(math.prod(map(int, factors))) if known else match[0]


def lines_of(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and end of each command line. Lines continued with a backslash count as one."""
    for match in _LINE.finditer(text, start, len(text) if end is None else end):
        if not match.group().lstrip().startswith("#"):
            yield match.span()


def find_launch(text: str, file: str) -> Launch | None:
    """Return the first launch command in a text, or None.

    Raises:
        UnreadableInput: If a quote is not closed.
    """
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
    """Return the launch command in one line, or None.

    Raises:
        ValueError: If a quote is not closed.
    """
    if not _LAUNCHER.search(text, start, end):
        return None
    inner = _SHELL.search(text, start, end)
    lines = lines_of(text, *inner.span(inner.lastindex or 0)) if inner else iter([(start, end)])
    found = (_from_launcher(words_of(text, *line)) for line in lines)
    words = next(filter(None, found), None)
    return _launch_of(_base_name(words[0]), words, (start, end)) if words else None


def find_python(text: str) -> Launch | None:
    """Return the first command that starts a script with plain python, or None."""
    for line in lines_of(text):
        if _PYTHON.search(text, *line):
            with contextlib.suppress(ValueError):
                words = words_of(text, *line)
                at = next(i for i, word in enumerate(words) if not _BEFORE.fullmatch(word.value))
                words = list(takewhile(lambda word: word.value not in ENDS, words[at:]))
                if _PYTHON.fullmatch(_base_name(words[0])) and _starts_script(words):
                    return _launch_of(PYTHON, words, line)
    return None


def _starts_script(words: list[Word]) -> bool:
    """Return True if python starts a file or a module that is no launcher."""
    values = [word.value for word in words]
    if "-m" in values[:-1]:
        module = values[values.index("-m") + 1]
        return not module.startswith(("accelerate.", "deepspeed.", "torch."))
    return any(value.endswith(".py") for value in values)


def _launch_of(name: str, words: list[Word], line: tuple[int, int]) -> Launch:
    flags, used = [], 2 if name == "accelerate" else 1
    while used < len(words) and re.match("-.", words[used].value):
        flag = _flag_at(words[used : used + 2], LAUNCHERS[name].alone)
        flags.append(flag)
        used += 1 if flag.value is None or flag.equals else 2
    rest = words[used:]
    script = (_flag_at(rest[i : i + 2]) for i in range(len(rest)))
    return Launch(
        name=name,
        line=line,
        flags=tuple(flags),
        script=tuple(flag for flag in script if flag.written.startswith("--")),
        flags_end=words[used - 1].end,
        script_end=words[-1].end,
    )


def _from_launcher(words: list[Word]) -> list[Word]:
    """Return the words of the first command that starts with a launcher."""
    names = [_base_name(word) for word in words]
    at = next((i for i in range(len(names)) if _starts_at(names, i)), len(names))
    return list(takewhile(lambda word: word.value not in ENDS, words[at:]))


def _base_name(word: Word) -> str:
    return word.value.rpartition("/")[2]


def _starts_at(names: list[str], i: int) -> bool:
    if names[i] == "accelerate":
        return names[i + 1 : i + 2] == ["launch"]
    return names[i] in LAUNCHERS.keys() - {PYTHON} and (
        not names[i].startswith("torch.distributed.") or names[i - 1 : i] == ["-m"]
    )


def _flag_at(words: list[Word], alone: frozenset[str] = frozenset()) -> Flag:
    """Return the flag that starts at the first of two words. Flags in `alone` have no value."""
    word = words[0]
    written, has_value, value = word.value.partition("=")
    if has_value:
        stated = Word(word.end - len(value), word.end, value)
        return Flag(word.start, word.end, written, stated, equals=True)
    flag = Flag(word.start, word.end, written, None)
    if flag.name in alone or len(words) < 2 or re.match(r"-{1,2}[A-Za-z]|--$", words[1].value):
        return flag
    return flag._replace(end=words[1].end, value=words[1])


def flag_text(value: Value) -> str:
    """Return a value as text for a flag."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_setting(text: str, launch: Launch, path: str, value: str) -> str:
    """Return `text` with the flag at `path` (see `Launch.find`) set to `value`.

    The flag is changed in place, or added.
    """
    flag = launch.find(path)
    if flag is None and path.startswith("-"):
        return with_flag(text, launch.flags_end, launch.flags, path, value)
    if flag is None:
        return with_flag(text, launch.script_end, launch.script, f"--{path}", value)
    if flag.value is None:
        return f"{text[: flag.end]} {value}{text[flag.end :]}"
    if flag.equals:  # Quotes may enclose the value or the whole argument.
        return f"{text[: flag.start]}{flag.written}={value}{text[flag.end :]}"
    return flag.value.replaced(text, value)


def with_flag(text: str, at: int, others: tuple[Flag, ...], written: str, value: str | None) -> str:
    """Return `text` with a new flag at position `at`.

    It is spelled like the `others`: with = or a space, with dashes or underscores.
    """
    equals = any(flag.equals for flag in others)
    if any("_" in flag.written for flag in others) != any(
        "-" in flag.written.lstrip("-") for flag in others
    ):
        separator = "_" if any("_" in flag.written for flag in others) else "-"
        written = "--" + re.sub("[-_]", separator, written.lstrip("-"))
    new = written if value is None else f"{written}{'=' if equals else ' '}{value}"
    return f"{text[:at]} {new}{text[at:]}"


def without(text: str, flag: Flag) -> str:
    """Return `text` without a flag and the space before it."""
    before = re.sub(r"[ \t]+$", "", text[: flag.start])
    return before + text[flag.end :]
