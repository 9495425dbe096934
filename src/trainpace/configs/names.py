"""The keys, arguments and flags that each tool understands, from names.toml."""

import tomllib
from pathlib import Path
from typing import Any

TOOLS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def names(tool: str, kind: str) -> tuple[str, ...]:
    return tuple(TOOLS[tool][kind].split())
