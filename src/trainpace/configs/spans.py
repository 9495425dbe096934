"""The positions of every key and value in a JSON or YAML text, so that one can be changed and nothing else moves.

Positions come from the parsers that read the file: PyYAML's marks, and json's own scanner. A round-trip library would
reformat the whole document, and ruamel.yaml reads YAML 1.2, in which `no` is a word; the tools that own these files read 1.1.
"""

from __future__ import annotations

import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from trainpace.errors import UnreadableInput

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


class Item(NamedTuple):
    key: str
    start: int
    end: int
    value: Node


class Node(NamedTuple):
    """A value: characters `start` to `end`, without comments or space after it. `flow`: written in braces or brackets.
    `borrowed`: an alias, whose characters stand elsewhere."""

    start: int
    end: int
    items: tuple[Item, ...] | None = None
    flow: bool = False
    borrowed: bool = False

    def get(self, key: str) -> Item | None:
        return next((item for item in self.items or () if item.key == key), None)


def json_spans(text: str) -> Node:
    """Positions in a text that `parsing.parse_json` accepts."""
    return _json_value(text, _after_space(text, 1 if text.startswith("\ufeff") else 0))


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it may be empty
    return match.end()


def _json_value(text: str, start: int) -> Node:
    first = text[start]
    if first == '"':
        return Node(start, scanstring(text, start + 1)[1])
    if first not in "{[":
        match = _SCALAR.match(text, start)
        assert match is not None  # the parser has accepted it
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


def yaml_spans(text: str, file: str) -> Node:
    """Positions in a text that `parsing.parse_yaml` accepts. Raises UnreadableInput for an empty document."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    if root is None:
        raise UnreadableInput(f"{file} is empty.")
    return _yaml_value(root, set())


def _yaml_value(node: Any, seen: set[int]) -> Node:
    borrowed = id(node) in seen  # the parser gives an alias as the very node that it stands for
    seen.add(id(node))
    start, end = node.start_mark.index, node.end_mark.index
    if not isinstance(node.value, list):
        return Node(start, end, borrowed=borrowed)
    flow = bool(node.flow_style)
    if (node.value and isinstance(node.value[0], tuple)) or node.tag.endswith(":map"):
        pairs = [(key, _yaml_value(value, seen)) for key, value in node.value]
        items = [Item(str(key.value), key.start_mark.index, key.end_mark.index, value) for key, value in pairs]
        last = next((max(i.end, i.value.end) for i in reversed(items) if not i.value.borrowed), end)
        last = max([last, *(i.end for i in items)])
        return Node(start, end if flow else last, tuple(items), flow, borrowed)
    parts = [_yaml_value(part, seen) for part in node.value]
    last = max((part.end for part in parts if not part.borrowed), default=end)
    return Node(start, end if flow else last, None, flow, borrowed)
