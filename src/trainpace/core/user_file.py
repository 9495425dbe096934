"""The user's own Python file: a name loaded from it, and its code told from libraries.

For a process of its own (`trainpace.core`): loading runs the user's code.
"""

import ast
import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trainpace.core.errors import UnknownName, UnreadableInput
from trainpace.core.host import holds_packages, top_of


def load_name(path: Path, name: str, what: str = "name") -> Any:
    """The value of `name` in a Python file, whose folder joins the import path as it does under ``python FILE.py``.

    A file with relative imports is loaded as a part of the package that its folders make. Raises `UnreadableInput` or
    `UnknownName` (which calls it `what`); what the file's own code raises goes through.
    """
    if not path.is_file():
        raise UnreadableInput(f"cannot read {path}: no such file.")
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))))
    except SyntaxError:  # which the import tells with its line
        nodes = []
    sys.path.insert(0, str(path.resolve().parent))
    module = _as_part_of_a_package(path.resolve(), nodes) or _alone(path)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if not n.startswith("_") and _is_from(v, module)]
        mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
        hidden = (
            "What a function or `if __name__ == ...` defines is not there when the file is"
            " imported."
        )
        raise UnknownName(f"{what} in {path}", name, own, hidden if name in mentioned else "")
    return getattr(module, name)


_MACHINES = ("sitecustomize.py", "usercustomize.py")
"""Files that Python itself loads at its start, wherever a system has them."""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's own: no library's, no built-in, and not ours."""
    if file.startswith(("~", "<")) or not file or os.path.basename(file) in _MACHINES:
        return False
    return Path(file) != Path(sys.executable) and not _is_installed(
        os.path.dirname(os.path.abspath(file))
    )


def _alone(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _as_part_of_a_package(path: Path, nodes: Sequence[ast.AST]) -> ModuleType | None:
    depth = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    if not depth:
        return None
    parts, folder = [path.stem], path.parent
    while len(parts) <= depth or (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    return importlib.import_module(".".join(parts))


def _is_from(value: Any, module: ModuleType) -> bool:
    return (
        not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    )


@functools.cache
def _is_installed(folder: str) -> bool:
    """In the standard library, in trainpace, or in a folder into which pip installed packages."""
    paths, root = sysconfig.get_paths(), Path(folder)
    if any(
        root.is_relative_to(known)
        for known in (paths["stdlib"], paths["platstdlib"], Path(__file__).parents[1])
    ):
        return True
    return holds_packages(top_of(folder))
