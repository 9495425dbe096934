"""JSON and YAML parsed more strictly than usual: a duplicate key is an error, where both parsers would take the last."""

import json
import math
from typing import Any

from trainpace.errors import UnreadableInput

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 50
MOST_NODES = 200_000
"""Keys and values with aliases expanded. A file of 1 MiB without aliases stays far below."""
_LONGEST_WHOLE_NUMBER_BITS = 128


def parse(text: str, file: str, syntax: str) -> Any:
    """The content of a text in JSON or YAML ("json" or "yaml"), which may begin with a byte-order mark."""
    return (parse_json if syntax == "json" else parse_yaml)(text.removeprefix("\ufeff"), file)


def parse_json(text: str, file: str) -> Any:

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _twice(file, key)
            result[key] = value
        return result

    def constant(name: str) -> Any:
        raise UnreadableInput(f"{file}: {name} is not a JSON number.")

    try:
        return _checked(json.loads(text, object_pairs_hook=unique, parse_constant=constant), file)
    except UnreadableInput:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{file} is not valid JSON: {str(error)[:200]}.") from None


def parse_yaml(text: str, file: str) -> Any:
    """Parse as PyYAML's safe loader does, which is what Hugging Face, Lightning and accelerate use."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            _measure(node, file)
            return _checked(None if node is None else loader.construct_document(node), file)
        finally:
            loader.dispose()
    except UnreadableInput:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UnreadableInput(f"{file} is not valid YAML{where}: {problem[:200]}.") from None
    except (RecursionError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadableInput(f"{file} is not valid YAML: {str(error)[:200]}.") from None


def _measure(root: Any, file: str) -> None:
    """Check a tree of YAML nodes before any value is built: a few aliases of aliases can stand for 2**50 values."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if depth > DEEPEST or id(node) in open_nodes:
            raise UnreadableInput(f"{file} is nested more than {DEEPEST} levels deep.")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts = _parts(node, file)
            sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in parts)
            open_nodes.discard(id(node))
        if sizes[id(node)] > MOST_NODES:
            raise UnreadableInput(f"{file} stands for more than {MOST_NODES:,} keys and values.")
        return sizes[id(node)]

    if root is not None:
        size(root, 0)


def _parts(node: Any, file: str) -> list[Any]:
    """The nodes inside a node. Raises UnreadableInput for a duplicate key of a mapping."""
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


def _checked(value: Any, file: str, depth: int = 0) -> Any:
    """Raises UnreadableInput for values that no settings file holds: NaN, huge integers, lone surrogates, NUL."""
    if depth > DEEPEST:
        raise UnreadableInput(f"{file} is nested more than {DEEPEST} levels deep.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnreadableInput(f"{file} holds {value}, which cannot be a setting.")
    if isinstance(value, int) and value.bit_length() > _LONGEST_WHOLE_NUMBER_BITS:
        raise UnreadableInput(f"{file} holds a whole number of {value.bit_length()} bits, which cannot be a setting.")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" or c == "\x00" for c in value):
        raise UnreadableInput(f"{file} holds {value[:40]!r}, which is not valid text.")
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _checked(part, file, depth + 1)
    return value


def _twice(file: str, key: str) -> UnreadableInput:
    return UnreadableInput(f"{file}: the key {key[:60]!r} is given twice.", "Keep one.")
