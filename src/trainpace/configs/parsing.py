"""JSON and YAML, more strictly than their parsers: a key given twice is an error, where both would take the last."""

from __future__ import annotations

import json
import math
from typing import Any

from trainpace.errors import UnreadableInput

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 50
MOST_ALIASES = 100


def parse_json(text: str, file: str) -> Any:
    """JSON without NaN, without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise UnreadableInput(f"{file}: the key {key!r} is given twice.", "Keep one.")
            result[key] = value
        return result

    def constant(name: str) -> Any:
        raise UnreadableInput(f"{file}: {name} is not a JSON number.")

    try:
        return _checked(json.loads(text, object_pairs_hook=unique, parse_constant=constant), file)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnreadableInput(f"{file} is not valid JSON: {error}.") from None
    except ValueError as error:
        if isinstance(error, UnreadableInput):
            raise
        raise UnreadableInput(f"{file} is not valid JSON: {error}.") from None


def parse_yaml(text: str, file: str) -> Any:
    """YAML as PyYAML's safe loader reads it, which is what Hugging Face, Lightning and accelerate use."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys and too many aliases."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                seen: set[str] = set()
                for key, _ in node.value:
                    if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                        if key.value in seen:
                            raise UnreadableInput(f"{file}: the key {key.value!r} is given twice.", "Keep one.")
                        seen.add(key.value)
            return super().construct_mapping(node, deep)

    if text.count("*") > MOST_ALIASES and text.count("&") > 0:
        raise UnreadableInput(f"{file} uses too many YAML aliases.")
    try:
        return _checked(yaml.load(text, Loader=Loader), file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise UnreadableInput(
            f"{file} is not valid YAML{where}: {getattr(error, 'problem', None) or 'unreadable'}."
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, UnreadableInput):
            raise
        raise UnreadableInput(f"{file} is not valid YAML: {error}.") from None


def _checked(value: Any, file: str, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise UnreadableInput(f"{file} is nested more than {DEEPEST} levels deep.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnreadableInput(f"{file} holds {value}, which is no setting.")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _checked(part, file, depth + 1)
    return value
