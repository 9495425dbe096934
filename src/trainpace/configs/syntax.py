"""Parsers for JSON, YAML and launch commands that keep positions, to change single values in place.

JSON and YAML are parsed more strictly than usual: a duplicate key is an error. Both standard
parsers would keep the last one. Positions come from the parsers themselves (PyYAML's marks, json's
scanner). A round-trip library would reformat the document. ruamel.yaml reads YAML 1.2, in which
`no` is text, but the tools that own these files read YAML 1.1.

The flags of launchers come from torch 2.13 (torch/distributed/run.py), accelerate 1.15
(commands/launch.py) and DeepSpeed 0.19 (launcher/runner.py). A launcher's own flags end at the
script, which is the first word that is neither a flag nor the value of a flag.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Literal, NamedTuple, Union

from trainpace.configs.settings import SettingName, Value, names
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.intake import json_of

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 50
MOST_NODES = 200_000
"""Largest number of keys and values after aliases are expanded.

A file of 1 MiB without aliases is far below this limit.
"""
_LONGEST_WHOLE_NUMBER_BITS = 128


def parse(text: str, file: str, syntax: str) -> Any:
    """Parse a text as "json" or "yaml". The text may begin with a byte-order mark."""
    return (parse_json if syntax == "json" else parse_yaml)(text.removeprefix("\ufeff"), file)


def parse_json(text: str, file: str) -> Any:
    """Parse JSON. A duplicate key is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _twice(file, key)
            result[key] = value
        return result

    return checked(json_of(text, file, object_pairs_hook=unique), file)


def parse_yaml(text: str, file: str) -> Any:
    """Parse YAML like PyYAML's safe loader, which Hugging Face, Lightning and accelerate use."""
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        _measure(node, file)
        return checked(None if node is None else yaml.SafeLoader("").construct_document(node), file)
    except UnreadableInput:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UnreadableInput(f"{file} is not valid YAML{where}: {problem[:200]}.") from None
    except RecursionError:
        raise _too_deep(file) from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadableInput(f"{file} is not valid YAML: {str(error)[:200]}.") from None


def _measure(root: Any, file: str) -> None:
    """Raise an error if a tree of YAML nodes is too large or too deep.

    The check runs before values are built, because nested aliases can stand for 2**50 values.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if depth > DEEPEST or id(node) in open_nodes:
            raise _too_deep(file)
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts = _parts(node, file)
            sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in parts)
            open_nodes.discard(id(node))
        if sizes[id(node)] > MOST_NODES:
            raise UnreadableInput(f"{file} expands to more than {MOST_NODES:,} keys and values.")
        return sizes[id(node)]

    if root is not None:
        size(root, 0)


def _parts(node: Any, file: str) -> list[Any]:
    """Return the child nodes of a YAML node.

    Raises:
        UnreadableInput: If a key is duplicated.
    """
    if not isinstance(node.value, list):
        return []
    if not node.value or not isinstance(node.value[0], tuple):
        return list(node.value)
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        written = (key.tag, key.value if isinstance(key.value, str) else "")
        if isinstance(key.value, str) and written in seen:
            raise _twice(file, key.value)
        seen.add(written)
    return [part for pair in node.value for part in pair]


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


def _twice(file: str, key: str) -> UnreadableInput:
    return UnreadableInput(f"{file}: the key {key[:60]!r} is given twice.", "Keep one.")


Syntax = Literal["json", "yaml"]
Path = tuple[str, ...]
"""Keys from the top of a document to a value."""
Tree = Union[Value, "dict[str, Tree]"]
"""Value, or nested sections of values."""
_SCALAR = re.compile(r"[^\s,\]}]+")
_YAML_WORDS = frozenset("y n yes no on off true false null".split())


class Item(NamedTuple):
    """Key of a mapping at characters `start` to `end`, with the position of its value."""

    key: str
    start: int
    end: int
    value: Node


class Node(NamedTuple):
    """Position of a value: characters `start` to `end`, without trailing comments or space.

    `items` has the keys of a mapping. `flow` is True if the value is in braces or brackets.
    `borrowed` is True for an alias, because its characters stand elsewhere.
    """

    start: int
    end: int
    items: tuple[Item, ...] | None = None
    flow: bool = False
    borrowed: bool = False


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _json_value(text: str, start: int) -> Node:
    """Return the positions of the values in a text that `parse_json` accepts."""
    first = text[start]
    if first == '"':
        return Node(start, scanstring(text, start + 1)[1])
    if first not in "{[":
        match = _SCALAR.match(text, start)
        assert match is not None  # The parser has accepted the text.
        return Node(start, match.end())
    items, at = [], _after_space(text, start + 1)
    while text[at] not in "}]":
        key, key_end = scanstring(text, at + 1) if first == "{" else ("", at)
        begin = _after_space(text, _after_space(text, key_end) + 1) if first == "{" else at
        value = _json_value(text, begin)
        items.append(Item(key, at, key_end, value))
        at = _after_space(text, value.end)
        at = _after_space(text, at + 1) if text[at] == "," else at
    return Node(start, at + 1, tuple(items) if first == "{" else None, flow=True)


def _yaml_root(text: str, file: str) -> Node:
    """Return the positions of the values in a text that `parse_yaml` accepts.

    Raises:
        UnreadableInput: If the text is empty.
    """
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)
    if root is None:
        raise UnreadableInput(f"{file} is empty.")
    return _yaml_value(root, set())


def _yaml_value(node: Any, seen: set[int]) -> Node:
    # The parser resolves an alias to the node of its anchor.
    borrowed = id(node) in seen
    seen.add(id(node))
    start, end = node.start_mark.index, node.end_mark.index
    if not isinstance(node.value, list):
        return Node(start, end, borrowed=borrowed)
    flow, items = bool(node.flow_style), None
    if (node.value and isinstance(node.value[0], tuple)) or node.tag.endswith(":map"):
        items = tuple(
            Item(str(key.value), key.start_mark.index, key.end_mark.index, _yaml_value(value, seen))
            for key, value in node.value
        )
        ends = [item.end for item in items]
        parts = [item.value for item in items]
    else:
        ends, parts = [], [_yaml_value(part, seen) for part in node.value]
    # PyYAML's end of a block includes the space and comments after it.
    ends += [part.end for part in parts if not part.borrowed] or [end]
    return Node(start, end if flow else max(ends), items, flow, borrowed)


def set_key(text: str, file: str, syntax: Syntax, path: Path, value: Value) -> str:
    """Return the text with a new value at `path`.

    An existing value is replaced in place. A new one gets its own line after its last neighbor.

    Raises:
        TrainpaceError: If the value is behind a YAML alias, anchor or tag, which only a person can
            change.
    """
    start = _after_space(text, 1 if text.startswith("\ufeff") else 0)
    node = _json_value(text, start) if syntax == "json" else _yaml_root(text, file)
    before, in_flow = None, node.flow
    depth = 0
    # A node without items is null or empty, so a section is created below.
    while depth < len(path) and node.items is not None:
        item = next((item for item in node.items if item.key == path[depth]), None)
        depth += 1
        if item is None:
            return _added(text, node, path[depth - 1], _nested(path[depth:], value), syntax)
        before, node = item, item.value
        in_flow = in_flow or node.flow
        if node.borrowed or re.match(r"[&*!|>]", text[node.start : node.end]):
            raise TrainpaceError(
                f"{file}: {'.'.join(path[:depth])} is written with an alias, an anchor or a tag."
            )
    return _replaced(text, node, before, _nested(path[depth:], value), syntax, in_flow)


def _nested(path: Path, value: Value) -> Tree:
    tree: Tree = value
    for key in reversed(path):
        tree = {key: tree}
    return tree


def _replaced(
    text: str, node: Node, item: Item | None, tree: Tree, syntax: Syntax, in_flow: bool
) -> str:
    assert item is not None  # A document is a mapping, so the path has at least one key.
    old = text[node.start : node.end]
    if isinstance(tree, dict) and not in_flow:
        indent = _indent(text, item.start)
        new = _block(tree, indent + _unit(text), _newline(text))
        colon = text.index(":", item.end) + 1
        return text[:colon] + _newline(text) + new + text[max(colon, node.end) :]
    new = _braces(tree, syntax) if isinstance(tree, dict) else _scalar(tree, old, syntax)
    if syntax == "yaml" and (node.start == node.end or "\n" in text[item.end : node.start]):
        colon = text.index(":", item.end) + 1
        return f"{text[:colon]} {new}{text[max(colon, node.end) :]}"
    return text[: node.start] + new + text[node.end :]


def _added(text: str, node: Node, key: str, tree: Tree, syntax: Syntax) -> str:
    if node.flow:
        return _added_in_flow(text, node, key, tree, syntax)
    items, newline = node.items or (), _newline(text)
    indent = _indent(text, items[0].start)
    last = max(max(i.end, 0 if i.value.borrowed else i.value.end) for i in items)
    at = text.find("\n", last)  # Skip a comment on that line.
    at = len(text) if at < 0 else at + 1
    lines = _block({key: tree}, indent, newline) + newline
    return text[:at] + ("" if not at or text[at - 1] == "\n" else newline) + lines + text[at:]


def _added_in_flow(text: str, node: Node, key: str, tree: Tree, syntax: Syntax) -> str:
    """Return the text with a new pair inside braces.

    If the braces span several lines, the pair gets its own line.
    """
    items, newline, unit = node.items or (), _newline(text), _unit(text)
    quoted = f'"{key}"' if syntax == "json" else key
    new_lines = syntax == "json" and "\n" in text.strip() and not items
    if "\n" in text[node.start : node.end] or new_lines:
        outer = _indent(text, node.start)
        indent = _indent(text, items[0].start) if items else outer + unit
        pair = f"{newline}{indent}{quoted}: {_braces(tree, syntax, indent, unit, newline)}"
        separator, end = ",", newline + outer
    else:
        pair, separator, end = f"{quoted}: {_braces(tree, syntax)}", ", ", ""
    if not items:
        return text[: node.start] + "{" + pair + end + "}" + text[node.end :]
    at = items[-1].value.end
    return text[:at] + separator + pair + text[at:]


def _indent(text: str, at: int) -> str:
    """Return the indentation of the line at `at`. After a list's dash, it counts from the key."""
    start = text.rfind("\n", 0, at) + 1
    before = text[start:at].removeprefix("\ufeff")
    space = re.match(r"[ \t]*(-[ \t]+)*", before)
    return re.sub("-", " ", space.group()) if space else ""


def _unit(text: str) -> str:
    """Return one level of indentation, taken from the first indented line."""
    match = re.search(r"^([ \t]+)[^\s#]", text, re.MULTILINE)
    return match.group(1) if match else "  "


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _block(tree: dict[str, Tree], indent: str, newline: str) -> str:
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", _block(value, indent + "  ", newline)]
        else:
            lines.append(f"{indent}{key}: {_scalar(value, '', 'yaml')}")
    return newline.join(lines)


def _braces(tree: Tree, syntax: Syntax, indent: str = "", unit: str = "", newline: str = "") -> str:
    """Return a value in braces: on one line, or with one line per key if `newline` is given."""
    if not isinstance(tree, dict):
        return _scalar(tree, "", syntax)
    inner = indent + unit
    quoted = syntax == "json" or newline
    pairs = [
        f"{newline}{inner}{json.dumps(key) if quoted else key}:"
        f" {_braces(value, syntax, inner, unit, newline)}"
        for key, value in tree.items()
    ]
    return "{" + ("," if newline else ", ").join(pairs) + newline + indent + "}"


def _scalar(value: Value, old: str, syntax: Syntax) -> str:
    """Return a value in the style of the old one: the same quotes, and the same case of True."""
    if syntax == "json":
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value) if old in ("True", "False") else str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if old[:1] == '"':
        return json.dumps(value, ensure_ascii=False)
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value.casefold() not in _YAML_WORDS
    return value if plain and old[:1] != "'" else "'" + value.replace("'", "''") + "'"


ENDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "2>", "2>&1", "&>", "<"))
"""Words that end the arguments of a command in a shell."""
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
    words, at = [], start
    end = len(text) if end is None else end
    while at < end and text[at] != "#":
        if space := _BETWEEN.match(text, at, end):
            at = space.end()
            continue
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
    """Yield start and end of each command line. Lines continued with a backslash count as one."""
    for match in _LINE.finditer(text):
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
    words = words_of(text, start, end)
    names = [word.value.rpartition("/")[2] for word in words]
    at = next((i for i in range(len(names)) if _starts_at(names, i)), None)
    if at is None:
        return None
    name = names[at]
    words = words[at + (2 if name == "accelerate" else 1) - 1 :]
    words = words[: next((i for i, word in enumerate(words) if i and word.value in ENDS), None)]
    flags, used = [], 1
    while used < len(words) and re.match("-.", words[used].value):
        flag, count = _flag_at(words[used : used + 2], LAUNCHERS[name].alone)
        flags.append(flag)
        used += count
    script = (i for i in range(used, len(words)) if words[i].value.startswith("--"))
    return Launch(
        name=name,
        line=(start, end),
        flags=tuple(flags),
        script=tuple(_flag_at(words[i : i + 2])[0] for i in script),
        flags_end=words[used - 1].end,
        script_end=words[-1].end,
    )


def _starts_at(names: list[str], i: int) -> bool:
    if names[i] == "accelerate":
        return names[i + 1 : i + 2] == ["launch"]
    return names[i] in LAUNCHERS and (
        not names[i].startswith("torch.distributed.") or names[i - 1 : i] == ["-m"]
    )


def _flag_at(words: list[Word], alone: frozenset[str] = frozenset()) -> tuple[Flag, int]:
    """Return the flag that starts at the first word, and the number of words that it covers.

    Flags in `alone` have no value.
    """
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
