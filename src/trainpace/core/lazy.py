"""A room's face: names that it exports, whose inner modules are imported when one of them is first used."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package: what its `__init__` imports from its own modules under TYPE_CHECKING."""
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith(f"{package}.")
        for alias in node.names
    }

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__, sorted(homes)
